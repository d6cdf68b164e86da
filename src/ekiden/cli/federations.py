"""The commands of a coordinator: `ekiden federation init | add | rotate | revoke | status | start |
agree`.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.table import Table as RichTable

from ekiden.cli.console import console, print_json, say
from ekiden.core.base.checks import Positional
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import write
from ekiden.silos import commands
from ekiden.silos.coordinator import federation as federations
from ekiden.silos.coordinator.federation import Federation
from ekiden.silos.logs import Format, Log
from ekiden.silos.metrics import Metrics
from ekiden.silos.silo.levels import Level
from ekiden.silos.trust import keys
from ekiden.silos.trust.agreement import ROSTER, read_roster

if TYPE_CHECKING:
    from ekiden.readers.scaling import Scaling


@dataclass(frozen=True)
class InitOptions:
    """Make what a coordinator needs: certificates, and a roster of the silos' public keys to give
    to all silos.
    """

    folder: Positional[Path]
    """new folder; it stays with the coordinator, FOLDER/roster.json goes to each silo"""
    public_keys: Positional[tuple[Path, ...]] = ()
    """files NAME.key.pub that `ekiden silo init` made at the silos, in the order in which methods
    visit them"""
    silos: str = ""
    """instead of files: names of silos, separated by commas. All keys are made here, and
    FOLDER/silos/NAME goes to each silo. Whoever has this machine can then read what these silos
    seal"""
    host: str = "localhost"
    """name or IP address under which silos reach this machine"""
    port: int = 8000
    """port of this machine for silos: open it to them, and no other"""
    control_port: int = 8001
    """port for the coordinator; only this machine (127.0.0.1) reaches it"""
    data: str = "data"
    """with --silos, each silo's data: a path relative to its silo.toml, a name of a data set, or
    FILE.py:FUNCTION"""
    level: Level = "sums"
    """with --silos, what may leave each silo: sums, also models, or all; see docs/security.md"""


@dataclass(frozen=True)
class AddOptions:
    """Let further silos into a federation; then give the new roster.json to all silos."""

    folder: Positional[Path]
    """folder that `ekiden federation init` made"""
    public_keys: Positional[tuple[Path, ...]]
    """files NAME.key.pub that `ekiden silo init` made at the silos"""


@dataclass(frozen=True)
class RotateOptions:
    """Replace keys of silos, or renew the SuperLink's certificate for a year."""

    folder: Positional[Path]
    """folder that `ekiden federation init` made"""
    public_keys: Positional[tuple[Path, ...]] = ()
    """new keys NAME.key.pub of silos that are in the federation; by default the certificate is
    renewed"""


@dataclass(frozen=True)
class RevokeOptions:
    """Refuse silos from now on, also one that is connected."""

    folder: Positional[Path]
    """folder that `ekiden federation init` made"""
    names: Positional[tuple[str, ...]]
    """names of the silos"""


@dataclass(frozen=True)
class StatusOptions:
    """List the silos of a federation, which of them are connected, and until when the certificate
    is valid.
    """

    folder: Positional[Path]
    """folder that `ekiden federation init` made"""
    json: bool = False
    """print JSON: `running`, last day of the `certificate`, `good`, `state` with the remedy,
    and `silos` (`name`, `fingerprint`, `state`: `connected`, `away` or `never`, `seen` in
    seconds)"""


@dataclass(frozen=True)
class FederationStartOptions:
    """Run a federation's SuperLink and let its silos in, until stopped."""

    folder: Positional[Path]
    """folder that `ekiden federation init` made"""
    metrics_port: int = 0
    """port at which a monitor reads /health and /metrics: counts only; 0 for none"""
    metrics_host: str = "127.0.0.1"
    """address of this machine for that; whoever reaches it reads the counts"""
    log: Format = "text"
    """how lines are printed, each with its time and level: text or json"""


@dataclass(frozen=True)
class AgreeOptions:
    """Compute the common scaling of a table from the sums of all silos."""

    sums: Positional[tuple[Path, ...]]
    """files that `ekiden silo sums` wrote, of all silos; or one run folder: silos that measure the
    run's model need the scaling with which it was trained"""
    out: Path = Path("agreed.json")
    """file to write; every silo names it by agreed in [data] of its silo.toml"""
    federation: Path | None = None
    """folder that `ekiden federation init` made: says whose sums are needed"""
    schema: Path | None = None
    """TOML file with the study's schema, see docs/own-data.md: it becomes part of what silos agree
    on, and each checks its own data against it"""
    spelling: Literal["", "merge", "keep"] = ""
    """names of classes and categories that are written in several ways: merge takes them as one,
    the commonest spelling (silos then need spelling = "merge" in [data]); keep: as different. By
    default they are refused"""
    table_one: bool = False
    """also show means and shares of all columns at each silo, of training rows"""


def init(options: InitOptions) -> None:
    """`ekiden federation init FOLDER NAME.key.pub ... --host NAME`."""
    names = tuple(filter(None, map(str.strip, options.silos.split(","))))
    if names and options.public_keys:
        raise UserError("give files of public keys, or --silos to make all keys here, not both")
    public = federations.named_keys(options.public_keys)
    made = Federation(
        options.folder, options.host, options.port, options.control_port, names or tuple(public)
    )
    federations.init(made, public, options.data, options.level)
    say(f"here: ekiden federation start {made.folder}")
    if public:
        _tell_roster(made)
    for name in names:
        say(
            f"{name} gets the folder {made.silo(name)}, with its private key, and runs: ekiden "
            "silo start silo.toml"
        )
    say(f"then here: ekiden run METHOD --on flower --federation {made.folder}")


def _tell_roster(federation: Federation) -> None:
    file = federation.folder / ROSTER
    say(f"give {file} to all silos, for: ekiden silo join silo.toml {ROSTER}")
    for name, key in read_roster(file).key_of.items():
        say(f"  {name}: {keys.fingerprint(key)}")


def add(options: AddOptions) -> None:
    """`ekiden federation add FOLDER NAME.key.pub ...`."""
    found = federations.read(options.folder)
    public = federations.named_keys(options.public_keys)
    _tell_roster(federations.add(found, public, partial(_register, found)))
    say(
        "runs go on without a new silo until you name it by --clients, which works once all others "
        "have joined by the new roster"
    )


def rotate(options: RotateOptions) -> None:
    """`ekiden federation rotate FOLDER [NAME.key.pub ...]`."""
    found = federations.read(options.folder)
    if options.public_keys:
        public = federations.named_keys(options.public_keys)
        return _tell_roster(federations.rotate(found, public, partial(_register, found)))
    keys.renew(found.folder, found.host)
    until = keys.valid_until(found.folder / "link.crt")
    say(
        f"the SuperLink's certificate is valid until {until:%Y-%m-%d}: restart `ekiden federation "
        "start`"
    )


def revoke(options: RevokeOptions) -> None:
    """`ekiden federation revoke FOLDER NAME ...`."""
    _tell_roster(federations.revoke(federations.read(options.folder), options.names))


def _register(federation: Federation, public: Mapping[str, str]) -> None:
    """Register new keys if the SuperLink runs."""
    if commands.is_running(federation):
        commands.let_in(federation, public, lambda line: None)


def status(options: StatusOptions) -> None:
    """`ekiden federation status FOLDER`."""
    found = federations.read(options.folder)
    until = keys.valid_until(found.folder / "link.crt")
    silos = federations.status(found)
    running = commands.is_running(found)
    good, words = commands.health(found)
    if options.json:
        return print_json(
            {
                "running": running,
                "certificate": f"{until:%Y-%m-%d}",
                "good": good,
                "state": words,
                "silos": list(map(asdict, silos)),
            }
        )
    table = RichTable("silo", "state", "last seen (s)", "key", "what to do")
    for silo in silos:
        seen = ""
        state = "unknown"
        if silo.seen is not None:
            seen = f"{silo.seen:.0f}"
        if running:
            state = silo.state
        table.add_row(silo.name, state, seen, silo.fingerprint, commands.REMEDY.get(state, ""))
    console.print(table)
    say(words)


def start_federation(options: FederationStartOptions) -> None:
    """`ekiden federation start FOLDER`."""
    found = federations.read(options.folder)
    log = Log(options.log)
    try:
        commands.start_superlink(found, log, Metrics(options.metrics_port, options.metrics_host))
    except KeyboardInterrupt:
        log("stopped; silos connect again when it is started again")


def agree(options: AgreeOptions) -> None:
    """`ekiden federation agree SUMS...`."""
    from ekiden.clinic import study
    from ekiden.lab import drawing
    from ekiden.readers.moments import read_sums
    from ekiden.readers.scaling import agree_on
    from ekiden.readers.schema import read as read_schema

    if options.sums[0].is_dir():
        return _agree_with(options)
    expected = tuple[str, ...]()
    schema = None
    if options.federation:
        expected = federations.read(options.federation).silos
    if options.schema:
        schema = read_schema(options.schema)
    made = agree_on(options.sums, options.spelling, expected, schema)
    if options.table_one:
        told = list(map(read_sums, options.sums))
        console.print(drawing.cohort(study.table_one(told)))
        if survival := study.survival(told):
            console.print(drawing.survival(survival))
    _write_agreed(options.out, made)


def _agree_with(options: AgreeOptions) -> None:
    """Write the scaling of a run's model."""
    from ekiden.core.engine.folder import read_config
    from ekiden.core.tasks import ScaledTask
    from ekiden.readers.scaling import Scaling
    from ekiden.runs.config import inputs_of, task_in

    if replace(options, sums=(), out=AgreeOptions.out) != AgreeOptions(()) or len(options.sums) > 1:
        raise UserError(
            "give one run folder alone: its scaling is written, and nothing is agreed on"
        )
    config = read_config(options.sums[0])
    inputs = inputs_of(config)
    task = task_in(config)
    scaled = zip(task.mean, task.std, strict=True) if isinstance(task, ScaledTask) else ()
    made = Scaling(
        inputs if inputs.agreed else None, dict(zip(config["classes"], scaled, strict=False))
    )
    if not made.scales:
        raise UserError(
            f"the model of {options.sums[0]} needs no scaling: silos measure it without data.agreed"
        )
    _write_agreed(options.out, made)


def _write_agreed(file: Path, made: "Scaling") -> None:
    write(file, [json.dumps(made.to_json(), indent=1).encode()])
    say(
        f"wrote {file}: {made}; give it to all silos, and name it in their silo.toml: [data] "
        f'agreed = "{file.name}"'
    )
