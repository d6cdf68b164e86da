"""Fixed features, and how many of them the bytes that a client may hand on have room for."""

import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from ekiden.authoring import UserError
from ekiden.models.split import as_split
from ekiden.models.whole_features import FrozenNetwork, RandomFourier, RandomReLU, WholeFeatures
from ekiden.training import frozen
from ekiden.training.network import trial

_WRITTEN = re.compile(r"(\d+(?:\.\d+)?)(%|B|kB|MB|GB|)")
_MOST_FEATURES = 10**6
_UNITS = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def check_bytes(text: str) -> None:
    """Refuse text that is not a size."""
    if text != "M" and not _WRITTEN.fullmatch(text):
        raise UserError(f"--bytes {text!r} is not a size: write M, a share as in 5%, or a size as in 250kB")


@dataclass(frozen=True)
class Room:
    """What a client may hand on.

    Attributes:
        width: D, where the user chose it; 0: as many features as fit into the bytes.
        text: the bytes as the user wrote them: M, a share of M, or a size.
        model: M, bytes of a model of the user's network.
        sums: the bytes of all sums over so many features.
        seeded: whether nobody settles the features, so that no values of theirs travel.
    """

    width: int
    text: str
    model: int
    sums: Callable[[int], int]
    seeded: bool = False

    @property
    def bytes(self) -> int:
        """The largest number of bytes."""
        if self.text == "M":
            return self.model
        found = _WRITTEN.fullmatch(self.text)
        assert found is not None, "checked"
        number, unit = float(found[1]), found[2]
        return int(self.model * number / 100 if unit == "%" else number * _UNITS[unit])

    def features(self, each: int, fixed: int, least: int = 1, always: int = 0) -> int:
        """D: what the user chose, or what fits with `each` bytes more a feature and `fixed` more in all.

        Where nobody settles the features, only `always` more bytes travel.
        """
        if self.width:
            if self.width < least:
                raise UserError(f"--width {self.width} is too small for features of this kind: give {least} or more")
            return self.width

        def taken(width: int) -> int:
            return self.sums(width) + always + (0 if self.seeded else each * width + fixed)

        found = bisect_right(range(1, _MOST_FEATURES), self.bytes, key=taken)
        if found < least:
            few = f"no room for {least} features, the fewest possible" if least > 1 else "room for no feature"
            raise UserError(f"--bytes {self.text} ({self.bytes} bytes) has {few}: give {taken(least)}B or more")
        return found


def random_units(inputs: int, room: Room) -> RandomReLU:
    """Random units of `inputs` numbers; the inputs are features, too, if they take half of them at most."""
    width = room.features(each=4, fixed=8 * inputs)
    return RandomReLU(inputs, width, direct=2 * inputs <= width)


def fourier(inputs: int, bandwidth: float, room: Room) -> RandomFourier:
    """Random cosines of `inputs` numbers; the inputs are features, too, if they take half of them at most."""
    width = room.features(each=0, fixed=8 * inputs + 4)
    return RandomFourier(inputs, width, bandwidth=bandwidth, direct=2 * inputs <= width)


def patch_room(channels: int, size: int, pool: int, room: Room) -> int:
    """Return D for features of patches with sides of at most `size` pixels."""
    # A filter of the largest patches and its gain serve 2g² features, each of which has a scale.
    together, filter_ = 2 * pool**2, channels * size**2 + 4
    return room.features(each=4 + -(-filter_ // together), fixed=0, least=together, always=8 * channels)


def frozen_network(network: nn.Module, shape: tuple[int, ...], room: Room) -> FrozenNetwork:
    """The features of a network as it is, and random units of these."""
    with torch.no_grad():
        inputs = network.eval()(trial(network, torch.zeros(1, *shape))).flatten(1).shape[1]
    width = room.features(each=4, fixed=4 * inputs)
    if width < inputs:
        least = room.sums(inputs) + 8 * inputs
        raise UserError(
            f"the network has {inputs} features, and --{'width' if room.width else 'bytes'} leaves room for "
            f"{width}: give --width {inputs} or --bytes {least}B, or more"
        )
    return FrozenNetwork(nn.Sequential(frozen.fix(network.requires_grad_(False)), nn.Flatten()), inputs, width)


def features_of(network: nn.Module) -> WholeFeatures:
    """Return the features of a network that `FixedFeatures.network_with` made."""
    return cast(WholeFeatures, as_split(network).features)
