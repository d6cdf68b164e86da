"""A kind of samples in the user's own file: read, trained on, measured and predicted, by the
command line."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ekiden.core.base import outside
from ekiden.core.base.errors import UserError
from ekiden.core.engine.folder import read_config, read_lines
from ekiden.data import federate, join, load
from ekiden.readers.kinds import Table, Tokens, from_json, named, of_terms, terms

Command = Callable[..., tuple[int, str]]
pytestmark = pytest.mark.usefixtures("no_data")

KIND = '''
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ekiden.core.base.errors import UserError
from ekiden.data import Inputs


@dataclass(frozen=True)
class Spectra(Inputs):
    """Numbers in text files, or in cells, with semicolons between them."""

    kind = "spectra"
    words = "spectra"
    suffixes = (".spc",)

    points: int = 6

    def encode(self, raw: Any) -> torch.Tensor:
        return torch.stack([self.one(item.read_text() if isinstance(item, Path) else item) for item in raw])

    def one(self, text: str) -> torch.Tensor:
        try:
            values = [float(value) for value in text.split(";")]
        except (ValueError, AttributeError):
            raise UserError("it is not a list of numbers") from None
        if len(values) != self.points:
            raise UserError(f"it has {len(values)} points, not {self.points}")
        return torch.tensor(values)


class NoKind:
    pass


@dataclass(frozen=True)
class Nameless(Inputs):
    def encode(self, raw: Any) -> torch.Tensor:
        return torch.zeros(len(raw), 1)


@dataclass(frozen=True)
class Wrong(Spectra):
    kind = "wrong"

    def encode(self, raw: Any) -> torch.Tensor:
        return torch.full((len(raw), 6), float("nan"))
'''


def spectrum(k: int) -> str:
    """Of class a for an even k; the classes differ in every point."""
    values = np.random.default_rng(k).normal(2.0 if k % 2 else -2.0, 1, 6)
    return ";".join(f"{value:.4f}" for value in values)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(KIND)
    for k in range(60):
        file = tmp_path / "lab" / "ab"[k % 2] / f"{k}.spc"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(spectrum(k))
    rows = {
        "signal": [spectrum(k) for k in range(60)],
        "label": ["ab"[k % 2] for k in range(60)],
        "site": range(60),
    }
    pd.DataFrame(rows).to_csv(tmp_path / "lab.csv", index=False)
    return tmp_path


OWN = ("--sample-kind", "mine.py:Spectra")
RUN = ("fedseq", "--partition", "iid", "--clients", "2", "--epochs", "15", *OWN)


def test_files_of_an_own_kind_are_trained_on_measured_and_predicted(
    folder: Path, command: Command
) -> None:
    code, said = command("run", *RUN, "--data", "lab")
    assert code == 0, said
    run = folder / "runs/fedseq-lab-seed0"
    config = read_config(run)
    assert config["inputs"] == {"kind": f"{folder}/mine.py:Spectra", "points": 6}
    assert str(folder / "mine.py") in config["plan"]["code"]
    accuracy = read_lines(run / "metrics.jsonl")[-1]["accuracy"]
    assert accuracy >= 0.9
    code, said = command("evaluate", str(run), "--json")
    assert code == 0, said
    assert json.loads(said)["accuracy"] == accuracy
    code, said = command("predict", str(run), "lab")
    assert code == 0, said
    found = pd.read_csv(io.StringIO(said))
    assert (found.prediction == [Path(file).parent.name for file in found.file]).mean() >= 0.9
    code, said = command("export", str(run), "--to", "pt2", "-o", str(folder / "exported"))
    assert code == 0, said
    assert (folder / "exported").is_file()

    (folder / "mine.py").write_text(KIND + "\n# changed\n")
    code, said = command("predict", str(run), "lab")
    assert code == 2
    assert "has changed since the run began" in said


def test_cells_of_an_own_kind(folder: Path, command: Command) -> None:
    code, said = command("run", *RUN, "--data", "lab.csv", "--feature-columns", "signal")
    assert code == 0, said
    run = folder / "runs/fedseq-lab-seed0"
    code, said = command("predict", str(run), "lab.csv")
    assert code == 0, said
    found = pd.read_csv(io.StringIO(said))
    assert (found.prediction == list("ab") * 30).mean() >= 0.9
    code, said = command("run", *RUN, "--data", "lab.csv")
    assert code == 2
    assert (
        "lab.csv has several columns that may hold spectra (signal, site): name one by "
        "--feature-columns" in said
    )


def test_an_own_kind_goes_through_every_source_and_names_bad_records(folder: Path) -> None:
    outside.trust("mine.py:Spectra")
    how: dict[str, Any] = {"sample_kind": "mine.py:Spectra"}
    rows = pd.read_csv(folder / "lab.csv").drop(columns="site")
    whole = load(str(folder / "lab"), **how)
    assert whole.classes == ("a", "b")
    assert (len(whole.train), len(whole.test), whole.shape) == (48, 12, (6,))
    assert whole.offers >= {"numbers"}
    both = federate([rows, rows.iloc[:30]], **how)
    assert [len(c.train) + len(c.val) + len(c.test) for c in both.clients] == [60, 30]
    for name in ("north", "south"):
        rows.to_csv(folder / f"{name}.csv", index=False)
    assert len(join([str(folder / "north.csv"), str(folder / "south.csv")], **how).train) == 96
    rows.loc[37, "signal"] = "1;2"
    with pytest.raises(
        UserError, match=r"row 37 \(counted from 0, .* cannot be used: it has 2 points, not 6"
    ):
        load(rows, **how)
    (folder / "lab/b/37.spc").write_text("junk")
    with pytest.raises(
        UserError, match=r"lab/b/37\.spc cannot be used: it is not a list of numbers"
    ):
        load(str(folder / "lab"), **how)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "mine.py:NoKind",
            "is not a kind of samples: derive a frozen dataclass from ekiden.data.Inputs",
        ),
        ("mine.py:Nameless", "does not say its kind: give the class a text 'kind'"),
        ("mine.py:Wrong", "Wrong.encode must return .* finite samples of torch.float32"),
        ("mine.py:Spectre", "Spectra"),
        ("nowhere.py:Spectra", "there is no file .*nowhere.py"),
        ("images", "images are told by the data: leave out sample_kind"),
        ("imags", "did you mean.*images"),
    ],
)
def test_mistakes_are_one_line(folder: Path, name: str, line: str) -> None:
    outside.trust("mine.py:Spectra")
    with pytest.raises(UserError, match=line) as caught:
        load(str(folder / "lab"), sample_kind=name)
    assert "\n" not in str(caught.value)


def test_code_runs_only_if_the_user_named_it_and_never_for_another_party(folder: Path) -> None:
    stored = {"kind": f"{folder}/mine.py:Spectra", "points": 6}
    with pytest.raises(UserError, match="is code that was not run from here before"):
        from_json(stored)
    outside.trust("mine.py:Spectra")
    inputs = from_json(stored)
    assert inputs.to_json() == stored
    assert type(inputs) is named(f"{folder}/mine.py:Spectra")
    told = terms(inputs)  # to other parties: the name and a digest of the file, no path and no code
    assert str(folder) not in told
    assert of_terms(told) == inputs
    for text in (json.dumps(stored), told.replace("mine.py:Spectra@", "mine.py:Spectra@0")):
        with pytest.raises(
            UserError,
            match=r"mine.py:Spectra.* is code that is not here, or that was never allowed",
        ):
            of_terms(text)
    (folder / "mine.py").write_text(KIND + "\n# changed\n")
    with pytest.raises(UserError, match=r"then `ekiden trust mine.py`"):
        of_terms(told)


def test_a_kind_of_an_installed_package(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """Write what pip installs: a module, and its entry point in a .dist-info folder."""
    site = folder / "site"
    (site / "spectra-1.0.dist-info").mkdir(parents=True)
    (site / "spectra_lab.py").write_text(KIND)
    (site / "spectra-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: spectra\nVersion: 1.0\n"
    )
    (site / "spectra-1.0.dist-info" / "entry_points.txt").write_text(
        "[ekiden.kinds]\nspectra = spectra_lab:Spectra\n"
    )
    with pytest.raises(UserError, match="unknown kind of samples 'spectra'"):
        load(str(folder / "lab"), sample_kind="spectra")
    monkeypatch.syspath_prepend(str(site))
    outside._points.cache_clear()
    try:
        code, said = command("run", *RUN[:-2], "--data", "lab", "--sample-kind", "spectra")
        assert code == 0, said
        run = folder / "runs/fedseq-lab-seed0"
        assert read_config(run)["inputs"] == {"kind": "spectra", "points": 6}
        code, said = command("predict", str(run), "lab", "-o", "found.csv")
        assert code == 0, said
        found = pd.read_csv("found.csv")
        assert (found.prediction == [Path(file).parent.name for file in found.file]).mean() >= 0.9
        inputs = named("spectra")()
        assert json.loads(terms(inputs)) == {"kind": "spectra", "points": 6}
        assert of_terms(terms(inputs)) == inputs
    finally:
        outside._points.cache_clear()
        sys.modules.pop("spectra_lab", None)


def test_the_kinds_of_ekiden_keep_their_names() -> None:
    for inputs in (Table(("a",), ("b",)), Tokens()):
        assert from_json(inputs.to_json()) == inputs
        assert inputs.to_json()["kind"] == inputs.kind
