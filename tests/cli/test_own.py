"""`ekiden new method`: files to begin a method with."""

import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

import ekiden
from ekiden.core.base.checks import plain
from ekiden.methods import FedProx

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
    assert command("new", "method", "NearProx", "--like", "fedprox")[0] == 0
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


def test_only_methods_of_the_library_are_copied(command: Callable[..., tuple[int, str]]) -> None:
    code, said = command("new", "method", "x_y", "--like", "fedpro")
    assert (code, "fedprox" in said) == (2, True)
