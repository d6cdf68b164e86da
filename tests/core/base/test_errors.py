"""Lines for the user."""

import ast
import inspect
import pickle
import re
import warnings
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import ekiden
from ekiden.core.base.errors import (
    DataWarning,
    UserError,
    command_line,
    counted,
    first_line,
    nearest,
    warnings_as_lines,
)
from ekiden.data import Reading
from ekiden.methods import METHODS


def test_warnings_about_data_are_lines_and_others_are_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warnings_as_lines()
    for _ in range(2):
        warnings.warn("all images of b.csv are grey:\n see there", DataWarning, stacklevel=1)
    warnings.warn("a library changes", FutureWarning, stacklevel=1)
    assert capsys.readouterr() == ("", "ekiden: all images of b.csv are grey: see there\n")


@pytest.mark.parametrize(
    ("given", "ours"),
    [("--silo-column", "--group-column"), ("site", "group_column"), ("--patient-column", "--subject-column"),
     ("target_column", "label_column"), ("num-rounds", "rounds"), ("epoch", "epochs"),
     ("AUROC", "auroc"), ("ROC AUC", "auroc"), ("f1", "macro_f1"), ("F1-score", "macro_f1")],
)  # fmt: skip
def test_names_of_other_libraries_lead_to_ours(given: str, ours: str) -> None:
    known = [ours, "--time-column", "image_column", "--image-column"]
    assert nearest(given, known, n=1) == [ours]


SOURCE = Path(ekiden.__file__).parent
ONLY_COMMANDS = (
    "cli/",
    "lab/tables/",
    "silos/",
    "runs/plan.py",
    "lab/drawing.py",
    "lab/launch.py",
)
"""Code of which Python has no function, or whose functions take a plan of the command line."""


def test_a_message_names_flags_or_arguments() -> None:
    error = UserError(
        "raise --val-fraction, or use --task=regression --drop-columns=['a b', 'c'] --missing='n "
        "d' --lr=0.1 --no-half "
        "--model=hf:FOLDER: `ekiden run --tune`, a--b, my/--c; --to=pt2."
    )
    assert str(pickle.loads(pickle.dumps(error))) == (
        "raise val_fraction, or use task='regression' drop_columns=['a b', 'c'] missing='n d' "
        "lr=0.1 half=False "
        "model='hf:FOLDER': `ekiden run --tune`, a--b, my/--c; to='pt2'."
    )
    with command_line():
        assert str(error) == (
            "raise --val-fraction, or use --task regression --drop-columns 'a b' c --missing 'n d' "
            "--lr 0.1 --no-half "
            "--model hf:FOLDER: `ekiden run --tune`, a--b, my/--c; --to pt2."
        )
    assert str(DataWarning("see --size")) == "see size"


def test_at_the_command_line_messages_of_worker_processes_name_flags(command: object) -> None:
    with command_line(), command_line():
        pass
    assert str(UserError("--lr")) == "lr", "it ends with the outer one"


def flags_in(file: Path) -> Iterator[str]:
    """Yield the flags that the texts of a file name outside commands in backticks; docstrings and
    help do not count."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=values):
                text = "".join(
                    str(v.value) if isinstance(v, ast.Constant) else "{}" for v in values
                )
            case ast.Constant(value=str() as text) if id(node) not in told | parts:
                pass
            case _:
                continue
        yield from re.findall(
            r"(?<![\w/.(-])--(?:no-)?([a-z][a-z0-9-]*[a-z0-9])(?![-{])", re.sub("`[^`]*`", "", text)
        )


def arguments() -> set[str]:
    """Return the names of arguments of public functions, and of the fields of public
    dataclasses."""
    public = [getattr(ekiden, name) for name in ekiden.__all__ if name != "__version__"]
    found: set[str] = set()
    for one in (
        *public,
        Reading,
        *METHODS,
        *vars(ekiden.Result).values(),
        *vars(ekiden.FederatedData).values(),
    ):
        if isinstance(one, type) and is_dataclass(one):
            found |= {field.name for field in fields(one)}
        elif callable(one) and not isinstance(one, type):
            found |= set(inspect.signature(one).parameters)
    return found


def test_a_flag_in_a_message_is_an_argument_of_a_public_function() -> None:
    known = arguments()
    for file in SOURCE.rglob("*.py"):
        if not str(file.relative_to(SOURCE)).startswith(ONLY_COMMANDS):
            assert {flag.replace("-", "_") for flag in flags_in(file)} <= known, file


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("\n no such layer\nadvice"), "no such layer"),
        (RuntimeError(" "), "RuntimeError"),
        (KeyError("x" * 400), "'" + "x" * 199),
    ],
)
def test_a_message_repeats_one_line_of_an_error(error: Exception, said: str) -> None:
    assert first_line(error) == said


def test_one_is_singular_and_large_numbers_have_separators() -> None:
    assert [counted(n, "step") for n in (0, 1, 2, 1000)] == [
        "0 steps",
        "1 step",
        "2 steps",
        "1,000 steps",
    ]
    assert [counted(n, "class", "classes") for n in (1, 2)] == ["1 class", "2 classes"]
