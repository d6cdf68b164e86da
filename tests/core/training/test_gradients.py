"""Shortcuts of a step give the bits of autograd, and where they do not, autograd does the work."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ekiden import Augment, Hardware, Training
from ekiden.core.models import catalogue
from ekiden.core.models.split import SplitNetwork
from ekiden.core.tasks import Task
from ekiden.core.tasks.labels import Classification, MultiLabel, Regression
from ekiden.core.training import fit as fitting
from ekiden.core.training import gradients
from ekiden.core.training import network as network_module
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
    return catalogue.build("mlp", shape, 3)


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
    """Stands in for a CUDA graph: it owns its arguments, and calls the function again."""

    def __init__(self, function: Pass, given: tuple[Tensor, ...]) -> None:
        self.function, self.given, self.count = function, [t.clone() for t in given], 0

    def __call__(self, *given: Tensor) -> Tensor:
        for own, new in zip(self.given, given, strict=True):
            own.copy_(new)
        self.count += 1
        return self.function(*self.given).clone()


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """Let this CPU record as a GPU does, and return what is recorded."""
    made: list[Replayed] = []

    def record(function: Pass, given: tuple[Tensor, ...]) -> Pass:
        made.append(Replayed(function, given))
        return made[-1]

    monkeypatch.setattr(fitting, "is_recordable", lambda network: True)
    monkeypatch.setattr(fitting, "record", record)
    return made


def never(function: Pass, given: tuple[Tensor, ...]) -> None:
    """Record nothing."""


def normed(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))


STEPS: list[dict[str, Any]] = [
    {},
    {"optimizer": "sgd", "momentum": 0.9, "clip_norm": 0.1},
    {"select": "tail", "max_steps": 11},
    {"select": "best"},
]


@pytest.mark.parametrize(
    ("build", "training"),
    [
        *((lambda: Dropping((3, 8, 8)), training) for training in STEPS),
        # its normalisation counts batches, whatever the optimiser is
        (lambda: normed(nn.BatchNorm2d(4)), {}),
        pytest.param(lambda: catalogue.build("resnet18", (3, 8, 8), 3), {}, marks=pytest.mark.slow),
    ],
)
def test_recorded_steps_draw_and_count_as_others_do(
    build: Callable[[], nn.Module],
    training: dict[str, Any],
    replayed: list[Replayed],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = dataset((3, 8, 8), 21, augment=Augment(crop=1, flip=True))
    quick = bench(data, build, **training)
    found = trained(quick, epochs=4)
    assert {len(recording.given[0]) for recording in replayed} >= {8, 5}
    assert all(recording.count > 1 for recording in replayed)
    monkeypatch.setattr(fitting, "record", never)
    slow = bench(data, build, **training)
    assert bits(trained(slow, epochs=4)) == bits(found)
    assert slow.work == quick.work


@pytest.mark.parametrize(
    "smooth",
    [
        lambda: normed(nn.GroupNorm(2, 4)),
        pytest.param(lambda: catalogue.build("resnet18_gn", (3, 8, 8), 3), marks=pytest.mark.slow),
    ],
)
def test_steps_without_dropout_are_those_of_an_epoch_that_is_drawn_batch_by_batch(
    smooth: Callable[[], nn.Module], replayed: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset((3, 8, 8), 21, augment=Augment(crop=1, flip=True))
    found = trained(bench(data, smooth))
    monkeypatch.setattr(fitting, "is_recordable", lambda network: False)
    assert replayed
    assert bits(trained(bench(data, smooth))) == bits(found)


def test_a_later_fit_replays_from_its_first_step(replayed: list[Replayed]) -> None:
    here = bench(dataset((1, 8, 8)), images, optimizer="sgd", momentum=0.9)
    start = here.network.weights()
    first = trained(here)
    made, counts = len(replayed), [recording.count for recording in replayed]
    here.network.load(start)
    assert bits(trained(here)) == bits(first)
    assert len(replayed) == made
    assert sum(recording.count for recording in replayed) - sum(counts) == 3 * 7


class Waiting:
    """A penalty that says nothing about itself."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, params: Tensor, grad: Tensor, loss: Tensor) -> None:
        self.calls += 1
        grad.add_(params, alpha=self.calls)


def test_what_may_do_something_else_in_each_step_is_not_recorded(replayed: list[Replayed]) -> None:
    samples = dataset((5,)).train
    train, none = Subset(samples, torch.arange(50)), Subset(samples, torch.arange(0))
    squares: Any = {"objective": lambda forward, x, y: forward(x).square().mean()}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"penalty": Waiting()}),
        ({}, squares),
        ({"optimizer": "sam"}, {}),
    ]
    for training, options in cases:
        here = bench(dataset((5,)), perceptron, **training)
        fit(here, here.network.weights(), train, none, epochs=2, seed=1, **options)
    assert not replayed


class Taught(fitting.Objective):
    """The task's loss, held near a teacher's answers."""

    fixed = True

    def __init__(self, task: Task, teacher: nn.Module) -> None:
        self.task, self.teacher = task, teacher

    @property
    def teachers(self) -> tuple[nn.Module]:
        return (self.teacher,)

    def __call__(self, forward: Any, x: Tensor, y: Tensor, *answers: Tensor) -> Tensor:
        outputs: Tensor = forward(x)
        return self.task.mean_loss(outputs, y) + (outputs - answers[0]).square().mean()


@pytest.mark.parametrize("augment", [Augment(), Augment(crop=1)])
def test_teachers_of_recorded_steps(
    augment: Augment, replayed: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset((1, 8, 8), 21, augment=augment)
    train, none = Subset(data.train, torch.arange(21)), Subset(data.train, torch.arange(0))

    def taught() -> list[bytes]:
        here = bench(data, images)
        objective = Taught(data.task, images().eval())
        start = here.network.weights()
        return bits(fit(here, start, train, none, epochs=3, seed=1, objective=objective))

    found = taught()
    assert replayed
    monkeypatch.setattr(fitting, "is_recordable", lambda network: False)
    assert taught() == found


def test_a_recording_that_leaves_something_out_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What happens on the CPU while a graph is made does not happen when it is replayed."""
    data = dataset((1, 8, 8))
    right = trained(bench(data, images))

    def lazy(function: Pass, given: tuple[Tensor, ...]) -> Pass:
        found = function(*given)
        return lambda *later: found

    monkeypatch.setattr(fitting, "is_recordable", lambda network: True)
    monkeypatch.setattr(fitting, "record", lazy)
    assert bits(trained(bench(data, images))) == bits(right)


def test_what_waits_for_a_gpu_is_found_before_it_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modes: list[str] = []

    def set_mode(mode: str) -> None:
        modes.append(mode)
        if mode == "error":
            warnings.warn("a prototype", stacklevel=2)

    def wait(x: Tensor) -> Tensor:
        assert modes == ["error"]
        raise RuntimeError("called a synchronizing CUDA operation")

    def never_made(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(gradients, "Recording", never_made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gradients.record(wait, (torch.ones(2),)) is None
    assert modes == ["error", "default"]


def test_evaluation_is_recorded(replayed: list[Replayed], monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset((1, 8, 8))
    here, all_samples = bench(data, images), Subset(data.train, torch.arange(50))
    found = [fitting.evaluate(here, all_samples, 16).answers for _ in range(3)]
    assert [len(recording.given[0]) for recording in replayed] == [16, 2]
    monkeypatch.setattr(fitting, "is_recordable", lambda network: False)
    right = fitting.evaluate(here, all_samples, 16).answers
    assert all(torch.equal(answers, right) for answers in found)


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


def test_only_modules_that_do_the_same_in_each_step_are_recorded() -> None:
    class Gpu:
        is_cuda = True

    def on_gpu(module: nn.Module) -> bool:
        network = Network(module)
        network_module.compute_aligned(network.module)
        network.params = Gpu()  # type: ignore[assignment]
        return gradients.is_recordable(network)

    # with biases that begin at no multiple of 16 bytes
    assert on_gpu(catalogue.build("lenet", (3, 32, 32), 3))
    # a module of the user's may do something else each time
    assert not on_gpu(Dropping((3, 8, 8)))
    hooked = catalogue.build("lenet", (3, 32, 32), 3)
    hooked.register_forward_hook(lambda module, args, output: None)
    assert not on_gpu(hooked)
    assert not gradients.is_recordable(Network(images()))
