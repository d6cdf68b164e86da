"""The one kind of error that a user's input causes, warnings, and numbers in sentences."""

import ast
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

typed: tuple[str, ...] = ()
"""what the user typed, in the process of Ekiden's own command line; empty in every other process"""
_COMMAND = (
    "EKIDEN_COMMAND_LINE"  # in the environment, because processes that a command starts inherit it
)
_FLAG = re.compile(
    r"""`[^`]*` | (?<![\w/.-]) --(?P<no>no-)?(?P<name>[a-z][a-z0-9-]*)
    (?:=(?P<value>\[[^]]*\] | '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" | (?:[^\s,;:.()]|[:.](?=[^\s,;]))+))?""",
    re.VERBOSE,
)


@contextmanager
def command_line(within: bool = True) -> Iterator[None]:
    """Within it, messages name flags and not arguments; with False arguments, as the keys of a file
    are called.
    """
    before = os.environ.pop(_COMMAND, None)
    if within:
        os.environ[_COMMAND] = "1"
    try:
        yield
    finally:
        os.environ.pop(_COMMAND, None)
        if before is not None:
            os.environ[_COMMAND] = before


def _for_reader(text: str) -> str:
    """Return a message in which `--val-fraction=0.2` is val_fraction=0.2, unless the reader is at
    the command line.
    """
    return _FLAG.sub(_flag_for_reader, text)


def _flag_for_reader(found: re.Match[str]) -> str:
    no, name, given = found.groups()
    # a command in backticks
    if name is None:
        return found[0]
    value = _read(given or "None")
    if _COMMAND in os.environ:
        words = [f"--{no or ''}{name}"]
        if isinstance(value, list):
            words += map(str, value)
        elif value is not None:
            words.append(str(value))
        return shlex.join(words)
    argument = name.replace("-", "_")
    if no:
        return f"{argument}=False"
    if value is None:
        return argument
    return f"{argument}={value!r}"


def _read(given: str) -> Any:
    try:
        return ast.literal_eval(given)
    except (ValueError, SyntaxError):
        return given


class _Message(Exception):
    """Its text names arguments as flags: --val-fraction, --task=regression, --drop-columns=['a',
    'b'], --no-half.

    At the command line these are shown as flags, elsewhere as arguments. Commands in backticks stay
    as they are.
    """

    def __str__(self) -> str:
        return _for_reader(super().__str__())


class UserError(_Message):
    """An error that the user can fix. Its text is one line that says what is wrong and what to do.

    The command line prints it and exits with code 2.
    """


class PrivateError(UserError):
    """An error whose text may hold values of single samples."""

    def __init__(self, text: str, told: str = "") -> None:
        super().__init__(text)
        # what other parties may know of it
        self.told = told


class DivergenceWarning(UserWarning):
    """A run ended with a model that is far worse than guessing."""


class DataWarning(_Message, UserWarning):
    """Something about the data that the user should know. Its text is one line."""


def tell(line: str) -> None:
    """Warn the user of something about the data."""
    warn(line, DataWarning)


def warn(line: str, kind: type[Warning]) -> None:
    """Warn of something that the user's own code called, so the warning shows that line and none of
    Ekiden's.
    """
    frame = sys._getframe(1)
    level = 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == "ekiden":
        frame = frame.f_back
        level = level + 1
    warnings.warn(line, kind, stacklevel=level)


def warnings_as_lines() -> None:
    """Print each `DataWarning` once, as a line on the standard error stream, and no other
    warnings.
    """

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        print(f"ekiden: {' '.join(str(message).split())}", file=sys.stderr, flush=True)

    warnings.filterwarnings("ignore")
    warnings.filterwarnings("once", category=DataWarning)
    warnings.showwarning = show


# names that a message lists in addition to the nearest one
_MANY = 12
_OTHERS_NAMES = {
    "label_column": "label labels class classes target targets y outcome",
    "group_column": "group site hospital silo_column client_column",
    "subject_column": "subject patient",
    "drop_columns": "drop",
    "val_fraction": "validation",
    "data": "dataset",
    "path": "source",
    "out": "output o",
    "clients": "n_clients num_clients parties",
    "model": "arch network",
    "device": "gpu",
    "seed": "random_state random_seed",
    "lr": "learning_rate eta",
    "batch_size": "batch",
    "rounds": "num_rounds",
    "epochs": "local_epochs num_epochs",
    "accuracy": "acc",
    "auroc": "auc roc_auc roc_auc_score",
    "average_precision": "auprc pr_auc aupr map",
    "macro_f1": "f1 f1_score f1_macro",
    "calibration_error": "ece",
    "brier": "brier_score",
    "c_index": "concordance",
}
"""our names, and what users of other libraries write for them"""
_MEANT = {other: ours for ours, others in _OTHERS_NAMES.items() for other in others.split()}


def unknown(what: str, name: str, known: Iterable[str]) -> UserError:
    """Return the error for a name that is not among `known`; its nearest match comes first."""
    known = sorted(filter(None, known))
    near = nearest(str(name), known, n=1, cutoff=0.5)
    if not known:
        hint = "leave it out"
    elif not near:
        hint = f"choose one of {', '.join(known)}."
    elif len(known) > _MANY:  # a long list would hide the nearest one
        hint = f"did you mean {near[0]!r}?"
    else:
        hint = f"did you mean {near[0]!r}? Known: {', '.join(known)}."
    return UserError(f"unknown {what} {name!r}: {hint}")


def nearest(name: str, known: Iterable[str], n: int, cutoff: float = 0.6) -> list[str]:
    """Return the known names that are meant by one that is not known: what others call it, or
    similar spellings.
    """
    known = list(known)
    plain = re.sub(r"[- ]", "_", name.strip("-")).lower()
    meant = _MEANT.get(plain, _MEANT.get(plain.removesuffix("_column"), ""))
    found = [one for one in known if one.lstrip("-").replace("-", "_") == meant]
    small = {one.lower(): one for one in known}
    return found or [small[one] for one in get_close_matches(name.lower(), small, n, cutoff)]


def first_line(error: BaseException) -> str:
    """Return the first line of what an error of another library says; its class if it says
    nothing.
    """
    # some print a whole array, or a page of advice
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@contextmanager
def at(where: str) -> Iterator[None]:
    """Add to an error's message in which file or entry it is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 step`, `2 steps`, `1,000 steps`; `plural` is `noun` and an s unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Iterable[object], most: int = 5, sign: str = ", ") -> str:
    """Return the first names, and how many more there are."""
    shown = list(map(str, names))
    more = len(shown) - most
    return sign.join(shown[:most]) + (f"{sign}and {more:,} more" if more > 0 else "")


def visible(text: str, keep: str = "") -> str:
    """Return a text of others with ? in place of what moves a cursor, turns a line around or is not
    seen at all.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else "?" for c in text)


def row_text(row: int) -> str:
    """Return how messages name a row of a file, a frame or an array."""
    return f"row {row} (counted from 0, without the header)"
