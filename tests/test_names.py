"""Each name has one meaning."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import ekiden


def test_no_class_name_is_defined_twice() -> None:
    """A reader of a name knows which class it is."""
    root, found = Path(ekiden.__file__).parent, defaultdict[str, list[str]](list)
    for file in sorted(root.rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(file.relative_to(root)))
    assert len(found) > 300
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_every_method_is_a_public_name() -> None:
    from ekiden.methods import METHODS

    assert {kind.__name__: getattr(ekiden, kind.__name__) for kind in METHODS} == {
        k.__name__: k for k in METHODS
    }
    assert {"FedSeq", "run"} <= set(dir(ekiden))
    with pytest.raises(AttributeError, match="no attribute 'METHODS'"):
        _ = ekiden.METHODS


def test_every_public_name_is_there() -> None:
    assert [name for name in ekiden.__all__ if not hasattr(ekiden, name)] == []
    space: dict[str, object] = {}
    exec("from ekiden import *", space)
    assert {"FedSeq", "SCAFFOLD", "Training", "run"} <= space.keys()
    assert set(ekiden.__all__) <= space.keys()
