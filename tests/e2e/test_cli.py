"""The command line from end to end: what users type, what they see, and what they read when
something is wrong."""

import errno
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import nn

from ekiden import FederatedData, Hardware, Training, __version__, federate, run
from ekiden.cli import app
from ekiden.cli.app import COMMANDS, main
from ekiden.core.base.errors import UserError
from ekiden.core.engine.folder import RunFolder, read_lines
from ekiden.core.engine.method import Method
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedELMY, FedSeq, Local
from ekiden.runs.loading import open_run
from ekiden.runs.plan import stored
from ekiden.runs.result import Result
from tests.warm import ekiden

QUICK = ["--epochs", "2", "--threads", "1"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working folder, no local data sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


Call = Callable[..., str]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Run the command in this process and return what it printed."""

    def calling(*args: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["ekiden", *map(str, args)])
        main()
        captured = capfd.readouterr()
        assert captured.err == ""
        return captured.out

    return calling


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """Run a command that must end with code 2 and one line; return the line."""

    def refusing(*args: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["ekiden", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            main()
        assert stop.value.code == 2
        return one_line(capfd.readouterr().err)

    return refusing


def one_line(error: str) -> str:
    assert error.startswith("ekiden: ")
    assert error.endswith("\n")
    assert error.count("\n") == 1
    return error[len("ekiden: ") : -1]


def nothing_begun() -> bool:
    return not Path("runs").exists()


# What users do.


def test_from_a_run_to_a_table() -> None:
    done = ekiden("run", "fedelmy", "--models", "2", "--warmup", "1", *QUICK)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "run folder: runs/fedelmy-digits-seed0" in done.stdout
    folder = Path("runs/fedelmy-digits-seed0")
    metrics = read_lines(folder / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, 11))
    accuracy = metrics[-1]["accuracy"]
    assert accuracy > 0.3
    assert f"{100 * accuracy:.2f}" in done.stdout
    assert sum(row["bytes"] for row in read_lines(folder / "ledger.jsonl")) == metrics[-1]["bytes"]

    measured = ekiden("evaluate", folder, "--json")
    assert measured.returncode == 0, measured.stderr
    found = json.loads(measured.stdout)
    assert found["accuracy"] == accuracy
    assert [round(a, 12) for _, a in found["client"].values()] == [
        round(a, 12) for a in metrics[-1]["clients"]
    ]
    assert sum(n for n, _ in found["class"].values()) == found["samples"]
    right = sum(n * a for n, a in found["class"].values())
    assert round(right) == round(found["samples"] * accuracy)


def test_seeds_side_by_side_and_what_can_be_done_with_them(call: Call) -> None:
    printed = call(
        "run", "fedseq", "--clients", "3", "--partition", "iid", "--seeds", "0", "1", *QUICK
    )
    folders = [Path("runs/fedseq-digits-seed0"), Path("runs/fedseq-digits-seed1")]
    assert [f"run folder: {folder}" in printed for folder in folders] == [True, True]
    assert [stored(folder).recipe.seed for folder in folders] == [0, 1]
    last = [read_lines(folder / "metrics.jsonl")[-1]["accuracy"] for folder in folders]
    spread = f"{50 * (last[0] + last[1]):.2f} ± {100 * abs(last[0] - last[1]) / 2**0.5:.2f}"
    assert spread in printed
    assert spread in call("compare", *folders)
    shown = call("show", folders[0])
    assert "fedseq (epochs=2)" in shown
    assert "finished" in shown
    assert "client-0 → client-1" in shown
    assert "started 1 time;" in shown
    tables = call("evaluate", folders[1])
    assert f"accuracy {100 * last[1]:.2f} %" in tables
    assert all(name in tables for name in ("client-2", "class"))
    assert "class" in call("evaluate", folders[0], "--data", "digits")

    again = call(
        "run", "fedseq", "--clients", "3", "--partition", "iid", *QUICK
    )  # a folder of its own
    assert "run folder: runs/fedseq-digits-seed0-2" in again
    one, two = (Path(f"runs/fedseq-digits-seed0{end}") for end in ("", "-2"))
    for name in ("metrics.jsonl", "ledger.jsonl", "model.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert spread in call("compare", *folders, two), "a repeated run does not count as another seed"


def test_resume_after_ctrl_c_ends_with_the_same_bits(
    call: Call, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ["run", "fedseq", "--clients", "3", "--partition", "iid", *QUICK]
    call(*flags)
    save, saved = RunFolder.save, list[object]()

    def stopping(self: RunFolder, *args: object, **how: object) -> None:
        if len(saved) == 1:
            raise KeyboardInterrupt
        saved.append(args)
        save(self, *args, **how)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "save", stopping)
        patch.setattr(sys, "argv", ["ekiden", *flags])
        with pytest.raises(SystemExit) as stop:
            main()
    assert stop.value.code == 130
    assert (
        "stopped. To continue: ekiden resume runs/fedseq-digits-seed0-2" in capfd.readouterr().err
    )
    whole, folder = Path("runs/fedseq-digits-seed0"), Path("runs/fedseq-digits-seed0-2")
    assert "stopped after step" in call("show", folder)
    assert "0 finished" in call("compare", folder)
    assert re.match(
        r"the run stopped after step \d of 3: this is its model so far\naccuracy",
        call("evaluate", folder),
    )
    monkeypatch.setattr(sys, "argv", ["ekiden", "evaluate", str(folder), "--json"])
    main()
    printed = capfd.readouterr()
    assert json.loads(printed.out)["accuracy"] >= 0
    assert printed.err.startswith("the run stopped after step"), "next to the JSON, not in it"
    call("resume", folder)
    for name in ("metrics.jsonl", "ledger.jsonl", "model.safetensors"):
        assert (whole / name).read_bytes() == (folder / name).read_bytes()
    shown = call("show", folder)
    assert "finished" in shown
    assert "started 2 times" in shown
    call("resume", whole)  # nothing left to do


@pytest.mark.parametrize(
    ("command", "hint"),
    [("sweep", ". To continue: run the same command again"), ("report", "")],
)
def test_ctrl_c_tells_of_resume_only_where_it_helps(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], command: str, hint: str
) -> None:
    def stopping(args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(app, "call", stopping)
    monkeypatch.setattr(sys, "argv", ["ekiden", command])
    with pytest.raises(SystemExit) as stop:
        main()
    assert (stop.value.code, capfd.readouterr().err) == (130, f"\nekiden: stopped{hint}\n")


def test_personal_models(call: Call) -> None:
    call("run", "local", "--clients", "2", "--partition", "iid", *QUICK)
    folder = Path("runs/local-digits-seed0")
    own = json.loads(call("evaluate", folder, "--client", "client-1", "--json"))
    assert own["client"]["client-1"][1] == read_lines(folder / "metrics.jsonl")[-1]["clients"][1]


def test_tuning_never_looks_at_the_test_data(call: Call) -> None:
    flags = ["fedseq", "--clients", "3", *QUICK]
    call("run", *flags)
    tuned, told = Path("runs/tuned"), call("run", *flags, "--tune", "--out", "runs/tuned")
    assert "on validation data" in told
    (folder,), (plain,) = tuned.iterdir(), Path("runs").glob("fedseq-*")
    assert (folder / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()

    plan = stored(folder)
    data, usual = plan.federation(), stored(plain).federation()
    own = torch.cat([c.val.rows for c in usual.clients])
    assert torch.equal(data.dataset.test.x, usual.dataset.train.x[own])
    assert torch.equal(data.dataset.test.y, usual.dataset.train.y[own])
    for client, before in zip(data.clients, usual.clients, strict=True):
        assert torch.equal(client.test.x, before.val.x)
        assert torch.equal(client.test.y, before.val.y)
        assert torch.equal(client.train.rows, before.train.rows)

    model = open_run(folder).build()
    model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))
    x = (usual.dataset.train.x[own] / 255 - usual.dataset.mean[0]) / usual.dataset.std[0]
    with torch.no_grad():
        right = int((model.eval()(x).argmax(1) == usual.dataset.train.y[own]).sum())
    assert read_lines(folder / "metrics.jsonl")[-1]["accuracy"] == right / len(own)


def test_data_and_the_version(call: Call) -> None:
    printed = call(
        "data", "digits", "--partition", "classes:2", "--clients", "5", "--draw", "who.png"
    )
    assert "client-4" in printed
    assert Image.open("who.png").size[0] > 100
    assert call("--version").strip() == __version__
    assert all(command.split()[0] in call() for command in COMMANDS)


def test_hosts_of_spfl(call: Call) -> None:
    flags = ["--host", "fedprox:mu=0.1", "--rounds", "1", "--epochs", "1", "--threads", "1"]
    printed = call("run", "spfl", "--clients", "2", "--partition", "iid", *flags)
    assert "host=fedprox:mu=0.1" in printed
    assert (
        json.loads(Path("runs/spfl-digits-seed0/config.json").read_text())["recipe"][
            "hyperparameters"
        ]["align_global"]
        == 1.0
    )


def test_help_shows_symbols_and_defaults(call: Call) -> None:
    done = ekiden("run", "fedelmy", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    text = re.sub(r"[\s│]+", " ", done.stdout)
    assert "S, models trained at each client (default: 5)" in text
    assert "--learning" not in text
    told = call("run", "--help")
    assert "  fedelmy, fedseq, fedtasuki" in told
    assert "ekiden run METHOD [flags]" in told


def pets(folder: Path, *domains: str) -> None:
    """Twelve images of each class, for training and for testing, in each domain."""
    for path in (Path(split, domain) for split in ("train", "test") for domain in domains or ("",)):
        for name in ("cat", "dog"):
            (folder / path / name).mkdir(parents=True)
            for i in range(12):
                shade = 200 if name == "cat" else 40
                image = Image.new("RGB", (18, 18), (shade, i, len(str(path))))
                image.putpixel((0, 0), (0, 0, 0))
                image.save(folder / path / name / f"{i}.png")


ON_PETS = ["run", "fedseq", "--data", "pets", "--clients", "2", "--lr", "0.01", *QUICK]


def test_own_files(call: Call) -> None:
    pets(Path("pets"))
    call(*ON_PETS, "--partition", "iid")
    found = json.loads(call("evaluate", "runs/fedseq-pets-seed0", "--json"))
    assert found["samples"] == 24
    assert set(found["class"]) == {"cat", "dog"}


@pytest.mark.slow
def test_own_files_are_found_from_another_folder(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pets(Path("pets"))
    assert "pets, iid, 2 clients" in call(*ON_PETS, "--partition", "iid")
    found = call("evaluate", "runs/fedseq-pets-seed0")
    assert stored(Path("runs/fedseq-pets-seed0")).data == str(tmp_path / "pets")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert call("evaluate", "../runs/fedseq-pets-seed0") == found
    call("resume", "../runs/fedseq-pets-seed0")
    call("report", "../runs/fedseq-pets-seed0", "-o", "report")
    assert "there is no file" not in Path("report/index.html").read_text()


@pytest.mark.slow
def test_changed_data_are_not_measured_in_silence(call: Call, refused: Call) -> None:
    pets(Path("pets"), "farm", "town")
    folder = "runs/fedseq-pets-seed0"
    call(*ON_PETS)
    call("evaluate", folder)
    changed = Path("pets", "test", "town", "cat", "3.png")
    other = Image.open(changed).convert("RGB")
    other.putpixel((0, 0), (1, 2, 3))
    other.save(changed)
    error = refused("evaluate", folder)
    assert error.startswith(
        f"the data of town differ from what {folder} was made with: put these data back, or give"
    )
    assert "on 48 of " in call("evaluate", folder, "--data", "pets")  # said, so it is meant
    assert "another run (the data of town differ)" in refused("resume", folder)
    call("report", folder, "-o", "report")
    page = Path("report/index.html").read_text()
    assert "the data of town differ from what" in page


def test_digests_do_not_depend_on_where_the_data_are(call: Call) -> None:
    pets(Path("pets"))
    call(*ON_PETS)
    shutil.move("pets", "animals")
    call(*[arg.replace("pets", "animals") for arg in ON_PETS])
    one, other = (
        json.loads(Path("runs", f"fedseq-{name}-seed0", "config.json").read_text())
        for name in ("pets", "animals")
    )
    assert one["digests"] == other["digests"]


@pytest.mark.slow
def test_a_pipe_gets_a_line_for_each_step_as_it_is_done() -> None:
    command = [
        sys.executable,
        "-m",
        "ekiden",
        "run",
        "fedseq",
        "--clients",
        "3",
        "--seeds",
        "4",
        *QUICK,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = [process.stdout.readline().split(":")[0] for _ in range(6)]
        lines = [process.stdout.readline() for _ in range(4)]
        seen = (
            process.poll() is None
            or not Path("runs/fedseq-digits-seed4/model.safetensors").exists()
        )
        process.communicate(timeout=60)
    assert told == ["samples", "layout", "range", "labels", "silos", "subjects"]
    name = "fedseq-digits-seed4, seed 4"
    assert lines[0] == f"{name}: 3 steps\n"
    for step, line in enumerate(lines[1:], 1):
        assert re.fullmatch(rf"{name}: step {step} of 3, accuracy \d+\.\d\d %\n", line)
    assert seen


def test_divergence_without_infinity_is_said(call: Call) -> None:
    printed = call("run", "fedseq", "--clients", "3", "--partition", "iid", "--lr", "1e6", *QUICK)
    folder = "runs/fedseq-digits-seed0"
    line = rf"{folder}: training diverged: the loss is \S+e\+\d+, that of guessing 2.30 \(ln 10\); lower lr \(now 1e\+06\)"
    assert re.search(line, printed)
    assert "1 of 1 diverged" in printed
    assert re.search(line, call("show", folder))
    assert "diverged" not in call("run", "fedseq", "--clients", "3", "--partition", "iid", *QUICK)


# What users get wrong.


def test_every_kind_of_name_is_checked(refused: Call) -> None:
    assert "unknown command 'rum': did you mean 'run'?" in refused("rum")
    assert "unknown method 'fedemly': did you mean 'fedelmy'?" in refused("run", "fedemly")
    assert "missing METHOD (first argument). Choose one of" in refused("run")
    assert "unknown data set 'digit': did you mean 'digits'?" in refused(
        "run", "fedseq", "--data", "digit"
    )
    assert "did you mean 'resnet18'" in refused("run", "fedseq", "--model", "resnet8")
    assert "is not a partition" in refused("run", "fedseq", "--partition", "dirichlet")
    assert "did you mean 'reversed'" in refused("run", "fedseq", "--order", "reverse")
    assert "unknown host 'fedporx': did you mean 'fedprox'?" in refused(
        "run", "spfl", "--host", "fedporx"
    )
    assert "did you mean 'ring'" in refused("topology", "rings")
    assert "7 clients do not form a torus" in refused("topology", "torus", "--clients", "7")
    assert "RUNS is missing" in refused("compare")
    Path("p.csv").touch()
    for command in ("compare", "show", "evaluate", "report"):
        assert "damaged" not in (line := refused(command, "p.csv"))
        assert "p.csv is not a run folder" in line or "p.csv is a file: give run folders" in line
    assert "PATHS is missing" in refused("export", "-o", "out.csv")
    assert "cannot write" in refused("data", "digits", "--draw", "nowhere/who.png")
    assert "there is no device 'gpu'" in refused("run", "fedseq", "--device", "gpu")
    assert nothing_begun()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epochs", "0"], "--epochs 0 is out of range: it must be 1 or more"),
        (["--models", "-1"], "--models -1 is out of range"),
        (["--alpha", "-0.5"], "--alpha -0.5 is out of range: it must be 0 or more"),
        (["--lr", "0"], "--lr 0.0 is out of range"),
        (["--lr", "nan"], "--lr nan is out of range"),
        (["--alpha", "nan"], "--alpha nan is out of range"),
        (["--batch-size", "0"], "--batch-size 0 is out of range"),
        (["--val-fraction", "1"], "--val-fraction 1.0 is out of range"),
        (["--clients", "0"], "--clients 0 is out of range"),
        (["--workers", "0"], "--workers 0 is out of range"),
        (["--threads", "-1"], "--threads -1 is out of range"),
        (["--evaluate-every", "-1"], "--evaluate-every -1 is out of range"),
        (["--epochs", "many"], "--epochs 'many' is of the wrong type: it must be a whole number"),
        (["--clients", "many"], "--clients 'many' is of the wrong type: it must be a whole number"),
        (["--lr", "low"], "--lr 'low' is of the wrong type: it must be a number"),
        (["--mean", "0.5", "low"], "--mean 'low' is of the wrong type: it must be a number"),
        (
            ["--epoch", "3"],
            "unknown flag --epoch: did you mean --epochs? All flags: ekiden run fedelmy --help",
        ),
        (["--zzz=3"], "unknown flag --zzz: see ekiden run fedelmy --help"),
        (
            ["--measure", "l3"],
            "unknown --measure 'l3': did you mean 'l2'? Known: cosine, l1, l2, squared_l2.",
        ),
        (["--optimizer", "adagrad"], "unknown --optimizer 'adagrad': did you mean 'adam'?"),
        (
            ["--task", "classify"],
            "unknown --task 'classify': did you mean 'classification'? Known: auto, "
            "classification,",
        ),
        (["stray"], "unexpected argument 'stray'"),
        (["--clients", "2000"], "2000 clients cannot share"),
        (["--clients", "1500"], "1500"),
        (
            ["--partition", "dirichlet:-1"],
            "dirichlet:-1: beta -1.0 is out of range: it must be greater than 0",
        ),
        (["--partition", "classes:11"], "classes:11 cannot give all 10 classes"),
        (["--partition", "domains"], "has no domains"),
        (["--partition", "natural"], "has no natural owners"),
        (["--order", "client-0,client-1"], "--order must name each of the 10 clients once"),
        (["--seed", "-1"], "--seed -1 is out of range: it must be 0 or more"),
        (["--seeds", "0", "x"], "x"),
        (["--seeds", "0,1,2"], "must be a whole number; separate values by blanks: 0 1 2"),
        (["--mean", "0.5,0.5"], "must be a number; separate values by blanks: 0.5 0.5"),
        (["--seeds", "0", "1", "0"], "--seeds 0 1 0 names one twice"),
        (["--on"], "--on needs a value"),
        (["--on="], "unknown `--on` '': choose one of flower, here, ray"),
        (["--seeds"], "--seeds needs a value"),
        (["--mean", "--std", "1"], "--mean needs a value"),
        (["--mean", "0.5", "--std"], "--std needs a value"),
        (
            ["--mean", "0.5", "0.5", "--std", "1"],
            "--mean has 2 values and --std 1, but the images have 1 channel: give",
        ),
        (["--epochs"], "--epochs needs a value: see ekiden run fedelmy --help"),
        (["--model", "vgg11"], "vgg11"),
        (["--size", "0"], "--size 0 is out of range: it must be 1 or more"),
        (["--out", "/dev/null/runs"], "/dev/null/runs"),
    ],
    ids=lambda v: "_".join(v) if isinstance(v, list) else None,
)
def test_flags_out_of_range(refused: Call, flags: list[str], message: str) -> None:
    assert message in refused("run", "fedelmy", *flags)
    assert nothing_begun()


def test_flags_are_named_without_rules_of_ascii_terminals(
    refused: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert refused("list", "--epoch") == "unknown flag --epoch: see ekiden list --help"


def test_tuning_needs_validation_data(refused: Call) -> None:
    assert (
        "no validation samples, which choose settings and recalibrate: run with --val-fraction 0.1"
        in refused("run", "fedseq", "--tune", "--val-fraction", "0")
    )


def test_a_folder_that_may_not_be_read(refused: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read everything, so the system's error is imitated."""

    def denied(self: Path, *args: object, **kwargs: object) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", denied)
    for command in ("results", "compare"):
        assert re.match(
            "cannot read or write closed.*: Permission denied", refused(command, "closed")
        )


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_error_of_a_real_process_is_one_line(fresh: bool) -> None:
    words = ("run", "fedseq", "--clients", "2000")
    command = [sys.executable, "-m", "ekiden", *words]
    done = (
        subprocess.run(command, capture_output=True, text=True, check=False)
        if fresh
        else ekiden(*words)
    )
    assert done.returncode == 2
    assert one_line(done.stderr)
    assert nothing_begun()


def png(shade: int) -> bytes:
    data = io.BytesIO()
    image = Image.new("L", (8, 8), shade)
    image.putpixel((0, 0), 255)
    image.save(data, "png")
    return data.getvalue()


def table(images: list[bytes], labels: list[int]) -> pa.Table:
    return pa.table({"image": [{"bytes": i, "path": None} for i in images], "label": labels})


def test_files_that_cannot_be_read(refused: Call) -> None:
    good, labels = [png(20 * i) for i in range(12)], [0, 1] * 6
    pq.write_table(table(good, labels), "good.parquet")
    Path("cut.parquet").write_bytes(Path("good.parquet").read_bytes()[:-50])
    Path("text.parquet").write_text("no parquet\nat all\n")
    pq.write_table(table([*good[:7], good[7][:40], *good[8:]], labels), "bad-image.parquet")
    pq.write_table(table([], []), "empty.parquet")
    Path("folder/a").mkdir(parents=True)
    Path("folder/b").mkdir()
    for i in range(5):
        Path(f"folder/a/{i}.png").write_bytes(png(i))
        Path(f"folder/b/{i}.png").write_bytes(png(i))
    Path("folder/b/3.png").write_bytes(b"\x89PNG\r\n no image\n")
    Path("nothing").mkdir()
    for name, message in {
        "cut.parquet": "cut.parquet",
        "text.parquet": "text.parquet",
        "bad-image.parquet": "bad-image.parquet cannot be decoded",
        "empty.parquet": "empty.parquet",
        "folder": "folder/b/3.png",
        "nothing": "nothing",
        "nowhere.parquet": "there is no file or folder 'nowhere.parquet': give a folder of class folders,",
        "god.parquet": "there is no file or folder 'god.parquet': did you mean 'good.parquet'?",
        "good.csv": "there is no file or folder 'good.csv': did you mean 'good.parquet'?",
    }.items():
        assert message in refused(
            "run", "fedseq", "--data", name, "--clients", "2", "--partition", "iid"
        )
    assert "13 clients cannot share 10" in refused(
        "run", "fedseq", "--data", "good.parquet", "--clients", "13", "--partition", "iid"
    )
    assert nothing_begun()


def test_a_network_that_does_not_fit_the_images(refused: Call) -> None:
    assert "cnn_ma_echo" in refused("run", "fedseq", "--size", "4", "--model", "cnn_ma_echo")
    assert nothing_begun()


def test_folders_that_are_no_runs(refused: Call, call: Call) -> None:
    assert refused("resume") == "RUNS is missing: see ekiden resume --help"
    Path("kept.jsonl").touch()
    Path("empty").mkdir()
    Path("empty/sweep.json").write_text(
        json.dumps({"format": 1, "file": "table.toml", "budget": "paper"})
    )
    Path("empty/experiment.toml").write_text('[[row]]\nlabel = "A"\nmethod = "fedseq"\n')
    none = "no run in empty: give other folders, or the file of --records"
    assert refused("compare", "empty") == none
    assert refused("export", "empty", "-o", "out.csv").startswith("no finished step there: give")
    for wrong in (
        ["show", "kept.jsonl"],
        ["export", "kept.jsonl", "-o", "out.csv"],
        ["report", "kept.jsonl"],
    ):
        assert "kept.jsonl holds records, not steps or models" in refused(*wrong)
    Path("photos").mkdir()
    Path("photos/cat.jpg").write_bytes(b"cat")
    for command in ("resume", "show", "evaluate", "compare"):
        assert "photos is not a run folder" in refused(command, "photos")
        assert "nowhere is not a run folder" in refused(command, "nowhere")
        assert "photos/cat.jpg" in refused(command, "photos/cat.jpg")
    assert [p.name for p in Path("photos").iterdir()] == ["cat.jpg"]


def test_damaged_run_folders(refused: Call, call: Call) -> None:
    call("run", "fedseq", "--clients", "2", "--partition", "iid", *QUICK)
    whole = Path("runs/fedseq-digits-seed0")

    def damaged(name: str, content: bytes) -> Path:
        folder = Path("damaged")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        (folder / name).write_bytes(content)
        return folder

    config, model = (whole / "config.json").read_bytes(), (whole / "model.safetensors").read_bytes()
    old = json.dumps(json.loads(config) | {"format": 0}).encode()
    assert "metrics.jsonl is shorter" in refused("resume", damaged("metrics.jsonl", b""))
    assert "damaged" in refused("show", damaged("metrics.jsonl", b"{\n"))
    for command in ("resume", "show", "evaluate", "compare"):
        assert "config.json cannot be read" in refused(command, damaged("config.json", config[:-9]))
        assert "run-folder format 0, this version reads 2" in refused(
            command, damaged("config.json", old)
        )
    for line, names in (
        (b"null\n", ("ledger", "attempts", "times")),
        (b'{"a":1}\n', ("ledger", "times")),  # lines of attempts are of two kinds
    ):
        for name in names:
            assert f"{name}.jsonl" in refused("show", damaged(f"{name}.jsonl", line))
    changed = json.loads(config)
    changed["recipe"]["hyperparameters"] = {"speed": 1}
    foreign = json.dumps(changed).encode()
    for command in ("show", "compare"):
        assert "use the version of Ekiden that wrote it" in refused(
            command, damaged("config.json", foreign)
        )
    for content in (model[:-1], b"", b"\x80\x04N."):
        assert "model.safetensors is damaged" in refused(
            "evaluate", damaged("model.safetensors", content)
        )
    other = safetensors.torch.save({"weight": torch.ones(2)})
    assert "model.safetensors is damaged" in refused(
        "evaluate", damaged("model.safetensors", other)
    )
    folder = damaged("model.safetensors", model)
    (folder / "model.safetensors").unlink()
    assert "run `ekiden resume` first" in refused("evaluate", folder)
    (folder / "personal").mkdir()
    (folder / "personal" / "client-0.safetensors").write_bytes(model)
    assert "it has personal/client-0.safetensors: choose one by --client" in refused(
        "evaluate", folder
    )
    assert "this method gives no personal models: leave out client" in refused(
        "evaluate", whole, "--client", "client-1"
    )
    assert "classes" in refused("evaluate", whole, "--data", own_classes())


def own_classes() -> str:
    pq.write_table(table([png(20 * i) for i in range(12)], [0, 1, 12] * 4), "three.parquet")
    return "three.parquet"


def test_a_run_in_use_is_refused(refused: Call, call: Call) -> None:
    call("run", "fedseq", "--clients", "2", "--partition", "iid", *QUICK)
    folder = Path("runs/fedseq-digits-seed0")
    held = RunFolder(folder, json.loads((folder / "config.json").read_text()))
    try:
        done = ekiden("resume", folder)
    finally:
        held.close()
    assert done.returncode == 2
    assert "is in use by another process" in one_line(done.stderr)


def test_training_that_diverges_keeps_the_last_good_model(refused: Call) -> None:
    error = refused("run", "fedseq", "--clients", "3", "--partition", "iid", "--lr", "1e30", *QUICK)
    assert re.search(
        r"step 1, client client-0: loss or weights became NaN or infinite in epoch 1, batch \d+",
        error,
    )
    assert "lower --lr" in error
    loaded = safetensors.torch.load_file("runs/fedseq-digits-seed0/model.safetensors")
    assert all(bool(torch.isfinite(v).all()) for v in loaded.values())


class Exploding(nn.Module):
    """Gives infinity where the first feature is large."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * torch.where(x[:, :1] > 50, torch.inf, 1.0)  # type: ignore[no-any-return]


def go(
    method: Method, data: FederatedData, model: type[nn.Module], folder: Path | None = None
) -> Result:
    training, hardware = Training(lr=0.01, batch_size=16), Hardware(threads=1)
    return run(method, data, model, training=training, hardware=hardware, folder=folder)


def silo(n: int, classes: tuple[int, ...] = (0, 1, 2)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, 4, generator=generator), torch.tensor(classes).repeat(n)[:n]


@pytest.mark.filterwarnings("ignore:value . of the inputs of silo client-2 holds 100")
def test_the_client_that_diverges_is_named_and_the_model_before_it_is_kept() -> None:
    bad = silo(40)
    bad[0][35] = 100.0
    data = federate([silo(30), silo(31), bad, silo(32)], test=silo(20), val_fraction=0)
    with pytest.raises(
        UserError, match=r"step 3, client client-2: .* in epoch 1, batch [123]: lower"
    ) as caught:
        go(FedSeq(epochs=2), data, Exploding, Path("run"))
    assert str(caught.value).count("\n") == 0
    good = go(
        FedSeq(epochs=2), federate([silo(30), silo(31)], test=silo(20), val_fraction=0), Exploding
    )
    kept = safetensors.torch.load_file("run/model.safetensors")
    assert kept.keys() == good.model.state_dict().keys()
    assert all(torch.equal(kept[name], value) for name, value in good.model.state_dict().items())
    assert len(read_lines(Path("run/metrics.jsonl"))) == 2


@pytest.mark.parametrize(
    "method",
    [FedSeq(epochs=2), FedELMY(models=2, epochs=2, warmup=2), Local(epochs=2)],
    ids=lambda m: m.title(),
)
@pytest.mark.parametrize("model", [Tiny, Exploding])
def test_clients_with_one_sample_or_one_class_take_part(
    method: Method, model: type[nn.Module]
) -> None:
    data = federate(
        [silo(30), silo(1, (2,)), silo(17, (1,)), silo(2, (0,)), silo(33)], test=silo(40)
    )
    result = go(method, data, model, Path("run"))
    assert len(result.metrics) == method.steps(5)
    assert result.weights is None or result.weights.is_finite()
    assert all(m.is_finite() for m in result.personal)


def test_an_empty_client_is_refused() -> None:
    data = federate([silo(30), silo(31)], test=silo(20))
    one, other = data.clients
    empty = replace(other, train=replace(other.train, rows=torch.empty(0, dtype=torch.int64)))
    for clients, message in (
        ((one, empty), "client client-1 has no training sample"),
        ((one, one), "two clients are called 'client-0'"),
        ((one, replace(other, name="a/b")), "a client cannot be called 'a/b'"),
        ((one, replace(other, name="server")), "a client cannot be called 'server'"),
        ((), "there is no client"),
    ):
        with pytest.raises(UserError, match=message):
            go(FedSeq(epochs=1), replace(data, clients=clients), Exploding, Path("run"))
    with pytest.raises(UserError, match="silo client-1"):
        federate([silo(30), (torch.empty(0, 4), torch.empty(0, dtype=torch.int64))], test=silo(20))
    assert not Path("run").exists()


class WrongWidth(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 3)


class WrongClasses(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 2)


def test_a_module_that_does_not_fit_the_data_is_refused() -> None:
    data = federate([silo(30), silo(31)], test=silo(20))
    with pytest.raises(
        UserError, match=r"the model cannot take samples of shape \(4,\) \(arrays\): .*; choose"
    ):
        go(FedSeq(epochs=1), data, WrongWidth, Path("run"))
    with pytest.raises(
        UserError, match=r"the model gives \(2,\) per sample, but the data have 3 classes"
    ):
        go(FedSeq(epochs=1), data, WrongClasses, Path("run"))
    assert not Path("run").exists()
