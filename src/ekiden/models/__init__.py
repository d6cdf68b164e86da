"""The networks that the papers use, by name."""

from collections.abc import Callable

from torch import nn

from ekiden.errors import UserError, unknown
from ekiden.models.resnet import ResNet18, resnet18_gn
from ekiden.models.small import CNN, MLP, LeNet, Split, TinyCNN

_BUILDERS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": MLP,
    "lenet": LeNet,
    "cnn": CNN,
    "cnn_tiny": TinyCNN,
    "resnet18": ResNet18,
    "resnet18_gn": resnet18_gn,
}
_FLAT = ("digits", "mnist", "fashion_mnist", "femnist")


def names() -> tuple[str, ...]:
    """All networks of the library."""
    return tuple(_BUILDERS)


def build(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network with random initial values, drawn from torch's default generator.

    Args:
        name: one of `names()`.
        shape: of one sample, (C, H, W) or (d,).
        classes: K, number of outputs.

    Raises:
        UserError: there is no such network, or it cannot take samples of this shape.
    """
    if name not in _BUILDERS:
        raise unknown("model", name, _BUILDERS)
    if name != "mlp" and len(shape) != 3:
        raise UserError(f"{name} needs images, these samples have shape {shape}: use --model mlp")
    try:
        return _BUILDERS[name](shape, classes)
    except RuntimeError:
        raise UserError(
            f"images of {shape[1]}x{shape[2]} are too small for {name}: use --model mlp, or larger images with --size"
        ) from None


def default_for(dataset: str, shape: tuple[int, ...]) -> str:
    """The network that the papers use for a data set; for others by the shape of a sample."""
    if len(shape) != 3 or dataset in _FLAT or min(shape[1:]) < 16:
        return "mlp"
    if dataset in ("cifar10", "cifar100", "svhn", "pathmnist"):
        return "cnn"
    return "cnn_tiny" if shape[1] >= 64 else "lenet"


__all__ = ["CNN", "MLP", "LeNet", "ResNet18", "Split", "TinyCNN", "build", "default_for", "names"]
