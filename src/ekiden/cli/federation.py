"""The command line of a coordinator: `ekiden federation init | start | agree`, `ekiden ps` and `ekiden stop`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.table import Table
from tyro.conf import Positional

from ekiden.base.errors import UserError
from ekiden.base.files import write
from ekiden.cli.console import console, say
from ekiden.data.schema import read as read_schema
from ekiden.transports.flower import commands, scaling, superlink
from ekiden.transports.flower import federation as federations
from ekiden.transports.flower.commands import Security
from ekiden.transports.flower.federation import Federation


@dataclass(frozen=True)
class InitOptions:
    """Make what a federation needs: certificates, key pairs, and a folder for each silo with its silo.toml."""

    folder: Positional[Path]
    """new folder; it stays with the coordinator, FOLDER/silos/NAME goes to each silo"""
    silos: str = ""
    """names of the silos, separated by commas, in the order that methods see"""
    host: str = "localhost"
    """name or IP address under which silos reach this machine"""
    port: int = 8000
    """port of this machine for silos: open it to them, and no other"""
    control_port: int = 8001
    """port for the coordinator, on loopback only"""
    data: str = "data"
    """each silo's data: a path relative to its silo.toml, a name of a data set, or FILE.py:FUNCTION"""


@dataclass(frozen=True)
class FederationStartOptions:
    """Run a federation's SuperLink and let its silos in, until stopped."""

    folder: Positional[Path]
    """folder that `ekiden federation init` made"""


@dataclass(frozen=True)
class LinkOptions:
    """Which SuperLink."""

    federation: Path | None = None
    """folder that `ekiden federation init` made"""
    link: str = ""
    """or HOST:PORT of the SuperLink for the coordinator"""
    certificate: Path | None = None
    """PEM file of the authority that signed the SuperLink's certificate"""
    insecure: bool = False
    """no TLS; to this machine only"""


@dataclass(frozen=True)
class PsOptions(LinkOptions):
    """List the runs that a SuperLink knows, and whether they are still running."""


@dataclass(frozen=True)
class StopOptions(LinkOptions):
    """End a run at the SuperLink; `ekiden resume` goes on with it."""

    run: Positional[str] = ""
    """run folder, or the number that `ekiden run` and `ekiden ps` show (then also --federation, or --link)"""


@dataclass(frozen=True)
class AgreeOptions:
    """Make the scaling of a table that all silos use, from the sums that each gave."""

    sums: Positional[tuple[Path, ...]]
    """files that `ekiden silo sums` wrote, of all silos"""
    out: Path = Path("agreed.json")
    """file to write; every silo names it by agreed in [data] of its silo.toml"""
    federation: Path | None = None
    """folder that `ekiden federation init` made: says whose sums are needed"""
    schema: Path | None = None
    """TOML file with the study's schema, see docs/own-data.md: it becomes part of what silos agree on, and each checks
    its own data against it"""
    spelling: Literal["", "merge", "keep"] = ""
    """names of classes and categories that differ in case or blanks only: merge takes them as one, the commonest
    spelling (silos then need spelling = "merge" in [data]); keep: as different. By default they are refused"""


def init(options: InitOptions) -> None:
    """`ekiden federation init FOLDER --silos a,b,c --host NAME`."""
    names = federations.parse_names(options.silos)
    made = Federation(options.folder, options.host, options.port, options.control_port, names)
    federations.init(made, options.data)
    say(f"here: ekiden federation start {made.folder}")
    for name in names:
        say(f"{name} gets the folder {made.silo(name)}, with its private key, and runs: ekiden silo start silo.toml")
    say(f"then here: ekiden run METHOD --on flower --federation {made.folder}")


def start(options: FederationStartOptions) -> None:
    """`ekiden federation start FOLDER`."""
    found = federations.read(options.folder)
    try:
        superlink.start(found, say)
    except KeyboardInterrupt:
        say("stopped; silos connect again when it is started again")


def agree(options: AgreeOptions) -> None:
    """`ekiden federation agree SUMS...`."""
    if not options.sums:
        raise UserError("name the files that `ekiden silo sums` wrote")
    expected = federations.read(options.federation).silos if options.federation else ()
    made = scaling.agree_on(
        options.sums, options.spelling, expected, read_schema(options.schema) if options.schema else None
    )
    write(options.out, [json.dumps(made.to_json(), indent=1).encode()])
    say(
        f"wrote {options.out}: {made}; "
        'give it to all silos, and name it in their silo.toml: [data] agreed = "agreed.json"'
    )


def ps(options: PsOptions) -> None:
    """`ekiden ps`."""
    link, security = _reached(options)
    table = Table()
    for column in ("run", "what", "state", "since (UTC)", "seconds", "remarks"):
        table.add_column(column)
    for row in commands.runs(link, security, _quiet):
        since = next((row[key] for key in ("finished-at", "running-at", "starting-at") if row[key] != "N/A"), "")
        state = row["status"].replace("finished:", "")
        table.add_row(row["run-id"], row["fab-name"], state, since, f"{row['elapsed']:.0f}", row["status-details"])
    console.print(table)


def stop(options: StopOptions) -> None:
    """`ekiden stop RUN`."""
    if not options.run:
        raise UserError("say which run to stop: its folder, or its number in `ekiden ps`")
    if options.run.isdigit() and not Path(options.run).is_dir():
        link, security = _reached(options)
        commands.stop(options.run, link, security, _quiet)
    else:
        file = Path(options.run) / "link.json"
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            number, link = str(values["run"]), str(values["link"])
            security = Security(Path(values["certificate"]) if values["certificate"] else None, values["insecure"])
        except (OSError, ValueError, KeyError, TypeError):
            raise UserError(
                f"{options.run} is neither a number nor the folder of a run between machines: `ekiden ps` lists them"
            ) from None
        commands.stop(number, link, security, _quiet)
    say(f"stopped {options.run}; a silo that works on a task finishes it")


def _reached(options: LinkOptions) -> tuple[str, Security]:
    """Return the SuperLink's address, and how to verify it."""
    if options.federation is not None:
        found = federations.read(options.federation)
        return found.link, Security(found.certificate)
    if not options.link:
        raise UserError("say which SuperLink: --federation FOLDER, or --link HOST:PORT --certificate FILE")
    security = Security(options.certificate, options.insecure)
    commands.checked(options.link, security, say, anywhere=False)
    return options.link, security


def _quiet(line: str) -> None:
    """Print nothing about the commands behind a short question."""
