"""`ekiden run --config FILE` and `--print-config`."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from ekiden.core.base.errors import UserError
from ekiden.data import Reading
from ekiden.methods import FedGram, FedSeq
from ekiden.runs.plan import Plan, read, stored, written
from ekiden.runs.recipe import Recipe

Command = Callable[..., tuple[int, str]]


FLAGS = ["fedgram", "--data", "digits", "--clients", "2", "--partition", "iid"]
FLAGS += ["--width", "8", "--model", "mlp", "--size", "4", "--seed", "3"]


def test_what_is_printed_can_be_given_back(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed = command("run", *FLAGS, "--print-config")
    assert code == 0
    assert not list(tmp_path.iterdir()), "nothing is run"
    Path("plan.toml").write_text(printed, encoding="utf-8")
    assert command("run", "--config", "plan.toml", "--print-config") == (0, printed)
    short = 'data = "digits"\nclients = 2\npartition = "iid"\nmodel = "mlp"\nwidth = 9\nseed = 3\nsize = 4\n'
    Path("short.toml").write_text(short, encoding="utf-8")
    assert command(
        "run", "fedgram", "--config", "short.toml", "--width", "8", "--print-config"
    ) == (0, printed)


@pytest.mark.slow
def test_a_run_of_the_file_has_the_digests_of_the_run_of_the_flags(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plan.toml").write_text(command("run", *FLAGS, "--print-config")[1], encoding="utf-8")
    assert (
        command("run", *FLAGS, "--out", "a")[0]
        == command("run", "--config", "plan.toml", "--out", "b")[0]
        == 0
    )
    folders = [next(Path(name).iterdir()) for name in "ab"]
    assert stored(folders[0]) == stored(folders[1])
    digests = [json.loads((folder / "config.json").read_text())["digests"] for folder in folders]
    assert digests[0] == digests[1]
    assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 1


def test_every_setting_survives(tmp_path: Path) -> None:
    odd = Reading(
        drop_columns=('a "b"', "ü\\n\x7f"),
        pixel_window=(-0.5, 1e9),
        label_column=("y",),
        augment_flip=True,
    )
    plan = Plan(
        Recipe(FedSeq(epochs=3), seed=4, metric="balanced_accuracy"),
        "a.csv",
        reading=odd,
        data_seed=1,
        tune=True,
    )
    (tmp_path / "p.toml").write_text(written(plan), encoding="utf-8")
    found = read(tmp_path / "p.toml")
    assert found.recipe == plan.recipe
    assert (found.reading, found.data_seed, found.tune) == (odd, 1, True)
    assert set(tomllib.loads(written(Plan(Recipe(FedGram()))))) > {
        "width",
        "lr",
        "device",
        "data",
        "seed",
        "label_column",
    }


@pytest.mark.parametrize(
    ("text", "method", "line"),
    [
        (
            'method = "fedseq"\nepocs = 3',
            "",
            "unknown setting of fedseq 'epocs': did you mean 'epochs'",
        ),
        ("epochs = 3", "", 'it names no method: add a line such as method = "fedseq"'),
        ('method = "fedseqq"', "", "unknown method 'fedseqq': did you mean 'fedseq'"),
        ("method = 3", "", "it names no method"),
        (
            'method = "fedseq"',
            "fedgram",
            "it is for fedseq, not for fedgram: leave out one of them",
        ),
        ("epochs = '3'", "fedseq", "epochs '3' is of the wrong type"),
        ("epochs = nan", "fedseq", "epochs nan is of the wrong type"),
        ("lr = inf", "fedseq", "lr inf is out of range"),
        ("epochs = ", "fedseq", "it is not valid TOML"),
        ("[training]\nlr = 1", "fedseq", "unknown setting of fedseq 'training'"),
        ('partition = "iidd"', "fedseq", "'iidd' is not a partition"),
        ('silos = "a.csv"', "fedseq", "silos 'a.csv' is of the wrong type"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(
    tmp_path: Path, text: str, method: str, line: str
) -> None:
    (tmp_path / "p.toml").write_text(text)
    with pytest.raises(UserError) as refused:
        read(tmp_path / "p.toml", method)
    assert str(refused.value).startswith(f"{tmp_path / 'p.toml'}: ")
    assert line in str(refused.value)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path, command: Command) -> None:
    (tmp_path / "p.toml").write_bytes(b"\xff\xff")
    for name, line in (
        ("none.toml", "No such file"),
        (".", "cannot be read"),
        ("p.toml", "is not text in UTF-8"),
    ):
        code, said = command("run", "fedseq", "--config", str(tmp_path / name))
        assert (code, said.count("\n")) == (2, 1)
        assert line in said
    assert command("run", "fedseq", "--on", "flower", "--config", "p.toml")[0] == 2
