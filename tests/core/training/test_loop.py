"""A training loop of the user's own trains in place of Ekiden's, on the same samples, with the same
bits each time, and what it cannot keep is refused."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ekiden
from ekiden import FedAvg, FedELMY, FedGram, FedProx, FedSeq, Training, UserError
from ekiden.core.base import outside
from tests.pages import DOCS, blocks

LOOPS = DOCS.parent / "examples" / "own_loop"
SILOS = [
    (torch.randn(20, 4, generator=torch.Generator().manual_seed(n)), torch.arange(20) % 2)
    for n in range(3)
]
SEEN: list[tuple[int, int]] = []


@ekiden.train
def sgd(model: Any, loader: Any) -> Any:
    """Plain SGD, with noise of every kind that a loop may draw."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    SEEN.append((len(loader), sum(len(x) for x, _ in loader)))
    for x, y in loader:
        optimizer.zero_grad()
        noise = random.random() + float(np.random.rand()) + torch.rand(1)
        (noise * torch.nn.functional.cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


@ekiden.train
def moved(model: Any, loader: Any) -> Any:
    """It gives all parameters other tensors, as a device does."""
    for parameter in model.parameters():
        parameter.data = torch.ones_like(parameter)
    return model


@ekiden.train
def nothing(model: Any, loader: Any) -> None:
    """It forgets to return."""


@ekiden.train
def diverges(model: Any, loader: Any) -> Any:
    torch.nn.init.constant_(model.weight, torch.nan)
    return model


def run(method: Any, loop: Any, **training: Any) -> ekiden.Result:
    how = Training(loop=loop, batch_size=8, **training)
    return ekiden.run(method, SILOS, torch.nn.Linear(4, 2), training=how, quiet=True)


def test_it_gets_the_epochs_of_the_method_and_what_it_reads_is_counted() -> None:
    SEEN.clear()
    torch.manual_seed(0)
    result = run(FedSeq(epochs=3), sgd)
    # 15 of 20 samples train, in batches of 8 and 7
    assert SEEN == [(6, 45)] * 3
    # all are read twice
    assert result.metrics[-1]["backward"] == 3 * 2 * 45
    SEEN.clear()
    run(FedSeq(epochs=3), sgd, max_steps=4)
    assert [steps for steps, _ in SEEN] == [4] * 3


def test_it_has_the_same_bits_each_time_and_leaves_the_callers_generators_alone() -> None:
    network = torch.nn.Linear(4, 2)
    how = Training(loop=sgd)
    random.seed(1)
    before = random.getstate(), torch.random.get_rng_state()
    one, other = (
        ekiden.run(FedAvg(rounds=2), SILOS, network, training=how, quiet=True) for _ in range(2)
    )
    assert one.weights is not None
    assert other.weights is not None
    assert torch.equal(one.weights.params, other.weights.params)
    assert random.getstate() == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])


def test_what_counts_is_the_network_that_it_returns() -> None:
    result = run(FedSeq(epochs=1), moved)
    assert result.weights is not None
    assert result.weights.params.tolist() == [1.0] * 10


@pytest.mark.parametrize(
    ("method", "loop", "training", "why"),
    [
        (FedSeq(), nothing, {}, "AttributeError"),
        (FedSeq(), diverges, {}, "NaN or infinite"),
        (FedSeq(), lambda model, loader: model, {}, "mark it by @ekiden.train"),
        (FedGram(), sgd, {}, "fedgram does not only train"),
        (FedProx(), sgd, {}, "adds to the loss of client-0, or changes its data"),
        (FedELMY(), sgd, {}, "adds to the loss of client-0"),
        (FedAvg(rounds=2, lr_decay=0.5), sgd, {}, "step size"),
        (FedSeq(), sgd, {"lr": 0.1}, "lr=0.1 is for Ekiden's own loop"),
        (FedSeq(), sgd, {"select": "tail"}, "select='tail' is for Ekiden's own loop"),
        (FedSeq(), sgd, {"class_weights": "balanced"}, "class_weights='balanced' is for"),
    ],
)
def test_what_it_cannot_keep_is_refused_in_one_line(
    method: Any, loop: Any, training: dict[str, Any], why: str
) -> None:
    with pytest.raises(UserError) as no:
        run(method, loop, **training)
    assert why in str(no.value)
    assert "\n" not in str(no.value)


def test_privacy_and_other_precision_are_refused() -> None:
    how: dict[str, Any] = {"training": Training(loop=sgd), "quiet": True}
    with pytest.raises(UserError, match="dp clips each gradient, which no loop of your own"):
        ekiden.run(FedSeq(), SILOS, torch.nn.Linear(4, 2), dp="epsilon=8,delta=1e-3", **how)
    bf16 = ekiden.Hardware(precision="bf16")
    with pytest.raises(UserError, match="precision is for Ekiden's own loop"):
        ekiden.run(FedSeq(), SILOS, torch.nn.Linear(4, 2), hardware=bf16, **how)


def test_a_method_that_only_trains_may_also_have_a_pool() -> None:
    run(FedELMY(models=2, epochs=1, warmup=1, alpha=0, beta=0), sgd)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loops", "with_lightning", "with_transformers"])
@pytest.mark.filterwarnings("ignore")
def test_the_loops_of_the_page_and_the_example_train(
    name: str, tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    package = name.removeprefix("with_")
    if package != name:
        pytest.importorskip(package, reason=f"needs {package}: pip install {package}")
    if package == name:
        (block,) = [b for b in blocks(DOCS / "own.md") if b.title == f"{name}.py"]
        text = block.text
    else:
        text = (LOOPS / f"{name}.py").read_text(encoding="utf-8")
    (tmp_path / f"{name}.py").write_text(text)
    loop = f"{tmp_path}/{name}.py:{'sgd' if package == name else 'train'}"
    args = [
        "run",
        "fedavg",
        "--data",
        "digits",
        "--clients",
        "2",
        "--rounds",
        "1",
        "--model",
        "mlp",
    ]
    code, text = command(*args, "--batch-size", "32", "--loop", loop, "--out", str(tmp_path))
    assert code == 0, text
    assert ekiden.open_run(tmp_path / "fedavg-digits-seed0").accuracy > 0.4


def test_a_run_is_resumed_with_the_loop_of_its_file_as_long_as_it_stays_as_it_was(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import ekiden\n@ekiden.train\ndef keep(model, loader):\n    return model\n")
    loop = f"{file}:keep"
    how: dict[str, Any] = {"training": Training(loop=loop), "folder": tmp_path / "run"}
    with pytest.raises(UserError, match="ekiden trust"):
        ekiden.run(FedSeq(), SILOS, torch.nn.Linear(4, 2), **how)
    assert not (tmp_path / "run").exists()
    outside.trust(loop)
    ekiden.run(FedSeq(), SILOS, torch.nn.Linear(4, 2), stop_after=1, **how)
    assert ekiden.open_run(tmp_path / "run").config["recipe"]["training"]["loop"] == loop
    file.write_text(f"{file.read_text()}# changed\n")
    with pytest.raises(UserError, match="has changed since"):
        ekiden.run(FedSeq(), SILOS, torch.nn.Linear(4, 2), **how)
