"""Features that are fixed before any sample is seen: rounding, frozen networks, and how many fit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ekiden import Hardware, run
from ekiden.core.models.catalogue import build
from ekiden.core.tasks import Classification
from ekiden.core.training.gram import size
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedGram
from ekiden.methods.exact.blocks.fixed_features import ShortColumns, features_of
from ekiden.runs.recipe import Recipe
from tests.methods.gram_runs import inside, points, silos


@given(st.integers(0, 2**31), st.sampled_from([1e-6, 1.0, 1e9]))
def test_columns_are_rounded_a_little(seed: int, size: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    matrices = [size * torch.randn(7, 3, generator=draw, dtype=torch.float64) for _ in range(2)]
    a, b = map(ShortColumns.of, matrices)
    for matrix, columns in zip(matrices, (a, b), strict=True):
        assert bool(((columns.matrix() - matrix).abs() <= matrix.abs().amax(0) / 65_000).all())
    both = matrices[0] + matrices[1]
    assert (
        float((a.plus(b).matrix() - both).abs().max())
        <= float(max(m.abs().max() for m in matrices)) / 10_000
    )
    assert torch.equal(
        ShortColumns.of(torch.zeros(4, 2)).matrix(), torch.zeros(4, 2, dtype=torch.float64)
    )


def test_rounding_by_hand() -> None:
    short = ShortColumns.of(
        torch.tensor([[127.0, 0.5], [-63.4, 1.0], [0, -2.0]], dtype=torch.float64), torch.int8
    )
    assert short.counts.tolist() == [[127, 32], [-63, 64], [0, -127]]
    assert short.units.tolist() == pytest.approx([1, 2 / 127])


def test_a_frozen_network_is_left_as_it_is() -> None:
    data, network = silos(torch.split(torch.arange(60, 300), 80)), Tiny()
    method = FedGram(features="network", width=20)
    result = run(method, data, network, hardware=Hardware(threads=1), seed=3)
    x, _ = points()
    features, _ = inside(result, x)
    hidden = network.features.eval()(x).detach()
    centre, scale, _ = features_of(result.model).tell()
    assert torch.equal(features[:, :8], ((hidden - centre) * scale).round().clamp(-127, 127))
    assert result.accuracy > 0.6
    assert result.metrics[-1]["backward"] == 0


@pytest.mark.parametrize(("features", "b"), [("components", 11), ("auto", 18)])
def test_bits_follow_from_features_and_then_bytes_decide_how_many(features: str, b: int) -> None:
    """The largest number whose sums fit, and at most 1,000 components."""
    method = Recipe(FedGram(features=features, samples=300)).method
    assert isinstance(method, FedGram)
    assert method.bits == b
    shape = (3, 16, 16)
    for room, most in (("9kB", 10**6), ("60kB", 10**6), ("900kB", 1000)):
        with torch.device("meta"):
            network = replace(method, bytes=room).own_network(
                build("lenet", shape, 5), shape, 5, Classification()
            )
        width = features_of(network).width
        step = 1 if features == "components" else 8
        taken = [
            size(5, width + more, bits=b) + features_of(network).told_bytes() for more in (0, step)
        ]
        assert taken[0] <= int(room[:-2]) * 1000
        assert taken[1] > int(room[:-2]) * 1000 or (features == "components" and width == most)
