"""`ekiden run --config FILE` and `--print-config`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ekiden.runs.plan import stored

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


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path, command: Command) -> None:
    (tmp_path / "p.toml").write_bytes(b"\xff\xff")
    for name, line in (
        ("none.toml", "No such file"),
        (".", "cannot read"),
        ("p.toml", "is not text in UTF-8"),
    ):
        code, said = command("run", "fedseq", "--config", str(tmp_path / name))
        assert (code, said.count("\n")) == (2, 1)
        assert line in said
    assert command("run", "fedseq", "--on", "flower", "--config", "p.toml")[0] == 2
