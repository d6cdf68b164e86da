"""What single methods need from training: gradients of a batch, penalties with memory, disagreement
of models."""

import pytest
import torch
from torch import Tensor

from ekiden import FederatedData, Hardware, Training
from ekiden.core.engine.evaluation import consensus
from ekiden.core.training import fit as fitting
from ekiden.core.training.feed import Feed
from ekiden.core.training.fit import Bench
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods.gossip.criticalfl import Squares
from tests.methods.toys import weights


def bench_of(data: FederatedData, **training: object) -> Bench:
    torch.manual_seed(3)
    settings = Training(**({"batch_size": 16} | training))  # type: ignore[arg-type]
    return Bench(Network(Tiny()), Feed(data.dataset, Hardware()), settings, Hardware())


def test_gradient_is_that_of_the_mean_loss_in_evaluation_mode(blobs: FederatedData) -> None:
    bench, train = bench_of(blobs), blobs.clients[0].train
    start = bench.network.weights()
    ours = fitting.gradient(bench, start, train)
    module = Tiny().eval()
    module.load_state_dict(bench.network.module.state_dict())
    x, y = bench.feed.batch(train, slice(None), train=False)
    torch.nn.functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
    theirs = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(bench.network.weights().buffers, start.buffers)
    assert (bench.work.forward, bench.work.backward) == (len(train), len(train))


class Memory:
    """A journal in a dict."""

    def __init__(self) -> None:
        self.saved: dict[str, dict[str, Tensor]] = {}

    def load(self, key: str) -> dict[str, Tensor] | None:
        return self.saved.get(key)

    def save(self, key: str, tensors: dict[str, Tensor]) -> None:
        self.saved[key] = {k: v.clone() for k, v in tensors.items()}


class Killed(Exception):
    """The machine went down."""


def test_a_penalty_remembers_through_a_crash(
    blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_SHARE_OF_SAVING", 0)
    client = blobs.clients[0]

    def squares(bench: Bench) -> float:
        penalty = Squares()
        fitting.fit(bench, start, client.train, client.val, epochs=3, seed=1, penalty=penalty)
        return penalty.sum

    bench = bench_of(blobs)
    start = bench.network.weights()
    whole = squares(bench)
    assert whole > 0
    bench.journal = Memory()

    def kill(epoch: int, epochs: int) -> None:
        if epoch == 2:
            raise Killed

    bench.watch = kill
    with pytest.raises(Killed):
        squares(bench)
    assert bench.journal.saved
    bench.watch = lambda epoch, epochs: None
    assert squares(bench) == whole
    assert squares(bench) == whole  # all epochs from the journal


def test_consensus_is_the_mean_squared_distance_from_the_mean() -> None:
    assert consensus([weights(0.0, 0.0), weights(2.0, 4.0)]) == pytest.approx(5)
    assert consensus([weights(1.0, 7.0)] * 3) == 0
