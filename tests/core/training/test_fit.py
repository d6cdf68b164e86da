"""The training loop and its optimisers against plain PyTorch written out here."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, federate, run
from ekiden.core.base.settings import derive
from ekiden.core.data.augment import Augment
from ekiden.core.tasks import own_metric
from ekiden.core.training import fit as fitting
from ekiden.core.training.feed import Feed
from ekiden.core.training.fit import Bench, Diverged, Forward, Objective, Optimizer, Work, fit
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.data import Dataset, Samples, Subset, from_tensors
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Local
from ekiden.methods.gossip.criticalfl import Squares
from ekiden.readers.kinds import of_tensor

SEED = 11


def dataset(n: int = 50) -> Dataset:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(3, (n,), generator=generator)
    x = torch.randn(n, 4, generator=generator) + F.one_hot(y, 4) * 2
    return from_tensors((x, y), (x, y))


def bench(data: Dataset, module: Callable[[], nn.Module] = Tiny, **training: Any) -> Bench:
    torch.manual_seed(0)
    fields: dict[str, Any] = {"batch_size": 16, "weight_decay": 0.01, "select": "last"} | training
    settings = Training(**fields)
    return Bench(
        Network(module()), Feed(data, Hardware(threads=1)), settings, Hardware(threads=1), "here"
    )


def subset(data: Dataset, start: int = 0, stop: int | None = None) -> Subset:
    return Subset(data.train, torch.arange(len(data.train))[start:stop])


def plain(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Subset,
    epochs: int,
    each: Callable[[], None] = lambda: None,
    size: int = 16,
) -> None:
    """The obvious loop: epochs of shuffled mini-batches, with the seeds that fit documents."""
    module.train()
    for epoch in range(epochs):
        torch.manual_seed(derive(SEED, epoch))
        order = torch.randperm(len(data))
        for start in range(0, len(data), size):
            rows = order[start : start + size]
            optimizer.zero_grad()
            F.cross_entropy(module(data.x[rows]), data.y[rows]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        each()


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize(
    ("training", "optimizer"),
    [
        ({"optimizer": "adam", "lr": 0.01}, lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01)),
        ({"optimizer": "sgd", "lr": 0.1}, lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01)),
        (
            {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9},
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
        ),
    ],
    ids=["adam", "sgd", "momentum"],
)
def test_equals_a_plain_loop(
    training: dict[str, Any], optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    data = dataset()
    here, twin = bench(data, **training), Tiny()
    twin.load_state_dict(here.network.module.state_dict())
    result = fit(
        here, here.network.weights(), subset(data), subset(data, 0, 0), epochs=4, seed=SEED
    )
    plain(twin, optimizer(twin.parameters()), subset(data), 4)
    torch.testing.assert_close(result.params, flat(twin), rtol=1e-5, atol=1e-6)
    statistics = torch.cat([b.flatten() for b in twin.buffers() if b.is_floating_point()])
    torch.testing.assert_close(result.buffers, statistics, rtol=1e-5, atol=1e-6)


def test_sam_equals_its_definition() -> None:
    class Linear(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)

    data = dataset(20)
    here = bench(data, Linear, optimizer="sgd", lr=0.1, weight_decay=0.0, batch_size=20)
    here.training = Training(
        optimizer="sam", lr=0.1, rho=0.5, weight_decay=0.0, batch_size=20, select="last"
    )
    start, train = here.network.weights(), subset(data)
    result = fit(here, start, train, subset(data, 0, 0), epochs=1, seed=SEED)

    def gradient(params: Tensor) -> Tensor:
        w = params.clone().requires_grad_()
        loss = F.cross_entropy(train.x @ w[:12].view(3, 4).T + w[12:], train.y)
        return torch.autograd.grad(loss, w)[0]

    g = gradient(start.params)
    expected = start.params - 0.1 * gradient(start.params + 0.5 * g / g.norm())
    torch.testing.assert_close(result.params, expected)


def test_sam_updates_running_statistics_once_a_step() -> None:
    data = dataset(32)
    here = bench(data, optimizer="sam", lr=0.1)
    result = fit(
        here, here.network.weights(), subset(data), subset(data, 0, 0), epochs=1, seed=SEED
    )
    assert result.counters.tolist() == [2]


def test_clips_the_norm_of_the_gradient() -> None:
    data = dataset(16)
    here = bench(data, optimizer="sgd", lr=1.0, weight_decay=0.0, clip_norm=0.01)
    start = here.network.weights()
    result = fit(here, start, subset(data), subset(data, 0, 0), epochs=1, seed=SEED)
    assert float((result.params - start.params).norm()) == pytest.approx(0.01, rel=1e-4)


def test_penalty_is_added_to_the_gradient() -> None:
    data = dataset(16)
    here = bench(data, optimizer="sgd", lr=0.5, weight_decay=0.0)
    start, seen = here.network.weights(), []

    def pull(params: Tensor, grad: Tensor, loss: Tensor) -> None:
        seen.append(float(loss))
        grad.add_(torch.ones_like(params))

    without = fit(here, start, subset(data), subset(data, 0, 0), epochs=1, seed=SEED)
    pulled = fit(here, start, subset(data), subset(data, 0, 0), epochs=1, seed=SEED, penalty=pull)
    torch.testing.assert_close(pulled.params, without.params - 0.5)
    assert len(seen) == 1
    assert seen[0] > 0


class Scripted(nn.Module):
    """Answers so that validation accuracy follows a script, whatever is trained."""

    def __init__(self, accuracies: list[float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.accuracies = accuracies
        self.evaluations = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return torch.stack([self.weight.expand(len(x)), -self.weight.expand(len(x))], 1)
        right = round(self.accuracies[self.evaluations] * len(x))
        self.evaluations += 1
        return F.one_hot(torch.tensor([0] * right + [1] * (len(x) - right)), 2).float()


@pytest.mark.parametrize(
    ("accuracies", "best"),
    [([0.3, 0.8, 0.8, 0.5], 2), ([0.0, 0.0, 0.0], 1), ([0.0, 0.5, 1.0], 3), ([0.9, 0.2], 1)],
)
def test_keeps_the_first_epoch_with_the_best_validation_accuracy(
    accuracies: list[float], best: int
) -> None:
    data = from_tensors(
        (torch.zeros(10, 1), torch.zeros(10, dtype=torch.int64)), classes=("a", "b")
    )
    here = bench(
        data, lambda: Scripted(accuracies), optimizer="sgd", lr=1.0, weight_decay=0.0, select="best"
    )
    everything = Subset(data.train, torch.arange(len(data.train)))
    after: list[Tensor] = []
    here.watch = lambda epoch, epochs: after.append(here.network.params.clone())
    result = fit(
        here, here.network.weights(), everything, everything, epochs=len(accuracies), seed=SEED
    )
    assert torch.equal(result.params, after[best - 1])


def test_best_epoch_brings_its_own_statistics() -> None:
    data = dataset()
    here = bench(data, select="best", lr=0.01)
    statistics: list[Tensor] = []
    accuracies: list[float] = []

    def watch(epoch: int, epochs: int) -> None:
        statistics.append(here.network.buffers.clone())
        accuracies.append(float(fitting.evaluate(here, subset(data, 0, 20)).right.sum()))

    here.watch = watch
    result = fit(
        here, here.network.weights(), subset(data, 20), subset(data, 0, 20), epochs=8, seed=SEED
    )
    best = accuracies.index(max(accuracies))
    assert best < 7, "the test needs a best epoch before the last"
    assert torch.equal(result.buffers, statistics[best])


def test_without_validation_data_the_last_epoch_counts() -> None:
    data = dataset()
    start = bench(data).network.weights()
    last, best = (
        fit(bench(data, select=s), start, subset(data), subset(data, 0, 0), epochs=3, seed=SEED)
        for s in ("last", "best")
    )
    assert torch.equal(last.params, best.params)


@pytest.mark.parametrize(("tail", "first"), [(0.5, 5), (1.0, 1), (0.25, 7)])
def test_tail_is_the_mean_of_the_last_iterates(tail: float, first: int) -> None:
    data = dataset(32)  # 2 steps an epoch, 4 epochs: iterates 1 to 8
    here = bench(data, optimizer="sgd", select="tail", tail=tail)
    iterates: list[Tensor] = []
    step = Optimizer.step

    def spy(self: Optimizer) -> None:
        step(self)
        iterates.append(here.network.params.clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimizer, "step", spy)
        result = fit(
            here, here.network.weights(), subset(data), subset(data, 0, 0), epochs=4, seed=SEED
        )
    assert len(iterates) == 8
    torch.testing.assert_close(
        result.params, torch.stack(iterates[first - 1 :]).mean(0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(("limit", "steps"), [(6, 6), (8, 8), (1, 1), (100, 12), (0, 12)])
def test_max_steps_are_the_first_steps_of_a_plain_loop(limit: int, steps: int) -> None:
    data = dataset()  # 4 steps an epoch
    here, twin = bench(data, optimizer="sgd", lr=0.1, max_steps=limit), Tiny()
    twin.load_state_dict(here.network.module.state_dict())
    seen: list[tuple[int, int]] = []
    here.watch = lambda epoch, epochs: seen.append((epoch, epochs))
    result = fit(
        here, here.network.weights(), subset(data), subset(data, 0, 0), epochs=3, seed=SEED
    )
    plain(twin, Stops(twin.parameters(), steps), subset(data), 3)
    torch.testing.assert_close(result.params, flat(twin), rtol=1e-5, atol=1e-6)
    rounds, rest = divmod(steps, 4)
    assert here.work.backward == rounds * 50 + rest * 16
    assert seen == [(epoch + 1, -(-steps // 4)) for epoch in range(-(-steps // 4))]


class Stops(torch.optim.SGD):
    """SGD that does nothing after this many steps."""

    def __init__(self, params: Any, left: int) -> None:
        super().__init__(params, 0.1, weight_decay=0.01)
        self.left = left

    def step(self, *args: Any) -> Any:
        self.left -= 1
        return super().step(*args) if self.left >= 0 else None


class Memory:
    """A journal in memory that forgets nothing, and may stop the run."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.saved: dict[str, dict[str, Tensor]] = {}
        self.stop_after = stop_after

    def load(self, key: str) -> dict[str, Tensor] | None:
        return self.saved.get(key)

    def save(self, key: str, tensors: dict[str, Tensor]) -> None:
        self.saved[key] = {name: value.clone() for name, value in tensors.items()}
        if int(tensors["numbers"][0]) == self.stop_after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("stop", [1, 2, 4, 5])
@pytest.mark.parametrize(
    "training",
    [
        {"select": "best"},
        {"select": "tail"},
        {"optimizer": "sgd", "momentum": 0.9},
        {"optimizer": "sam"},
        {"select": "tail", "max_steps": 9},
    ],
    ids=["best", "tail", "momentum", "sam", "max-steps"],
)
def test_interrupted_fit_goes_on_bit_for_bit(
    training: dict[str, Any], stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "_SHARE_OF_SAVING", 0)
    data = dataset()
    whole = bench(data, lr=0.01, **training)
    start = whole.network.weights()
    train, val = subset(data, 20), subset(data, 0, 20)
    expected = fit(whole, start, train, val, epochs=5, seed=SEED)

    broken = bench(data, lr=0.01, **training)
    broken.journal = journal = Memory(stop)
    with pytest.raises(KeyboardInterrupt):
        fit(broken, start, train, val, epochs=5, seed=SEED)
    journal.stop_after = 10**9
    resumed = bench(data, lr=0.01, **training)
    resumed.journal = journal
    epochs: list[int] = []
    resumed.watch = lambda epoch, of: epochs.append(epoch)
    result = fit(resumed, start, train, val, epochs=5, seed=SEED)
    assert epochs == list(range(stop + 1, 6)), "what was done is not done again"
    for a, b in zip(vars(expected).values(), vars(result).values(), strict=True):
        assert torch.equal(a, b)
    assert resumed.work == whole.work


def test_leaves_the_ambient_random_state_alone() -> None:
    data = dataset()
    here = bench(data)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    fit(here, here.network.weights(), subset(data), subset(data, 0, 0), epochs=2, seed=SEED)
    assert torch.equal(torch.rand(3), expected)


def test_does_not_depend_on_the_ambient_random_state() -> None:
    data = dataset()
    start, results = bench(data).network.weights(), []
    for ambient in (1, 2):
        here = bench(data)
        torch.manual_seed(ambient)
        results.append(
            fit(here, start, subset(data), subset(data, 0, 0), epochs=2, seed=SEED).params
        )
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize(
    ("n", "sizes"), [(17, [17]), (33, [16, 17]), (16, [16]), (20, [16, 4]), (1, [1])]
)
def test_a_last_batch_of_one_joins_the_one_before(n: int, sizes: list[int]) -> None:
    batches = list(fitting.shuffled(n, 16))
    assert [len(b) for b in batches] == sizes
    assert sorted(torch.cat(batches).tolist()) == list(range(n))
    assert Training(batch_size=16).steps(n, 3) == 3 * len(sizes)


def test_one_sample_trains_with_the_running_statistics() -> None:
    data = dataset()
    here = bench(data, lr=0.01)
    start = here.network.weights()
    result = fit(here, start, subset(data, 0, 1), subset(data, 0, 0), epochs=2, seed=SEED)
    assert result.is_finite()
    assert torch.equal(result.buffers, start.buffers)
    assert not torch.equal(result.params, start.params)


def test_batchnorm_cannot_takeshuffled_of_one() -> None:
    data = dataset()
    here = bench(data, batch_size=1)
    with pytest.raises(UserError, match=r"^here: .* use a larger batch_size"):
        fit(here, here.network.weights(), subset(data), subset(data, 0, 0), epochs=1, seed=SEED)


def test_says_where_training_diverged() -> None:
    x = torch.randn(32, 4)
    x[20] = float("inf")
    data = Dataset(
        "bad",
        Samples(x, torch.zeros(32, dtype=torch.int64)),
        Samples(x, torch.zeros(32).long()),
        ("a", "b", "c"),
        inputs=of_tensor(x),
    )
    here = bench(data)
    with pytest.raises(Diverged, match=r"^here: .* epoch 1, batch [12]: lower lr"):
        fit(here, here.network.weights(), subset(data), subset(data, 0, 0), epochs=3, seed=SEED)


def test_counts_work() -> None:
    data = dataset()
    here = bench(data, select="best")
    fit(here, here.network.weights(), subset(data, 20), subset(data, 0, 20), epochs=3, seed=SEED)
    assert (here.work.forward, here.work.backward) == (3 * (30 + 20), 3 * 30)


@dataclass
class Mimicry(Objective):
    """Fits the outputs to a teacher's; it also makes a useless pass over each batch."""

    teacher: Forward

    def further(self, batch: int) -> Work:
        return Work(batch // 2)

    @property
    def teachers(self) -> tuple[Forward]:
        return (self.teacher,)

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *given: Tensor) -> Tensor:
        (answers,) = given
        assert torch.allclose(answers, self.teacher(x)), "to the same samples"
        assert not answers.requires_grad
        return F.mse_loss(forward(x), answers)


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "sam"])
def test_teachers_answer_once_unless_samples_change(augmented: bool, optimizer: Any) -> None:
    x = torch.randint(256, (80, 1, 4, 4), dtype=torch.uint8)
    data = from_tensors(
        (x, torch.arange(80) % 2),
        classes=("a", "b"),
        augment=Augment(crop=1, flip=True) if augmented else Augment(),
    )
    weight = torch.randn(16, 2)
    asked: list[int] = []

    def teacher(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # not in Mimicry
            asked.append(len(x))
        return x.flatten(1) @ weight

    network, hardware = Network(nn.Sequential(nn.Flatten(), nn.Linear(16, 2))), Hardware(threads=1)
    here = Bench(
        network,
        Feed(data, hardware),
        Training(optimizer, lr=0.1, batch_size=20, select="last"),
        hardware,
    )
    held, none = subset(data, 0, 60), subset(data, 0, 0)
    held.rows.copy_(held.rows.flip(0))
    fit(here, network.weights(), held, none, epochs=3, seed=SEED, objective=Mimicry(teacher))
    passes = 2 if optimizer == "sam" else 1
    assert asked == ([20] * 9 if augmented else [60])
    assert here.work.backward == passes * 180
    assert here.work.forward == passes * (180 + 90) + (180 if augmented else 60)

    asked.clear()
    few = replace(here, training=replace(here.training, max_steps=2))
    fit(few, network.weights(), held, none, epochs=3, seed=SEED, objective=Mimicry(teacher))
    assert asked == [20, 20], "less than one pass over the samples"


class Partly(Mimicry):
    """Learns the teacher's answers for the first three quarters of a batch."""

    def asks(self, batch: int) -> int:
        return batch * 3 // 4

    def __call__(self, forward: Forward, x: Tensor, y: Tensor, *given: Tensor) -> Tensor:
        (answers,) = given
        return super().__call__(forward, x[: self.asks(len(x))], y, answers[: self.asks(len(x))])


def test_teachers_answer_what_is_asked_for() -> None:
    """In every step if samples are augmented; otherwise for all samples, once, because any may come
    first."""
    x = torch.randint(256, (80, 1, 4, 4), dtype=torch.uint8)
    for augment, passes in (Augment(flip=True), 2 * 3 * 15), (Augment(), 60):
        data = from_tensors((x, torch.arange(80) % 2), classes=("a", "b"), augment=augment)
        network, hardware = (
            Network(nn.Sequential(nn.Flatten(), nn.Linear(16, 2))),
            Hardware(threads=1),
        )
        here = Bench(
            network, Feed(data, hardware), Training(lr=0.1, batch_size=20, select="last"), hardware
        )
        fit(
            here,
            network.weights(),
            subset(data, 0, 60),
            subset(data, 0, 0),
            epochs=2,
            seed=SEED,
            objective=Partly(lambda x: x.flatten(1)[:, :2]),
        )
        assert here.work.forward == 2 * (60 + 30) + passes


def test_bf16_and_channels_last_train_images() -> None:
    x = torch.randint(256, (24, 3, 8, 8), dtype=torch.uint8)
    data = from_tensors((x, x[:, 0, 0, 0].long() // 128), classes=("dark", "light"))
    hardware = Hardware(threads=1, precision="bf16", channels_last=True)
    network = Network(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)))
    here = Bench(
        network, Feed(data, hardware), Training(batch_size=8, lr=0.01, select="last"), hardware
    )
    start = network.weights()
    rows = torch.arange(len(data.train))
    result = fit(
        here, start, Subset(data.train, rows), Subset(data.train, rows[:0]), epochs=2, seed=SEED
    )
    assert result.is_finite()
    assert result.params.dtype == torch.float32
    assert not torch.equal(result.params, start.params)


@pytest.mark.parametrize(
    "changes",
    [
        {"lr": 0},
        {"batch_size": 0},
        {"weight_decay": -1},
        {"momentum": 1},
        {"tail": 0},
        {"clip_norm": -1},
        {"rho": -1},
        {"max_steps": -1},
    ],
)
def test_training_refuses_what_is_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(changes))} .* out of range"):
        Training(**changes)


def test_weights_are_never_changed_in_place() -> None:
    data = dataset()
    here = bench(data, lr=0.01)
    start = here.network.weights()
    copy = Weights(start.params.clone(), start.buffers.clone(), start.counters.clone())
    fit(here, start, subset(data), subset(data, 0, 0), epochs=2, seed=SEED)
    assert torch.equal(start.params, copy.params)
    assert torch.equal(start.buffers, copy.buffers)


@pytest.mark.parametrize("undefined", [1, 2])
def test_an_epoch_whose_metric_is_not_defined_is_not_the_best(undefined: int) -> None:
    seen: list[float] = []

    def rising(answers: torch.Tensor, y: torch.Tensor) -> float:
        seen.append(float("nan") if len(seen) + 1 == undefined else 1 / (1 + len(seen)))
        return seen[-1]

    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 2, generator=g), torch.randint(2, (60,), generator=g)
    models = []
    for epochs in (4, {1: 2, 2: 1}[undefined]):
        seen.clear()
        torch.manual_seed(0)
        done = run(
            Local(epochs=epochs),
            federate([(x, y)], val_fraction=0.3),
            nn.Linear(2, 2),
            metric=own_metric(rising),
            training=Training(optimizer="sgd", lr=0.2),
            evaluate_every=0,
            quiet=True,
        )
        models.append(done.personal[0].params)
    assert torch.equal(*models)


CASES = {
    "adam": Training(optimizer="adam", lr=0.01, weight_decay=0.1),
    "adamw": Training(optimizer="adamw", lr=0.01, weight_decay=0.1),
    "sgd": Training(optimizer="sgd", lr=0.1),
    "momentum": Training(optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
}


def reference(params: torch.Tensor, training: Training) -> torch.optim.Optimizer:
    """PyTorch's optimiser, as its users make it."""
    if training.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
        return kind([params], training.lr, weight_decay=training.weight_decay, fused=True)
    return torch.optim.SGD(
        [params],
        training.lr,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        fused=True,
    )


@pytest.mark.parametrize("name", CASES)
def test_steps_are_torchs_bit_for_bit_also_when_taken_up_again(name: str) -> None:
    start = torch.randn(37, generator=torch.Generator().manual_seed(0))
    ours, theirs = start.clone(), start.clone()
    theirs.grad, grad = torch.zeros_like(start), torch.zeros_like(start)
    mine, its = Optimizer(ours, grad, CASES[name]), reference(theirs, CASES[name])
    for step in range(6):
        if step == 3:  # as after a crash
            kept = {name: value.clone() for name, value in mine.state.items()}
            mine = Optimizer(ours, grad, CASES[name])
            mine.state |= kept
        drawn = torch.randn(37, generator=torch.Generator().manual_seed(step + 1))
        grad.copy_(drawn)
        theirs.grad.copy_(drawn)
        mine.step()
        its.step()
        assert torch.equal(ours, theirs)
    assert not torch.equal(ours, start)
    torch_keeps = {
        name: value for name, value in its.state[theirs].items() if isinstance(value, torch.Tensor)
    }
    assert mine.state.keys() == torch_keeps.keys()
    assert all(torch.equal(mine.state[name], value) for name, value in torch_keeps.items())


def test_decoupled_weight_decay_is_no_part_of_the_gradient() -> None:
    """Control variates are means of gradients: what AdamW subtracts from the weights does not
    belong to them."""
    assert [CASES[name].l2 for name in CASES] == [0.1, 0.0, 0.0001, 0.01]
    assert [CASES[name].adaptive for name in CASES] == [True, True, False, False]


def test_training_starts_without_what_takes_seconds_to_load() -> None:
    """Torch's compiler, statistics, and what other sources need: every task on Flower is a new
    process."""
    code = """
import sys
heavy = {"datasets", "flwr_datasets", "sklearn", "scipy", "matplotlib", "pandas", "pyarrow", "polars", "transformers"}
heavy |= {"peft", "timm", "flwr", "cryptography", "jinja2", "onnx", "torch._dynamo", "sympy"}
from ekiden import Training, run
from ekiden.data import load, parse, split
print([name for name in heavy if name in sys.modules])
from ekiden.methods import FedSeq
load("digits")
for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
    del sys.modules[name]
for optimizer in "adam", "adamw", "sgd", "sam":
    data, training = split(load("digits"), parse("iid"), 2, seed=0), Training(optimizer=optimizer, max_steps=2)
    run(FedSeq(epochs=1), data, training=training)
print([name for name in ("torch._dynamo", "sympy", "sklearn") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n[]\n"), done.stderr


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
