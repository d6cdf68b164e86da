"""Every method on a device that is not the CPU, by a stand-in with a GPU's rules: see `elsewhere`.

Its own tests come first: mistakes that it must find, and what is right on a GPU and it must let
pass."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, run
from ekiden.cli.app import main
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import safetensors_chunks
from ekiden.core.data.augment import Augment
from ekiden.core.engine.method import Method
from ekiden.core.engine.worker import Setup, Worker
from ekiden.core.models.images import MaxPool
from ekiden.core.training import fit as fitting
from ekiden.core.training.fit import Optimizer as step_of
from ekiden.core.training.gradients import Pass
from ekiden.data import federate
from ekiden.lab.conformance.small_runs import Tiny, files, same
from ekiden.methods import (
    DENSE,
    METHODS,
    MOON,
    SCAFFOLD,
    SPFL,
    DisPFL,
    FedAvg,
    FedELMY,
    FedFisher,
    FedLPA,
    FedMA,
    FedOV,
    FedPFT,
    FedSeq,
    FedTasuki,
    FisherMerging,
    MAEcho,
    MetaFed,
    OTFusion,
    RegMean,
)
from ekiden.methods.chain import fedelmy
from tests.lab.conformance.elsewhere import Elsewhere, Mixed
from tests.lab.conformance.test_rules import ELSEWHERE, mostly, small
from tests.silos import sessions as remote

ONE = torch.zeros(1, dtype=torch.int64)


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedELMY walks a small network's pool in another way on a GPU, where asking would wait."""
    monkeypatch.setattr(fedelmy, "_SMALL", 0)


MISTAKES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "a sum of vectors": lambda there, here: there + here,
    "a sum in place": lambda there, here: here.add_(there),
    "a total on the CPU": lambda there, here: here.sum().add_(there.sum()),
    "a product": lambda there, here: there @ here.T,
    "a dot product": lambda there, here: there[0].dot(here[0]),
    "a running mean": lambda there, here: there.lerp_(here, 0.5),
    "a concatenation": lambda there, here: torch.cat([there, here]),
    "a comparison": torch.equal,
    "a choice": lambda there, here: torch.where(here > 0, there, there),
    "an index of the device into the CPU": lambda there, here: here[ONE.to(there.device)],
    "an index of the CPU, by index_select": lambda there, here: there.index_select(0, ONE),
    "an index of the CPU, by gather": lambda there, here: there.gather(0, ONE[None]),
    "values of the CPU put at places": lambda there, here: there.index_put_((ONE,), here[:1]),
    "sums of the CPU by index": lambda there, here: there.index_add_(0, ONE, here[:1]),
    "a mask of the CPU": lambda there, here: there.masked_fill(here > 0, 0.0),
    "labels of the CPU": lambda there, here: F.cross_entropy(
        there, torch.zeros(3, dtype=torch.int64)
    ),
    "labels of the CPU, one-hot": lambda there, here: there * F.one_hot(torch.tensor([0, 1, 2]), 4),
    "a network of the CPU": lambda there, here: nn.Linear(4, 2)(there),
    "a network of another GPU": lambda there, here: nn.Linear(4, 2).to("cuda:1")(there),
    "what nobody put there": lambda there, here: there + torch.arange(4),
    "a gradient of the CPU": lambda there, here: setattr(there, "grad", here),
    "numpy": lambda there, here: there.numpy(),
    "numpy, by itself": lambda there, here: np.asarray(there),
    "a file": lambda there, here: _unmoved({"x": there}),
    "a generator of the CPU": lambda there, here: there.normal_(generator=torch.Generator()),
    "a generator of the CPU, for a new tensor": lambda there, here: torch.rand(
        2, device="cuda", generator=torch.Generator()
    ),
    "autocast of the CPU": lambda there, here: _autocast("cpu", there),
}

RIGHT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a number of the CPU": lambda there, here: there * torch.tensor(2.0) + here[0, 0],
    "a number of the CPU at a place": lambda there, here: there.index_put(
        (ONE,), torch.tensor(1.0)
    ),
    "an index of the CPU": lambda there, here: there[ONE] + there[[0]],
    "a value of the CPU set": lambda there, here: _with(there.clone(), here),
    "a copy": lambda there, here: torch.zeros_like(there).copy_(here),
    "a new tensor like it": lambda there, here: (
        there + there.new_ones(4) + torch.zeros(4, device=there.device)
    ),
    "one-hot labels": lambda there, here: (
        there * F.one_hot(torch.tensor([0, 1, 2], device=there.device), 4)
    ),
    "a copy of a copy": lambda there, here: copy.deepcopy([there.clone()])[0] + there,
    "a view": lambda there, here: (
        there.view(4, 3).T.flatten()[::2] + there.detach().data.view(-1)[:6]
    ),
    "the type of another": lambda there, here: here.double().to(there) + there,
    "sorting": lambda there, here: (
        there.sort(dim=0).values.median(dim=0).values + there.quantile(0.5)
    ),
}


def _unmoved(tensors: dict[str, Tensor]) -> list[object]:
    """Do what `safetensors_chunks` does, without the move to the CPU."""
    return [t.contiguous().view(torch.uint8).numpy().data for t in tensors.values()]


def _with(there: Tensor, here: Tensor) -> Tensor:
    there[0], there[there > 1] = here[0], 0.0
    return there


def _autocast(kind: str, x: Tensor) -> Tensor:
    with torch.autocast(kind, torch.bfloat16):
        return F.linear(x, x)


def values() -> Tensor:
    return torch.arange(12.0).view(3, 4) / 4


def pair() -> tuple[Tensor, Tensor]:
    """Equal values there and here."""
    return values().to("cuda"), values()


@pytest.mark.parametrize("name", MISTAKES)
def test_refuses_what_a_gpu_refuses(name: str) -> None:
    with Elsewhere(), pytest.raises((Mixed, TypeError)):
        MISTAKES[name](*pair())


@pytest.mark.parametrize("name", RIGHT)
def test_accepts_what_a_gpu_accepts(name: str) -> None:
    with Elsewhere() as mode:
        there = RIGHT[name](*pair())
        assert there.device == torch.device("cuda:0")
        assert there.is_cuda
        found = there.cpu()
        assert not found.is_cuda
    assert mode.seen
    here = values()
    assert torch.equal(found, RIGHT[name](here, here.clone()))


def test_reads_numbers_of_the_device() -> None:
    with Elsewhere():
        there, here = pair()
        assert there.tolist() == here.tolist()
        assert float(there[2, 3]) == there.max().item() == 2.75
        assert b"".join(safetensors_chunks({"x": there}, {})) == b"".join(
            safetensors_chunks({"x": here}, {})
        )


def test_gradients_stay_and_go_back_where_they_belong() -> None:
    with Elsewhere():
        weight, network = torch.ones(4, requires_grad=True), nn.Linear(4, 2)
        parameter = network.weight
        network.to("cuda:1")
        assert network.weight is parameter, "as on a GPU"
        network(weight.to("cuda:1")).sum().backward()
        assert weight.grad is not None
        assert weight.grad.device.type == "cpu"
        assert parameter.grad is not None
        assert parameter.grad.device == torch.device("cuda:1")


def test_each_device_draws_from_its_own_generator() -> None:
    with Elsewhere():
        torch.manual_seed(5)
        before = torch.get_rng_state()
        one, other = (torch.ones(8, device=f"cuda:{i}") for i in range(2))
        drawn = [
            F.dropout(one),
            torch.rand(8, device="cuda:0"),
            torch.rand_like(one),
            one.clone().uniform_(),
        ]
        assert torch.equal(torch.get_rng_state(), before)
        torch.cuda.manual_seed(5)  # of the current device, the first
        assert torch.equal(F.dropout(one), drawn[0])
        again = F.dropout(other)
        torch.cuda.manual_seed(5)
        assert not torch.equal(F.dropout(other).cpu(), again.cpu())
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(1, device="cuda")  # the mode is over


def test_rounds_otherwise_if_told_to() -> None:
    with Elsewhere(rounds=True):
        there, here = pair()
        assert not torch.equal((there @ there.T).cpu(), here @ here.T)
        assert torch.equal(there[[2, 0]].clone().cpu(), here[[2, 0]])


class Plain(Tiny):
    """Without dropout, whose draws come from the device's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.features[3] = nn.Identity()


class Wide(nn.Module):
    """A network of 4 inputs with space for statistics next to it."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (b, 3)."""
        return self.head(self.features(x))  # type: ignore[no-any-return]


class Picture(nn.Module):
    """A network for images of 8 x 8 pixels, in two parts and without BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), MaxPool(), nn.Flatten())
        self.features.extend([nn.Linear(36, 64), nn.ReLU()])
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (b, 3)."""
        return self.head(self.features(x))  # type: ignore[no-any-return]


def on(device: str, precision: Any = "float32", **training: Any) -> dict[str, Any]:
    return {
        "training": Training(**({"lr": 0.01, "batch_size": 16} | training)),
        "hardware": Hardware(threads=1, device=device, precision=precision),
        "seed": 3,
    }


UNORDERED = {
    f"aten.{name}"
    for name in (
        *(
            "index_add",
            "index_add_",
            "index_reduce",
            "scatter_add",
            "scatter_add_",
            "scatter_reduce",
            "put_",
            "put",
        ),
        *(
            "histc",
            "cumsum",
            "cumsum_",
            "kthvalue",
            "median",
            "nanmedian",
            "embedding_dense_backward",
        ),
        *("_adaptive_avg_pool2d_backward", "adaptive_max_pool2d_backward", "avg_pool3d_backward"),
        *(
            "max_pool3d_with_indices_backward",
            "max_unpool2d",
            "nll_loss2d_forward",
            "nll_loss2d_backward",
        ),
        *(
            "upsample_linear1d_backward",
            "upsample_bilinear2d_backward",
            "upsample_bicubic2d_backward",
        ),
        *("reflection_pad1d_backward", "reflection_pad2d_backward", "replication_pad1d_backward"),
        *("replication_pad2d_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
    )
}
"""What a GPU sums in an order of its own, as `torch.use_deterministic_algorithms` lists it (here by
operation)."""


@mostly(ELSEWHERE)
def test_gives_the_bits_of_the_cpu(kind: type[Method], few: FederatedData, tmp_path: Path) -> None:
    """It trains, evaluates, saves and resumes, and draws nothing on the device that the CPU would
    draw differently."""
    method = small(kind)
    cpu, cuda = on("cpu", batch_size=32), on("cuda:1", batch_size=32)
    here = run(method, few, Plain, folder=tmp_path / "cpu", **cpu)
    with Elsewhere() as mode:
        run(method, few, Plain, folder=tmp_path / "there", stop_after=1, **cuda)
        run(method, few, Plain, folder=tmp_path / "there", **cuda)
    assert files(tmp_path / "there") == files(tmp_path / "cpu")
    assert mode.seen & {"aten.addmm", "aten.bincount"}, "it computed there"
    assert not mode.seen & UNORDERED
    if here.metrics[-1]["backward"]:
        assert "aten.native_batch_norm_backward" in mode.seen, "it trained there"


RESUMED = (SCAFFOLD,)
"""Clients and the server keep something between tasks."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(k, marks=[] if k in RESUMED else pytest.mark.slow, id=k.title())
        for k in METHODS
    ],
)
def test_resumes_there_bit_for_bit(kind: type[Method], few: FederatedData, tmp_path: Path) -> None:
    """With dropout, on a device that rounds differently: after a resume everything is computed
    where it was before."""
    for name, stops in (("whole", [None]), ("stopped", [1, None])):
        for stop in stops:
            with Elsewhere(rounds=True):
                options = on("cuda:1") | {"stop_after": stop, "evaluate_every": 10**9}
                run(small(kind), few, Tiny, folder=tmp_path / name, **options)
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")


def images() -> FederatedData:
    """Two silos of small pictures in three classes, which are augmented."""
    draw = torch.Generator().manual_seed(2)

    def some(n: int) -> tuple[Tensor, Tensor]:
        y = torch.arange(n) % 3
        return (torch.randint(100, (n, 1, 8, 8), generator=draw) + 60 * y[:, None, None, None]).to(
            torch.uint8
        ), y

    data = federate([some(24), some(30)], test=some(12))
    return replace(
        data, dataset=replace(data.dataset, augment=Augment(crop=1, flip=True, rotation=10))
    )


SILOS = (SCAFFOLD, FedSeq, FedAvg, FedOV, MetaFed, DisPFL)

IMAGE_METHODS = (
    DENSE(epochs=1, distill_epochs=2, steps_per_batch=2, distill_batch_size=8),
    FedAvg(rounds=2, epochs=1),
    FedELMY(models=2, epochs=1, warmup=1),
    FedOV(epochs=1),
    FedTasuki(epochs=2, recall=0.5),
    MAEcho(epochs=1),
    OTFusion(epochs=1),
    FedMA(epochs=1, retrain_epochs=1),
)


def cases() -> Iterator[Any]:
    """Some methods are fast without changes, and each change with one that has a loss of its own;
    the rest is slow."""
    for method in IMAGE_METHODS:
        for changes in ({}, {"optimizer": "sam"}, {"precision": "bf16"}):
            changed = FedTasuki if "optimizer" in changes else FedELMY
            fast = isinstance(method, changed if changes else (FedAvg, FedOV, FedMA, MAEcho, DENSE))
            marks = [] if fast else [pytest.mark.slow]
            yield pytest.param(method, changes, marks=marks, id=f"{method.title()}-{changes}")


@pytest.mark.parametrize(("method", "changes"), [*cases()])
def test_images_give_the_bits_of_the_cpu(method: Method, changes: dict[str, Any]) -> None:
    """Convolutions, augmentation, generated and spoiled samples; SAM's second gradient with the
    draws of the first."""
    cpu, there = on("cpu", **changes), on("cuda", **changes)
    expected = run(method, images(), Picture, **cpu)
    with Elsewhere() as mode:
        found = run(method, images(), Picture, **there)
    # FedOV adds one number at each place; the gradient of an augmented image up to two, whose sum
    # has no order either.
    ordered = {"aten.scatter_add"} if isinstance(method, (FedOV, DENSE)) else set()
    assert not mode.seen & UNORDERED - ordered
    assert found.metrics == expected.metrics
    assert same(found.weights, expected.weights)


@pytest.mark.parametrize(
    ("method", "augment"),
    [
        (FedAvg(rounds=2, epochs=2), False),
        (FedAvg(rounds=1, epochs=2), True),
        (FedELMY(models=2, epochs=2, warmup=1), True),
        (FedELMY(models=2, epochs=2, warmup=1, form="released", alpha=0.5), True),
        (FedTasuki(epochs=2), True),
        (MetaFed(rounds=1, epochs=2), True),
        (MOON(rounds=2, epochs=2), True),
        (SCAFFOLD(rounds=1, epochs=3), True),
    ],
)
def test_steps_that_a_gpu_records_compute_there(
    method: Method, augment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording, here a call, owns its arguments; what is replayed meets nothing of the CPU."""
    recorded: list[int] = []

    def record(function: Pass, given: tuple[Tensor, ...]) -> Pass:
        own = [tensor.clone() for tensor in given]
        recorded.append(len(own[0]))

        def replay(*now: Tensor) -> Tensor:
            for kept, new in zip(own, now, strict=True):
                kept.copy_(new)
            return function(*own).clone()

        return replay

    found = []
    for way in (record, lambda *_: None):
        monkeypatch.setattr(fitting, "record", way)
        options = on("cuda:1", augment=augment, batch_size=8)
        with Elsewhere():
            found.append(run(method, images(), "cnn_tiny", **options))
    assert recorded
    assert found[0].metrics == found[1].metrics
    models = ([result.weights or result.personal[0]] for result in found)
    assert all(same(a, b) for a, b in zip(*models, strict=True) if a and b)


OPTIONS = (
    DisPFL(rounds=2, epochs=1, regrow="gradient", topology="ring"),
    FedTasuki(epochs=2, statistics=True),
    FedTasuki(epochs=2, widen=0.5),
    MAEcho(epochs=1, form="paper", weighting="qp", projector="closed", iterations=2, step=0.5),
    MAEcho(epochs=1, align=True, normalise=True, iterations=2),
    OTFusion(epochs=1, alignment="activations", samples=8, combine_heads="class-wise"),
    OTFusion(epochs=1, sinkhorn=0.1),
    FisherMerging(epochs=1, fisher="sampled", normalise=True),
    RegMean(epochs=1, weighting="uniform"),
    FedFisher(epochs=1, curvature="diagonal", iterations=3),
    FedFisher(epochs=1, fisher="sampled", iterations=3),
    FedLPA(epochs=1, iterations=3),
    SPFL(host="feddc", rounds=2, epochs=1, length=2),
    SPFL(host="moon", rounds=2, epochs=1, length=2),
    FedPFT(topology="chain", mixtures=2, covariance="full", head_epochs=2),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "pictures"),
    [
        pytest.param(
            method, pictures, id=f"{method.title()}-{'pictures' if pictures else 'numbers'}"
        )
        for method in OPTIONS
        for pictures in (False, True)
    ],
)
def test_options_give_the_bits_of_the_cpu(
    method: Method, pictures: bool, few: FederatedData
) -> None:
    """Options that are off by default."""
    if pictures and isinstance(method, FedTasuki):
        method = replace(method, statistics=False)  # too large for a network of so many features
    data, network = (images(), Picture) if pictures else (few, Wide)
    expected = run(method, data, network, **on("cpu"))
    with Elsewhere():
        found = run(method, data, network, **on("cuda"))
    assert found.metrics == expected.metrics
    assert same(found.weights, expected.weights)


@pytest.mark.parametrize(
    "optimizer", ["adam", *(pytest.param(o, marks=pytest.mark.slow) for o in ("sgd", "sam"))]
)
def test_a_fit_goes_on_there(
    optimizer: str, blobs: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of a hop, from the journal: optimiser, best epoch and dropout."""
    monkeypatch.setattr("ekiden.core.training.fit._SHARE_OF_SAVING", 0)

    def killed(client: str, epoch: int, epochs: int) -> None:
        if epoch == 3:
            raise KeyboardInterrupt

    method, options = FedSeq(epochs=4), on("cuda:1", optimizer=optimizer, momentum=0.9)
    with Elsewhere():
        run(method, blobs, Tiny, folder=tmp_path / "whole", **options)
    with Elsewhere(), pytest.raises(KeyboardInterrupt):
        run(method, blobs, Tiny, folder=tmp_path / "killed", watch=killed, **options)
    assert list(tmp_path.glob("killed/clients/*/journal/*fit*"))
    with Elsewhere():
        resumed = run(method, blobs, Tiny, folder=tmp_path / "killed", **options)
    assert files(tmp_path / "killed") == files(tmp_path / "whole")
    assert resumed.metrics[0]["backward"] > 0


def test_a_step_of_adam_needs_its_count_on_the_device() -> None:
    """The fused step, as on a GPU: what a journal restores goes to the device."""
    with Elsewhere():
        params, grad = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
        adam = step_of(params, grad, Training())
        adam.step()
        adam.state["step"] = adam.state["step"].cpu()
        with pytest.raises(Mixed):
            adam.step()


def test_training_seeds_its_device_and_leaves_the_users_draws_alone(blobs: FederatedData) -> None:
    network, found = Tiny(), []
    with Elsewhere():
        generators: Any = torch.cuda.default_generators
        for seed in (1, 2):
            users = generators[1].manual_seed(seed)
            before = users.get_state()
            result = run(FedSeq(epochs=1), blobs, network, **on("cuda:1"))
            assert result.weights is not None
            found.append(result.weights.params.cpu())
            assert torch.equal(users.get_state(), before)
    assert torch.equal(*found)


def test_a_full_memory_is_one_line(blobs: FederatedData, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 44.00 MiB.\nGPU 0 has ..."
        )

    monkeypatch.setattr("ekiden.core.training.fit.TaskLoss.__call__", full)
    with pytest.raises(
        UserError, match=r"step 1, client client-0: the memory of cpu is full: lower batch_size"
    ):
        run(FedSeq(epochs=1), blobs, Tiny, **on("cpu"))


def test_every_process_asks_cudnn_for_the_same_bits(
    blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker processes make a `Worker` and nothing else."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    with Elsewhere():
        Worker(
            Setup(FedSeq(), Tiny, blobs.dataset, hardware=Hardware(threads=1, device="cuda")), {}
        )
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark


@pytest.mark.slow
@pytest.mark.parametrize("kind", SILOS, ids=lambda kind: kind.title())
def test_silos_compute_there(kind: type[Method], tmp_path: Path) -> None:
    method = remote.small(kind)
    expected = remote.here(method)
    with Elsewhere() as mode:
        nodes = remote.nodes_in(
            tmp_path, f'device = "cuda:1"\n[limits]\nmethods = ["{kind.title()}"]\n'
        )
        remote.assert_equal(remote.far(method, nodes, tmp_path / "run"), expected)
    assert "aten.addmm" in mode.seen


def test_what_was_trained_on_a_gpu_is_measured_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    folder = "runs/fedseq-digits-seed0"

    def ekiden(*args: str) -> str:
        monkeypatch.setattr("sys.argv", ["ekiden", *args])
        main()
        return capsys.readouterr().out

    with Elsewhere():
        ekiden("run", "fedseq", "--clients", "2", "--epochs", "1", "--device", "cuda")
        expected = ekiden("evaluate", folder, "--json")
    assert json.loads(Path(folder, "config.json").read_text())["hardware"]["device"] == "cuda"
    assert ekiden("evaluate", folder, "--json") == expected
