"""`--secure` between machines: the server reads masked parts and the sum, with the bits of a run on one machine."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ekiden.base.errors import UserError
from ekiden.base.modular import Masked
from ekiden.engine.worker import Client
from ekiden.methods import SCAFFOLD, FedAvg, FedDC, FedDisco, FedDyn, FedNova, FedProx
from ekiden.methods.blocks.rounds import Reply
from ekiden.methods.blocks.secure import ModelSums
from ekiden.runs import summary
from ekiden.training.weights import Weights
from ekiden.transports.flower.coordinator.transport import Remote
from ekiden.transports.flower.coordinator.verify import verify
from tests.transports.fakes import NAMES, FakeNodes, with_keys
from tests.transports.test_masking import numbers
from tests.transports.test_remote import assert_equal, far, here

KINDS = (FedAvg, FedProx, SCAFFOLD, FedNova, FedDyn, FedDC, FedDisco)
each_method = pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[] if k is SCAFFOLD else pytest.mark.slow, id=k.title()) for k in KINDS]
)


@each_method
def test_masked_averages_have_the_bits_of_one_machine_and_only_the_sum_is_read(
    kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A curious coordinator that keeps all that it opens: masked parts, and what follows from their sums."""
    read: list[Any] = []
    own: list[Any] = []
    value, added = Remote.value, Client.added

    def opened(self: Remote, ref: Any) -> Any:
        read.append(value(self, ref))
        return read[-1]

    def given(self: Client, before: Any, part: Any) -> Any:
        own.append(part)
        return added(self, before, part)

    method = kind(rounds=2, epochs=1, secure=True)
    monkeypatch.setattr(Remote, "value", opened)
    files, public = with_keys(tmp_path, NAMES)
    with monkeypatch.context() as patch:
        patch.setattr(Client, "added", given)
        result = far(method, FakeNodes(files), tmp_path / "run", public)
    assert_equal(result, here(method))
    parts = [v for v in read if isinstance(v, Masked)]
    assert len(parts) == len(own) >= 6
    assert not any(isinstance(v, (ModelSums, Reply)) for v in read)
    assert sum(isinstance(v, Weights) for v in read) <= 1, "the initial model"
    models = [numbers(part) for part in own if isinstance(part, ModelSums)]
    for part, true in itertools.product(parts, models):
        hidden = numbers(part)
        if len(hidden) == len(true):
            assert all((a == b).mean() < 0.2 for a, b in zip(hidden, true, strict=True) if len(a))
    assert verify(tmp_path / "run", public).wrong == ()
    assert summary.sums(summary.summarise(tmp_path / "run")).startswith("sums: masked")


def test_without_masks_a_secure_run_is_refused_by_the_coordinator_and_by_silos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, public = with_keys(tmp_path, NAMES)
    nodes = FakeNodes([replace(file, limits=replace(file.limits, unsealed=True)) for file in files])
    method, refused = FedAvg(rounds=1, epochs=1, secure=True), "secure needs masks, which only sealed runs have"
    with pytest.raises(UserError, match=refused) as no:
        far(method, nodes, tmp_path / "run", public, sealed=False)
    assert "\n" not in str(no.value)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    # A coordinator that leaves the check out is refused by the silos.
    from ekiden.transports.flower.trust import agreement

    check = agreement.Agreement.check_masks
    asked: list[int] = []

    def first_is_blind(self: Any) -> None:
        asked.append(1)
        if len(asked) > 1:
            check(self)

    monkeypatch.setattr(agreement.Agreement, "check_masks", first_is_blind)
    with pytest.raises(UserError, match=refused):
        far(method, nodes, tmp_path / "blind", public, sealed=False)


def test_a_silo_can_insist_on_masks(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    strict = [replace(file, allow={"fedavg": {"secure": (True,)}}) for file in files]
    with pytest.raises(UserError, match=r"fedavg has secure = False, client-0 allows only True \(allow.fedavg"):
        far(FedAvg(rounds=1, epochs=1), FakeNodes(strict), tmp_path / "run", public)
    assert far(FedAvg(rounds=1, epochs=1, secure=True), FakeNodes(strict), tmp_path / "yes", public).weights is not None


def test_a_silo_whose_model_has_no_room_stops_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = Client.fit

    def huge(self: Client, model: Weights, **how: Any) -> Weights:
        trained = fit(self, model, **how)
        return trained.with_params(trained.params * 1e12) if self.name == "client-1" else trained

    monkeypatch.setattr(Client, "fit", huge)
    files, public = with_keys(tmp_path, NAMES)
    with pytest.raises(UserError, match=r"client-1.*values of the model, times the client's weight, reach") as no:
        far(FedAvg(rounds=1, epochs=1, secure=True), FakeNodes(files), tmp_path / "run", public)
    assert "\n" not in str(no.value)
