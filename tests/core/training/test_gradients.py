"""Shortcuts of a step give the bits of autograd, and where they do not, autograd does the work."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ekiden import Augment, Hardware, Training
from ekiden.core import models
from ekiden.core.models.split import SplitNetwork
from ekiden.core.tasks import Task
from ekiden.core.tasks.labels import Classification, MultiLabel, Regression
from ekiden.core.training import fit as fitting
from ekiden.core.training import gradients
from ekiden.core.training.feed import Feed
from ekiden.core.training.fit import Bench, TaskLoss, fit
from ekiden.core.training.gradients import Chain, Gradient, Pass
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.data import Dataset, Subset, from_tensors
from ekiden.lab.conformance.small_runs import Tiny

HARDWARE = Hardware(threads=1)


def perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 7, bias=False), nn.ReLU(), nn.Linear(7, 3)
    )


def images(shape: tuple[int, ...] = (1, 8, 8)) -> nn.Module:
    return models.build("mlp", shape, 3)


def dataset(shape: tuple[int, ...], n: int = 50, **more: Any) -> Dataset:
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(n, *shape, generator=draw), torch.randint(3, (n,), generator=draw)
    return from_tensors((x, y), (x, y), **more)


def bench(data: Dataset, build: Callable[[], nn.Module], **training: Any) -> Bench:
    torch.manual_seed(0)
    fields: dict[str, Any] = {"batch_size": 8, "lr": 0.05, "select": "last"} | training
    settings = Training(**fields)
    return Bench(Network(build()), Feed(data, HARDWARE), settings, HARDWARE)


def trained(here: Bench, epochs: int = 3) -> Weights:
    samples = here.feed.dataset.train
    train, none = Subset(samples, torch.arange(len(samples))), Subset(samples, torch.arange(0))
    return fit(here, here.network.weights(), train, none, epochs=epochs, seed=1)


def bits(weights: Weights) -> list[bytes]:
    return [t.numpy().tobytes() for t in vars(weights).values()]


@pytest.mark.parametrize(
    "task",
    [
        Classification(),
        Classification(weights=(1.0, 2.0, 0.5)),
        MultiLabel(),
        Regression((0.0,) * 3, (1.0,) * 3),
    ],
    ids=lambda task: task.kind,
)
@pytest.mark.parametrize("batch", [1, 8, 33])
def test_a_chain_of_linear_layers_has_the_bits_of_autograd(task: Task, batch: int) -> None:
    torch.manual_seed(batch)
    network = Network(perceptron())
    chain = Chain.of(network, task)
    assert chain is not None
    for _ in range(5):
        x, y = torch.randn(batch, 5), torch.randint(3, (batch,))
        y = y if task.kind == "classification" else torch.randn(batch, 3).clamp(0, 1)
        loss = Gradient(network, HARDWARE, TaskLoss(task))(x, y)
        right = network.grad.clone()
        assert torch.equal(chain(x, y), loss)
        assert right.numpy().tobytes() == network.grad.numpy().tobytes()  # also the signs of zeros
        network.params.sub_(network.grad, alpha=0.1)


@pytest.mark.parametrize("build", [perceptron, lambda: SplitNetwork(perceptron(), nn.Linear(3, 3))])
def test_fit_takes_the_chain_and_gives_the_same_bits(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset((5,))
    calls: list[int] = []
    by_chain = Chain.__call__

    def noted(self: Chain, x: Tensor, y: Tensor) -> Tensor:
        calls.append(len(y))
        return by_chain(self, x, y)

    monkeypatch.setattr(Chain, "__call__", noted)
    quick = trained(bench(data, build))
    assert len(calls) > 10
    monkeypatch.setattr(Chain, "of", lambda network, task: None)
    assert bits(quick) == bits(trained(bench(data, build)))


def test_a_chain_with_other_bits_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset((1, 8, 8))
    right = trained(bench(data, images))
    by_chain = Chain.__call__

    def wrong(self: Chain, x: Tensor, y: Tensor) -> Tensor:
        loss = by_chain(self, x, y)
        self._grad[3] += 1e-7
        return loss

    monkeypatch.setattr(Chain, "__call__", wrong)
    assert bits(trained(bench(data, images))) == bits(right)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def tied() -> nn.Module:
    same = nn.Linear(5, 5)
    return nn.Sequential(same, nn.ReLU(), same, nn.Linear(5, 3))


def half_frozen() -> nn.Module:
    network = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))
    network[0].bias.requires_grad_(False)
    return network


@pytest.mark.parametrize(
    "build",
    [
        Tiny,
        tied,
        half_frozen,
        lambda: nn.Sequential(Scaled(5, 3)),
        lambda: nn.Sequential(nn.Linear(5, 3), nn.GELU()),
    ],
)
def test_other_networks_are_no_chains(build: Callable[[], nn.Module]) -> None:
    assert Chain.of(Network(build()), Classification()) is None


def test_a_hook_that_comes_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    here = bench(dataset((5,)), perceptron)
    trained(here)
    seen: list[int] = []
    part = here.network.module.get_submodule("0")
    part.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    trained(here, epochs=1)
    assert sum(seen) == 50


class Replayed:
    """Stands in for a CUDA graph: it owns its inputs, and its passes call the function again."""

    def __init__(self, make: Pass, batch: tuple[Tensor, ...]) -> None:
        self.make, self.batch, self.count = make, [tensor.clone() for tensor in batch], 0

    def __call__(self, *batch: Tensor) -> Tensor:
        for own, given in zip(self.batch, batch, strict=True):
            own.copy_(given)
        self.count += 1
        return self.make(*self.batch).clone()


@pytest.mark.parametrize("optimizer", ["adam", "sam"])
@pytest.mark.parametrize(
    "build", [lambda: Dropping((3, 8, 8)), lambda: models.build("resnet18", (3, 8, 8), 3)]
)
def test_a_recording_draws_and_counts_as_autograd_does(
    build: Callable[[], nn.Module], optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset((3, 8, 8), 21, augment=Augment(crop=1, flip=True))
    right = trained(bench(data, build, optimizer=optimizer))
    made: list[Replayed] = []

    def record(make: Pass, batch: tuple[Tensor, ...]) -> Pass:
        made.append(Replayed(make, batch))
        return made[-1]

    monkeypatch.setattr(fitting, "recorder", lambda network: record)
    assert bits(trained(bench(data, build, optimizer=optimizer))) == bits(right)
    assert [len(recording.batch[1]) for recording in made] == [8, 5]
    assert all(recording.count > 1 for recording in made)


class Dropping(nn.Module):
    """Everything that a pass can change: running statistics, counters and generators."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(shape[0], 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Sequential(
            nn.Dropout(0.5), nn.Linear(4 * (shape[1] - 2) * (shape[2] - 2), 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))  # type: ignore[no-any-return]


def test_only_modules_that_do_the_same_in_each_step_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Gpu:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)

    def on_gpu(module: nn.Module) -> Any:
        network = Network(module)
        network.params = Gpu()  # type: ignore[assignment]
        return gradients.recorder(network)

    assert on_gpu(models.build("lenet", (3, 32, 32), 3)) is not None
    assert (
        on_gpu(Dropping((3, 8, 8))) is None
    )  # a module of the user's may do something else each time
    assert gradients.recorder(Network(images())) is None
