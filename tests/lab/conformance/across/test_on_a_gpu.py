"""Every method, kind of data and network of images on a real GPU; without one,
`test_on_another_device` has a stand-in.

    python -m pytest tests/lab/conformance/across/test_on_a_gpu.py -n 8 -m "slow or not slow"

A run on a GPU has the same bits each time, also when it is resumed, and nearly the CPU's numbers.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ekiden import DP, FederatedData, Result, load_model, run
from ekiden.core.base.errors import UserError
from ekiden.core.engine.method import Method
from ekiden.core.models import catalogue
from ekiden.data import federate
from ekiden.lab.conformance.small_runs import Tiny, files, same
from ekiden.methods import METHODS, FedAvg, FedELMY, FedGram, FedOV, FedSeq
from tests.lab.conformance.across import test_on_another_device as stand_in
from tests.lab.conformance.across.test_frozen_backbone import backbone
from tests.lab.conformance.test_rules import small
from tests.lifecycle.kinds import KINDS, Kind
from tests.lifecycle.silos import ekiden
from tests.silos import sessions as remote

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

Note = Callable[[str, object], None]
SHAPES = {
    "mlp": (1, 28, 28),
    "mlp_ma_echo": (1, 28, 28),
    "cnn_ma_echo": (1, 28, 28),
    "cnn_tiny": (3, 64, 64),
}


def on(device: str, precision: Any = "float32", **training: Any) -> dict[str, Any]:
    return stand_in.on(device, precision, **training)


def resumed(folder: Path, *args: Any, **options: Any) -> tuple[Result, dict[str, bytes]]:
    """A run that stops after a step and goes on, and its files."""
    run(*args, folder=folder, stop_after=1, **options)
    return run(*args, folder=folder, **options), files(folder)


def apart(one: Result, other: Result) -> float:
    """How far two models are from each other, as a share of their length."""
    if one.weights is None or other.weights is None:
        pairs = list(zip(one.personal, other.personal, strict=True))
    else:
        pairs = [(one.weights, other.weights)]
    gaps = [(a.params.cpu() - b.params.cpu()).norm() / b.params.cpu().norm() for a, b in pairs]
    return float(max(gaps, default=torch.zeros(())))


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.title())
def test_a_method(
    kind: type[Method], few: FederatedData, tmp_path: Path, record_property: Note
) -> None:
    options = on("cuda", batch_size=32)
    whole = run(small(kind), few, stand_in.Plain, folder=tmp_path / "whole", **options)
    _, again = resumed(tmp_path / "resumed", small(kind), few, stand_in.Plain, **options)
    assert again == files(tmp_path / "whole")
    here = run(small(kind), few, stand_in.Plain, **on("cpu", batch_size=32))
    record_property("apart", apart(whole, here))
    record_property(
        "accuracy", (whole.metrics[-1].get("accuracy"), here.metrics[-1].get("accuracy"))
    )
    assert apart(whole, here) < 0.02


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.title())
def test_a_method_with_dropout(kind: type[Method], few: FederatedData, tmp_path: Path) -> None:
    """Dropout and BatchNorm: the GPU's own draws are those of the run that was not stopped."""
    run(small(kind), few, Tiny, folder=tmp_path / "whole", **on("cuda"))
    _, again = resumed(tmp_path / "resumed", small(kind), few, Tiny, **on("cuda"))
    assert again == files(tmp_path / "whole")


@pytest.mark.parametrize("changes", [{}, {"optimizer": "sam"}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("method", stand_in.IMAGE_METHODS, ids=lambda method: method.title())
def test_images(method: Method, changes: dict[str, Any], record_property: Note) -> None:
    """Convolutions, augmentation, generated and spoiled samples."""
    one, other = (
        run(method, stand_in.images(), stand_in.Picture, **on("cuda", **changes)) for _ in range(2)
    )
    assert same(one.weights, other.weights)
    assert one.metrics == other.metrics
    record_property(
        "apart",
        apart(one, run(method, stand_in.images(), stand_in.Picture, **on("cpu", **changes))),
    )


@pytest.mark.parametrize("pictures", [False, True])
@pytest.mark.parametrize("method", stand_in.OPTIONS, ids=lambda method: repr(method)[:60])
def test_an_option(
    method: Method, pictures: bool, few: FederatedData, record_property: Note
) -> None:
    if pictures and getattr(method, "statistics", False):
        method = replace(method, statistics=False)  # type: ignore[call-arg]
    data, network = (stand_in.images(), stand_in.Picture) if pictures else (few, stand_in.Wide)
    one, other = (run(method, data, network, **on("cuda")) for _ in range(2))
    assert same(one.weights, other.weights)
    assert one.metrics == other.metrics
    record_property("apart", apart(one, run(method, data, network, **on("cpu"))))


def pictures(shape: tuple[int, ...]) -> FederatedData:
    """Two silos of noise with a colour by class."""
    draw = torch.Generator().manual_seed(4)

    def some(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.arange(n) % 3
        x = torch.randint(120, (n, *shape), generator=draw) + 60 * y.view(-1, *[1] * len(shape))
        return x.to(torch.uint8), y

    return federate([some(48), some(40)], test=some(30))


@pytest.mark.parametrize("changes", [{}, {"precision": "bf16"}], ids=str)
@pytest.mark.parametrize("name", [n for n in catalogue.fitting((3, 64, 64)) if n != "scattering"])
def test_a_network(name: str, changes: dict[str, Any], record_property: Note) -> None:
    data = pictures(SHAPES.get(name, (3, 32, 32)))
    one, other = (
        run(FedSeq(epochs=2), data, name, **on("cuda", lr=1e-4, **changes)) for _ in range(2)
    )
    assert same(one.weights, other.weights)
    assert one.metrics == other.metrics
    record_property("apart", apart(one, run(FedSeq(epochs=2), data, name, **on("cpu", lr=1e-4))))


@pytest.mark.parametrize("method", ["fedseq", "fedavg", "fedgram"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_kind_of_data(
    kind: Kind, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Note
) -> None:
    """From the command line: the same bits twice, then measured and loaded."""
    if method in kind.refused:
        pytest.skip("the method refuses such data")
    monkeypatch.chdir(tmp_path)
    paths, found = kind.make(tmp_path / "silos"), []
    flags = [
        *kind.flags(tmp_path / "silos"),
        "--model",
        kind.network(tmp_path / "silos"),
        "--lr",
        "3e-3",
    ]
    flags += [] if method == "fedgram" else ["--epochs", "2", "--batch-size", "16"]
    flags += ["--rounds", "2"] if method == "fedavg" else []
    for name in ("one", "other"):
        ekiden(
            "run", method, "--silos", *paths, *flags, "--device", "cuda", "--out", tmp_path / name
        )
        (folder,) = (tmp_path / name).iterdir()
        found.append(files(folder))
    assert found[0] == found[1]
    there = json.loads(ekiden("evaluate", folder, "--json"))
    record_property("measured", there)
    assert load_model(folder)


def test_workers_share_a_gpu(few: FederatedData) -> None:
    for method in (FedAvg(rounds=2, epochs=1), FedOV(epochs=1)):
        one, other = (run(method, few, Tiny, workers=n, **on("cuda")) for n in (1, 2))
        assert same(one.weights, other.weights)
        assert one.metrics == other.metrics


def test_a_frozen_backbone(few: FederatedData, record_property: Note) -> None:
    for method in (FedAvg(rounds=2, epochs=1), FedGram(), FedELMY(models=2, epochs=1, warmup=1)):
        one, other = (run(method, few, backbone(), train="head", **on("cuda")) for _ in range(2))
        assert same(one.weights, other.weights)
        record_property(
            "apart", apart(one, run(method, few, backbone(), train="head", **on("cpu")))
        )


def test_sums_of_patches_on_both_devices(record_property: Note) -> None:
    """The sums of whole numbers do not depend on the device, unless a feature rounds otherwise
    there."""
    one, other = (
        run(FedGram(width=64), pictures((3, 32, 32)), "lenet", **on(d)) for d in ("cuda", "cpu")
    )
    record_property("apart", apart(one, other))
    record_property("accuracy", (one.accuracy, other.accuracy))
    assert one.accuracy == pytest.approx(other.accuracy, abs=0.05)


def test_private_training(few: FederatedData) -> None:
    options = on("cuda") | {"dp": DP(epsilon=8.0, delta=1e-3, clip=1.0)}
    one, other = (run(FedAvg(rounds=2, epochs=1), few, stand_in.Wide, **options) for _ in range(2))
    assert same(one.weights, other.weights)


@pytest.mark.parametrize("kind", stand_in.SILOS, ids=lambda kind: kind.title())
def test_silos_compute_there(kind: type[Method], tmp_path: Path) -> None:
    method, allowed = (
        remote.small(kind),
        f'device = "cuda"\n[limits]\nmethods = ["{kind.title()}"]\n',
    )
    one, other = (
        remote.far(method, remote.nodes_in(tmp_path / name, allowed), tmp_path / name / "run")
        for name in ("a", "b")
    )
    remote.assert_equal(one, other)


def test_too_little_memory_is_one_line() -> None:
    """The model fits, its activations do not."""
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.003)
    try:
        with pytest.raises(UserError, match="memory") as caught:
            run(FedSeq(epochs=1), pictures((3, 64, 64)), "resnet18", **on("cuda", batch_size=48))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "\n" not in str(caught.value)
