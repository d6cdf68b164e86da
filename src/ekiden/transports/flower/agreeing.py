"""Make the terms of a run from a plan and what silos report about themselves, or say why there are none."""

from collections.abc import Mapping
from dataclasses import asdict, replace

from ekiden import models
from ekiden.base.checks import plain
from ekiden.base.errors import UserError
from ekiden.data.augment import Augment
from ekiden.data.kinds import of_terms
from ekiden.data.spelling import Spelling, fold, merging, numbered_from_two, spellings
from ekiden.data.tasks import Classification, task_of_terms
from ekiden.data.undecoded import natural
from ekiden.engine.drive import outline
from ekiden.engine.folder import code_version, values_digest
from ekiden.engine.method import Method
from ekiden.engine.worker import Setup
from ekiden.methods import check_needs
from ekiden.transports.flower.agreement import Agreement, no_samples
from ekiden.transports.flower.parcel import Hello, said
from ekiden.transports.flower.remote_plan import RemotePlan


def agree(
    plan: RemotePlan[Method], hellos: Mapping[str, Hello], run_id: str, public_keys: Mapping[str, str]
) -> Agreement:
    """Return the terms of the run, from the plan and from what the silos hold."""
    one = _alike(plan, hellos)
    inputs = of_terms(one.inputs)
    task = task_of_terms(one.task)
    dataset = one.dataset if len({hello.dataset for hello in hellos.values()}) == 1 else "own data"
    model = models.default_for(dataset, one.shape, inputs, task) if plan.model == "auto" else plan.model
    agreed = Agreement(
        run=run_id,
        version=code_version(),
        method=plan.method.title(),
        hyperparameters=plain(plan.method),
        training=asdict(plan.training),
        model=model,
        dataset=dataset,
        shape=one.shape,
        classes=one.classes,
        mean=one.mean,
        std=one.std,
        augment=Augment(*one.augment),
        seed=plan.seed,
        clients=plan.names,
        keys=tuple(public_keys[name] for name in plan.names) if public_keys else (),
        sealed=plan.sealed and bool(public_keys),
        skips=plan.absent == "skip",
        train=plan.train,
        pretrained=plan.pretrained,
        inputs=one.inputs,
        task=one.task,
        schema=one.schema,
        spelling=plan.spelling,
        revises=plan.revises,
    )
    check_needs(plan.method, no_samples(agreed))
    plan.method.check_source(plan.pretrained, no_samples(agreed))
    if not agreed.has_values:
        return agreed
    return replace(agreed, values=values_digest(agreed.builder(plan.method)()))


def _alike(plan: RemotePlan[Method], hellos: Mapping[str, Hello]) -> Hello:
    """Return what one silo reports, if the others' data go together with its own."""
    for name, hello in hellos.items():
        if plan.method.traits.needs_validation and not hello.samples[1]:
            raise UserError(
                f"{plan.method.title()} needs validation data at every silo, {name} has none: "
                "raise data.val_fraction in its silo.toml"
            )
    hellos = _one_spelling(hellos, plan.spelling)
    first, *others = hellos
    one = hellos[first]
    for name in others:
        for what in ("shape", "classes", "mean", "std", "augment"):
            here, there = getattr(one, what), getattr(hellos[name], what)
            if here != there:
                do = _grey_and_colour(one.shape, hellos[name].shape) or _spelled(one.classes, hellos[name].classes)
                raise UserError(
                    f"{first} and {name} hold data of different {what}: {said(str(here), 300)} and "
                    f"{said(str(there), 300)}; {do or 'make them equal'}"
                )
        if one.schema != hellos[name].schema:
            lacks = next((silo for silo in (first, name) if not hellos[silo].schema), "")
            differ = (
                f"{lacks} has no study schema, other silos have one"
                if lacks
                else f"{first} and {name} have different study schemas"
            )
            raise UserError(
                f"{differ}: name one schema in [data] of all silos, or agree by `ekiden federation agree --schema`"
            )
        if one.task != hellos[name].task:
            raise UserError(
                f"{first} and {name} hold labels of different tasks, or scale their targets in different ways: name "
                "one task in [data] of all silos, and agree on the scale by `ekiden silo sums`"
            )
        if one.inputs != hellos[name].inputs:
            raise UserError(
                f"{first} and {name} read or scale their samples in different ways: use the same columns and "
                "options in [data] of all silos, and the same data.agreed"
            )
    return one


def _spelled(one: tuple[str, ...], other: tuple[str, ...]) -> str:
    """Return what to do if some names of classes of two silos differ in case or blanks only."""
    alike = spellings({"one": dict.fromkeys(one, 1), "other": dict.fromkeys(other, 1)})
    pairs = ", ".join(" and ".join(said(repr(name), 60) for name, _ in ways) for ways in alike[:3])
    if pairs:
        return f"{pairs} differ in case or blanks only: write them alike, or choose --spelling merge or --spelling keep"
    numbers = all(name.isdecimal() for name in (*one, *other))
    if numbers and numbered_from_two({"one": set(map(int, one)), "other": set(map(int, other))}):
        return "some count classes from 0 and others from 1: number them alike"
    return ""


def _one_spelling(hellos: Mapping[str, Hello], how: Spelling) -> Mapping[str, Hello]:
    """Return what silos report, with one list of classes if these differ in case or blanks only and that is allowed."""
    lists = {hello.classes for hello in hellos.values()}
    classes = all(isinstance(task_of_terms(hello.task), Classification) for hello in hellos.values())
    if not how or not classes or len(lists) == 1 or len({frozenset(map(fold, names)) for names in lists}) > 1:
        return hellos
    together = {silo: dict.fromkeys(hello.classes, 1) for silo, hello in hellos.items()}
    instead = merging(together) if how == "merge" else {}
    names = {instead.get(name, name) for each in together.values() for name in each}
    return {silo: replace(hello, classes=tuple(sorted(names, key=natural))) for silo, hello in hellos.items()}


def _grey_and_colour(one: tuple[int, ...], other: tuple[int, ...]) -> str:
    """Return what to do if one silo holds grey images and the other colour images of the same size."""
    if len(one) != 3 or len(other) != 3 or one[1:] != other[1:] or {one[0], other[0]} != {1, 3}:
        return ""
    return 'set colour = "rgb" or "grey" in [data] of all silos'


def check_reading(plan: RemotePlan[Method], agreed: Agreement, setup: Setup) -> None:
    """Refuse to measure intermediate models that only silos may read."""
    if not plan.evaluate_every or not agreed.sealed or outline(setup, agreed.clients) is None:
        return
    raise UserError(
        f"--evaluate-every shows the coordinator models that only silos read in {plan.method.title()}: leave it out, "
        "or let it read them with --no-sealed"
    )


def check_measuring(plan: RemotePlan[Method], hellos: Mapping[str, Hello]) -> None:
    """Refuse to measure more often than a silo allows, before the run starts."""
    steps = plan.method.steps(len(plan.names))
    often = -(-steps // plan.evaluate_every) if plan.evaluate_every else 1
    for name, hello in hellos.items():
        if often > hello.evaluations:
            raise UserError(
                f"the run measures models {often} times, {name} allows {hello.evaluations} (limits.evaluations in its "
                "silo.toml): raise --evaluate-every"
            )
