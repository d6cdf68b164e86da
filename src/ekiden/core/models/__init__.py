"""The networks that the papers use."""

from collections.abc import Callable
from typing import Any

from torch import nn

from ekiden.core.base import outside
from ekiden.core.base.errors import UserError, unknown
from ekiden.core.data.inputs import Inputs
from ekiden.core.models import images, pretrained
from ekiden.core.models.pretrained import LITE, is_pretrained, load_weights, located, located_file
from ekiden.core.models.split import Split, SplitNetwork
from ekiden.core.models.tables_and_texts import (
    TableRows,
    Tokenised,
    linear,
    table_mlp,
    table_transformer,
    text_mean,
    text_transformer,
)
from ekiden.core.tasks import Segmentation, Task

__all__ = [
    "Split",
    "SplitNetwork",
    "build",
    "check_name",
    "default_for",
    "described",
    "fitting",
    "is_pretrained",
    "load_weights",
    "located",
    "located_file",
    "names",
    "pretrained_names",
    "usual",
]

# Networks for samples other than images and features: what they read, and their builder.
_SPECIAL: dict[str, tuple[type[Any], Callable[[Any, int], SplitNetwork]]] = {
    "table_mlp": (TableRows, table_mlp),
    "table_transformer": (TableRows, table_transformer),
    "text_mean": (Tokenised, text_mean),
    "text_transformer": (Tokenised, text_transformer),
}

_Builder = Callable[[tuple[int, ...], int], SplitNetwork]

# Builder and smallest side of an image in pixels; 0 if it also takes features (d,).
_NETWORKS: dict[str, tuple[_Builder, int]] = {
    "mlp": (images.mlp, 0),
    "linear": (linear, 0),
    "mlp_ma_echo": (images.mlp_ma_echo, 0),
    "lenet": (images.lenet, 16),
    "cnn": (images.cnn, 18),
    "cnn_tiny": (images.cnn_tiny, 4),
    "cnn_ma_echo": (images.cnn_ma_echo, 8),
    "cnn_ua_pdfl": (images.cnn_ua_pdfl, 4),
    "resnet18": (images.resnet18, 1),
    "resnet18_gn": (images.resnet18_gn, 1),
    "vgg11": (images.vgg11, 32),
    "scattering": (images.scattering, 16),
    "cnn_signal": (images.cnn_signal, 0),
}

# Networks that give classes to pixels: builder and smallest side of an image.
_OF_PIXELS: dict[str, tuple[_Builder, int]] = {"unet": (images.unet, images.SMALLEST)}

# The papers' networks for these data sets, except ResNet-18.
_DEFAULTS = {
    "digits": "mlp",
    "mnist": "mlp",
    "fashion_mnist": "mlp",
    "femnist": "mlp",
    "pacs": "lenet",
    "office_caltech10": "lenet",
    "cifar10": "cnn",
    "cifar100": "cnn",
    "svhn": "cnn",
    "pathmnist": "cnn",
    "tiny_imagenet": "cnn_tiny",
    "tiny_imagenet20": "cnn_tiny",
}


_TAKES: dict[type[Any], str] = {TableRows: "rows of a table", Tokenised: "texts"}


def names() -> tuple[str, ...]:
    """Names of all networks, those of other packages last."""
    return (*_NETWORKS, *_SPECIAL, *_OF_PIXELS, *outside.installed("ekiden.models"))


def described() -> dict[str, tuple[str, str]]:
    """Return for each network of the library which samples it takes and the first line of its
    docstring.
    """
    takes = {name: _TAKES[kind] for name, (kind, _) in _SPECIAL.items()}
    builders: dict[str, Callable[..., nn.Module]] = {
        name: builder for name, (builder, _) in _NETWORKS.items()
    }
    builders |= {name: builder for name, (_, builder) in _SPECIAL.items()}
    builders |= {name: builder for name, (builder, _) in _OF_PIXELS.items()}
    for name, (_, smallest) in _NETWORKS.items():
        takes[name] = f"images from {smallest}x{smallest} pixels" if smallest > 1 else "images"
    takes |= {
        name: f"images from {least}x{least} pixels, segmentation"
        for name, (_, least) in _OF_PIXELS.items()
    }
    takes |= {"cnn_signal": f"signals of {images.SHORTEST} values or more"} | dict.fromkeys(
        ("mlp", "mlp_ma_echo"), "numbers"
    )
    takes |= {"linear": "numbers, rows of a table"}
    return {name: (takes[name], outside.summary_of(builders[name])) for name in builders}


def pretrained_names() -> tuple[str, ...]:
    """Return the names, and forms of names, of networks that come with values."""
    return (*LITE, "hf:FOLDER", "timm:NAME")


def check_name(name: str) -> None:
    """Refuse a name that no network has."""
    if name not in names() and not outside.is_file(name) and not is_pretrained(name):
        raise unknown("model", name, ("auto", *pretrained_names(), *names()))


def build(
    name: str, shape: tuple[int, ...], classes: int, inputs: Inputs | None = None
) -> nn.Module:
    """Make a network with random weights, which depend on torch's random state only.

    Args:
        name: one of `names()`, hf:FOLDER or hf:NAME, timm:NAME, or PATH.py:FUNCTION of a function
            that takes shape and classes, or nothing.
        shape: of one sample, (C, H, W) or (d,).
        classes: number of outputs.
        inputs: what the samples are, which networks for tables and texts need to know.

    Returns:
        A network; those of the library have the parts `features` and `head` (see `Split`).

    Raises:
        UserError: the name is unknown, or the network cannot take samples of this shape.
    """
    check_name(name)
    if is_pretrained(name):
        return pretrained.build(name, shape, classes, inputs)
    if name in _SPECIAL:
        kind, special = _SPECIAL[name]
        if not isinstance(inputs, kind):
            raise UserError(
                f"{name} reads {_TAKES[kind]}, but these samples are {_words(inputs)}: use --model "
                "with one of "
                f"{', '.join(fitting(shape, inputs))}"
            )
        return special(inputs, classes)
    if name in _OF_PIXELS:
        of_pixels, least = _OF_PIXELS[name]
        if len(shape) != 3 or min(shape[1:]) < least:
            needs = f"images of at least {least}x{least} pixels"
            raise _unfit(
                name, needs, shape, "larger images with --size" if len(shape) == 3 else "", inputs
            )
        return of_pixels(shape, classes)
    if name == "linear":
        return linear(shape, classes, inputs)
    if name not in _NETWORKS:
        return _from_outside(name, shape, classes)
    if inputs is not None and not inputs.continuous:
        raise UserError(
            f"{name} reads numbers, but these samples are {_words(inputs)}: use --model with one "
            "of "
            f"{', '.join(fitting(shape, inputs))}"
        )
    builder, smallest = _NETWORKS[name]
    if not _fits(name, shape):
        size = f"images of at least {smallest}x{smallest} pixels" if smallest > 1 else "images"
        size = f"signals of {images.SHORTEST} values or more" if name == "cnn_signal" else size
        others = f"--model with one of {', '.join(fitting(shape, inputs))}"
        raise _unfit(
            name,
            size,
            shape,
            f"{others}, or larger images with --size" if len(shape) == 3 else others,
            inputs,
        )
    return builder(shape, classes)


def _unfit(
    name: str, needs: str, shape: tuple[int, ...], use: str, inputs: Inputs | None
) -> UserError:
    """Return the error about samples that a network cannot take."""
    found = f"have shape {shape}" if inputs is None else f"are {inputs.words}, of shape {shape}"
    use = use or f"--model with one of {', '.join(fitting(shape, inputs))}"
    return UserError(f"{name} needs {needs}, but these samples {found}: use {use}")


def _words(inputs: Inputs | None) -> str:
    return "images or arrays" if inputs is None else inputs.words


def fitting(shape: tuple[int, ...], inputs: Inputs | None = None) -> list[str]:
    """Return the networks of the library that take such samples."""
    special = [name for name, (kind, _) in _SPECIAL.items() if isinstance(inputs, kind)]
    if inputs is not None and not inputs.continuous:
        return [*special, *(["linear"] if isinstance(inputs, TableRows) else [])]
    return [*special, *(name for name in _NETWORKS if _fits(name, shape))]


def default_for(
    dataset_name: str,
    shape: tuple[int, ...],
    inputs: Inputs | None = None,
    task: Task | None = None,
) -> str:
    """Return the network to take if the user names none.

    Args:
        dataset_name: a named data set gets the papers' network for it, if its images are large
            enough.
        shape: of one sample; decides for other data.
        inputs: what the samples are.
        task: what the labels mean.

    Returns:
        One of `names()`.
    """
    if isinstance(task, Segmentation) and len(shape) == 3:
        return "unet"
    if inputs is not None and (usual_ := inputs.network(shape)):
        return usual_
    named = _DEFAULTS.get(dataset_name)
    if named and _fits(named, shape):
        return named
    if not _fits("lenet", shape) or (
        shape[0] == 1 and max(shape[1:]) <= 28
    ):  # small, or like MNIST
        return "mlp"
    return "cnn_tiny" if min(shape[1:]) >= 64 else "lenet"


def usual(dataset_name: str) -> str:
    """Return the network that the papers use for a named data set."""
    return _DEFAULTS[dataset_name]


def _from_outside(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Call a function of the user or of another package."""
    network = outside.call(name, "ekiden.models", shape, classes)
    if not isinstance(network, nn.Module):
        raise UserError(f"{name} gives {type(network).__name__}, not a torch.nn.Module")
    return network


def _fits(name: str, shape: tuple[int, ...]) -> bool:
    if name == "cnn_signal":
        return len(shape) in (1, 2) and shape[-1] >= images.SHORTEST
    smallest = _NETWORKS[name][1]
    return smallest == 0 or (len(shape) == 3 and min(shape[1:]) >= smallest)
