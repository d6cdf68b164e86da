"""Each name has one meaning."""

import ast
import inspect
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

import ekiden
from ekiden import methods


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
    assert {kind.__name__: getattr(ekiden, kind.__name__) for kind in methods.METHODS} == {
        k.__name__: k for k in methods.METHODS
    }
    assert {"FedSeq", "run"} <= set(dir(ekiden))
    space: dict[str, object] = {}
    exec("from ekiden.methods import *", space)
    named = {kind.__name__ for kind in methods.METHODS}
    assert named <= space.keys()
    assert named <= set(dir(methods))
    with pytest.raises(AttributeError, match="no attribute 'METHODS'"):
        _ = ekiden.METHODS


def test_every_public_name_is_there() -> None:
    assert [name for name in ekiden.__all__ if not hasattr(ekiden, name)] == []
    space: dict[str, object] = {}
    exec("from ekiden import *", space)
    assert {"FedSeq", "SCAFFOLD", "Training", "run"} <= space.keys()
    assert set(ekiden.__all__) <= space.keys()


def promised(module: ModuleType) -> dict[str, str]:
    """Return where type checkers find the names that a module loads when they are used."""
    found: dict[str, str] = {}
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom)
                found |= {name.asname or name.name: str(line.module) for name in line.names}
    return found


def test_type_checkers_find_each_name_where_it_is_loaded_from() -> None:
    """Each of these modules lists its names twice: for type checkers, and to load them late."""
    loaded = {name: place.partition(":")[0] for name, place in methods.PLACES.items()}
    assert promised(methods) == loaded
    late = {name: f"ekiden.{module}" for name, module in ekiden._WHERE.items()}
    assert promised(ekiden) == {**late, "*": "ekiden.methods"}


WHOLE_ROOM = "across"
"""the folder of tests of what several files of a room do together"""


def without_source(tests: Path, sources: Path) -> list[str]:
    """Return the test files whose name is that of no file and no folder of the room they test."""
    # `test_methods` tests what the package `methods` itself holds
    named = {sources.name}
    named |= {path.stem for path in sources.rglob("*") if path.suffix == ".py" or path.is_dir()}
    return [
        str(file)
        for file in sorted(tests.rglob("test_*.py"))
        if file.stem.removeprefix("test_") not in named and file.parent.name != WHOLE_ROOM
    ]


def test_a_test_file_is_named_after_the_file_that_it_tests() -> None:
    """Rooms are the folders of the source; other folders of tests look at the whole."""
    source, tests = Path(ekiden.__file__).parent, Path(__file__).parent
    rooms = [tests / room.name for room in source.iterdir() if (tests / room.name).is_dir()]
    assert len(rooms) > 5
    assert [file for room in rooms for file in without_source(room, source / room.name)] == []


def test_a_test_file_of_another_name_is_found(tmp_path: Path) -> None:
    for name in ("src/fit.py", "src/rounds/fedavg.py", "tests/test_fit.py", "tests/test_moods.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tests" / WHOLE_ROOM).mkdir()
    (tmp_path / "tests" / WHOLE_ROOM / "test_both.py").touch()
    (tmp_path / "tests" / "test_rounds.py").touch()
    found = without_source(tmp_path / "tests", tmp_path / "src")
    assert found == [str(tmp_path / "tests" / "test_moods.py")]


DOORS = {
    "care/inspection": "calls the other files of its room, each in turn",
    "lab/conformance/small_runs": "the data and networks of other tests",
    "readers/inspector": "imports `care/inspection`",
}
"""files that need no test of their own, and why"""


def without_tests(sources: Path, tests: Path) -> list[str]:
    """Return the files with functions or methods of which no test file of their room has the name."""
    found = []
    for file in sorted(sources.rglob("[!_]*.py")):
        parts = file.relative_to(sources).with_suffix("").parts
        nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if any(isinstance(node, ast.FunctionDef) for node in nodes):
            room = tests.joinpath(*parts[:-1][:1])
            if not any(room.rglob(f"test_{parts[-1]}.py")):
                found.append("/".join(parts))
    return found


def test_a_file_with_functions_has_a_test_file_of_its_name() -> None:
    source, tests = Path(ekiden.__file__).parent, Path(__file__).parent
    lacking = without_tests(source, tests)
    assert lacking == sorted(DOORS), "write tests/<room>/test_<file>.py"


def test_a_file_without_a_test_file_is_found(tmp_path: Path) -> None:
    for name, text in (("fit", "def fit(): ..."), ("rank", "def rank(): ..."), ("names", "A = 1")):
        (tmp_path / "src" / "core").mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / "core" / f"{name}.py").write_text(text)
    (tmp_path / "tests" / "core" / "across").mkdir(parents=True)
    (tmp_path / "tests" / "core" / "test_fit.py").touch()
    assert without_tests(tmp_path / "src", tmp_path / "tests") == ["core/rank"]
