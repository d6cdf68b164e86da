"""A run over silos, from the roll call to the model.

The roll call finds out which node is which silo: nodes have random numbers, and silos prove their
names. The terms of the run are made from a plan and what silos report about themselves, or it is
said why there are none.
"""

import json
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from ekiden.care.spelling import ALIKE, Names, numbered_from_two
from ekiden.clinic.counting import counting_of
from ekiden.clinic.subgroups import check_task, divisions
from ekiden.core.base.checks import all_but
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import write
from ekiden.core.engine import wire
from ekiden.core.engine.drive import Row, outline, told
from ekiden.core.engine.evaluation import Built, divergence
from ekiden.core.engine.folder import (
    RunFolder,
    code_version,
    read_config,
    read_ledger,
    read_lines,
)
from ekiden.core.engine.method import Method, Size, State
from ekiden.core.engine.run import Run, last
from ekiden.core.engine.setup import describe_model, read_model
from ekiden.core.engine.transport import ClientMissing
from ekiden.core.engine.worker import Setup
from ekiden.core.models import catalogue
from ekiden.core.tasks import Classification, balanced, task_of_terms, terms
from ekiden.core.training.network import Network, on_meta
from ekiden.methods import among, check_needs
from ekiden.methods.exact.blocks.fixed_features import FixedFeatures, features_of
from ekiden.readers.kinds import of_terms
from ekiden.readers.kinds import terms as inputs_terms
from ekiden.runs.config import inputs_of, task_in
from ekiden.runs.recipe import recipe_of
from ekiden.runs.result import Result
from ekiden.silos.coordinator.courier import Courier, Crossing, Lost, Patience
from ekiden.silos.coordinator.remote_plan import Measuring, RemotePlan, check
from ekiden.silos.coordinator.transport import Remote, SiloTests
from ekiden.silos.security import Say
from ekiden.silos.silo.policy import is_spanned
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust import custody, keys
from ekiden.silos.trust.agreement import AGREEMENT, Agreement, no_samples
from ekiden.silos.trust.parcel import HELLO, Answer, Ask, Hello, pack, said, signed_text, unpack
from ekiden.silos.trust.sealing import Reader

# seconds without an answer
_GREET_AGAIN = 600.0
# seconds in which other silos may refuse, too, so that one message names all of them
_FOR_OTHERS = 5.0


class Nodes(Protocol):
    """The engine: numbered nodes, and byte strings to and from them."""

    def ids(self) -> Sequence[int]:
        """Return the nodes that are connected now."""

    def send(self, node: int, data: bytes) -> str | Lost:
        """Send a message, and return the name of its ticket."""

    def receive(self, tickets: Sequence[str]) -> Mapping[str, bytes | Lost]:
        """Return the answers that have come; each answer is returned once."""


@dataclass
class Roll:
    """A post that addresses silos by name."""

    nodes: Nodes
    clients: Sequence[str]
    public_keys: Mapping[str, str]
    patience: Patience
    warn: Say
    data: str = ""
    plan: str = ""
    _terms: str = ""
    _began: bool = False
    _greeted: set[int] = field(default_factory=set)
    _pending: dict[str, tuple[int, str, float]] = field(default_factory=dict)
    _silos: dict[str, tuple[int, Hello]] = field(default_factory=dict)
    # nodes that proved their names, and so are told the terms
    _known: set[int] = field(default_factory=set)
    # the silos' reasons for not taking part
    _reasons: dict[str, str] = field(default_factory=dict)
    # reasons of silos that proved their names
    _refused: dict[str, str] = field(default_factory=dict)
    # when others have had time to refuse, too
    _others_until: float = 0.0

    def gather(
        self, clients: Collection[str] = (), *, all_of_them: bool = True
    ) -> dict[str, Hello]:
        """Wait for every client, or ClientMissing; without `all_of_them`, one is enough once patience ends.

        A silo that refuses ends the wait as soon as all that are connected have answered.
        """
        clients = clients or self.clients
        since = time.monotonic()
        told = 0.0
        while True:
            self._call()
            if self._refused and not (self._pending and time.monotonic() < self._others_until):
                raise UserError(
                    "; ".join(f"silo {name}: {why}" for name, why in self._refused.items())
                )
            absent = [c for c in clients if c not in self._silos]
            waited = time.monotonic() - since
            # asked once: else patience could end between the two uses
            ended = self.patience.ended(since)
            some = not all_of_them and self._silos and ended
            if not absent or some:
                if absent:
                    self.warn(
                        f"{self._with_reasons(absent)} did not come: going on without (--absent skip)"
                    )
                return {c: self._silos[c][1] for c in self.clients if c in self._silos}
            if ended:
                raise ClientMissing(
                    f"{self._with_reasons(absent)} did not come: run `ekiden silo start silo.toml` "
                    "there and retry"
                )
            if waited > told + 30:
                told = waited
                self.warn(f"waiting for {self._with_reasons(absent)}")
            time.sleep(self.patience.pause(since))

    def begin(self) -> None:
        """From now on, a silo that refuses is away if the run goes on without silos that are."""
        self._began = True

    def _with_reasons(self, absent: Sequence[str]) -> str:
        told = {name: f"{name} (it said: {why})" for name, why in self._reasons.items()}
        return ", ".join(told.get(name, name) for name in absent)

    def introduce(self, terms: str) -> None:
        """From now on, ask silos that proved their names whether they agree to these terms;
        `gather` waits for all.
        """
        self._terms = terms
        self._known = {node for node, _ in self._silos.values()}
        self._greeted -= self._known
        self._greeted.difference_update(node for node, _, _ in self._pending.values())
        self._silos = {}
        self._pending = {}

    def send(self, client: str, data: bytes) -> str | Lost:
        """Send to the node that is now `client`."""
        if client not in self._silos or self._silos[client][0] not in self.nodes.ids():
            self._call()
        if client not in self._silos:
            return Lost("not connected")
        return self.nodes.send(self._silos[client][0], data)

    def receive(self, tickets: Sequence[str]) -> Mapping[str, bytes | Lost]:
        """Return the answers that have come."""
        return self.nodes.receive(tickets)

    def reader(self, client: str) -> Reader | None:
        """Return the silo with the key that it gave when it introduced itself; None if it is not
        connected.
        """
        if client not in self._silos:
            self._call()
        if client not in self._silos:
            return None
        hello = self._silos[client][1]
        return Reader(client, 0, hello.sealing, hello.proof)

    def anyone(self) -> bool:
        """Return whether any silo is connected."""
        return any(node in self.nodes.ids() for node, _ in self._silos.values())

    def _call(self) -> None:
        """Greet new nodes, and receive their answers."""
        present = set(self.nodes.ids())
        self._greeted &= present
        self._silos = {name: silo for name, silo in self._silos.items() if silo[0] in present}
        self._known &= present
        for node in sorted(present - self._greeted):
            nonce = secrets.token_hex(16)
            ask = Ask(HELLO, "", nonce, self.data, self.plan)
            if node in self._known:
                ask = replace(ask, agreement=self._terms)
            ticket = self.nodes.send(node, pack(ask))
            if isinstance(ticket, str):
                self._greeted.add(node)
                self._pending[ticket] = (node, nonce, time.monotonic())
        for ticket, data in self.nodes.receive(list(self._pending)).items():
            node, nonce, _ = self._pending.pop(ticket)
            if isinstance(data, Lost):
                # greet it again
                self._greeted.discard(node)
            else:
                self._meet(node, nonce, data)

        for ticket, (node, _, since) in list(self._pending.items()):
            # the message was cut off on the way
            if time.monotonic() - since > _GREET_AGAIN:
                del self._pending[ticket]
                self._greeted.discard(node)

    def _meet(self, node: int, nonce: str, data: bytes) -> None:
        """Believe only what a node proves. No message of a node can end the run of the others."""
        try:
            answer, body = unpack(data, Answer)
            hello: Hello | None = wire.decode(body, Hello) if body or not answer.error else None
        except wire.WireError as error:
            self.warn(
                "a node sent an unreadable answer, maybe from another version of Ekiden "
                f"({error}): ignored"
            )
            return
        name = answer.silo[:80]
        if hello is None:
            self._reasons[name] = said(answer.error, 300)
            self.warn(f"a node that says it is {name!r} cannot take part: {said(answer.error)}")
        elif name not in self.clients:
            self.warn(f"silo {name!r} is connected, but not among --clients: ignored")
        elif not keys.proves(
            self.public_keys[name], HELLO, signed_text(nonce, name), hello.signature
        ):
            self.warn(f"a node says it is {name!r} but does not hold the key of {name!r}: ignored")
        elif name in self._silos:
            raise UserError(
                f"two silos are called {name!r}: give each its own name in its silo.toml"
            )
        elif hello.version != code_version():
            raise UserError(
                f"silo {name!r} has Ekiden {said(hello.version, 40)}, here is {code_version()}: "
                "install the same commit"
            )
        elif answer.error:
            self._refuse(name, said(answer.error))
        elif self._terms and node not in self._known:
            self._known.add(node)
            # greet it again, with the terms
            self._greeted.discard(node)
        else:
            self._reasons.pop(name, None)
            self._silos[name] = (node, hello)

    def _refuse(self, name: str, why: str) -> None:
        if self._began and self.patience.absent == "skip":
            self._reasons[name] = why
            self.warn(f"{name} stays away: {why}")
        elif self._began:
            raise UserError(f"silo {name}: {why}")
        else:
            if not self._refused:
                self._others_until = time.monotonic() + _FOR_OTHERS
            self._refused[name] = why


def planned(plan: RemotePlan[Method], run_id: str, public_keys: Mapping[str, str]) -> Agreement:
    """Return the terms that follow from the plan alone, with no data: silos can refuse them at once."""
    return Agreement(
        run=run_id,
        version=code_version(),
        recipe=plan.recipe,
        clients=plan.names,
        keys=tuple(public_keys[name] for name in plan.names),
        skips=plan.absent == "skip",
        revises=plan.revises,
        data=plan.data,
        evaluate_dp=plan.evaluate_dp,
    )


def agree(
    plan: RemotePlan[Method],
    hellos: Mapping[str, Hello],
    run_id: str,
    public_keys: Mapping[str, str],
) -> Agreement:
    """Return the terms of the run, from the plan and from what the silos hold."""
    hello = _alike(plan, hellos)
    one = hello.holds
    inputs = of_terms(one.inputs)
    task = replace(task_of_terms(one.task), metric=plan.recipe.metric)
    if plan.recipe.training.class_weights != "none":
        if not hello.counts and isinstance(task, Classification):
            raise UserError(
                "--class-weights needs counts of classes, which silos agree on (`ekiden silo "
                "sums`, then `ekiden federation agree`): do that first, or leave it out"
            )
        task = balanced(task, hello.counts, one.classes)
    if counting_of(task, task.outputs(one.classes), full=True).lacks(task.headline.name):
        raise UserError(
            f"silos count no scores of {len(one.classes)} classes, which {task.headline.name} "
            "needs: choose another --metric"
        )
    if len({hello.holds.dataset for hello in hellos.values()}) > 1:
        one = replace(one, dataset="own data")
    model = plan.recipe.model
    if model == "auto":
        model = catalogue.default_for(one.dataset, one.shape, inputs, task)
    recipe = replace(plan.recipe, model=model)
    about = vars(replace(one, task=terms(task)))
    agreed = replace(planned(plan, run_id, public_keys), recipe=recipe, **about)
    agreed.check_noise()
    check_needs(plan.recipe.method, no_samples(agreed))
    plan.recipe.method.check_source(plan.recipe.pretrained, no_samples(agreed))
    return _narrow(agreed, hellos).with_values()


def _narrow(agreed: Agreement, hellos: Mapping[str, Hello]) -> Agreement:
    """Return the terms with no more features than silos give exact sums of; refuse what does not
    allow that.
    """
    recipe = agreed.recipe
    allowed = {name: hello.features for name, hello in hellos.items() if hello.features}
    if not allowed or not is_spanned(agreed):
        return agreed
    method = cast(FixedFeatures, recipe.method)
    smallest = min(allowed, key=allowed.__getitem__)
    most = allowed[smallest]
    width = features_of(on_meta(agreed.builder())).width
    if width <= most:
        return agreed
    if not method.width:
        narrower = replace(agreed, recipe=replace(recipe, method=replace(method, width=most)))
        # a network has as many features as it has
        with suppress(UserError):
            on_meta(narrower.builder())
            return narrower
    raise UserError(
        f"sums of {width} features show which samples {smallest} has: give --width {most} or less "
        f"if the method has one, leave {smallest} out, or run fedgram with --dp (limits.min_active "
        "in its silo.toml)"
    )


def _alike(plan: RemotePlan[Method], hellos: Mapping[str, Hello]) -> Hello:
    """Return what one silo reports, if the others' data go together with its own."""
    for name, hello in hellos.items():
        if plan.recipe.method.traits.needs_validation and not hello.samples[1]:
            raise UserError(
                f"{plan.recipe.method.title()} needs validation data at every silo, {name} has "
                "none: raise data.val_fraction in its silo.toml"
            )
    first, *others = hellos
    one = hellos[first]
    for name in others:
        other = hellos[name]
        found = one.holds.difference(other.holds)
        if found.startswith("classes"):
            found += _spelled(one.holds.classes, other.holds.classes)
        if one.counts != other.counts:
            found = found or "counts; use the same data.agreed at all silos"
        if found:
            raise UserError(f"{first} and {name} hold data of different {found}")
    return one


def _spelled(one: tuple[str, ...], other: tuple[str, ...]) -> str:
    """Return what to do if two silos write some names of classes in several ways."""
    held = {"one": dict.fromkeys(one, 1), "other": dict.fromkeys(other, 1)}
    alike = Names("classes", held, zeros=False).alike()
    pairs = ", ".join(" and ".join(said(repr(name), 60) for name in names) for names in alike[:3])
    if pairs:
        return f": {pairs} are {ALIKE}: write them alike"
    if numbered_from_two(held):
        return ": some count classes from 0 and others from 1: number them alike"
    return ""


def run(
    plan: RemotePlan[Method],
    nodes: Nodes,
    folder: Path,
    public_keys: Mapping[str, str],
    say: Say,
    *,
    link: str = "{}",
    poll: float = 1.0,
) -> Result:
    """Run `plan` over the silos behind `nodes`, or continue it, in `folder`.

    Silos must prove their names by `public_keys`. `link` is JSON that says how to reach the engine
    again, for `ekiden resume`. The post is looked at each `poll` seconds or more often.
    """
    check(plan)
    patience = Patience(plan.patience, poll, plan.absent)
    run_id = _run_id(folder)
    before = None
    if (folder / AGREEMENT).exists():
        before = agreements.of_run(folder)
    everybody = plan.absent != "skip"
    text = planned(plan, run_id, public_keys).text()
    roll = Roll(nodes, plan.names, public_keys, patience, say, plan.data, text)
    hellos = roll.gather(all_of_them=everybody)
    agreed = before or agree(plan, hellos, run_id, public_keys)
    if isinstance(now := agreed.recipe.method, FixedFeatures) and now != plan.recipe.method:
        say(f"{now.width} features: the smallest silo gives sums of no more")
        plan = replace(plan, recipe=replace(plan.recipe, method=now))
    setup = agreed.coordinators_setup()
    # the server computes the same bits on any machine
    torch.set_num_threads(1)
    # what the method asks for is known beforehand if only silos read models on the way
    if plan.recipe.evaluate_every and outline(setup, agreed.clients) is not None:
        raise UserError(
            "--evaluate-every shows the coordinator models that only silos read in "
            f"{agreed.method}: leave it out"
        )
    plan.recipe.method.check_network(
        Size.of(Network(setup.build()), setup.dataset.shape, setup.dataset.task)
    )
    roll.introduce(agreed.text())
    hellos = roll.gather(hellos, all_of_them=everybody)
    roll.begin()
    config = _config(plan, agreed, setup, hellos, folder)
    with closing(RunFolder(folder, config, needed={"link.json": link})) as run_folder:
        write(folder / AGREEMENT, [agreed.text().encode()])
        return _go(plan, agreed, setup, run_folder, roll, patience, say)


def _go(
    plan: RemotePlan[Method],
    agreed: Agreement,
    setup: Setup,
    run_folder: RunFolder,
    roll: Roll,
    patience: Patience,
    say: Say,
) -> Result:
    """Run all steps that are left, and return the result with its models."""
    method = plan.recipe.method
    clients = plan.names
    folder = run_folder.path
    total = method.steps(len(clients))
    build = Built(method, setup.build, len(clients))

    def remote(state: State, written: Mapping[str, str] | None) -> Remote:
        """Make the transport, which records in the folder what crosses the network and what silos
        sign.
        """
        if state.step:
            say(f"going on after step {state.step} of {total}")
        _cut_custody(folder, state.step)
        held = {
            name: counts[0] for name, counts in read_config(folder)["clients"].items() if counts
        }

        def crossed(row: Crossing) -> None:
            run_folder.append("network.jsonl", asdict(row))

        def note(record: str) -> None:
            run_folder.append(custody.FILE, json.loads(record))

        courier = Courier(roll, patience, crossed, say)
        return Remote(courier, setup, agreed, state, note, _void(folder), held, written or {})

    def told_of(row: Row) -> None:
        metric = agreed.labels.headline
        value = row.get(metric.name)
        shown = f", {metric.said(value)}" if value is not None else ""
        say(f"step {row['step']} of {total} done{shown}")
        if notes := row.get("notes"):
            say(f"step {row['step']}: {told(notes)}")

    tests = partial(SiloTests, agreed=agreed)
    run = Run(
        setup,
        clients,
        remote,
        tests,
        build,
        run_folder,
        plan.recipe.evaluate_every,
        told_of,
        skip=agreed.skips,
        elsewhere=True,
    )
    end = last(run.steps())
    metrics = tuple(end.trace.metrics)
    ledger = tuple(end.trace.ledger)
    weights, personal = end.models
    if metrics and (
        line := divergence(metrics[-1], agreed.labels.guess(agreed.outputs), plan.recipe.step_size)
    ):
        say(line)
    models = weights, tuple(personal)
    config = read_config(folder)
    passes = dict(end.trace.passes)
    return Result(end.state, metrics, ledger, folder, build, config, lambda: models, passes=passes)


def _config(
    plan: RemotePlan[Method],
    agreed: Agreement,
    setup: Setup,
    hellos: Mapping[str, Hello],
    folder: Path,
) -> dict[str, Any]:
    """Return the configuration of the run; for a silo that is not connected yet, with what it
    reported before.
    """
    samples: dict[str, list[int]] = {name: [] for name in plan.names}
    if (folder / "config.json").exists():
        samples |= read_config(folder)["clients"]
    samples |= {name: list(hello.samples) for name, hello in hellos.items()}
    return config_of(agreed, setup, samples) | {"remote_plan": all_but(plan.to_json(), "recipe")}


def config_of(agreed: Agreement, setup: Setup, samples: Mapping[str, list[int]]) -> dict[str, Any]:
    """Return what config.json must say because of the terms, and of numbers of samples.

    Patience, and what is done about a missing silo, are the coordinator's own.
    """
    recipe = agreed.recipe
    return {
        "on": "flower",
        "run": agreed.run,
        "recipe": recipe.to_json(),
        "steps": recipe.method.steps(len(agreed.clients)),
        "selection": recipe.method.selection(recipe.training.select),
        "hardware": {},
        "dataset": agreed.dataset,
        "clients": samples,
        **setup.told({name: counts[0] for name, counts in samples.items() if counts}),
        # digests of the model alone: the data are the silos' own
        **describe_model(setup),
        "remote_plan": {
            "data": agreed.data,
            "evaluate_dp": agreed.evaluate_dp,
            "clients": ",".join(agreed.clients),
            "revises": agreed.revises,
        },
    }


def _run_id(folder: Path) -> str:
    """Return the id of the run in `folder`, or a new one."""
    if not (folder / "config.json").exists():
        return secrets.token_hex(8)
    found = read_config(folder).get("run")
    if not isinstance(found, str):
        raise UserError(f"{folder} holds a run on one machine: choose another folder")
    return found


def _cut_custody(folder: Path, steps: int) -> None:
    """Drop records of interrupted steps: they are done again, and signed again."""
    file = folder / custody.FILE
    lines = map(keys.canonical, read_lines(file))
    kept = [line for line in lines if custody.parse(line.decode()).after <= steps]
    if file.exists():
        write(file, [line + b"\n" for line in kept])


def _void(folder: Path) -> dict[str, set[int]]:
    """Return in which steps each silo was missing; what it did in them does not count."""
    void: dict[str, set[int]] = {}
    for row in read_ledger(folder):
        if row["missing"]:
            void.setdefault(row["source"], set()).add(row["step"])
    return void


# folder in a run folder that holds what silos measured of its model later
EVALUATIONS = "evaluations"
METRICS = "metrics.jsonl"
MODEL = "model.safetensors"


def evaluate(
    plan: RemotePlan[Method],
    asked: Measuring,
    nodes: Nodes,
    folder: Path,
    public_keys: Mapping[str, str],
    say: Say,
    *,
    poll: float = 1.0,
) -> dict[str, Any]:
    """Measure a model at the silos behind `nodes`, and return the row of metrics.

    Args:
        plan: names the silos that measure, on which of their data sets, and with which noise.
        asked: which model, and what about it.
        nodes: the engine.
        folder: where to keep the terms, what silos signed, and the row.
        public_keys: public keys by which silos prove their names.
        say: shows a line to the user.
        poll: longest time in seconds between two looks at the post.
    """
    before = replace(made_by(Path(asked.run)), data=plan.data, evaluate_dp=plan.evaluate_dp)
    agreed, model = terms_for(before, asked, plan.names, public_keys)
    patience = Patience(plan.patience, poll)
    roll = Roll(nodes, plan.names, public_keys, patience, say, plan.data)
    roll.gather()
    roll.introduce(agreed.text())
    roll.gather()
    setup = agreed.coordinators_setup()
    # the server computes the same bits on any machine
    torch.set_num_threads(1)
    signed: list[str] = []
    courier = Courier(roll, patience, lambda row: None, say)
    remote = Remote(courier, setup, agreed, setup.method.start(), signed.append, {}, {}, {})
    row = SiloTests(remote, agreed)(model, [], last=True)
    if not row:
        raise UserError(
            "no silo has enough samples to report anything (limits.min_samples in their silo.toml)"
        )
    folder.mkdir(parents=True)
    if asked.weights:
        write(folder / MODEL, [Path(asked.weights).read_bytes()])
    write(folder / AGREEMENT, [agreed.text().encode()])
    write(folder / custody.FILE, ["".join(f"{line}\n" for line in signed).encode()])
    write(folder / METRICS, [json.dumps(row).encode() + b"\n"])
    return row


def made_by(run: Path) -> Agreement:
    """Return the terms under which a run was made; of a run on one machine, those under which silos
    measure its model.
    """
    config = read_config(run)
    if config.get("on") == "flower":
        return agreements.of_run(run)
    if config["network"] is None:
        raise UserError(
            f"{run} has a network that was made in Python, which silos do not have: measure it here"
        )
    scale = config["input"]
    agreed = Agreement(
        run="",
        version=code_version(),
        recipe=replace(recipe_of(config["recipe"]), model=config["network"], evaluate_on="all"),
        dataset="own data",
        shape=tuple(scale["shape"]),
        classes=tuple(config["classes"]),
        mean=tuple(scale["mean"]),
        std=tuple(scale["std"]),
        inputs=inputs_terms(inputs_of(config)),
        clients=tuple(config["clients"]),
        task=terms(task_in(config)),
    )
    return agreed.with_values()


def terms_for(
    before: Agreement, asked: Measuring, clients: Sequence[str], public_keys: Mapping[str, str]
) -> tuple[Agreement, Any]:
    """Return the terms for measuring the model of a run, or other values of its network, and the
    model.
    """
    setup = before.coordinators_setup()
    method = setup.method
    if method.changes_network and len(clients) != len(before.clients):
        raise UserError(
            f"the model of {method.title()} depends on the number of silos: name "
            f"{len(before.clients)} by --clients"
        )
    build = Built(method, setup.build, len(before.clients))
    model = read_model(Path(asked.run), asked.weights or MODEL, build, own=not asked.weights)
    labels = before.labels
    if isinstance(labels, Classification):
        # other silos have other counts of classes
        labels = replace(labels, weights=())
    agreed = replace(
        before,
        run=secrets.token_hex(8),
        task=terms(labels),
        recipe=replace(before.recipe, method=among(method, clients)),
        clients=tuple(clients),
        keys=tuple(public_keys[name] for name in clients),
        skips=False,
        revises="",
        measures=custody.digest(wire.chunks(model)),
        validation=asked.validation,
        by=tuple(one.text() for one in divisions(asked.by)),
    )
    if agreed.subgroups:
        check_task(agreed.labels)
    return agreed, model
