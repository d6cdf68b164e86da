"""The commands of a coordinator about runs: `ekiden run METHOD --on flower`, `ps`, `stop` and
`verify`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from ekiden.cli.console import console, only_json, print_json, say
from ekiden.cli.flags import parse
from ekiden.cli.run_options import BOXES, BetweenMachines, LinkOptions, RunOptions
from ekiden.core.base import outside
from ekiden.core.base.checks import Positional
from ekiden.core.base.errors import UserError, counted
from ekiden.core.base.files import read_regular
from ekiden.core.base.outside import summary_of
from ekiden.core.engine.folder import note_end
from ekiden.core.engine.method import Method
from ekiden.core.engine.wire import EVERYONE
from ekiden.lab import drawing, launch
from ekiden.lab.drawing import table_of
from ekiden.methods import among, between_machines
from ekiden.runs import summary, tracking
from ekiden.runs.recipe import Recipe
from ekiden.runs.reruns import new_folder
from ekiden.runs.summary import Summary
from ekiden.silos import commands
from ekiden.silos.coordinator import federation as federations
from ekiden.silos.coordinator import remote_plan, session
from ekiden.silos.coordinator import verify as verifying
from ekiden.silos.coordinator.federation import Federation
from ekiden.silos.coordinator.remote_plan import Measuring, RemotePlan, check, stored
from ekiden.silos.coordinator.session import EVALUATIONS
from ekiden.silos.security import check_link

LINK = "link.json"
"""file in a run folder that says how its SuperLink is reached"""


@dataclass(frozen=True)
class VerifyOptions:
    """Compare a run folder with what the silos signed, and say what is not proven."""

    run: Positional[Path]
    """run folder"""
    keys: Path | None = None
    """folder with the public key NAME.pub of every silo, as you know it; by default the keys that
    the run had"""
    json: bool = False
    """print JSON: signed tasks (`hops`), what is `wrong`, what stays `unproven`, whether the
    `result` is what the silos gave"""


def verify(options: VerifyOptions) -> None:
    """`ekiden verify RUN`."""
    agreed = verifying.terms(options.run)
    trusted = None
    if options.keys:
        trusted = commands.read_keys(options.keys, verifying.signers(options.run))
    found = verifying.verify(options.run, trusted)
    if options.json:
        print_json(
            {
                "hops": list(map(asdict, found.hops)),
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
    plan = options.plan
    place = options.place
    link = _reach(place)
    if place.federation is not None:
        if place.link or place.certificate or place.keys:
            raise UserError(
                "--federation says --link, --certificate and --keys: give one or the others"
            )
        federation = federations.read(place.federation)
        link = _reach(federation)
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
    check_link(link["link"], _certificate(link), lambda line: None)
    outside.trust_text(_named(link), folder / LINK)
    with only_json(options.json) as tell:
        run = _submit(plan, folder, link, options.track)
        tell([summary.as_record(run)])
    if place.federation is not None:
        federations.met(place.federation, plan.names)


def _reach(place: BetweenMachines | Federation) -> dict[str, Any]:
    """Return how a SuperLink is reached, as a run folder keeps it."""
    return {
        "link": place.link,
        "certificate": absolute(place.certificate),
        "keys": absolute(place.keys),
    }


def absolute(path: Path | None) -> str:
    """Return a path as a run folder keeps it; empty if there is none."""
    if path is None:
        return ""
    return str(path.absolute())


def resume(folder: Path, track: Sequence[str] = ()) -> bool:
    """Resume a run over silos; return False if the folder is of a run on one machine."""
    plan = stored(folder)
    if plan is None:
        return False
    tracking.check(track, folder)
    _submit(plan, folder, _link(folder), track)
    return True


def forget(folder: Path, client: str, out: Path | None = None, release: Path | None = None) -> None:
    """Repeat a run over silos without `client`, in a new folder; in `release` it agrees to that."""
    _revise(folder, remote_plan.without(folder, client, release), out, f"without-{client}")


def join(folder: Path, client: str, out: Path | None = None, release: Path | None = None) -> None:
    """Repeat a run over silos with `client`, in a new folder; in `release` it agrees to that."""
    _revise(folder, remote_plan.with_one_more(folder, client, release), out, f"with-{client}")


def _revise(folder: Path, plan: RemotePlan[Method], out: Path | None, suffix: str) -> None:
    _submit(plan, new_folder(folder, out, suffix), _link(folder), ())


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
    return json.dumps([LINK, *(link[name] for name in ("link", "certificate", "keys"))])


def _words(link: Mapping[str, Any]) -> str:
    certificate = link["certificate"] or "of any authority"
    public_keys = link["keys"] or "of nobody"
    return f"{link['link']} with the certificate {certificate} and the keys {public_keys}"


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
        link = _reach(one)
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
    certificate, public_keys = _superlink_of(plan, link)
    if ended := commands.run(plan, link, certificate, out, public_keys, say, asked):
        raise UserError(ended)
    try:
        row: dict[str, Any] = json.loads((out / "metrics.jsonl").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UserError(
            f"no {out / 'metrics.jsonl'} on this machine: it is on the SuperLink's"
        ) from None
    say(f"kept in {out}")
    return row


def _certificate(link: Mapping[str, Any]) -> Path | None:
    """Return the certificate by which a SuperLink is verified; None trusts the system's authorities."""
    if link["certificate"]:
        return Path(link["certificate"])
    return None


def _superlink_of(
    plan: RemotePlan[Any], link: Mapping[str, Any]
) -> tuple[Path | None, dict[str, str]]:
    """Return the SuperLink's certificate, and the silos' public keys."""
    certificate = _certificate(link)
    check_link(link["link"], certificate, say)
    if not link["keys"]:
        raise UserError(
            "say where the silos' public keys are: --keys FOLDER with NAME.pub for each of --clients"
        )
    return certificate, commands.read_keys(Path(link["keys"]), plan.names)


def _submit(
    plan: RemotePlan[Any],
    folder: Path,
    link: Mapping[str, Any],
    track: Sequence[str],
) -> Summary:
    check(plan)
    certificate, public_keys = _superlink_of(plan, link)
    with tracking.watching(track, folder, plan.recipe.method.steps(len(plan.names))) as look:

        def follow(line: str) -> None:
            say(line)
            look()

        ended = commands.run(plan, link, certificate, folder, public_keys, follow)
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
    """print JSON: a list of runs: `run`, `name`, `state`, `since`, `reason`"""


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
        return print_json(list(map(asdict, runs)))
    table = table_of(*commands.RUN_COLUMNS)
    for run in runs:
        table.add_row(*run.row)
    console.print(table)


def stop(options: StopOptions) -> None:
    """`ekiden stop RUN`."""
    if not options.run:
        raise UserError("say which run to stop: its folder, or its number in `ekiden ps`")
    folder = Path(options.run)
    values = dict[str, Any]()
    if options.run.isdigit() and not folder.is_dir():
        number = options.run
        link, certificate = _reached(options)
    else:
        if (folder / LINK).exists():
            values = _link(folder)
        try:
            number = str(values["run"])
            link = str(values["link"])
            certificate = _certificate(values)
        except KeyError:
            raise UserError(
                f"{options.run} is neither a number nor the folder of a run between machines: "
                "`ekiden ps` lists them"
            ) from None
    commands.connect(link, certificate).stop(number)
    say(f"stopped {options.run}; a silo that works on a task finishes it")


def _reached(options: LinkOptions) -> tuple[str, Path | None]:
    """Return the SuperLink's address, and how to verify it."""
    if options.federation is not None:
        found = federations.read(options.federation)
        return found.link, found.certificate
    if not options.link:
        raise UserError(
            "say which SuperLink: --federation FOLDER, or --link HOST:PORT --certificate FILE"
        )
    check_link(options.link, options.certificate, say)
    return options.link, options.certificate
