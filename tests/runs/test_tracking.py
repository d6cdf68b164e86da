"""Trackers get each committed row, once, and cannot end a run."""

import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ekiden import FederatedData, UserError, run
from ekiden.core.engine.folder import read_lines
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg
from ekiden.runs import tracking

Command = Callable[..., tuple[int, str]]
METHOD = FedAvg(rounds=3, epochs=1)


class Noting:
    """Records what it is told."""

    told: list[tuple[str, object]]
    at_once = True
    fails_at = -1

    def begin(self, run: tracking.Tracked) -> str:
        self.told.append(("begin", run.config["recipe"]["hyperparameters"]))
        return "its id"

    def step(self, step: int, numbers: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the server is away")
        self.told.append(("step", (step, numbers["accuracy"])))

    def end(self, finished: bool) -> None:
        self.told.append(("end", finished))


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> type[Noting]:
    class Fresh(Noting):
        told: list[tuple[str, object]] = []  # noqa: RUF012

    monkeypatch.setattr(tracking, "TRACKERS", {"noting": (Fresh, "json")})
    return Fresh


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_program_like_weights_and_biases_gets_each_step_once(
    package: str, blobs: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, Any]] = []
    fake = ModuleType(package)
    fake.__spec__ = ModuleSpec(package, None)
    fake.init = lambda **given: seen.append(("init", given))  # type: ignore[attr-defined]
    fake.log = lambda numbers, step: seen.append(("log", (step, numbers["accuracy"])))  # type: ignore[attr-defined]
    fake.finish = lambda: seen.append(("finish", None))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package, fake)
    folder, network = tmp_path / "run", Tiny()
    run(METHOD, blobs, network, folder=folder, track=package, stop_after=1)
    result = run(METHOD, blobs, network, folder=folder, track=package)
    rows = [("log", (row["step"], row["accuracy"])) for row in result.metrics]
    (_, first), (_, second) = (one for one in seen if one[0] == "init")
    assert [one for one in seen if one[0] != "init"] == [
        rows[0],
        ("finish", None),
        *rows[1:],
        ("finish", None),
    ]
    assert first == second, "the same run goes on"
    assert first["config"]["rounds"] == 3
    assert (first["project"], first["name"], first["resume"]) == ("ekiden", "run", "allow")
    assert ("id" in first) == (package == "wandb")


def test_rows_that_a_kill_may_have_lost_are_sent_again(
    blobs: FederatedData, tmp_path: Path, noting: type[Noting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """trackio 0.43 loses rows that its thread has not written yet."""
    monkeypatch.setattr(noting, "at_once", False)
    module, folder = Tiny(), tmp_path / "run"
    monkeypatch.setattr(tracking._Follower, "close", lambda self: None)
    run(METHOD, blobs, module, folder=folder, track="noting", stop_after=1)
    monkeypatch.undo()
    monkeypatch.setattr(tracking, "TRACKERS", {"noting": (noting, "json")})
    noting.told.clear()
    run(METHOD, blobs, module, folder=folder, track="noting")
    assert steps(noting.told) == [1, 2, 3], "nobody knows whether step 1 arrived"


def steps(told: list[tuple[str, object]]) -> list[int]:
    return [value[0] for what, value in told if what == "step"]  # type: ignore[index]


def test_each_row_is_told_once_and_then_the_model(
    blobs: FederatedData, tmp_path: Path, noting: type[Noting]
) -> None:
    result = run(METHOD, blobs, Tiny(), folder=tmp_path / "run", track="noting")
    rows = [("step", (row["step"], row["accuracy"])) for row in result.metrics]
    assert result.config["recipe"]["hyperparameters"]["rounds"] == 3
    assert noting.told == [
        ("begin", result.config["recipe"]["hyperparameters"]),
        *rows,
        ("end", True),
    ]


def test_a_run_that_goes_on_tells_what_was_missed(
    blobs: FederatedData, tmp_path: Path, noting: type[Noting]
) -> None:
    module = Tiny()
    run(METHOD, blobs, module, folder=tmp_path / "run", track="noting", stop_after=2)
    assert noting.told[-1] == ("end", False)
    noting.told.clear()
    # step 2 was lost on the way
    (tmp_path / "run" / "noting.json").write_text('{"id": "its id", "step": 1}')
    run(METHOD, blobs, module, folder=tmp_path / "run", track="noting")
    assert steps(noting.told) == [2, 3]


def test_a_tracker_that_fails_is_left_out_with_one_line(
    blobs: FederatedData, tmp_path: Path, noting: type[Noting], caplog: pytest.LogCaptureFixture
) -> None:
    noting.fails_at = 2
    module = Tiny()
    tracked = run(METHOD, blobs, module, folder=tmp_path / "run", track=["noting"])
    assert tracked.state.step == 3
    assert steps(noting.told) == [1]
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["tracker noting failed and is left out; the run continues: the server is away"]
    plain = run(METHOD, blobs, module, folder=tmp_path / "plain")
    assert tracked.metrics == plain.metrics
    files = ("metrics.jsonl", "ledger.jsonl", "model.safetensors", "config.json")
    assert all(
        (tmp_path / "run" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
        for name in files
    )


def test_tensorboard_draws_what_was_measured(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    flags = ["--clients", "2", "--partition", "iid", "--epochs", "1", "--track", "tensorboard"]
    code, printed = command("run", "fedseq", *flags)
    assert code == 0, printed
    folder = tmp_path / "runs" / "fedseq-digits-seed0"
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    drawn = [(event.step, event.value) for event in events.Scalars("accuracy")]
    wanted = [(row["step"], row["accuracy"]) for row in read_lines(folder / "metrics.jsonl")]
    assert drawn == [(step, pytest.approx(value)) for step, value in wanted]
    assert "settings/text_summary" in events.Tags()["tensors"]


@pytest.mark.slow
def test_mlflow_goes_on_with_its_run(
    blobs: FederatedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    module, folder = Tiny(), tmp_path / "run"
    run(METHOD, blobs, module, folder=folder, track="mlflow", stop_after=2)
    result = run(METHOD, blobs, module, folder=folder, track="mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("ekiden")
    (found,) = client.search_runs([experiment.experiment_id])
    drawn = [
        (point.step, point.value)
        for point in client.get_metric_history(found.info.run_id, "accuracy")
    ]
    assert drawn == [(row["step"], row["accuracy"]) for row in result.metrics]
    assert (found.data.params["rounds"], found.data.params["method"]) == ("3", "fedavg")
    assert found.data.tags["run_folder"] == str(folder)
    assert found.info.status == "FINISHED"


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--track", "tensorbord"], "unknown tracker 'tensorbord': did you mean 'tensorboard'"),
        (["--track", "mlflow"], 'tracker mlflow needs an extra: pip install "ekiden[mlflow]"'),
        (["--track"], "--track"),
    ],
)
def test_trackers_that_cannot_work_are_refused_before_the_run(
    flags: list[str], wanted: str, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    code, printed = command("run", "fedseq", *flags)
    assert (code, printed.count("\n")) == (2, 1)
    assert wanted in printed
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_needs_a_folder(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match="give folder="):
        run(
            METHOD, blobs, Tiny(), track="tensorboard" if "tensorboard" in sys.modules else "mlflow"
        )


def test_what_another_process_writes_is_followed(
    blobs: FederatedData, tmp_path: Path, noting: type[Noting]
) -> None:
    folder = tmp_path / "run"
    with tracking.watching(["noting"], folder, 3) as look:
        look()  # nothing is there yet
        assert noting.told == []
        run(METHOD, blobs, Tiny(), folder=folder, on_step=lambda row: look())
        look()
    assert steps(noting.told) == [1, 2, 3]
    assert noting.told[0][0] == "begin"
    assert noting.told[-1] == ("end", True)


def test_a_run_that_stopped_is_not_told_as_finished(
    blobs: FederatedData, tmp_path: Path, noting: type[Noting]
) -> None:
    with tracking.watching(["noting"], tmp_path / "run", 3):
        run(METHOD, blobs, Tiny(), folder=tmp_path / "run", stop_after=2)
    assert steps(noting.told) == [1, 2]
    assert noting.told[-1] == ("end", False)


def test_a_tracker_that_fails_does_not_end_what_is_watched(
    blobs: FederatedData, tmp_path: Path, noting: type[Noting], caplog: pytest.LogCaptureFixture
) -> None:
    noting.fails_at = 1
    with tracking.watching(["noting"], tmp_path / "run", 3) as look:
        run(METHOD, blobs, Tiny(), folder=tmp_path / "run", on_step=lambda row: look())
    assert len(caplog.records) == 1


EXPERIMENT = """
seeds = [0, 1]
[settings]
clients = 2
partition = "iid"
epochs = 1
[[row]]
label = "FedSeq"
method = "fedseq"
"""


@pytest.mark.slow
def test_runs_of_a_sweep_are_followed(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(EXPERIMENT)
    code, printed = command("sweep", "small.toml", "--track", "tensorboard")
    assert code == 0, printed
    runs = sorted((tmp_path / "runs" / "small").glob("FedSeq*"))
    assert len(runs) == 2
    assert all(list((folder / "tensorboard").iterdir()) for folder in runs)
    code, printed = command("sweep", "small.toml", "--track", "tensorbord")
    assert (code, printed.count("\n")) == (2, 1)
    assert "unknown tracker 'tensorbord'" in printed


def test_a_run_between_machines_is_followed_here(
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    noting: type[Noting],
    blobs: FederatedData,
) -> None:
    """A function plays the SuperLink: it writes the run folder and prints what Flower would
    print."""
    pytest.importorskip("flwr")
    from ekiden.silos import commands
    from ekiden.silos.trust import keys

    monkeypatch.chdir(tmp_path)
    for name in "ab":
        keys.generate(tmp_path / "keys" / name)

    def submitted(
        plan: object,
        link: object,
        how: object,
        folder: Path,
        public_keys: object,
        say: Callable[..., None],
    ) -> str:
        run(
            METHOD,
            blobs,
            Tiny(),
            folder=folder,
            on_step=lambda row: say(f"ekiden: step {row['step']} of 3 done"),
        )
        return ""

    monkeypatch.setattr(commands, "run", submitted)
    flags = (
        "--on",
        "flower",
        "--clients",
        "a,b",
        "--link",
        "127.0.0.1:1",
        "--keys",
        "keys",
        "--rounds",
        "3",
    )
    code, printed = command("run", "fedavg", *flags, "--track", "noting")
    assert code == 0, printed
    assert steps(noting.told) == [1, 2, 3]
    assert noting.told[-1] == ("end", True)
    code, printed = command("run", "fedavg", *flags, "--track", "other")
    assert code == 2
    assert "unknown tracker 'other'" in printed
