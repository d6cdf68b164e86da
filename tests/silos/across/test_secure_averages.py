"""`--secure` between machines: the server reads masked parts and the sum, with the bits of a run on
one machine."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ekiden import Training
from ekiden.core.base.errors import UserError
from ekiden.core.base.sums import Masked
from ekiden.core.engine.client import Client
from ekiden.core.training.weights import Weights
from ekiden.methods import SCAFFOLD, FedAvg, FedDC, FedDisco, FedDyn, FedNova, FedProx
from ekiden.methods.blocks.rounds import ModelSums, Reply
from ekiden.runs import summary
from ekiden.silos.coordinator.courier import Lost
from ekiden.silos.coordinator.transport import Remote
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust.parcel import Answer, Ask, pack, unpack
from tests.silos.fakes import NAMES, FakeNodes, with_keys
from tests.silos.sessions import assert_equal, far, here
from tests.silos.test_masking import numbers

KINDS = (FedAvg, FedProx, SCAFFOLD, FedNova, FedDyn, FedDC, FedDisco)
each_method = pytest.mark.parametrize(
    "kind",
    [pytest.param(k, marks=[] if k is SCAFFOLD else pytest.mark.slow, id=k.title()) for k in KINDS],
)


@each_method
def test_masked_averages_have_the_bits_of_one_machine_and_only_the_sum_is_read(
    kind: type[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A curious coordinator that keeps all that it opens: masked parts, and what follows from their
    sums."""
    read: list[Any] = []
    own: list[Any] = []
    value, added = Remote.value, Client.added

    def opened(self: Remote, ref: Any) -> Any:
        read.append(value(self, ref))
        return read[-1]

    def given(self: Client, before: Any, part: Any, *more: Any) -> Any:
        own.append(part)
        return added(self, before, part, *more)

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


def test_a_silo_can_insist_on_masks(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    strict = [replace(file, allow={"fedavg": {"secure": (True,)}}) for file in files]
    with pytest.raises(
        UserError, match=r"fedavg has secure = False, client-0 allows only True \(allow.fedavg"
    ):
        far(FedAvg(rounds=1, epochs=1), FakeNodes(strict), tmp_path / "run", public)
    assert (
        far(
            FedAvg(rounds=1, epochs=1, secure=True), FakeNodes(strict), tmp_path / "yes", public
        ).weights
        is not None
    )


def test_a_silo_whose_model_has_no_room_stops_the_run_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit = Client.fit

    def huge(self: Client, model: Weights, **how: Any) -> Weights:
        trained = fit(self, model, **how)
        return trained.with_params(trained.params * 1e12) if self.name == "client-1" else trained

    monkeypatch.setattr(Client, "fit", huge)
    files, public = with_keys(tmp_path, NAMES)
    with pytest.raises(
        UserError, match=r"client-1.*values of the model, times the client's weight, reach"
    ) as no:
        far(FedAvg(rounds=1, epochs=1, secure=True), FakeNodes(files), tmp_path / "run", public)
    assert "\n" not in str(no.value)


# All or again.


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (SCAFFOLD, "the answer was lost"),
        *(
            pytest.param(kind, "unsent", marks=pytest.mark.slow)
            for kind in (FedAvg, SCAFFOLD, FedDC)
        ),
    ],
)
def test_a_sum_is_formed_again_without_a_silo_that_drops_out(
    kind: type[Any], how: str, tmp_path: Path
) -> None:
    """Its bits, private states, ledger and custody are those of a run in which the silo is missing
    in that step."""
    files, public = with_keys(tmp_path, NAMES)
    nodes, method = FakeNodes(files), kind(rounds=3, epochs=1, secure=True)

    def lose(node: int, data: bytes) -> Lost | None:
        ask = unpack(data, Ask)[0]
        return (
            Lost(how)
            if node == 101 and (ask.kind, ask.task, ask.step) == ("task", "add", 1)
            else None
        )

    nodes.lose = lose
    result = far(method, nodes, tmp_path / "run", public, absent="skip", patience=0.05)
    expected = here(method, absent=lambda step, client: (step, client) == (1, "client-1"))
    assert_equal(result, expected)
    asks = [unpack(data, Ask)[0] for node, data in nodes.log if node == 100]
    lists = [len(ask.members) for ask in asks if (ask.kind, ask.task) == ("task", "add")]
    assert lists == [3, 3, 2, 3], "the second sum was formed twice"
    assert not any(ask.readers for ask in asks if ask.task == "add"), (
        "no part leaves before all silos have one"
    )
    assert verify(tmp_path / "run", public).wrong == ()


def test_a_sum_of_too_few_silos_is_not_formed(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    nodes = FakeNodes(files)
    nodes.lose = lambda node, data: (
        Lost("unsent") if node != 100 and unpack(data, Ask)[0].task == "add" else None
    )
    with pytest.raises(
        UserError, match=r"a sum of 1 silos, client-0 allows 2 or more \(limits.min_clients"
    ):
        far(
            FedAvg(rounds=1, epochs=1, secure=True),
            nodes,
            tmp_path / "run",
            public,
            absent="skip",
            patience=0.05,
        )
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_coordinator_reads_a_model_from_two_sums_at_the_level_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends the same model twice, and claims the second time that client-2 is missing."""
    files, public = with_keys(tmp_path, NAMES)
    nodes, sums, own = FakeNodes(files), [], []
    mean, update, added = ModelSums.mean, FedAvg.update, Client.added

    def noted(self: ModelSums, like: Weights) -> Weights:
        sums.append(self)
        return mean(self, like)

    def given(self: Client, before: Any, part: Any, *more: Any) -> Any:
        if self.name == "client-2":
            own.append(part)
        return added(self, before, part, *more)

    monkeypatch.setattr(ModelSums, "mean", noted)
    monkeypatch.setattr(
        FedAvg, "update", lambda self, s, model, target: update(self, s, model, model)
    )
    monkeypatch.setattr(Client, "added", given)
    nodes.lose = lambda node, data: (
        Lost("unsent") if node == 102 and unpack(data, Ask)[0].step == 1 else None
    )
    far(
        FedAvg(rounds=2, epochs=1, secure=True),
        nodes,
        tmp_path / "run",
        public,
        absent="skip",
        patience=0.05,
        training=Training(lr=0.01, batch_size=4096),
    )
    all_of_them, two = sums
    read = (all_of_them.params - two.params).double() / (all_of_them.weight - two.weight)
    true = own[0].params.double() / own[0].weight
    assert float((read - true).abs().max()) < 1e-3 * float(true.abs().max())


def at_models(folder: Path) -> tuple[list[SiloFile], dict[str, str]]:
    files, public = with_keys(folder, NAMES, '[limits]\nlevel = "models"\n', trusting=False)
    return [replace(f, limits=replace(f.limits, min_clients=2)) for f in files], public


def test_sums_of_models_are_of_all_silos_at_the_level_of_models(tmp_path: Path) -> None:
    """The coordinator says so in its plan, or it asks two of three silos for a second sum."""
    files, public = at_models(tmp_path)
    method, nodes, said = FedAvg(rounds=1, epochs=1, secure=True), FakeNodes(files), list[str]()
    with pytest.raises(UserError, match=r"forms sums again .* would show its model") as refused:
        far(method, nodes, tmp_path / "skips", public, absent="skip")
    assert "\n" not in str(refused.value)
    send = nodes.send

    def fewer(node: int, data: bytes) -> Any:
        ask, body = unpack(data, Ask)
        if ask.kind == "task" and len(ask.members) == 3:
            less = pack(replace(ask, members=ask.members[:2]), (bytes(body),))
            said.append(unpack(nodes.silo(100).answer(less), Answer)[0].error)
        return send(node, data)

    nodes.send = fewer  # type: ignore[method-assign]
    far(method, nodes, tmp_path / "run", public)
    assert any("gives its part to sums of all silos of a run, not of" in error for error in said)


def test_sums_of_models_of_the_same_samples_are_among_one_list_of_silos(tmp_path: Path) -> None:
    """Two runs with the same seed begin with the same model."""
    files, public = at_models(tmp_path)
    method = FedAvg(rounds=1, epochs=1, secure=True)
    far(method, FakeNodes(files), tmp_path / "all", public)
    fewer = {name: public[name] for name in NAMES[:2]}
    with pytest.raises(
        UserError, match=r"sums of training samples \w+ were told with other members"
    ):
        far(method, FakeNodes(files[:2]), tmp_path / "two", fewer, clients=",".join(NAMES[:2]))
    noise: dict[str, Any] = {
        "dp": "epsilon=8,delta=1e-4,clip=1",
        "evaluate_dp": agreements.NOISE,
        "clients": ",".join(NAMES[:2]),
    }
    far(method, FakeNodes(files[:2]), tmp_path / "noise", fewer, **noise)


def test_noise_and_masks_work_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reads sums of models that each silo trained with secret noise of its own."""
    read: list[Any] = []
    value = Remote.value

    def opened(self: Remote, ref: Any) -> Any:
        read.append(value(self, ref))
        return read[-1]

    monkeypatch.setattr(Remote, "value", opened)
    files, public = with_keys(tmp_path, NAMES)
    method, dp = FedAvg(rounds=1, epochs=1, secure=True), "epsilon=8,delta=1e-4,clip=1"
    result = far(method, FakeNodes(files), tmp_path / "run", public, dp=dp)
    simulated = here(method, dp=dp)
    assert result.weights is not None
    assert simulated.weights is not None
    assert not torch.equal(
        result.weights.params, simulated.weights.params
    )  # there noise follows from the seed
    assert sum(isinstance(v, Masked) for v in read) == 3
    assert not any(isinstance(v, (ModelSums, Reply)) for v in read)
    for file in files:
        assert len((file.folder / "privacy.jsonl").read_text().splitlines()) == 1
    assert result.config["privacy"]["epsilon"] <= 8
    assert summary.sums(summary.summarise(tmp_path / "run")).startswith("sums: masked")
    assert verify(tmp_path / "run", public).wrong == ()
