"""Who sends one silo other values than the others, so that the parts of the others are known, opens
no sum.

Dario Pasquini, Danilo Francati, Giuseppe Ateniese: Eluding Secure Aggregation in Federated Learning
via Model Inconsistency. CCS 2022. https://arxiv.org/abs/2111.07380"""

import dataclasses
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.core.engine.client import Client
from ekiden.core.engine.method import Method
from ekiden.core.engine.transport import Request
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.methods import (
    SCAFFOLD,
    Average,
    DeepAFL,
    FedAvg,
    FedDC,
    FedDisco,
    FedDyn,
    FedGram,
    FedKrylov,
    FedNova,
    FedProx,
    Trees,
)
from ekiden.methods.blocks.rounds import ModelSums
from ekiden.methods.exact.closing import with_lap
from ekiden.methods.rounds.feddisco import discrepancy
from ekiden.silos.coordinator.transport import Remote
from ekiden.silos.silo import tasks
from tests.silos.fakes import NAMES, FakeNodes, mine, with_keys
from tests.silos.sessions import far

pytestmark = pytest.mark.filterwarnings(
    "ignore:each pixel is a column of the trees:ekiden.core.base.errors.DataWarning"
)


def test_a_coordinator_that_sends_the_others_a_dead_network_reads_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no unit of a network fires, all layers but the last stay as they are: the sum shows those
    of client-1."""
    submit, mean, added = Remote.submit, ModelSums.mean, Client.added
    sums, own, sent = list[ModelSums](), dict[str, ModelSums](), list[Weights]()

    def sends(self: Remote, request: Request) -> None:
        model, *more = request.args
        if request.client != "client-1":
            module = self._setup.build()
            for layer in module.parameters():
                torch.nn.init.constant_(layer, -1.0 if layer.ndim == 1 else 0.0)
            model = Network(module).weights()
            sent.append(model)
        submit(self, replace(request, args=(model, *more)))

    def given(self: Client, before: Any, part: Any, *more: Any) -> Any:
        own[self.name] = part
        return added(self, before, part, *more)

    def noted(self: ModelSums, like: Weights) -> Weights:
        sums.append(self)
        return mean(self, like)

    monkeypatch.setattr(Remote, "submit", sends)
    monkeypatch.setattr(Client, "added", given)
    monkeypatch.setattr(ModelSums, "mean", noted)
    files, public = with_keys(tmp_path, NAMES)
    method = FedAvg(rounds=1, epochs=1, secure=True, weighting="uniform")
    with pytest.raises(UserError, match="does not open") as no:
        far(method, FakeNodes(files), tmp_path / "run", public)
    assert "\n" not in str(no.value)
    assert len(own) == 3
    assert not sums
    for name in (
        "client-0",
        "client-2",
    ):  # the attack would have worked: the server knows these parts beforehand
        trained = own[name].params.double() / own[name].weight
        assert float(((trained - sent[0].params).abs() > 1e-6).double().mean()) < 0.01, (
            "those of the last layer"
        )


def other(value: Any) -> Any:
    """A value of the same form in which one number is another."""
    if isinstance(value, Weights):
        return value.with_params(other(value.params))
    if isinstance(value, Tensor):
        changed = value.clone()
        changed.view(-1)[0] = (
            changed.view(-1)[0] ^ 1 if value.dtype == torch.int64 else changed.view(-1)[0] + 1
        )
        return changed
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name, part = next(
            (f.name, p)
            for f in dataclasses.fields(value)
            if _has_numbers(p := getattr(value, f.name))
        )
        return replace(value, **{name: other(part)})
    first = next(k for k, part in enumerate(value) if _has_numbers(part))
    parts = [other(part) if k == first else part for k, part in enumerate(value)]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _has_numbers(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.numel() > 0) or isinstance(value, tuple)


SECURE = [
    kind(rounds=1, epochs=1, secure=True) for kind in (FedProx, SCAFFOLD, FedNova, FedDyn, FedDC)
]
KRYLOV = FedKrylov(width=40, laps=2, sums="whole")
SENT: list[tuple[Method, str, int]] = [
    (KRYLOV, "multiply", 1),
    (KRYLOV, "open", 1),
    (FedGram(width=40, topology="star"), "measure", 1),
    (DeepAFL(layers=1, width=8, random_features=8), "sums", 1),
    (Trees(rounds=1, trees=2, depth=2), "count", 1),
    (Trees(rounds=1, trees=2, depth=2), "begin", 1),
    (Trees(rounds=1, trees=2, depth=2), "grow", 0),
    (with_lap(Average(epochs=1)), "lap_add", 0),
    *((method, "add", 0) for method in SECURE),
    (SECURE[1], "add", 1),
]
FAST = 1
"""the others are slow tests"""


@pytest.mark.parametrize(
    ("method", "task", "place"),
    [
        pytest.param(
            *one,
            id=f"{one[0].title()} {one[1]} {one[2]}",
            marks=[] if i < FAST else pytest.mark.slow,
        )
        for i, one in enumerate(SENT)
    ],
)
def test_a_sum_opens_only_if_all_silos_were_sent_the_same(
    method: Method, task: str, place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another silo sends it, as FedKrylov's directions, bins and splits of trees, or the
    body of a lap."""
    gather, changed = tasks.gather, []

    def lied_to(worker: Any, name: str, asked: str, *more: Any) -> Any:
        given = gather(worker, name, asked, *more)
        if (name, asked) != ("client-1", task) or given.args[place] is None:
            return given
        args = list(given.args)
        args[place] = other(args[place])
        changed.append(place)
        return replace(given, args=tuple(args))

    monkeypatch.setattr(tasks, "gather", lied_to)
    files, public = with_keys(tmp_path, NAMES)
    with pytest.raises(UserError, match="does not open"):
        far(method, FakeNodes(files), tmp_path / "run", public)
    assert changed
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_the_coordinator_of_feddisco_chooses_whose_model_alone_counts(tmp_path: Path) -> None:
    """It tells all silos the same two numbers, which are not those that follow from their sums."""
    method = FedDisco(rounds=1, epochs=1, secure=True)
    parts = [mine(name)[1].train for name in NAMES]
    far_off = [discrepancy(part.class_counts(10), method.discrepancy) for part in parts]
    alone = set()
    for samples, far_told in itertools.product(
        (10.0, 100.0, 1000.0), (-0.1, -1.0, 0.01, 0.1, 0.2, 0.5, 1.0, 5.0)
    ):
        shares = [
            len(part) / samples / 3 - method.a * d / far_told / 3
            for part, d in zip(parts, far_off, strict=True)
        ]
        counting = [name for name, share in zip(NAMES, shares, strict=True) if share + method.b > 0]
        alone.update(counting if len(counting) == 1 else [])
    assert alone
    assert method.chosen_by == "party"  # so it needs the level of models, as any sum of them does
