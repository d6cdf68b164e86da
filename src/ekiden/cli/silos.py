"""The command line between machines.

At a silo: `ekiden silo ...`. At the coordinator: `ekiden federation ...`, `ekiden run METHOD --on
flower`, `ps`, `stop` and `verify`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, TypeAlias

from ekiden.cli.console import console, only_json, print_json, say
from ekiden.cli.flags import parse
from ekiden.cli.run_options import BOXES, BetweenMachines, LinkOptions, RunOptions
from ekiden.core.base import outside
from ekiden.core.base.checks import Positional, Positive
from ekiden.core.base.errors import UserError, counted
from ekiden.core.base.files import read_regular, write
from ekiden.core.base.outside import summary_of
from ekiden.core.engine.folder import note_end
from ekiden.core.engine.method import Method
from ekiden.core.engine.wire import EVERYONE
from ekiden.core.training.private import DP
from ekiden.lab import drawing, launch
from ekiden.lab.drawing import table_of
from ekiden.methods import among, between_machines
from ekiden.runs import summary, tracking
from ekiden.runs.recipe import Recipe
from ekiden.runs.summary import Summary
from ekiden.silos import commands, supernode
from ekiden.silos.coordinator import federation as federations
from ekiden.silos.coordinator import remote_plan, session
from ekiden.silos.coordinator import verify as verifying
from ekiden.silos.coordinator.remote_plan import Measuring, RemotePlan, check, stored
from ekiden.silos.coordinator.session import EVALUATIONS
from ekiden.silos.logs import Format, Log
from ekiden.silos.security import Security, checked, days_left
from ekiden.silos.silo import (
    approval,
    budget,
    connection,
    levels,
    noisy_columns,
    participation,
    silo_file,
    trusted,
)
from ekiden.silos.silo.levels import Level
from ekiden.silos.silo.silo_file import Limits, SiloFile
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust import keys
from ekiden.silos.trust.agreement import read_roster
from ekiden.silos.trust.masking import RELEASE, release_text

Place: TypeAlias = Literal["here", "flower"]
LINK = "link.json"
"""file in a run folder that says how its SuperLink is reached"""


@dataclass(frozen=True)
class SiloInitOptions:
    """Make a silo's folder with its key pair and silo.toml; the public key goes to the
    coordinator.
    """

    folder: Positional[Path]
    """new folder"""
    link: str
    """HOST:PORT at which silos reach the SuperLink, which the coordinator tells"""
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
    insecure: bool = False
    """no TLS; to this machine only"""
    insecure_anywhere: bool = False
    """no TLS, also to other machines"""
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
    """print JSON instead of lines; see docs/reference/json.md"""


@dataclass(frozen=True)
class KeysOptions:
    """Make the silo's key pair; the public key goes to the coordinator."""

    file: Positional[Path]
    """silo.toml; its [link] key says where the private key is"""


@dataclass(frozen=True)
class SumsOptions:
    """Write what the silo tells, so that all silos agree on the scaling of a table: counts and
    sums, never a row.
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
    dp: str = ""
    """tell noisy sums, as in --dp epsilon=1,delta=1e-6; needs data.schema with bounds, and counts
    in limits.epsilon"""


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


@dataclass(frozen=True)
class VerifyOptions:
    """Compare a run folder with what the silos signed, and say what is not proven."""

    run: Positional[Path]
    """run folder"""
    keys: Path | None = None
    """folder with the public key NAME.pub of every silo, as you know it; by default the keys that
    the run had"""
    json: bool = False
    """print JSON instead of tables; see docs/reference/json.md"""


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
    file = silo_file.read(options.file)
    if options.metrics_port:
        file = replace(file, metrics=replace(file.metrics, port=options.metrics_port))
    security = Security(
        file.beside(file.link.certificate) if file.link.certificate else None,
        options.insecure or options.insecure_anywhere,
    )
    if not file.link.address:
        raise UserError(f'{file.path}: say where the SuperLink is: [link] address = "HOST:PORT"')
    log = Log(options.log)
    checked(file.link.address, security, log, anywhere=options.insecure_anywhere)
    if not security.insecure and not file.link.key:
        raise UserError(
            f'{file.path}: give the silo a key: [link] key = "{file.name}.key", then `ekiden silo '
            "keys`"
        )
    if file.link.key and not file.beside(file.link.key).is_file():
        raise UserError(
            f"there is no key {file.beside(file.link.key)}: make it with `ekiden silo keys "
            f"{file.path}`"
        )
    with supernode.alone(file):
        _serve(file, security, log)


def _serve(file: SiloFile, security: Security, log: Log) -> None:
    try:
        held = supernode.load(file)
    except UserError as error:
        with suppress(KeyboardInterrupt):
            supernode.tell(file, security, log, str(error))
        raise
    for name, (dataset, client) in held.items():
        log(
            f"{f'{file.name}, {name}' if name else file.name}: {len(client.train)} training, "
            f"{len(client.val)} validation, {len(client.test)} test samples of shape "
            f"{dataset.shape} for {dataset.task.kind} with {dataset.outputs} outputs; they stay here"
        )
    limits = file.limits
    methods = ", ".join(limits.methods)
    if limits.methods == Limits().methods:
        methods = "all methods"
    size = summary.size(limits.model_bytes)
    log(f"allows {methods}; models up to {size}; {limits.epochs} epochs a task")
    for line in _doubts(file):
        log(line, "WARNING")
    try:
        supernode.start(file, security, log)
    except KeyboardInterrupt:
        log("stopped; the silo goes on where it was when it is started again")


def _doubts(file: SiloFile) -> Iterator[str]:
    """Yield what the operator of a silo should look at."""
    if file.link.key and not (file.link.peers and any(file.beside(file.link.peers).glob("*.pub"))):
        yield (
            "the silo knows no key of another one, and refuses runs that seal models: take the "
            f"coordinator's roster.json by `ekiden silo join {file.path} roster.json`"
        )


def status(options: SiloStatusOptions) -> None:
    """`ekiden silo status silo.toml`."""
    file = silo_file.read(options.file)
    good, words = connection.health(file.folder)
    if not supernode.is_started(file):
        good, words = False, f"not started: `ekiden silo start {file.path}`"
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
    say(f"{file.name}: {words}{days_left(file.link.address)}")
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
    file = silo_file.read(options.file).holding(options.data)
    out = (
        options.out
        or file.path.parent / f"{'-'.join(filter(None, (file.name, options.data)))}-sums.json"
    )
    if (dp := DP.parse(options.dp)) and options.times:
        raise UserError("--times has no noise: leave out --times or --dp")
    found = noisy_columns.sums(file, dp) if dp else file.sums(options.times)
    write(out, [found.to_json().encode()])
    say(f"wrote {out}: read it, then give it to the coordinator")
    if file.limits.epsilon is not None and not dp:
        say("these sums have no noise, so limits.epsilon does not cover them: --dp adds it")


def make_keys(options: KeysOptions) -> None:
    """`ekiden silo keys silo.toml`."""
    file = silo_file.read(options.file)
    if not file.link.key:
        raise UserError(f'{file.path}: say where the key is to be: [link] key = "{file.name}.key"')
    private = file.beside(file.link.key)
    public = keys.generate(private)
    say(f"private key: {private} (stays here)\npublic key:  {public}")
    say(f"fingerprint: {keys.fingerprint(keys.read_public(public))}")
    say(
        f"give the public key to the coordinator as {file.name}.pub, who lets the silo in with\n"
        f"  ekiden federation add FOLDER {file.name}.pub\n"
        "or, if the silo had another key, with rotate instead of add"
    )


def release(options: ReleaseOptions) -> None:
    """`ekiden silo release silo.toml agreement.json`."""
    file = silo_file.read(options.file)
    if not file.link.key:
        raise UserError(f"{file.path}: only a silo with a key can agree: name it under [link]")
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
    file, code = silo_file.read(options.file), f"{options.code}:"
    if not outside.is_file(code):
        raise UserError(f"{options.code} is not a Python file: runs execute nothing else")
    outside.trust(outside.located(code), trusted.register(file))
    say(
        f"runs at {file.name} may execute {outside.by_content(code).replace(':', '')}: a coordinator "
        "can name this file, and cannot send one"
    )


def verify(options: VerifyOptions) -> None:
    """`ekiden verify RUN`."""
    agreed = verifying.terms(options.run)
    trusted = None
    if options.keys:
        trusted = commands.read_keys(options.keys, verifying.signers(options.run))
    found = verifying.verify(options.run, trusted)
    if options.json:
        hops = [asdict(hop) for hop in found.hops]
        print_json(
            {
                "hops": hops,
                "wrong": found.wrong,
                "unproven": found.unproven,
                "result": bool(found.result),
            }
        )
    else:
        _show_hops(found)
    if found.wrong:
        raise UserError(f"{options.run} is not what the silos signed: {found.wrong[0]}")
    if options.json:
        return
    if revision := agreed.revision:
        say(f"signed: this run replaces {revision.told()}")
    if agreed.recipe.dp:
        say(f"signed by each silo: it trained with differential privacy ({agreed.recipe.dp})")
    run = summary.summarise(options.run)
    if not run.finished:
        say(f"stopped after step {run.last.get('step', 0)}: {summary.going_on(run)}")
    line = f"verified: {len(found.hops)} tasks, each signed by its silo"
    if found.result:
        line += ", and the result is what they gave"
    if measured := len(verifying.evaluations(options.run)):
        line += f"; {counted(measured, 'later evaluation')}, signed by all silos"
    say(line)


def _show_hops(found: verifying.Verdict) -> None:
    """Print the tasks that silos signed, and what is wrong or not proven."""
    table = table_of("step", "silo", "did", "samples", "took", "gave", right=("step", "samples"))
    for hop in found.hops:
        took = ", ".join(
            f"{t.digest[:12]} of {'all' if t.owner == EVERYONE else t.owner}" for t in hop.taken
        )
        table.add_row(
            str(hop.step + 1), hop.client, hop.task, str(hop.samples[0]), took, hop.given[:12]
        )
    console.print(table)
    for line in found.wrong:
        say(line)
    for claim in found.unproven:
        say(f"not proven: {claim}")


def run(kind: type[Method], args: Sequence[str]) -> None:
    """`ekiden run METHOD --on flower [flags]`."""
    default: RemotePlan[Any] = RemotePlan(Recipe(between_machines(kind), evaluate_every=0))
    options = parse(
        RunOptions,
        args,
        f"ekiden run {kind.title()} --on flower",
        RunOptions(default, BetweenMachines(), on="flower"),
        summary_of(kind),
        BOXES,
    )
    plan, place = options.plan, options.place
    if place.federation is not None:
        if place.link or place.certificate or place.keys:
            raise UserError(
                "--federation says --link, --certificate and --keys: give one or the others"
            )
        federation = federations.read(place.federation)
        place = replace(
            place, link=federation.link, certificate=federation.certificate, keys=federation.keys
        )
        if not plan.clients:
            plan = replace(plan, clients=",".join(federations.members(federation)))
            if federation.joining:
                say(
                    f"the run is made without {', '.join(federation.joining)}, added later: once "
                    "all silos have joined by the new roster, give --clients "
                    f"{','.join(federation.silos)}"
                )
    if not plan.clients:
        raise UserError("say where the silos are: --federation FOLDER, or --clients NAME,NAME,...")
    tracking.check(options.track, options.out)
    folder = launch.free_folder(options.out, f"{kind.title()}-flower-seed{plan.recipe.seed}")
    link: dict[str, Any] = {
        "link": place.link,
        "certificate": _absolute(place.certificate),
        "keys": _absolute(place.keys),
        "insecure": place.insecure or place.insecure_anywhere,
    }
    checked(
        place.link,
        Security(place.certificate, link["insecure"]),
        lambda line: None,
        anywhere=place.insecure_anywhere,
    )
    outside.trust_text(_named(link), folder / LINK)
    with only_json(options.json) as tell:
        run = _submit(plan, folder, link, anywhere=place.insecure_anywhere, track=options.track)
        tell([summary.as_record(run)])
    if place.federation is not None:
        federations.met(place.federation, plan.names)


def _absolute(path: Path | None) -> str:
    """Return a path as a run folder keeps it; empty if there is none."""
    return str(path.absolute()) if path else ""


def resume(folder: Path, track: Sequence[str] = ()) -> bool:
    """Resume a run over silos; return False if the folder is of a run on one machine."""
    plan = stored(folder)
    if plan is None:
        return False
    tracking.check(track, folder)
    _submit(plan, folder, _link(folder), anywhere=True, track=track)
    return True


def forget(folder: Path, client: str, out: Path | None = None, release: Path | None = None) -> None:
    """Repeat a run over silos without `client`, in a new folder; in `release` it agrees to that."""
    _revise(folder, remote_plan.without(folder, client, release), out, f"without-{client}")


def join(folder: Path, client: str, out: Path | None = None, release: Path | None = None) -> None:
    """Repeat a run over silos with `client`, in a new folder; in `release` it agrees to that."""
    _revise(folder, remote_plan.with_one_more(folder, client, release), out, f"with-{client}")


def _revise(folder: Path, plan: RemotePlan[Method], out: Path | None, suffix: str) -> None:
    out = out or folder.with_name(f"{folder.resolve().name}-{suffix}")
    if out.exists():
        raise UserError(f"{out} exists already: delete it, or choose another folder by --out")
    _submit(plan, out, _link(folder), anywhere=True, track=())


def _link(folder: Path) -> dict[str, Any]:
    """Return how the engine of a run is reached, if the user has reached it like this before."""
    try:
        link: dict[str, Any] = json.loads(read_regular(folder / LINK))
        named = _named(link)
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(
            f"{folder / LINK} cannot be read: the run folder is damaged, start a new run"
        ) from None
    if not outside.trusts_text(named):
        raise UserError(
            f"{folder / LINK} leads to {_words(link)}, where nobody has run anything from here "
            "like this: read the "
            f"file, then `ekiden trust {folder / LINK}` if that is right"
        )
    return link


def _named(link: Mapping[str, Any]) -> str:
    """Return what decides which SuperLink is reached, and whose word counts there."""
    return json.dumps([LINK, *(link[name] for name in ("link", "certificate", "keys", "insecure"))])


def _words(link: Mapping[str, Any]) -> str:
    how = f"with the certificate {link['certificate'] or 'of any authority'}"
    if link["insecure"]:
        how = "WITHOUT encryption"
    return f"{link['link']} {how} and the keys {link['keys'] or 'of nobody'}"


def trust(file: Path) -> str:
    """Note that a SuperLink may be reached as a file says, and return that in words."""
    try:
        link: dict[str, Any] = json.loads(read_regular(file))
        outside.trust_text(_named(link), file)
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f"{file} does not say how a SuperLink is reached") from None
    return _words(link)


def evaluate(
    asked: Measuring,
    federation: Path | None,
    clients: str,
    data: str,
    evaluate_dp: str = "",
) -> dict[str, Any]:
    """Measure the model of a run at silos, on validation or on test samples, and return the row of
    metrics.
    """
    run = Path(asked.run)
    plan = stored(run)
    if federation is not None:
        one = federations.read(federation)
        link = {
            "link": one.link,
            "certificate": str(one.certificate),
            "keys": str(one.keys),
            "insecure": False,
        }
        names = clients or ",".join(federations.members(one))
    elif plan is not None:
        link = _link(run)
        names = clients or plan.clients
    else:
        raise UserError(
            f"{run} is of a run on one machine: say which silos measure its model, --federation "
            "FOLDER"
        )
    plan = plan or RemotePlan(session.made_by(run).recipe)
    recipe = replace(plan.recipe, method=among(plan.recipe.method, names.split(",")))
    plan = replace(
        plan,
        clients=names,
        recipe=recipe,
        data=data or plan.data,
        evaluate_dp=evaluate_dp or plan.evaluate_dp,
    )
    out = run / EVALUATIONS / token_hex(8)
    security, public_keys = _superlink_of(plan, link, anywhere=True)
    if ended := commands.run(plan, link, security, out, public_keys, say, asked):
        raise UserError(ended)
    try:
        row: dict[str, Any] = json.loads((out / "metrics.jsonl").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"no {out / 'metrics.jsonl'} on this machine: it is on the SuperLink's"
        ) from None
    say(f"kept in {out}")
    return row


def _security(link: Mapping[str, Any]) -> Security:
    """Return how a SuperLink is verified."""
    certificate = link["certificate"]
    return Security(Path(certificate) if certificate else None, link["insecure"])


def _superlink_of(
    plan: RemotePlan[Any], link: Mapping[str, Any], *, anywhere: bool
) -> tuple[Security, dict[str, str]]:
    """Return how the SuperLink is reached, and the silos' public keys."""
    security = _security(link)
    checked(link["link"], security, say, anywhere=anywhere)
    if link["keys"]:
        return security, commands.read_keys(Path(link["keys"]), plan.names)
    if security.insecure:
        return security, {}
    raise UserError(
        "say where the silos' public keys are: --keys FOLDER with NAME.pub for each of --clients"
    )


def _submit(
    plan: RemotePlan[Any],
    folder: Path,
    link: Mapping[str, Any],
    *,
    anywhere: bool,
    track: Sequence[str],
) -> Summary:
    check(plan)
    security, public_keys = _superlink_of(plan, link, anywhere=anywhere)
    with tracking.watching(track, folder, plan.recipe.method.steps(len(plan.names))) as look:

        def follow(line: str) -> None:
            say(line)
            look()

        ended = commands.run(plan, link, security, folder, public_keys, follow)
    begun = (folder / "config.json").exists()
    if ended:
        if begun:
            note_end(folder, ended)
            if "ekiden resume" not in ended:
                ended += f"; `ekiden resume {folder}` goes on"
        raise UserError(ended)
    if not begun:
        raise UserError(f"no run folder {folder} on this machine: it is on the SuperLink's")
    run = summary.summarise(folder)
    console.print(drawing.comparison([run]))
    say(f"run folder: {folder}")
    if not run.finished:
        raise UserError(f"the run did not end: continue it with `ekiden resume {folder}`")
    return run


@dataclass(frozen=True)
class PsOptions(LinkOptions):
    """List the runs that a SuperLink knows, and whether they are still running."""

    json: bool = False
    """print JSON instead of tables; see docs/reference/json.md"""


@dataclass(frozen=True)
class StopOptions(LinkOptions):
    """End a run at the SuperLink; `ekiden resume` goes on with it."""

    run: Positional[str] = ""
    """run folder, or the number that `ekiden run` and `ekiden ps` show (then also --federation, or
    --link)"""


def ps(options: PsOptions) -> None:
    """`ekiden ps`."""
    runs = commands.connect(*_reached(options)).runs()
    if options.json:
        return print_json([asdict(run) for run in runs])
    table = table_of(*commands.RUN_COLUMNS)
    for run in runs:
        table.add_row(*run.row)
    console.print(table)


def stop(options: StopOptions) -> None:
    """`ekiden stop RUN`."""
    if not options.run:
        raise UserError("say which run to stop: its folder, or its number in `ekiden ps`")
    if options.run.isdigit() and not Path(options.run).is_dir():
        number, (link, security) = options.run, _reached(options)
    else:
        try:
            values = _link(Path(options.run)) if (Path(options.run) / LINK).exists() else {}
            number, link = str(values["run"]), str(values["link"])
            security = _security(values)
        except KeyError:
            raise UserError(
                f"{options.run} is neither a number nor the folder of a run between machines: "
                "`ekiden ps` lists them"
            ) from None
    commands.connect(link, security).stop(number)
    say(f"stopped {options.run}; a silo that works on a task finishes it")


def _reached(options: LinkOptions) -> tuple[str, Security]:
    """Return the SuperLink's address, and how to verify it."""
    if options.federation is not None:
        found = federations.read(options.federation)
        return found.link, Security(found.certificate)
    if not options.link:
        raise UserError(
            "say which SuperLink: --federation FOLDER, or --link HOST:PORT --certificate FILE"
        )
    security = Security(options.certificate, options.insecure)
    checked(options.link, security, say, anywhere=False)
    return options.link, security
