"""What `ekiden.run`, `split` and `federate` accept: unambiguous arguments run, all others give one
line; and runs that go on after their data have moved, with more laps, and on another machine."""

import json
import multiprocessing
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

import ekiden
from ekiden import GLM, FederatedData, Hardware, Training, UserError, federate, run, split, steps
from ekiden.core.base.errors import DataWarning
from ekiden.core.engine import folder as folders
from ekiden.core.engine.setup import resolved_hardware
from ekiden.data import Dirichlet, Iid, from_tensors
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedAvg, FedELMY, FedSeq
from ekiden.runs import api, tracking
from ekiden.runs.result import Result
from tests.methods.test_glm import held

pandas = pytest.importorskip("pandas")

GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(60, 4, generator=GENERATOR), torch.arange(60) % 3
FRAME = pandas.DataFrame(X.numpy(), columns=list("abcd")).assign(label=Y.numpy())
SILOS: Any = [(X[:30], Y[:30]), (X[30:], Y[30:])]
FAST = Training(max_steps=1)


def images() -> Any:
    """Twelve 8 by 8 colour images in three classes, as a data set of Hugging Face."""
    import datasets

    draw = np.random.default_rng(0)
    pictures = [
        PIL.Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)) for _ in range(12)
    ]
    kinds = datasets.Features(
        {
            "img": datasets.Image(),
            "kind": datasets.ClassLabel(names=["a", "b", "c"]),
            "id": datasets.Value("int64"),
        }
    )
    rows = {"img": pictures, "kind": [i % 3 for i in range(12)], "id": list(range(12))}
    return datasets.Dataset.from_dict(rows, features=kinds)


@pytest.mark.parametrize("method", ["fedseq", "FedSeq", FedSeq])
def test_a_name_or_a_class_stands_for_the_method_with_its_defaults(
    method: Any, blobs: FederatedData
) -> None:
    result = run(method, blobs, Tiny, training=FAST)
    expected = run(FedSeq(), blobs, Tiny, training=FAST)
    assert result.weights is not None
    assert expected.weights is not None
    assert torch.equal(result.weights.params, expected.weights.params)


def test_a_list_of_silos_is_federated() -> None:
    result = run(FedSeq(), SILOS, Tiny, training=FAST)
    expected = run(FedSeq(), federate(SILOS), Tiny, training=FAST)
    assert result.metrics == expected.metrics


def test_a_run_learns_within_no_grad() -> None:
    with torch.no_grad():
        result = run(FedSeq(), SILOS, Tiny, training=FAST)
    assert result.metrics == run(FedSeq(), SILOS, Tiny, training=FAST).metrics
    assert result.metrics[-1]["backward"] > 0


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (("fedelmi", SILOS), {}, "unknown method 'fedelmi': did you mean 'fedelmy'?"),
        (
            (SILOS, FedSeq()),
            {},
            "run takes the method first, then the data: ekiden.run(method, data)",
        ),
        (
            (federate(SILOS), FedSeq),
            {},
            "run takes the method first, then the data: ekiden.run(method, data)",
        ),
        (
            (federate(SILOS), "fedseq"),
            {},
            "FederatedData is not a method: ekiden.run(method, data) takes one of",
        ),
        ((None, SILOS), {}, "NoneType is not a method"),
        ((Training, SILOS), {}, "type is not a method"),
        ((FedSeq(), "digits"), {}, "data are not divided among clients yet: give ekiden.split("),
        (
            (FedSeq(), from_tensors((X, Y))),
            {},
            "data are not divided among clients yet: give ekiden.split(data",
        ),
        ((FedSeq(), (X, Y)), {}, "federate needs a list with the samples of each silo"),
        ((FedSeq(), list(zip(X, Y, strict=True))), {}, "silo client-0 is one sample, not many"),
        (
            (FedSeq(), list(zip(X, Y.tolist(), strict=True))),
            {},
            "silo client-0 is one sample, not many",
        ),
        ((FedSeq(), FRAME), {}, "data are not divided among clients yet: give ekiden.split("),
        ((FedSeq(), images), {}, "data cannot be of type Dataset"),
        (
            (FedSeq(), SILOS, 3),
            {},
            "model 3 is of the wrong type: it must be a text or of type Module or of type Call",
        ),
        (
            (FedSeq(), SILOS, torch.nn.Linear),
            {},
            "Linear needs in_features, out_features: give a module, or a function",
        ),
        ((FedSeq(), SILOS, lambda: 3), {}, "<lambda> returns int: return a torch.nn.Module"),
        (
            (FedSeq(), SILOS, "hf:"),
            {},
            "model hf: names no network: write its name after the colon",
        ),
        (
            ("fedseq", SILOS),
            {"epochs": 3},
            "epochs is a setting of the method: give FedSeq(epochs=...) as the method",
        ),
        (
            (FedSeq, SILOS),
            {"lr": 0.1},
            "lr is a setting of training: give training=ekiden.Training(lr=...)",
        ),
        ((FedSeq(), SILOS), {"out": "runs"}, "unknown argument 'out': "),
        (
            ("fedseq", SILOS),
            {"epoch": 3},
            "unknown argument 'epoch': did you mean 'epochs'? It is a setting of the method: give "
            "FedSeq(epochs=...)",
        ),
        (
            ("fedseq", SILOS),
            {"partition": "iid"},
            "partition is about the data: give it to ekiden.split",
        ),
        (("fedseq", SILOS), {"label_column": "y"}, "label_column is about the data: give it to"),
        (("fedseq", SILOS), {"worker": 2}, "unknown argument 'worker': did you mean 'workers'?"),
        (
            (FedSeq(), SILOS, Tiny),
            {"seed": "3"},
            "seed '3' is of the wrong type: it must be a whole number, 0 or more",
        ),
        ((FedSeq(), SILOS, Tiny), {"seed": -1}, "seed -1 is out of range: it must be 0 or more"),
        ((FedSeq(), SILOS, Tiny), {"workers": "2"}, "workers '2' is of the wrong type"),
        (
            (FedSeq(), SILOS, Tiny),
            {"workers": 0},
            "workers 0 is out of range: it must be 1 or more",
        ),
        (
            (FedSeq(), SILOS, Tiny),
            {"evaluate_every": -1},
            "evaluate_every -1 is out of range: it must be 0 or more",
        ),
        (
            (FedSeq(), SILOS, Tiny),
            {"folder": 3},
            "folder 3 is of the wrong type: it must be a text or of type Path",
        ),
        (
            (FedSeq(), SILOS, Tiny),
            {"training": {"lr": 0.1}},
            "training {'lr': 0.1} is of the wrong type: it must be of",
        ),
        (
            (FedSeq(), SILOS, Tiny),
            {"hardware": "cuda"},
            "hardware 'cuda' is of the wrong type: it must be of type Har",
        ),
        (
            (FedSeq(), SILOS, Tiny),
            {"watch": True},
            "watch True is of the wrong type: it must be of type Callable or N",
        ),
    ],
)
def test_run_refuses_the_rest_in_one_line(
    arguments: Any, keywords: Any, message: str, tmp_path: Path
) -> None:
    arguments = [part() if part is images else part for part in arguments]
    with pytest.raises(UserError) as raised:
        run(*arguments, **({"folder": tmp_path / "run"} | keywords))
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_an_epoch_count_as_a_text_is_refused_where_it_is_written() -> None:
    with pytest.raises(
        UserError, match="epochs '3' is of the wrong type: it must be a whole number, 1 or more"
    ):
        FedELMY(epochs="3")  # type: ignore[arg-type]


@pytest.mark.parametrize("partition", ["dirichlet:0.5:1", Dirichlet(0.5, 1)])
@pytest.mark.parametrize("given", [from_tensors((X, Y)), (X, Y), (X.numpy(), Y.tolist())])
def test_split_takes_spellings_and_samples(given: Any, partition: Any) -> None:
    wanted = split(from_tensors((X, Y)), Dirichlet(0.5, 1), 3, seed=0)
    found = split(given, partition, 3)
    assert [c.train.rows.tolist() for c in found.clients] == [
        c.train.rows.tolist() for c in wanted.clients
    ]
    assert torch.equal(found.dataset.train.x, wanted.dataset.train.x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("iid", from_tensors((X, Y))), "split takes the data set first"),
        (
            ("digits", "iid"),
            "split takes a data set, not its name: ekiden.split(ekiden.load('digits'), ...)",
        ),
        ((federate(SILOS), "iid"), "split was given data that are divided already"),
        (((X, Y), "irichlet:0.5"), "'irichlet:0.5' is not a partition"),
        (((X, Y), Iid), "split cannot divide by Iid: give a partition"),
        (((X, Y), 0.5), "split cannot divide by float: give a partition"),
        (
            ((X, Y), "iid", "3"),
            "clients '3' is of the wrong type: it must be a whole number or None",
        ),
        (((X, Y), "iid", 2.0), "clients 2.0 is of the wrong type"),
        (
            (FRAME.drop(columns="label"), "iid"),
            "train has no column 'label': say which one holds the labels (label_column)",
        ),
    ],
)
def test_split_refuses_the_rest_in_one_line(arguments: Any, message: str) -> None:
    with pytest.raises(UserError) as raised:
        split(*arguments)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "silo",
    [
        (FRAME[list("abcd")], FRAME["label"]),
        (X.numpy(), FRAME["label"]),
        (X.tolist(), Y.tolist()),
        (X, Y.tolist()),
        [(row, int(label)) for row, label in zip(X, Y, strict=True)],
    ],
    ids=["frame", "series", "lists", "labels", "pairs"],
)
def test_samples_that_other_libraries_hold(silo: Any) -> None:
    found, wanted = federate([silo]), federate([(X, Y)])
    assert torch.equal(found.dataset.train.x, wanted.dataset.train.x)
    assert torch.equal(found.dataset.train.y, wanted.dataset.train.y)


@pytest.mark.filterwarnings(
    "ignore:.* has columns that no model of images gets:ekiden.core.base.errors.DataWarning"
)
def test_a_hugging_face_data_set_of_images() -> None:
    table = images()
    data = split(table, "iid", 2)
    pixels = torch.stack([torch.from_numpy(np.array(row["img"])).permute(2, 0, 1) for row in table])
    found = torch.cat([data.dataset.train.x, data.dataset.test.x])
    assert data.dataset.shape == (3, 8, 8)
    assert sorted(found.flatten(1).tolist()) == sorted(pixels.flatten(1).tolist())
    assert len(federate([table, table]).clients) == 2


def renamed(*names: str) -> Any:
    """The images with other names of the classes, and so that the last class has none."""
    import datasets

    few = images().filter(lambda row: row["kind"] < 2)
    return few.cast_column("kind", datasets.ClassLabel(names=list(names)))


def two_parts() -> Any:
    """The images as one of the parts of a data set."""
    import datasets

    return datasets.DatasetDict({"train": images()})


@pytest.mark.filterwarnings(
    "ignore:.* has columns that no model of images gets:ekiden.core.base.errors.DataWarning"
)
def test_a_hugging_face_data_set_keeps_the_names_of_its_classes() -> None:
    assert split(images(), "iid", 2).dataset.classes == ("a", "b", "c")
    named = from_tensors(renamed("zebra", "ant", "moose"))
    assert named.classes == ("zebra", "ant", "moose"), (
        "in their own order, also of classes without samples"
    )
    assert sorted(torch.cat([named.train.y, named.test.y]).tolist()) == [0] * 4 + [1] * 4
    # Silos whose numbers mean other classes go by the names.
    both = federate([renamed("ant", "bee", "cat"), renamed("bee", "ant", "cat")]).dataset
    first, second = both.train.x[: len(both.train) // 2], both.train.x[len(both.train) // 2 :]
    assert both.classes == ("ant", "bee", "cat")
    assert torch.equal(first, second)
    half = len(both.train) // 2
    assert torch.equal(both.train.y[:half], 1 - both.train.y[half:])
    with pytest.raises(
        UserError, match="silo client-0 holds images, silo client-1 arrays: give one kind"
    ):
        federate([images(), (torch.zeros(10, 3, 8, 8), torch.arange(10) % 3)])
    with pytest.raises(
        UserError, match=r"label 'a' in row 0 .* of silo client-0 is not among the classes: x, y, z"
    ):
        federate([images()], classes=("x", "y", "z"))


@pytest.mark.parametrize(
    ("silo", "message"),
    [
        (FRAME.drop(columns="label"), "silo client-0 has no column 'label'"),
        (
            lambda: images().remove_columns("kind"),
            "silo client-0 has no column 'label': say which one holds",
        ),
        (two_parts, "silo client-0 is a DatasetDict of train: give one of its parts"),
        ((FRAME.assign(a="x"), FRAME["label"]), "silo client-0 holds values that are not numbers"),
        (([[1.0], [1.0, 2.0]], [0, 1]), "silo client-0 holds rows of different lengths"),
        (X, "silo client-0 must be tensors"),
        ("photos", "there is no file or folder 'photos'"),
        (None, "silo client-0 must be tensors"),
    ],
)
def test_federate_refuses_the_rest_in_one_line(silo: Any, message: str) -> None:
    with pytest.raises(UserError) as raised:
        federate([silo() if callable(silo) else silo])
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("silos", [(X, Y), X, "photos", images, FRAME, 3])
def test_federate_wants_a_list(silos: Any) -> None:
    with pytest.raises(UserError, match="federate needs a list with the samples of each silo"):
        federate(silos() if callable(silos) else silos)


def test_federate_takes_a_dict_by_names() -> None:
    assert [client.name for client in federate({"b": (X, Y), "a": (X, Y)}).clients] == ["b", "a"]


SCRIPT = """
import torch, ekiden
silos = [(torch.randn(40, 4), torch.arange(40) % 2) for _ in range(2)]
{guard}ekiden.run("average", silos, torch.nn.Linear(4, 2), workers=2, training=ekiden.Training(max_steps=1))
"""


def script(folder: Path, guard: str) -> "subprocess.CompletedProcess[str]":
    file = folder / "script.py"
    file.write_text(SCRIPT.format(guard=guard))
    return subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.slow
def test_a_script_with_workers_needs_a_main_guard(tmp_path: Path) -> None:
    done = script(tmp_path, "")
    assert done.returncode == 1
    advice = 'put what starts the run under `if __name__ == "__main__":`, or use workers=1'
    assert done.stderr.splitlines()[-1].endswith(advice)
    assert done.stderr.count("Traceback") == 1, "that of the script's own process"
    assert "bootstrapping" not in done.stderr
    assert "BrokenProcessPool" not in done.stderr


@pytest.mark.slow
def test_a_script_with_a_main_guard_runs(tmp_path: Path) -> None:
    done = script(tmp_path, 'if __name__ == "__main__": ')
    assert (done.returncode, done.stderr) == (0, "")


def test_workers_cannot_read_a_script_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    with pytest.raises(
        UserError, match="worker processes cannot read <stdin>: put the script into a file"
    ):
        run(FedSeq(), SILOS, Tiny, workers=2)


def test_steps_gives_what_run_gives_step_by_step(blobs: FederatedData) -> None:
    seen = list(steps(FedSeq(epochs=1), blobs, Tiny, training=FAST))
    whole = run(FedSeq(epochs=1), blobs, Tiny, training=FAST)
    assert [result.state.step for result in seen] == [1, 2, 3, 4]
    assert [len(result.metrics) for result in seen] == [1, 2, 3, 4]
    assert seen[-1].metrics == whole.metrics
    assert seen[-1].ledger == whole.ledger
    for done, result in enumerate(seen, 1):  # as a run that is stopped there
        stopped = run(FedSeq(epochs=1), blobs, Tiny, training=FAST, stop_after=done)
        assert result.weights is not None
        assert stopped.weights is not None
        assert torch.equal(result.weights.params, stopped.weights.params)
        assert result.accuracy == whole.metrics[done - 1]["accuracy"]


def test_a_loop_over_steps_that_is_left_goes_on_later(blobs: FederatedData, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for result in steps(FedSeq(epochs=1), blobs, Tiny, training=FAST, folder=folder):
        if result.state.step == 2:
            break
    assert (folder / "model.safetensors").exists()
    later = list(steps(FedSeq(epochs=1), blobs, Tiny, training=FAST, folder=folder))
    assert [result.state.step for result in later] == [3, 4]
    assert [row["step"] for row in later[0].metrics] == [1, 2, 3]
    whole = run(FedSeq(epochs=1), blobs, Tiny, training=FAST)
    assert later[-1].metrics == whole.metrics
    assert later[-1].ledger == whole.ledger


@pytest.mark.slow
def test_worker_processes_end_when_a_loop_over_steps_is_left(blobs: FederatedData) -> None:
    before = {child.pid for child in multiprocessing.active_children()}
    going = steps(FedSeq(epochs=1), blobs, Tiny, training=FAST, processes=True)
    assert next(going).state.step == 1
    assert {child.pid for child in multiprocessing.active_children()} - before
    going.close()
    assert not {child.pid for child in multiprocessing.active_children()} - before


def test_steps_refuses_what_run_refuses_before_the_first_step(blobs: FederatedData) -> None:
    with pytest.raises(UserError, match="evaluate_every -1 is out of range"):
        steps(FedSeq(epochs=1), blobs, Tiny, evaluate_every=-1)
    with pytest.raises(UserError, match="the model gives"):
        steps(FedSeq(epochs=1), blobs, torch.nn.Linear(4, 2))
    stopped = next(steps(FedSeq(epochs=1), blobs, Tiny, training=FAST, evaluate_every=2))
    with pytest.raises(UserError, match="lower evaluate_every"):
        _ = stopped.accuracy


def test_a_run_can_be_measured_at_its_end_only(blobs: FederatedData) -> None:
    rows = run(FedSeq(epochs=1), blobs, Tiny, training=FAST, evaluate_every=0).metrics
    assert [row["step"] for row in rows if "accuracy" in row] == [4]


def test_without_a_terminal_lines_say_how_far_a_run_is(
    blobs: FederatedData, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(FedSeq(epochs=1), blobs, Tiny())
    assert not capsys.readouterr().err, "a short run says nothing"
    monkeypatch.setattr(tracking, "BETWEEN_LINES", 0.0)
    run(FedSeq(epochs=1), blobs, Tiny())
    first, *_ = told = capsys.readouterr().err.splitlines()
    assert len(told) == len(blobs.clients)
    assert first.startswith(f"fedseq: 1 of {len(blobs.clients)}, accuracy ")
    run(FedSeq(epochs=1), blobs, Tiny(), quiet=True)
    assert not capsys.readouterr().err


def test_a_bar_is_shown_on_a_terminal_unless_quiet(
    blobs: FederatedData, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(FedSeq(epochs=1), blobs, Tiny())
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    run(FedSeq(epochs=1), blobs, Tiny(), quiet=True)
    assert capsys.readouterr().err == ""
    run(FedSeq(epochs=1), blobs, Tiny())
    shown = capsys.readouterr()
    assert "fedseq" in shown.err
    assert shown.out == ""


Command = Callable[..., tuple[int, str]]


def table(path: Path, shift: float = 0.0) -> Path:
    draw = np.random.default_rng(0)
    v = draw.normal(size=90) + shift
    label = np.where(v - shift + draw.normal(size=90) > 0, "p", "q")
    rows = [f"{a},{b}" for a, b in zip(v, label, strict=True)]
    path.write_text("\n".join(["v,label", *rows]))
    return path


def begun(place: Path, **more: Any) -> Path:
    """A run of a file that was stopped after its first step."""
    place.mkdir()
    data = ekiden.split(ekiden.load(table(place / "t.csv"), label_column="label"), "iid", 3)
    method = FedAvg(rounds=2, epochs=1)
    ekiden.run(method, data, folder=place / "run", stop_after=1, quiet=True, **more)
    return place / "run"


def test_a_run_goes_on_with_data_that_were_moved(tmp_path: Path, command: Command) -> None:
    run = begun(tmp_path / "old")
    whole = ekiden.resume(shutil.copytree(run, tmp_path / "whole"))
    shutil.move(tmp_path / "old", tmp_path / "new")
    run = tmp_path / "new" / "run"
    with pytest.raises(UserError, match=r"t.csv, the data of .*run, is not there: say where by"):
        ekiden.resume(run)
    code, said = command("resume", str(run))
    assert code == 2
    assert "is not there: say where by --data" in said
    other = table(tmp_path / "other.csv", shift=1.0)
    before = (run / "config.json").read_bytes()
    with pytest.raises(UserError, match=r"scale of .* differ from what"):
        ekiden.resume(run, other)
    assert (run / "config.json").read_bytes() == before
    assert command("resume", str(run), "--data", str(tmp_path / "new" / "t.csv"))[0] == 0
    for name in ("metrics.jsonl", "ledger.jsonl", "model.safetensors"):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert whole.state.step == 2
    ekiden.evaluate(run)  # it knows the new place


def test_a_regression_goes_on_with_more_laps(tmp_path: Path) -> None:
    rows = [slice(0, 90), slice(90, 200)]
    data = held("died", rows)

    def go(laps: int, name: str) -> Result:
        method = GLM(firth=True, laps=laps)
        return ekiden.run(method, data, folder=tmp_path / name, evaluate_every=10**9, quiet=True)

    with pytest.raises(UserError, match="has not converged"):
        go(4, "run")
    enough = go(30, "enough")
    with pytest.raises(UserError, match="makes so many laps already"):
        ekiden.resume(tmp_path / "run", data, laps=4)
    found = ekiden.resume(tmp_path / "run", data, laps=30, quiet=True)
    assert found.coefficients == enough.coefficients
    assert found.state.step == 118, "two laps for each step of two silos, the first one apart"
    with pytest.raises(UserError, match="has ended: leave out laps"):
        ekiden.resume(tmp_path / "run", data, laps=40)
    run = begun(tmp_path / "average")
    with pytest.raises(UserError, match="fedavg does not stop at a limit of laps"):
        ekiden.resume(run, laps=9)


def test_another_environment_is_named_with_both_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path / "run")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ekiden.resume(shutil.copytree(run, tmp_path / "same"))
    usual = folders._environment()
    changed = {"torch": "9.9", "platform": "a phone"}
    monkeypatch.setattr(folders, "_environment", lambda: usual | changed)
    with pytest.warns(DataWarning, match="torch .* before and 9.9 now, platform .* now;"):
        ekiden.resume(run)
    attempts = (run / "attempts.jsonl").read_text().splitlines()
    noted = [json.loads(line)["environment"]["torch"] for line in attempts]
    assert noted == [usual["torch"], "9.9"]


def test_threads_that_nobody_chose_may_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 is the number that the machine has; a number that was chosen identifies the run."""
    data = ekiden.split(ekiden.load(table(tmp_path / "t.csv"), label_column="label"), "iid", 3)
    method, usual = FedAvg(rounds=2, epochs=1), resolved_hardware

    def go(threads: int, here: int, **more: Any) -> Result:
        def resolved(hardware: Hardware, *rest: Any) -> Hardware:
            return usual(hardware if hardware.threads else Hardware(threads=here), *rest)

        monkeypatch.setattr(api, "resolved_hardware", resolved)
        hardware = Hardware(threads=threads)
        more |= {"hardware": hardware, "folder": tmp_path / f"run{threads}", "quiet": True}
        return ekiden.run(method, data, **more)

    go(0, 1, stop_after=1)
    with pytest.warns(DataWarning, match="threads 1 before and 2 now"):
        assert go(0, 2).state.step == 2
    go(1, 1, stop_after=1)
    with pytest.raises(UserError, match=r"holds another run \(.*hardware"):
        ekiden.run(method, data, hardware=Hardware(threads=2), folder=tmp_path / "run1", quiet=True)
