"""The small networks of the papers. Each is an extractor `features` and a linear `head`."""

import itertools

import torch
from torch import Tensor, nn


class Split(nn.Module):
    """A network in two named parts, as personalised methods need it: extractor, then classifier."""

    features: nn.Module
    head: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Logits (b, K) of inputs (b, ...)."""
        return self.head(self.features(x))  # type: ignore[no-any-return]


class MLP(Split):
    """Inputs → 400 → 200 → 100 → K: the network of MA-Echo on MNIST, 784 inputs there."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        widths = [width(nn.Flatten(), shape), 400, 200, 100]
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in itertools.pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(100, classes)


class LeNet(Split):
    """Convolutions of 6 and 16 channels, 5x5, then 120, 84, K: FedELMY's network on PACS and Office-Caltech-10."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        convolutions = nn.Sequential(
            nn.Conv2d(shape[0], 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)
        )
        flat = width(convolutions, shape)
        self.features = nn.Sequential(
            convolutions, nn.Flatten(), nn.Linear(flat, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU()
        )
        self.head = nn.Linear(84, classes)


class CNN(Split):
    """Three 3x3 convolutions of 128 channels without padding, a pool after the first two: FedELMY's on CIFAR-10."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(shape[0], 128, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(128, 128, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(128, 128, 3),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(width(self.features, shape), classes)


class TinyCNN(Split):
    """Two padded 3x3 convolutions of 32 and 64 channels with pools, then 128, K: FedELMY's on Tiny-ImageNet."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        convolutions = nn.Sequential(
            nn.Conv2d(shape[0], 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        flat = width(convolutions, shape)
        self.features = nn.Sequential(convolutions, nn.Flatten(), nn.Linear(flat, 128), nn.ReLU())
        self.head = nn.Linear(128, classes)


def width(module: nn.Module, shape: tuple[int, ...]) -> int:
    """Number of values that `module` gives for one sample of `shape`."""
    with torch.no_grad():
        return module(torch.zeros(1, *shape)).numel()  # type: ignore[no-any-return]
