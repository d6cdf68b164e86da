"""The commands of a silo: `ekiden silo ...`.

Most only read or write files of the silo, so what a run needs is imported where it is used.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path

from ekiden.cli.console import print_json, say
from ekiden.core.base import outside
from ekiden.core.base.checks import Positional, Positive
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import write
from ekiden.silos.logs import Format, Log
from ekiden.silos.security import certificate_end, certificate_state, check_link
from ekiden.silos.silo import connection, levels, silo_file, trusted
from ekiden.silos.silo.levels import Level
from ekiden.silos.silo.silo_file import SiloFile
from ekiden.silos.trust import keys
from ekiden.silos.trust.agreement import read_roster


@dataclass(frozen=True)
class SiloInitOptions:
    """Make a silo's folder with its key pair and silo.toml; the public key goes to the
    coordinator.
    """

    folder: Positional[Path]
    """new folder"""
    link: str
    """HOST:PORT of the coordinator's SuperLink, such as link.example.org:8000; ask the coordinator"""
    name: str = ""
    """the silo's name; by default the folder's"""
    data: str = "data"
    """a path relative to silo.toml, a name of a data set, or FILE.py:FUNCTION"""
    level: Level = "sums"
    """what may leave the silo, as silo.toml then says: sums, also models, or all; see
    docs/security.md"""


@dataclass(frozen=True)
class RosterOptions:
    """Take the other silos' keys and the SuperLink's certificate from the coordinator's roster."""

    file: Positional[Path]
    """silo.toml"""
    roster: Positional[Path]
    """file that the coordinator gave"""
    replace: tuple[str, ...] = ()
    """silos whose key may be replaced, after you asked them; ca.crt for the certificate"""


@dataclass(frozen=True)
class SiloStartOptions:
    """Connect a silo to its SuperLink and serve until stopped."""

    file: Positional[Path]
    """silo.toml"""
    metrics_port: int = 0
    """port for /health and /metrics on this machine, instead of that in silo.toml"""
    log: Format = "text"
    """how lines are printed, each with its time and level: text or json"""


@dataclass(frozen=True)
class SiloStatusOptions:
    """Say whether a silo is connected, what waits for its operator, and what was spent; works while it serves."""

    file: Positional[Path]
    """silo.toml"""
    json: bool = False
    """print JSON: `silo`, `connected`, `state` with the remedy, waiting `plans`, `evaluations`
    and `epsilon` spent, `doubts`"""


@dataclass(frozen=True)
class KeysOptions:
    """Make the silo's key pair; the public key goes to the coordinator."""

    file: Positional[Path]
    """silo.toml; its [link] key says where the private key is"""


@dataclass(frozen=True)
class SumsOptions:
    """Write a file of counts and sums, never a row, from which silos agree on the scaling of a
    table.
    """

    file: Positional[Path]
    """silo.toml"""
    data: str = ""
    """which data set, if the file names several"""
    out: Path | None = None
    """JSON file to write; by default NAME-sums.json next to it. Read it before you give it away"""
    times: tuple[Positive, ...] = ()
    """for survival: also tell how many rows had the event up to each of these times, which all
    silos agree on"""
    bounds: bool = False
    """tell the bounds of columns in data.schema instead, which say nothing about rows"""


@dataclass(frozen=True)
class ReleaseOptions:
    """Agree that a run is made again without this silo, or with it if it took no part.

    The difference of the two runs' sums is what this silo gave. So the other silos take part only
    with this agreement. It holds for one run.
    """

    file: Positional[Path]
    """silo.toml"""
    run: Positional[Path]
    """agreement.json of the run, from its folder at the coordinator"""
    out: Path | None = None
    """file to write, for `ekiden forget --release` or `ekiden join --release`; by default
    NAME-release.txt next to silo.toml"""


@dataclass(frozen=True)
class ApproveOptions:
    """Read the plans that wait at a silo, or agree to one run of one of them."""

    file: Positional[Path]
    """silo.toml"""
    digest: Positional[str] = ""
    """the plan to agree to; by default all plans that wait are shown"""
    until: str = ""
    """the last day of the run, such as 2027-01-31; by default it is in 30 days"""


@dataclass(frozen=True)
class SiloTrustOptions:
    """Let runs execute a Python file, as it is now: a method, a training loop or a network of your
    own.
    """

    file: Positional[Path]
    """silo.toml"""
    code: Positional[Path]
    """Python file, which you have read; if it changes, it has to be trusted again"""


def init_silo(options: SiloInitOptions) -> None:
    """`ekiden silo init FOLDER --link HOST:PORT`."""
    name = options.name or options.folder.absolute().name
    public = silo_file.make(options.folder, name, options.link, options.data, level=options.level)
    say(f"private key: stays in {options.folder}\npublic key:  {public} goes to the coordinator")
    say(
        f"fingerprint: {keys.fingerprint(keys.read_public(public))} (tell the other silos by "
        "telephone)"
    )
    say(
        f"with the coordinator's roster.json: ekiden silo join {options.folder / 'silo.toml'} "
        "roster.json"
    )
    say(f'silo.toml has level = "{options.level}"; what each level lets out:')
    for level, what in levels.TELLS.items():
        say(f"    {level}: {what}")


def join_roster(options: RosterOptions) -> None:
    """`ekiden silo join silo.toml roster.json`."""
    told = silo_file.join(
        silo_file.read(options.file), read_roster(options.roster), options.replace
    )
    say("\n".join(told or ["nothing changed"]))
    if told:
        say("compare each fingerprint with its owner, by another way than the coordinator")


def start(options: SiloStartOptions) -> None:
    """`ekiden silo start silo.toml`."""
    from ekiden.silos import supernode

    file = silo_file.read(options.file)
    if options.metrics_port:
        file = replace(file, metrics=replace(file.metrics, port=options.metrics_port))
    if not file.link.address:
        raise UserError(f'{file.path}: say where the SuperLink is: [link] address = "HOST:PORT"')
    log = Log(options.log)
    certificate = None
    if file.link.certificate:
        certificate = file.beside(file.link.certificate)
    check_link(file.link.address, certificate, log)
    if not file.key.is_file():
        raise UserError(f"there is no key {file.key}: make it with `ekiden silo keys {file.path}`")
    with supernode.alone(file):
        _serve(file, log)


def _serve(file: SiloFile, log: Log) -> None:
    from ekiden.runs import summary
    from ekiden.silos import client_app, supernode

    try:
        held = client_app.hold(file)
    except UserError as error:
        with suppress(KeyboardInterrupt):
            supernode.tell(file, log, str(error))
        raise
    for name, (dataset, client) in held.items():
        log(
            f"{f'{file.name}, {name}' if name else file.name}: {len(client.train)} training, "
            f"{len(client.val)} validation, {len(client.test)} test samples of shape "
            f"{dataset.shape} for {dataset.task.kind} with {dataset.outputs} outputs; they stay here"
        )
    limits = file.limits
    methods = "all methods"
    if limits.methods is not None:
        methods = ", ".join(limits.methods)
    size = summary.size(limits.model_bytes)
    log(f"allows {methods}; models up to {size}; {limits.epochs} epochs a task")
    for line in _doubts(file):
        log(line, "WARNING")
    try:
        supernode.start(file, log)
    except KeyboardInterrupt:
        log("stopped; the silo goes on where it was when it is started again")


def _doubts(file: SiloFile) -> Iterator[str]:
    """Yield what the operator of a silo should look at."""
    if not any(file.peers.glob("*.pub")):
        yield (
            "the silo knows no key of another one, and refuses runs: take the "
            f"coordinator's roster.json by `ekiden silo join {file.path} roster.json`"
        )


def status(options: SiloStatusOptions) -> None:
    """`ekiden silo status silo.toml`."""
    from ekiden.silos.silo import approval, budget

    file = silo_file.read(options.file)
    good, words = connection.health(file.folder)
    if not connection.is_started(file.folder):
        good = False
        words = f"not started: `ekiden silo start {file.path}`"
    plans = [digest for digest, _ in approval.waiting(file)]
    spent = {name: budget.told(file, name) for name in file.named or ("",)}
    epsilon = budget.promised(file)
    doubts = list(_doubts(file))
    if options.json:
        return print_json(
            {
                "silo": file.name,
                "connected": good,
                "state": words,
                "plans": plans,
                "evaluations": spent,
                "epsilon": epsilon,
                "doubts": doubts,
            }
        )
    _, certificate = certificate_state(certificate_end(file.link.address))
    say("; ".join(filter(None, (f"{file.name}: {words}", certificate))))
    for digest in plans:
        say(f"plan {digest} waits: read it by `ekiden silo approve {file.path}`")
    for name, told in spent.items():
        on = f" on {name}" if name else ""
        say(f"models measured{on}: epsilon {told:.3g} of {file.limits.evaluation_epsilon:g}")
    if file.limits.epsilon is not None:
        say(f"privacy spent: epsilon {epsilon:.3g} of {file.limits.epsilon:g}")
    for line in doubts:
        say(line)


def sums(options: SumsOptions) -> None:
    """`ekiden silo sums silo.toml`."""
    from ekiden.silos.silo import bounds

    file = silo_file.read(options.file).holding(options.data)
    out = (
        options.out
        or file.path.parent / f"{'-'.join(filter(None, (file.name, options.data)))}-sums.json"
    )
    if options.bounds and options.times:
        raise UserError("--times tells events of rows: leave out --times or --bounds")
    found = bounds.sums(file) if options.bounds else file.sums(options.times)
    write(out, [found.to_json().encode()])
    say(f"wrote {out}: read it, then give it to the coordinator")
    if file.limits.epsilon is not None and not options.bounds:
        say("limits.epsilon does not cover these sums: --bounds tells nothing about rows")


def make_keys(options: KeysOptions) -> None:
    """`ekiden silo keys silo.toml`."""
    file = silo_file.read(options.file)
    public = keys.generate(file.key)
    say(f"private key: {file.key} (stays here)\npublic key:  {public}")
    say(f"fingerprint: {keys.fingerprint(keys.read_public(public))}")
    say(
        f"give the public key to the coordinator as {file.name}.pub, who lets the silo in with\n"
        f"  ekiden federation add FOLDER {file.name}.pub\n"
        "or, if the silo had another key, with rotate instead of add"
    )


def release(options: ReleaseOptions) -> None:
    """`ekiden silo release silo.toml agreement.json`."""
    from ekiden.methods import among
    from ekiden.silos.silo import participation
    from ekiden.silos.trust import agreement as agreements
    from ekiden.silos.trust.masking import RELEASE, release_text

    file = silo_file.read(options.file)
    before = agreements.read(options.run, partial(trusted.own_copy, file))
    # its own copy of the terms, if it took part, must be the same
    participation.Admission(file, before).check()
    names = [name for name in before.clients if name != file.name]
    if len(names) == len(before.clients):
        names.append(file.name)
    if not names:
        raise UserError(
            f"{file.name} is the only silo of run {before.run}: nothing is left without it"
        )
    recipe = replace(before.recipe, method=among(before.recipe.method, names))
    text = release_text(file.name, before.run, recipe, before.data, names)
    out = options.out or file.beside(f"{file.name}-release.txt")
    write(out, [f"{participation.sign(file, RELEASE, text)}\n".encode()])
    say(
        f"wrote {out}: with it, run {before.run} ({before.method}, seed {recipe.seed}) is made "
        "again among "
        f"{', '.join(names)}. The difference of the two shows the part of {file.name}; give the "
        "file to the coordinator"
    )


def approve(options: ApproveOptions) -> None:
    """`ekiden silo approve silo.toml [DIGEST]`."""
    from ekiden.silos.silo import approval

    file = silo_file.read(options.file)
    if options.digest:
        try:
            until = date.fromisoformat(options.until) if options.until else None
        except ValueError:
            raise UserError(f"--until {options.until!r} is not a day: write 2027-01-31") from None
        given = approval.approve(file, options.digest, until)
        told = approval.told(file, approval.read_terms(file, given.terms))
        say("\n".join(f"{name}: {text}" for name, text in told.items()))
        return say(f"approved: one run of {options.digest}, until {given.until}")
    for digest, terms in approval.waiting(file):
        say(f"plan {digest}")
        say("".join(f"  {name}: {text}\n" for name, text in approval.told(file, terms).items()))
    for digest in approval.approved(file):
        say(f"approved, not begun: {digest}")
    say(
        f"agree to one run of a plan by `ekiden silo approve {file.path.name} DIGEST`; "
        f"{file.folder / 'plans'} has them"
    )


def trust_code(options: SiloTrustOptions) -> None:
    """`ekiden silo trust silo.toml FILE.py`."""
    file = silo_file.read(options.file)
    code = f"{options.code}:"
    if not outside.is_file(code):
        raise UserError(f"{options.code} is not a Python file: runs execute nothing else")
    outside.trust(outside.located(code), trusted.register(file))
    say(
        f"runs at {file.name} may execute {outside.by_content(code).replace(':', '')}: a coordinator "
        "can name this file, and cannot send one"
    )
