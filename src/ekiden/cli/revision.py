"""`ekiden forget` and `ekiden join`."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from ekiden import data as datasets
from ekiden.base import outside
from ekiden.base.errors import UserError
from ekiden.cli.console import console
from ekiden.engine.folder import read_config
from ekiden.results.result import Result
from ekiden.runs import summary
from ekiden.serving import revision


@dataclass(frozen=True)
class ForgetOptions:
    """Make a run again without one of its clients; the new run has the bits of one that never had it."""

    run: Positional[Path]
    """run folder; it stays as it is: delete it to forget the client there, too"""
    client: str
    """whom to forget"""
    out: Path | None = None
    """new run folder; by default RUN-without-CLIENT"""
    release: Path | None = None
    """between machines, for methods with secure sums: file in which the silo that leaves agrees to that; `ekiden silo
    release` makes it there"""


@dataclass(frozen=True)
class JoinOptions:
    """Make a run again with one more client; the new run has the bits of one that always had it."""

    run: Positional[Path]
    """run folder; it stays as it is"""
    client: str
    """who joins: a client that `ekiden run --without` left out, or one of --data"""
    data: str = ""
    """data that have this client and those of the run, unchanged; by default the run's own"""
    out: Path | None = None
    """new run folder; by default RUN-with-CLIENT"""


def forget(options: ForgetOptions) -> None:
    """`ekiden forget RUN --client NAME`."""
    if _between_machines(options.run):
        from ekiden.cli import silos  # noqa: PLC0415  (runs on one machine do not need it)

        silos.forget(options.run, options.client, options.out, options.release)
    else:
        if options.release:
            raise UserError("--release is for runs between machines: leave it out")
        _print(options.run, revision.forget(options.run, options.client, out=options.out))
    console.print(f"{options.run} still holds {options.client}: delete it to forget it there, too", soft_wrap=True)


def join(options: JoinOptions) -> None:
    """`ekiden join RUN --client NAME [--data DATA]`."""
    if _between_machines(options.run):
        from ekiden.cli import silos  # noqa: PLC0415

        if options.data:
            raise UserError(f"the silos of {options.run} have their own data: leave out --data")
        return silos.join(options.run, options.client, options.out)
    outside.trust(options.data)
    data = datasets.located(options.data) if options.data else None
    _print(options.run, revision.join(options.run, options.client, data, out=options.out))


def _between_machines(folder: Path) -> bool:
    return read_config(folder).get("on") == "flower"


def _print(before: Path, result: Result) -> None:
    assert result.folder is not None, "it was made"
    console.print(summary.comparison([summary.summarise(before), summary.summarise(result.folder)]))
    console.print(f"run folder: {result.folder}", soft_wrap=True)
