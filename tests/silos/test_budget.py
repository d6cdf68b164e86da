"""A silo counts what it tells under differential privacy itself, and keeps its noise secret."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ekiden.core.base.errors import UserError
from ekiden.core.base.settings import Training
from ekiden.core.engine import wire
from ekiden.core.engine.store import FolderJournal
from ekiden.core.engine.worker import Job, Worker
from ekiden.core.training.private.accountant import Spent
from ekiden.core.training.weights import Weights
from ekiden.silos.silo.budget import FILE, LedgerKeeper
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust.parcel import Answer, unpack
from ekiden.silos.trust.sealing import SECRET
from tests.silos.asked import TERMS, model, said, said_of_recipe, task, with_recipe
from tests.silos.fakes import mine, opened_by_server, seal_for, silo_file

PRIVATE = with_recipe(
    TERMS, dp="epsilon=8,delta=1e-4,clip=1", training=Training(batch_size=8, max_steps=1)
)


pytestmark = pytest.mark.usefixtures("any_request")


@pytest.fixture
def file(tmp_path: Path) -> SiloFile:
    return silo_file(tmp_path, "client-0")


def limited(file: SiloFile, epsilon: float, delta: float = 1e-2) -> SiloFile:
    return replace(file, limits=replace(file.limits, epsilon=epsilon, delta=delta))


def given(file: SiloFile, data: bytes) -> Weights:
    found = wire.decode(opened_by_server(file, data), Weights)
    assert isinstance(found, Weights)
    return found


def lines(file: SiloFile) -> list[str]:
    ledger = file.folder / FILE
    return ledger.read_text().splitlines() if ledger.exists() else []


def other_model() -> Weights:
    made = model(PRIVATE)
    return replace(made, params=made.params + 0.01)


def test_training_is_written_down_before_it_begins(
    file: SiloFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def died(*args: object, **more: object) -> None:
        raise UserError("died")

    with monkeypatch.context() as patched:
        patched.setattr("ekiden.core.engine.client.fitting.fit", died)
        assert said(file, task(PRIVATE)) == "died"
    assert len(lines(file)) == 1
    first = given(file, task(PRIVATE))  # as before it died
    assert len(lines(file)) == 1
    assert torch.equal(given(file, task(PRIVATE)).params, first.params)
    for name in (FILE, f"runs/{PRIVATE.run}/{SECRET}"):
        assert (file.folder / name).stat().st_mode & 0o777 == 0o600


def test_an_outcome_that_was_lost_is_made_again_with_the_same_noise(file: SiloFile) -> None:
    first = given(file, task(PRIVATE))
    for path in file.folder.rglob("outcome-*"):
        path.unlink()
    assert torch.equal(given(file, task(PRIVATE)).params, first.params)
    assert len(lines(file)) == 1


def test_a_coordinator_who_knows_the_seed_does_not_know_the_noise(
    file: SiloFile, tmp_path: Path
) -> None:
    told = given(file, task(PRIVATE))
    dataset, client = mine("client-0")
    setup = PRIVATE.setup(replace(dataset, mean=PRIVATE.mean, std=PRIVATE.std), file.hardware)
    worker = Worker(setup, {client.name: client})
    guess = worker.execute(
        Job(0, 0, client.name, "train", (model(PRIVATE),)), FolderJournal(tmp_path / "j")
    )
    assert not torch.equal(guess.value.params, told.params)
    again = worker.execute(Job(0, 0, client.name, "train", (model(PRIVATE),)))
    assert torch.equal(guess.value.params, again.value.params)  # a simulation repeats
    elsewhere = silo_file(tmp_path / "elsewhere", "client-0")
    assert not torch.equal(given(elsewhere, task(PRIVATE)).params, told.params)


def test_the_same_noise_never_hides_two_models(file: SiloFile) -> None:
    file.folder.mkdir()
    keeper = LedgerKeeper(limited(file, 100), PRIVATE, file.folder, "0-0 abc")
    spent = Spent(20.0, 0.5, 1)
    first = keeper.key(1, spent)
    assert keeper.key(1, spent) == first
    others = [
        keeper.key(2, spent),
        replace(keeper, task="0-0 abd").key(1, spent),
        replace(keeper, task="1-0 abc").key(1, spent),
    ]
    assert len({first, *others}) == 4
    assert len(lines(file)) == 4


def test_a_second_training_with_another_model_is_refused(file: SiloFile) -> None:
    assert said(file, task(PRIVATE)) == ""
    assert "has trained at client-0 as often as epsilon 8 allows" in said(
        file, task(PRIVATE, model=other_model())
    )
    assert "start a new run" in said(file, task(PRIVATE, model=other_model(), step=0, call=1))
    assert len(lines(file)) == 1


def test_a_run_whose_secret_is_gone_cannot_tell_again(file: SiloFile) -> None:
    assert said(file, task(PRIVATE)) == ""
    for path in (file.folder / "runs" / PRIVATE.run).iterdir():
        if path.is_file():
            path.unlink()
    for path in file.folder.rglob("outcome-*"):
        path.unlink()
    assert "as often as epsilon 8 allows" in said(file, task(PRIVATE))


def test_all_runs_together_are_bounded(file: SiloFile) -> None:
    file = limited(file, 20)
    runs = [replace(PRIVATE, run=f"{number:016x}") for number in range(3)]
    assert [said(file, task(terms)) for terms in runs[:2]] == ["", ""]
    assert "has promised epsilon 16 in 2 earlier runs and allows 20" in said(file, task(runs[2]))
    assert not (file.folder / "runs" / runs[2].run / "terms.json").exists()
    assert said(file, task(with_recipe(runs[2], dp="epsilon=4,delta=1e-4,clip=1"))) == ""
    assert "has promised delta" in said(
        limited(file, 100, 2e-4), task(with_recipe(runs[0], seed=1))
    )


def test_a_limit_holds_to_the_last_digit(file: SiloFile) -> None:
    """0.1 and 0.2 are 0.3, although their sum in binary is larger; nothing fits in addition."""
    file = limited(file, 0.3)
    runs = [replace(PRIVATE, run=f"{number:016x}") for number in range(3)]
    asked = [
        with_recipe(run, dp=f"epsilon={epsilon},delta=1e-4,clip=1")
        for run, epsilon in zip(runs, (0.1, 0.2, 1e-10), strict=True)
    ]
    assert [said(file, task(terms)) for terms in asked[:2]] == ["", ""]
    assert "allows 0.3 over all runs" in said(file, task(asked[2]))


def test_a_data_set_that_is_listed_twice_has_one_budget(file: SiloFile) -> None:
    """The limit is the silo's: it does not matter under which name, and in how many tables, it has
    its samples."""
    file = limited(replace(file, named={"labs": file.data, "copy": file.data}), 20)
    held = {name: mine(file.name) for name in file.named}
    for number, name, refusal in (
        (0, "labs", ""),
        (1, "copy", ""),
        (2, "labs", "16 in 2 earlier"),
        (3, "copy", "16 in 2"),
    ):
        asked = task(replace(PRIVATE, run=f"{number:016x}", data=name))
        answer, _ = unpack(Silo(file, held).answer(seal_for(file, asked)), Answer)
        assert refusal in answer.error
        assert bool(refusal) == bool(answer.error)
    assert len(lines(file)) == 2


def test_a_silo_with_a_limit_trains_with_noise_only(file: SiloFile) -> None:
    assert "trains without noise, client-0 allows epsilon 8" in said(limited(file, 8), task(TERMS))
    assert said(file, task(TERMS)) == ""


def test_terms_cannot_promise_for_a_method_that_tells_more(file: SiloFile) -> None:
    text = said_of_recipe(method="fedelmy", hyperparameters={}, dp="epsilon=8")
    assert "fedelmy is not supported with dp" in said(file, task(agreement=text))


@pytest.mark.parametrize("line", ["{}", "nonsense", '{"at": "", "run": "", "epsilon": -8}'])
def test_a_damaged_ledger_stops_training(file: SiloFile, line: str) -> None:
    file = limited(file, 100)
    assert said(file, task(PRIVATE)) == ""
    with (file.folder / FILE).open("a") as ledger:
        ledger.write(f"{line}\n")
    assert "line 2 is damaged" in said(file, task(replace(PRIVATE, run="0" * 16)))


def test_a_line_that_a_crash_left_unfinished_was_not_spent(file: SiloFile) -> None:
    file = limited(file, 16)
    assert said(file, task(PRIVATE)) == ""
    with (file.folder / FILE).open("a") as ledger:
        ledger.write('{"at": "2026')
    assert said(file, task(replace(PRIVATE, run="0" * 16))) == ""
    assert len(lines(file)) == 2
