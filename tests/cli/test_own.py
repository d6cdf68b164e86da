"""`ekiden new method`: files to begin a method with."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

import ekiden
from ekiden import UserError
from ekiden.cli import own
from ekiden.core.base.checks import plain
from ekiden.methods import FedProx

Command = Callable[..., tuple[int, str]]

METHODS = Path(ekiden.__file__).parent / "methods"


def test_a_copy_of_a_method_has_its_settings(
    command: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code, _ = command("new", "method", "near_prox", "--like", "fedprox")
    assert code == 0
    assert {p.name for p in tmp_path.iterdir()} >= {
        "near_prox.py",
        "test_near_prox.py",
        "near_prox.md",
    }
    kind = import_module("near_prox").NearProx
    del sys.modules["near_prox"]
    assert plain(kind()) == plain(FedProx())
    assert "FedProx" not in (tmp_path / "near_prox.py").read_text().split("class NearProx")[0][90:]


def test_in_a_checkout_each_file_goes_where_it_belongs_and_the_method_is_listed(
    command: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "src/ekiden/methods"
    (there / "rounds").mkdir(parents=True)
    for folder in ("tests/methods", "docs/methods"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("__init__.py", "rounds/fedprox.py"):
        shutil.copy(METHODS / file, there / file)
    code, said = command("new", "method", "NearProx", "--like", "fedprox")
    assert (code, "ekiden check nearprox; ekiden run nearprox --data" in said) == (0, True)
    assert (there / "rounds/near_prox.py").is_file()
    assert "ekiden run nearprox --data" in (tmp_path / "docs/methods/near_prox.md").read_text()
    test = (tmp_path / "tests/methods/test_near_prox.py").read_text()
    assert "from ekiden.methods.rounds.near_prox import NearProx" in test
    listed = (there / "__init__.py").read_text()
    assert "from ekiden.methods.rounds.near_prox import NearProx as NearProx\n" in listed
    assert '"rounds.fedprox:FedProx",\n        "rounds.near_prox:NearProx",\n' in listed
    code, said = command("new", "method", "NearProx", "--like", "fedprox")
    assert code == 2
    assert "exists already" in said
    code, said = command("new", "method", "Moon", "--like", "fedprox")
    assert (code, "a method called moon is there already" in said) == (2, True)
    assert not (there / "rounds/moon.py").exists()


def test_only_methods_of_the_library_are_copied(command: Callable[..., tuple[int, str]]) -> None:
    code, said = command("new", "method", "x_y", "--like", "fedpro")
    assert (code, "fedprox" in said) == (2, True)


@pytest.mark.parametrize("kind", ["study", "hospital"])
def test_a_new_project_has_data_settings_a_script_a_test_and_a_readme(
    kind: str, tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    folder = tmp_path / "mine"
    code, said = command("new", kind, str(folder))
    assert code == 0, said
    files = {file.name for file in folder.rglob("*") if file.is_file()}
    assert "README.md" in files
    for suffix in (".csv", ".toml", ".py"):
        assert any(name.endswith(suffix) for name in files), suffix
    assert any(name.startswith("test_") for name in files)
    assert not any(name.endswith(".txt") for name in files)
    assert (folder / "README.md").read_text(encoding="utf-8").startswith("# mine\n")
    for script in folder.glob("*.py"):
        compile(script.read_text(encoding="utf-8"), str(script), "exec")
    code, said = command("new", kind, str(folder))
    assert (code, "exists already" in said) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["study", "hospital"])
def test_the_test_of_a_new_project_passes(
    kind: str, tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    assert command("new", kind, str(tmp_path / "mine"))[0] == 0
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"],
        cwd=tmp_path / "mine", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_new_method_runs_and_keeps_the_contract(folder: Path, command: Command) -> None:
    code, text = command("new", "method", "half-seq")
    assert code == 0, text
    assert sorted(path.name for path in folder.glob("*half*")) == [
        "half_seq.md",
        "half_seq.py",
        "test_half_seq.py",
    ]
    code, text = command("check", "half_seq.py:HalfSeq")
    assert code == 0, text
    before = (folder / "half_seq.py").read_bytes()
    code, text = command("new", "method", "HalfSeq")
    assert (code, "exists already" in text) == (2, True)
    assert (folder / "half_seq.py").read_bytes() == before
    (folder / "half_seq.py").unlink()
    assert command("new", "method", "HalfSeq")[0] == 2
    assert not (folder / "half_seq.py").exists(), (
        "nothing is written where one of the files is there"
    )


def test_the_test_of_a_new_method_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own.write(folder, "QuickSeq")
    monkeypatch.syspath_prepend(str(folder))
    names: dict[str, object] = {"__name__": "test_quick_seq"}
    exec(compile((folder / "test_quick_seq.py").read_text(), "test_quick_seq.py", "exec"), names)
    try:
        tests = [
            value for name, value in names.items() if name.startswith("test_") and callable(value)
        ]
        assert len(tests) == 3
        for test in tests:
            test()
    finally:
        sys.modules.pop("quick_seq", None)


@pytest.mark.parametrize("name", ["torch", "class", "3d", "a b", "../x", "half.seq", "é"])
def test_names_that_no_file_can_have(name: str, folder: Path) -> None:
    with pytest.raises(UserError, match="choose a"):
        own.write(folder, name)
    assert not list(folder.glob("*.py"))
