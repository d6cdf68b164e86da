"""DisPFL: exact numbers of overlap, schedule, pruning and bytes, and reductions."""

from math import prod
from typing import Any, cast

import pytest
import torch
from torch import Generator, Tensor

from ekiden import FederatedData, Hardware, Training, run
from ekiden.core.engine import wire
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.method import Size, State
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import DFedAvgM, DisPFL
from ekiden.methods.gossip.dispfl import Sparse, densities, move, overlap, pack, random_mask, unpack
from tests.methods.toys import Free, Silo, Table, rounds, weights


def bits(text: str) -> Tensor:
    return torch.tensor([c == "1" for c in text])


def sparse(mask: str, *values: float) -> Sparse:
    return Sparse(torch.tensor(values)[bits(mask)], pack(bits(mask)), weights())


def test_average_where_masks_overlap() -> None:
    shown = [sparse("1100", 1, 2, 0, 0), sparse("0110", 0, 4, 6, 0), sparse("1001", 3, 0, 0, 8)]
    average = overlap(shown, 4).params
    assert average.tolist() == [2, 3, 6, 8], "not [4/3, 2, 2, 8/3], which all three would divide by"
    assert (average * bits("1100")).tolist() == [2, 3, 0, 0]
    assert (average * bits("1001")).tolist() == [2, 0, 0, 8]


def test_a_coordinate_in_no_mask_is_zero() -> None:
    assert overlap([sparse("10", 5, 0)], 2).params.tolist() == [5, 0]


@pytest.mark.parametrize(
    ("round", "share"), [(0, 0.5), (25, 0.42677670), (50, 0.25), (75, 0.07322330), (99, 0.00012336)]
)
def test_share_of_weights_that_move(round: int, share: float) -> None:
    assert DisPFL(rounds=100).share(round) == pytest.approx(share, abs=1e-8)


def test_prune_the_smallest_and_regrow_by_gradient() -> None:
    params, gradient = torch.tensor([0.5, -0.1, 0.3, 0.0]), torch.tensor([9.0, 0.2, 9.0, -0.7])
    assert move(bits("1110"), params, [(4,)], 1 / 3, gradient, 0).tolist() == bits("1011").tolist()


def test_a_weight_just_pruned_may_regrow() -> None:
    params, gradient = torch.tensor([0.5, -0.1, 0.3, 0.0]), torch.tensor([9.0, 0.8, 9.0, -0.7])
    assert move(bits("1110"), params, [(4,)], 1 / 3, gradient, 0).tolist() == bits("1110").tolist()


@pytest.mark.parametrize("gradient", [True, False])
def test_moving_keeps_the_number_of_each_tensor(gradient: bool) -> None:
    draw = Generator().manual_seed(1)
    shapes, active = [(8, 4), (8,), (3, 8)], [10, 8, 12]
    mask, params = random_mask(shapes, active, draw), torch.randn(64, generator=draw)
    moved = move(
        mask, params, shapes, 0.5, torch.randn(64, generator=draw) if gradient else None, 3
    )
    sizes = [prod(s) for s in shapes]
    before, after = torch.split(mask, sizes), torch.split(moved, sizes)
    assert [int(p.sum()) for p in after] == [int(p.sum()) for p in before] == active
    assert not torch.equal(moved, mask)
    assert torch.equal(before[1], after[1])  # dense


def test_erdos_renyi_kernel() -> None:
    shapes = [(100, 50), (100,), (10, 100), (10,)]
    share = densities(shapes, 0.2, erk=True)
    assert sum(d * prod(s) for d, s in zip(share, shapes, strict=True)) == pytest.approx(0.2 * 6110)
    assert share[1] == share[3] == 1
    assert share[0] / share[2] == pytest.approx((150 / 5000) / (110 / 1000))
    assert densities(shapes, 0.2, erk=False) == [pytest.approx(0.2)] * 4
    assert densities(shapes, 1.0, erk=True) == [1.0] * 4


@pytest.mark.parametrize("size", [1, 8, 13, 1000])
def test_masks_travel_as_bits(size: int) -> None:
    mask = torch.rand(size, generator=Generator().manual_seed(size)) < 0.5
    assert len(pack(mask)) == -(-size // 8)
    assert torch.equal(unpack(pack(mask), size), mask)


def test_bytes_of_a_thousand_weights_at_half() -> None:
    size = Size.of(Network(Free(1000, 0)))
    assert DisPFL(rounds=1, topology="ring").cost(3, size) == 6 * 2125
    shown = DisPFL().show(cast(Any, Marked(1000)), weights(*[1.0] * 1000))
    assert wire.size(shown) == 2125


class Marked(Silo):
    """A silo with the seeds of a client."""

    def __init__(self, size: int, target: float = 0.0) -> None:
        super().__init__(size, lambda w: 0.5 * (w - target).pow(2).sum())


def test_density_one_is_plain_gossip() -> None:
    targets = (1.0, -2.0, 4.0, 8.0)
    start = State(model=None, personal=(weights(0.0, 0.5),) * 4)
    method = DisPFL(rounds=2, epochs=2, density=1.0, topology="ring", lr_decay=1.0)
    one, two = rounds(method, [Marked(2, t) for t in targets], start)
    plain = DFedAvgM(rounds=1, epochs=2, theta=0.0, topology="ring")
    (mixed,) = rounds(plain, [Marked(2, t) for t in targets], start)
    fed = Table([Marked(2, t) for t in targets])
    trained = [fed.call(plain.train, k, weights(0.0, 0.5), 0).params.tolist() for k in fed.clients]
    again = [
        fed.call(plain.train, k, weights(*w), 1).params.tolist()
        for k, w in zip(fed.clients, mixed, strict=True)
    ]
    for ours, theirs in zip([*one, *two], [*trained, *again], strict=True):
        assert ours == pytest.approx(theirs)


def test_inactive_weights_stay_zero_through_training() -> None:
    silos = [Marked(20, 3.0) for _ in range(3)]
    fed = cast(Fed, Table(silos))
    method = DisPFL(rounds=3, epochs=2, density=0.3, topology="complete")
    for s in method.run(fed, State(model=None, personal=(weights(*[1.0] * 20),) * 3)):
        for silo, model in zip(silos, s.personal, strict=True):
            params = cast(Weights, model).params
            assert torch.equal(params != 0, silo.state.trained)
            assert int(silo.state.current.sum()) == 6


def settings() -> dict[str, Any]:
    return {
        "training": Training(lr=0.05, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 5,
    }


@pytest.mark.parametrize("regrow", ["random", "gradient"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd", "sam"])
def test_models_are_sparse_and_masks_personal(
    blobs: FederatedData, regrow: Any, optimizer: Any
) -> None:
    method = DisPFL(rounds=2, epochs=1, regrow=regrow, topology="complete")
    training = Training(optimizer=optimizer, momentum=0.5, lr=0.05, batch_size=16)
    result = run(method, blobs, Tiny, **(settings() | {"training": training}))
    active = sum(method.active(Network(Tiny()).shapes))
    masks = [m.params != 0 for m in result.personal]
    assert all(int(m.sum()) <= active < 50 for m in masks)
    assert not torch.equal(masks[0], masks[1])
    assert result.bytes == method.cost(4, Size.of(Network(Tiny())))
    assert "server" not in {row.target for row in result.ledger}
