"""The one kind of error that a user's input causes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches


class UserError(Exception):
    """An error that the user can fix. Its text is one line that says what is wrong and what to do.

    The command line prints it and exits with code 2.
    """


class DivergenceWarning(UserWarning):
    """A run ended with a model that is far worse than guessing."""


def unknown(what: str, name: str, known: Iterable[str]) -> UserError:
    """Return the error for a name that is not among `known`; its nearest match comes first."""
    known = sorted(known)
    if not known:
        return UserError(f"unknown {what} {name!r}: leave it out")
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return UserError(f"unknown {what} {name!r}: {hint}Known: {', '.join(known)}.")


@contextmanager
def at(where: str) -> Iterator[None]:
    """Add to an error's message in which file or entry it is."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
