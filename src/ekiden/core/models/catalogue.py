"""The networks that the papers use, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ekiden.core.base import outside
from ekiden.core.base.errors import UserError, unknown
from ekiden.core.data.inputs import Inputs
from ekiden.core.models import images, pretrained
from ekiden.core.models.pretrained import LITE, is_pretrained
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


@dataclass(frozen=True)
class Known:
    """A network of the library."""

    build: Callable[..., nn.Module]  # (shape, or inputs where it `reads` them; outputs)
    takes: str = "images"  # samples, in words
    side: int = 0  # fewest pixels of a side of an image; 0: it takes other shapes, too
    reads: type[Any] | None = None  # what the inputs must be; None: numbers of any kind
    pixels: bool = False  # whether it gives a class to each pixel

    @property
    def samples(self) -> str:
        """Return which samples it takes."""
        if self.side > 1:
            return f"images of at least {self.side}x{self.side} pixels"
        return self.takes

    def fits(self, shape: tuple[int, ...], inputs: Inputs | None = None) -> bool:
        """Return whether it takes such samples of this shape."""
        if self.build is linear:
            return not isinstance(inputs, Tokenised)
        if self.reads is not None:
            return isinstance(inputs, self.reads)
        if inputs is not None and not inputs.continuous:
            return False
        if self.build is images.cnn_signal:
            return len(shape) in (1, 2) and shape[-1] >= images.SHORTEST
        return self.side == 0 or (len(shape) == 3 and min(shape[1:]) >= self.side)


# Messages list what fits in this order, so what knows most of the samples comes first.
NETWORKS = {
    "table_mlp": Known(table_mlp, "rows of a table", reads=TableRows),
    "table_transformer": Known(table_transformer, "rows of a table", reads=TableRows),
    "text_mean": Known(text_mean, "texts", reads=Tokenised),
    "text_transformer": Known(text_transformer, "texts", reads=Tokenised),
    "mlp": Known(images.mlp, "numbers"),
    "linear": Known(linear, "numbers, rows of a table"),
    "mlp_ma_echo": Known(images.mlp_ma_echo, "numbers"),
    "lenet": Known(images.lenet, side=16),
    "cnn": Known(images.cnn, side=18),
    "cnn_tiny": Known(images.cnn_tiny, side=4),
    "cnn_ma_echo": Known(images.cnn_ma_echo, side=8),
    "cnn_ua_pdfl": Known(images.cnn_ua_pdfl, side=4),
    "resnet18": Known(images.resnet18, side=1),
    "resnet18_gn": Known(images.resnet18_gn, side=1),
    "vgg11": Known(images.vgg11, side=32),
    "scattering": Known(images.scattering, side=16),
    "cnn_signal": Known(images.cnn_signal, f"signals of {images.SHORTEST} values or more"),
    "unet": Known(images.unet, side=images.SMALLEST, pixels=True),
}
# The papers' networks for these data sets, except ResNet-18.
DEFAULTS = {
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


def names() -> tuple[str, ...]:
    """Names of all networks, those of other packages last."""
    return (*NETWORKS, *outside.installed("ekiden.models"))


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
    if name not in NETWORKS:
        return _from_outside(name, shape, classes)
    known = NETWORKS[name]
    if not known.fits(shape, inputs):
        are = "images or arrays" if inputs is None else inputs.words
        larger = ", or larger images with --size" if len(shape) == 3 else ""
        raise UserError(
            f"{name} needs {known.samples}, but these samples are {are}, of shape {shape}: use "
            f"--model with one of {', '.join(fitting(shape, inputs))}{larger}"
        )
    if name == "linear":
        return linear(shape, classes, inputs)
    if known.reads is not None:
        return known.build(inputs, classes)
    return known.build(shape, classes)


def fitting(shape: tuple[int, ...], inputs: Inputs | None = None) -> list[str]:
    """Return the networks of the library that take such samples and give one output for each."""
    known = NETWORKS.items()
    return [name for name, one in known if one.fits(shape, inputs) and not one.pixels]


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
    named = DEFAULTS.get(dataset_name)
    if named and NETWORKS[named].fits(shape):
        return named
    # small, or like MNIST
    if not NETWORKS["lenet"].fits(shape) or (shape[0] == 1 and max(shape[1:]) <= 28):
        return "mlp"
    if min(shape[1:]) >= 64:
        return "cnn_tiny"
    return "lenet"


def _from_outside(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Call a function of the user or of another package."""
    network = outside.call(name, "ekiden.models", shape, classes)
    if not isinstance(network, nn.Module):
        raise UserError(f"{name} gives {type(network).__name__}, not a torch.nn.Module")
    return network
