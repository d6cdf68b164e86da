"""Figures survive colour-blindness: simulated after Machado, Oliveira and Fernandes (2009),
severity 1."""

from itertools import combinations

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
import pytest
from matplotlib.colors import to_rgb

from ekiden.lab.reporting.style import HEAT, MARKERS, SERIES, line_style

Array = npt.NDArray[np.float64]

SEEN = {
    "as it is": np.eye(3),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritanopia": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
    "print in grey": np.tile([0.2126, 0.7152, 0.0722], (3, 1)),
}
TO_XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
)


def lab(colours: Array, seen: Array) -> Array:
    """CIE Lab coordinates (n, 3) of sRGB colours (n, 3) as such a reader sees them."""
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    xyz = (linear @ seen.T).clip(0, 1) @ TO_XYZ.T / (TO_XYZ @ np.ones(3))
    f = np.where(xyz > (6 / 29) ** 3, np.cbrt(xyz), xyz / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.stack(
        [116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1
    )


def least(colours: tuple[str, ...], seen: str) -> float:
    """The least distance ΔE between two of the colours."""
    places = lab(np.array([to_rgb(c) for c in colours]), SEEN[seen])
    return min(float(np.linalg.norm(a - b)) for a, b in combinations(places, 2))


@pytest.mark.parametrize("seen", [name for name in SEEN if name != "print in grey"])
def test_the_colours_of_series_are_told_apart(seen: str) -> None:
    assert (
        least(SERIES, seen) > 10
    )  # a difference of about 2 is the smallest that is seen side by side


def test_a_palette_of_red_and_green_would_fail() -> None:
    red, green = "#d62728", "#2ca02c"
    assert least((red, green), "as it is") > 100
    assert least((red, green), "deuteranopia") < 10


def test_series_of_one_colour_differ_in_mark_or_stroke() -> None:
    styles = [tuple(map(str, line_style(i).values())) for i in range(len(SERIES) * len(MARKERS))]
    assert len(set(styles)) == len(styles)
    assert len({str(line_style(i)["marker"]) for i in range(len(SERIES))}) == len(SERIES)


@pytest.mark.parametrize("seen", SEEN)
def test_heat_maps_grow_lighter_all_the_way(seen: str) -> None:
    colours = mpl.colormaps[HEAT](np.linspace(0, 1, 32))[:, :3]
    assert (np.diff(lab(colours, SEEN[seen])[:, 0]) > 0).all()
