"""Records of finished runs replace their folders: in the ledger, and when the sweep continues
elsewhere."""

import io
import json
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from ekiden.core.base.errors import UserError
from ekiden.lab.drawing import comparison
from ekiden.lab.tables import experiment, ledger, records, sweep, verdicts
from ekiden.lab.tables.records import portable
from ekiden.runs.plan import stored
from ekiden.runs.summary import Summary, about, label, summarise
from tests.readers.conftest import write_folder

TABLE = """
title = "digits"
source = "a paper, Table 1"
seeds = [0, 1]
[settings]
clients = 3
epochs = 1
[[row]]
label = "FedSeq"
method = "fedseq"
printed = ["10 ± 1"]
[[row]]
label = "Local"
method = "local"
metric = "client_mean"
"""


def planned(folder: Path, table: str = TABLE, file: Path | None = None) -> sweep.Sweep:
    """The sweep as `ekiden sweep` plans it, before its folder is made."""
    source = folder.parent / "table.toml"
    source.write_text(table)
    return sweep.plan_sweep(source, "paper", folder, file)


def run(swept: sweep.Sweep, number: int) -> None:
    sweep.begin(swept, TABLE)
    for one in swept.runs()[:number]:
        for job in sweep.jobs(swept, [one]):
            job.plan.run(job.folder, job.plan.federation(), about=job.about)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[sweep.Sweep, Path]:
    """Three of four runs, and the records of them."""
    folder = tmp_path_factory.mktemp("sweep")
    swept = planned(folder / "runs")
    run(swept, 3)
    file = folder / "kept" / "table.jsonl"
    assert sweep.keep_records(swept, TABLE, file, swept.runs()) == 3
    return swept, file


def _shown(runs: list[Summary]) -> str:
    console = Console(record=True, width=200, file=io.StringIO())
    console.print(comparison(runs))
    return console.export_text()


def test_the_ledger_from_records_is_that_from_folders(done: tuple[sweep.Sweep, Path]) -> None:
    swept, file = done
    page = ledger.page([sweep.opened(file)])
    assert page == ledger.page([sweep.opened(swept.folder)])
    assert "2 of 2 cells, 3 runs" in page
    folders = [run.folder for run in swept.runs()[:3]]
    assert (
        _shown(sweep.summaries([file]))
        == _shown(sweep.summaries(folders))
        == _shown(sweep.summaries([swept.folder]))
    )
    lines = file.read_text().splitlines()
    assert len(lines) == 4
    assert json.loads(lines[1])["environment"].keys() == {"python", "torch", "gpu"}, (
        "no more of the machine"
    )


def test_recorded_runs_are_not_run_again_and_count(
    done: tuple[sweep.Sweep, Path], tmp_path: Path
) -> None:
    swept, file = done
    kept = tmp_path / "kept.jsonl"
    shutil.copy(file, kept)
    again = planned(tmp_path / "runs", file=kept)
    left = sweep.jobs(again, again.runs())
    assert [job.folder.name for job in left] == [again.runs()[3].folder.name]
    run(again, 4)
    assert len(list((tmp_path / "runs").glob("*/config.json"))) == 1
    assert sweep.keep_records(again, TABLE, kept, again.runs()) == 4
    both = {r.cell.row: r for r in verdicts.collect(sweep.opened(kept))}
    first = {r.cell.row: r for r in verdicts.collect(swept)}
    assert {row: len(r.runs) for row, r in both.items()} == {"FedSeq": 2, "Local": 2}
    assert both["FedSeq"].values == first["FedSeq"].values
    assert both["Local"].values[0] == first["Local"].values[0]


def test_runs_of_another_experiment_with_the_same_settings_are_reused(
    done: tuple[sweep.Sweep, Path], tmp_path: Path
) -> None:
    swept, file = done
    table = TABLE.replace('"digits"', '"other"').replace('label = "FedSeq"', 'label = "a chain"')
    table += '[[row]]\nlabel = "longer"\nmethod = "fedseq"\nepochs = 2\n'
    source = tmp_path / "other.toml"
    source.write_text(table)
    kept = tmp_path / "kept.jsonl"
    for given in (file, swept.folder):
        again = sweep.plan_sweep(source, "paper", tmp_path / "runs", kept, [given])
        left = [(run.cell.row, run.seed) for run in again.runs() if not run.finished]
        assert left == [("longer", 0), ("Local", 1), ("longer", 1)], "three of four runs are there"
    assert sweep.keep_records(again, table, kept, again.runs()) == 3
    assert (
        len(sweep.jobs(sweep.plan_sweep(source, "paper", tmp_path / "runs", kept), again.runs()))
        == 3
    )
    found = {r.cell.row: r for r in verdicts.collect(sweep.opened(kept))}
    first = {r.cell.row: r for r in verdicts.collect(swept)}
    assert found["a chain"].values == first["FedSeq"].values
    assert found["a chain"].runs[0].config["sweep"]["row"] == "a chain"
    assert "3 runs, 3 of them from table;" in ledger.page([sweep.opened(kept)])
    assert "those of" not in ledger.page([sweep.opened(file)])


def test_a_folder_counts_before_its_record(done: tuple[sweep.Sweep, Path], tmp_path: Path) -> None:
    swept, file = done
    lines = file.read_text().splitlines()
    wrong = json.loads(lines[1])
    wrong["result"]["accuracy"] = 0.0
    kept = tmp_path / "kept.jsonl"
    kept.write_text("\n".join([lines[0], json.dumps(wrong), *lines[2:]]) + "\n")
    again = sweep.plan_sweep(swept.folder.parent / "table.toml", "paper", swept.folder, kept)
    assert verdicts.collect(again)[0].values == verdicts.collect(swept)[0].values
    sweep.keep_records(again, TABLE, kept, again.runs())
    assert kept.read_bytes() == file.read_bytes()


def test_records_of_other_settings(done: tuple[sweep.Sweep, Path], tmp_path: Path) -> None:
    changed = TABLE.replace("epochs = 1", "epochs = 2")
    again = planned(tmp_path / "runs", changed, done[1])
    with pytest.raises(
        UserError, match=r"was recorded \(and 2 other runs\): epochs is 1 there, 2 in the file"
    ):
        sweep.jobs(again, again.runs())
    assert all(not r.runs for r in verdicts.collect(again))
    with pytest.raises(UserError, match=r"must end in \.jsonl"):
        sweep.plan_sweep(tmp_path / "table.toml", "paper", None, tmp_path / "kept.txt")
    other = tmp_path / "other.toml"
    other.write_text(TABLE)
    with pytest.raises(
        UserError, match=r"keeps .*table\.toml at budget paper: give another file by records"
    ):
        sweep.plan_sweep(other, "paper", None, done[1])


@pytest.mark.parametrize(
    ("number", "line", "why"),
    [
        (1, "{}", "line 1 is damaged"),
        (1, '{"format":9,"file":"","budget":"","experiment":""}', "has format 9"),
        (1, '{"format":9,"about":{}}', "has format 9"),
        (1, '{"format":2,"file":3,"budget":"","experiment":""}', "line 1 is damaged"),
        (2, '{"run":', "line 2 is damaged"),
        (3, "[]", "line 3 is damaged"),
    ],
)
def test_damaged_records(
    done: tuple[sweep.Sweep, Path], tmp_path: Path, number: int, line: str, why: str
) -> None:
    lines = done[1].read_text().splitlines()
    lines[number - 1] = line
    file = tmp_path / "kept.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(UserError, match=why):
        records.read(file)


def test_empty_or_missing_records(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="line 1 is damaged"):
        records.read(tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match="cannot read"):
        records.read(tmp_path / "missing.jsonl")


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": ["x"]},
        {"config": []},
        {"config": {}},
        {"environment": None},
        {"seconds": "x"},
        {"result": []},
        {"result": {"accuracy": 0.3}},
    ],
    ids=str,
)
def test_a_record_of_other_types(
    done: tuple[sweep.Sweep, Path], tmp_path: Path, wrong: dict[str, object]
) -> None:
    head, line, *_ = done[1].read_text().splitlines()
    file = tmp_path / "kept.jsonl"
    file.write_text(f"{head}\n{json.dumps(json.loads(line) | wrong)}\n")
    with pytest.raises(UserError, match="line 2 is damaged"):
        records.read(file)


def test_two_sweeps_keep_their_records_in_one_file(
    done: tuple[sweep.Sweep, Path], tmp_path: Path
) -> None:
    """Both read it before either wrote; and files left by a killed process are removed."""
    file = tmp_path / "kept" / "kept.jsonl"
    sweeps = []
    for name, keep in (("one", 0), ("two", 2)):
        swept = planned(tmp_path / name, file=file)
        shutil.copytree(done[0].folder, swept.folder)
        for number, one in enumerate(swept.runs()[:3]):
            if number != keep:
                shutil.rmtree(one.folder)
        sweeps.append(swept)
    file.parent.mkdir()
    (file.parent / ".kept.jsonl.1.tmp").touch()
    assert [sweep.keep_records(swept, TABLE, file, swept.runs()) for swept in sweeps] == [1, 2]
    assert sorted(path.name for path in file.parent.iterdir()) == [".lock", "kept.jsonl"]


def test_a_sweep_that_began_before_its_file_grew_does_not_bring_the_old_one_back(
    done: tuple[sweep.Sweep, Path], tmp_path: Path
) -> None:
    swept, file = done[0], tmp_path / "kept.jsonl"
    sweep.keep_records(swept, TABLE, file, swept.runs())
    newer = f"# more\n{TABLE}"
    sweep.keep_records(swept, newer, file, swept.runs())
    sweep.keep_records(swept, None, file, swept.runs())
    assert records.read(file).experiment == newer
    file.unlink()
    assert sweep.keep_records(swept, None, file, swept.runs()) == 3
    assert records.read(file).experiment == (swept.folder / "experiment.toml").read_text()


def test_only_the_run_that_ended_is_read(
    done: tuple[sweep.Sweep, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept, _ = done
    read: list[Path] = []

    def reading(folder: Path) -> Summary:
        read.append(folder)
        return summarise(folder)

    monkeypatch.setattr(sweep, "summarise", reading)
    assert sweep.keep_records(swept, TABLE, tmp_path / "kept.jsonl", swept.runs()[:1]) == 1
    assert sweep.keep_records(swept, TABLE, tmp_path / "kept.jsonl", swept.runs()[1:2]) == 2
    assert read == [run.folder for run in swept.runs()[:2]]


def test_records_are_not_the_folder_of_their_name(
    done: tuple[sweep.Sweep, Path], tmp_path: Path
) -> None:
    head, *lines = done[1].read_text().splitlines(keepends=True)
    shutil.copytree(done[0].folder, tmp_path / "kept")
    (tmp_path / "kept.jsonl").write_text(head + lines[0])
    page = ledger.page([sweep.opened(tmp_path / "kept.jsonl")])
    assert "1 of 2 cells, 1 runs" in page


def test_sources_of_one_sweep_are_one_section(
    done: tuple[sweep.Sweep, Path], tmp_path: Path
) -> None:
    swept, file = done
    head, *lines = file.read_text().splitlines(keepends=True)
    parts = []
    for number, line in enumerate(lines):
        (tmp_path / f"{number}.jsonl").write_text(head + line)
        parts.append(sweep.opened(tmp_path / f"{number}.jsonl"))
    assert ledger.page(parts) == ledger.page([swept]) == ledger.page([parts[0], swept])
    less = TABLE.replace("seeds = [0, 1]", "seeds = [1]")
    (tmp_path / "less.jsonl").write_text(json.dumps(json.loads(head) | {"experiment": less}) + "\n")
    with pytest.raises(UserError, match=r"less\.jsonl has no cell for .*seed0: name .* first"):
        ledger.page([sweep.opened(tmp_path / "less.jsonl"), swept])


def test_a_damaged_run_takes_no_other_with_it(
    done: tuple[sweep.Sweep, Path], tmp_path: Path
) -> None:
    file = tmp_path / "kept.jsonl"
    swept = planned(tmp_path / "runs", file=file)
    shutil.copytree(done[0].folder, swept.folder)
    lines, version, plan, last = swept.runs()
    with open(lines.folder / "times.jsonl", "ab") as times:
        times.write(b"\0\0\n")
    config = json.loads((version.folder / "config.json").read_text())
    config["recipe"]["training"]["new"] = 1
    (version.folder / "config.json").write_text(json.dumps(config))
    config = json.loads((plan.folder / "config.json").read_text())
    config["plan"]["new"] = 1
    (plan.folder / "config.json").write_text(json.dumps(config))
    assert [job.folder for job in sweep.jobs(swept, swept.runs())] == [last.folder]
    damaged = dict(sweep.damaged(swept.runs()))
    assert [run.folder for run in damaged] == [lines.folder, version.folder, plan.folder]
    assert all(str(run.folder) in why for run, why in damaged.items())
    assert "use the version of Ekiden that" in damaged[version]
    assert sweep.keep_records(swept, TABLE, file, swept.runs()) == 0
    page = ledger.page([swept])
    assert page.count("does not count: ") == 3
    shutil.copy(done[1], file)
    again = sweep.plan_sweep(tmp_path / "table.toml", "paper", swept.folder, file)
    assert not sweep.damaged(again.runs()), "their records count"


def test_changed_settings_are_named_in_the_ledger_and_precision_is_one(
    done: tuple[sweep.Sweep, Path], tmp_path: Path
) -> None:
    kept = done[0]
    for changed, why in (
        (TABLE.replace("epochs = 1", "epochs = 2"), "epochs is 1 there, 2 in the file"),
        (
            TABLE.replace("epochs = 1", 'epochs = 1\nprecision = "bf16"'),
            "precision is float32 there, bf16 in the file",
        ),
    ):
        table = experiment.parsed(changed, "table", "paper", "table.toml")
        page = ledger.page([sweep.Sweep(table, kept.folder, kept.file)])
        assert (
            f"- FedSeq / accuracy %, seed 0 does not count: its settings have changed: {why}"
            in page
        )
        assert "No run is finished" in page
    elsewhere = TABLE.replace(
        "epochs = 1", 'epochs = 1\ndevice = "cuda"\nthreads = 2\nchannels_last = false'
    )
    table = experiment.parsed(elsewhere, "table", "paper", "table.toml")
    assert "3 runs" in ledger.page([sweep.Sweep(table, kept.folder, kept.file)]), (
        "where it ran is not a setting"
    )


def test_a_record_whose_environment_was_lost(
    done: tuple[sweep.Sweep, Path], tmp_path: Path
) -> None:
    swept = planned(tmp_path / "runs")
    shutil.copytree(done[0].folder, swept.folder)
    for run in swept.runs()[:3]:
        (run.folder / "environment.json").write_text("{tor")
    sweep.keep_records(swept, TABLE, tmp_path / "kept.jsonl", swept.runs())
    for path in (swept.folder, tmp_path / "kept.jsonl"):
        assert "PyTorch unknown, CPU" in ledger.page([sweep.opened(path)])


def test_a_relative_path_is_found_from_everywhere_and_counts_on_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file names the data; only the run folder knows where they were."""
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        place.mkdir()
    write_folder(here / "pets", {"cat": 12, "dog": 12})
    monkeypatch.chdir(here)
    table = TABLE.replace("[settings]", '[settings]\ndata = "pets"\npartition = "iid"').replace(
        "[0, 1]", "[0]"
    )
    swept = planned(here / "runs", table)
    run(swept, 1)
    one = swept.runs()[0]
    file = here / "pets.jsonl"
    assert one.finished
    assert sweep.keep_records(swept, table, file, swept.runs()) == 1
    monkeypatch.chdir(there)
    assert planned(here / "runs", table).runs()[0].finished
    assert stored(one.folder).federation().dataset.name == str(here / "pets")
    recorded = planned(there / "runs", table, file)  # neither the folder nor the data are here
    assert recorded.runs()[0].finished
    other = TABLE.replace("[0, 1]", "[0]").replace(
        "[settings]", '[settings]\ndata = "dogs"\npartition = "iid"'
    )
    assert planned(there / "runs", other, file).runs()[0].state.changed == (
        "data is pets there, dogs in the file",
    )


def test_a_record_says_what_local_training_returned() -> None:
    home = Path(__file__).parents[3] / "experiments"
    swept = sweep.plan_sweep(
        home / "fedelmy-table7.toml", "paper", Path("none"), home / "records/fedelmy-table7.jsonl"
    )
    kept = {
        one.cell.label: one.result
        for one in swept.runs()
        if one.seed == 0 and one.cell.row == "FedOV"
    }
    found = kept["FedOV / PACS"]
    assert found is not None
    assert (found.config["recipe"]["training"]["select"], found.config["selection"]) == (
        "best",
        "last",
    )
    assert "select last" in about(found)
    assert "select=" not in label(found.config)
    assert "| FedOV (N models) | PACS | 58." in ledger.section(swept)


PATHS = """
seeds = [0]
[settings]
silos = ["north.csv", "south.csv"]
text_column = "text"
label_column = ["label"]
tokenizer = "words"
[[row]]
label = "FedSeq"
method = "fedseq"
epochs = 1
"""


def test_records_hold_no_folders_and_count_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's files are identified by their names, so that records made in one place count for
    runs in another."""
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        place.mkdir()
        for name in ("north", "south"):
            rows = [
                f"{'good' if k % 2 else 'bad'} film,{'yes' if k % 2 else 'no'}" for k in range(20)
            ]
            (place / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
        (place / "table.toml").write_text(PATHS)
    monkeypatch.chdir(here)
    swept = sweep.plan_sweep(Path("table.toml"), "paper", here / "runs", None)
    run(swept, 1)
    file = tmp_path / "kept.jsonl"
    assert sweep.keep_records(swept, PATHS, file, swept.runs()) == 1
    assert str(tmp_path) not in file.read_text()
    monkeypatch.chdir(there)
    again = sweep.plan_sweep(Path("table.toml"), "paper", there / "runs", file)
    assert [one.finished for one in again.runs()] == [True]
    assert all(one.finished for one in sweep.opened(file).runs())
    (there / "table.toml").write_text(PATHS.replace("south.csv", "west.csv"))
    other = sweep.plan_sweep(Path("table.toml"), "paper", there / "runs", file)
    with pytest.raises(UserError, match=r"silos is .*south.csv.* there, .*west.csv.* in the file"):
        sweep.jobs(other, other.runs())


def test_paths_become_names_and_nothing_else_changes() -> None:
    values = {
        "model": "hf:/home/me/models/minilm",
        "plan": {
            "silos": ["/a/b.csv", "c.csv"],
            "data": "digits",
            "reading": {"tokenizer": "/m/minilm"},
        },
        "note": "/a/b stays",
        "network": "mine/net.py:Net",
        "pretrained": "/x/start.safetensors",
    }
    assert portable(values) == {
        "model": "hf:minilm",
        "plan": {"silos": ["b.csv", "c.csv"], "data": "digits", "reading": {"tokenizer": "minilm"}},
        "note": "/a/b stays",
        "network": "mine/net.py:Net",
        "pretrained": "start.safetensors",
    }
