"""What a silo agrees to. Its own file and the method installed here decide."""

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from math import isqrt, prod
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ekiden.clinic.subgroups import divisions
from ekiden.core.base import outside
from ekiden.core.base.errors import PrivateError, UserError
from ekiden.core.data.samples import ClientData, Dataset, Subset
from ekiden.core.engine import wire
from ekiden.core.engine.drive import EACH, Outline, TooLong, outline
from ekiden.core.engine.folder import values_digest
from ekiden.core.engine.method import INITIAL, Method, gives_of
from ekiden.core.engine.wire import SERVER, Ref
from ekiden.core.engine.worker import Setup
from ekiden.core.models.tables_and_texts import Linear
from ekiden.core.tasks import Task, balanced
from ekiden.core.tasks import terms as task_terms
from ekiden.core.training import frozen
from ekiden.core.training.network import on_meta
from ekiden.core.training.private.promise import DP
from ekiden.methods import LAP
from ekiden.methods.exact.blocks.fixed_features import FixedFeatures, features_of
from ekiden.readers.kinds import terms
from ekiden.runs.recipe import Recipe
from ekiden.silos.silo import budget, levels
from ekiden.silos.silo.levels import Level
from ekiden.silos.silo.silo_file import EVALUATE, Held, SiloFile
from ekiden.silos.silo.told import ToldSums
from ekiden.silos.trust import custody, keys, masking
from ekiden.silos.trust.agreement import Agreement
from ekiden.silos.trust.parcel import Absence, Ask, models_in
from ekiden.silos.trust.sample_terms import SampleTerms
from ekiden.silos.trust.sealing import Reader

_EACH = 2  # samples for each feature
_BITS = 16  # of a sum, about
_ALONE = 0.99  # leverage of a row from which sums show it alone


def check_terms(file: SiloFile, agreed: Agreement) -> None:
    """Refuse a run that the silo's file does not allow.

    This is asked at each request, so what the operator changes counts for runs that have begun.
    `check_data`, `check_size`, `check_values` and `check_span` are about what a run cannot change.
    """
    name = file.name
    if file.data.part and not agreed.measures:
        raise UserError(
            f"{name} holds external data, on which models are only evaluated (data.part in its "
            "silo.toml): leave it out"
        )
    wanted = EVALUATE if agreed.measures else agreed.method
    # trust in a file is what allows the code in it
    methods = file.limits.allowed_methods
    if wanted not in methods and not outside.is_file(wanted):
        raise UserError(
            f"{name} does not allow {wanted[:40]!r}, only {', '.join(methods)} "
            "(limits.methods in its silo.toml)"
        )
    if agreed.regroups and binds_members(file, agreed):
        raise UserError(
            f"the run forms sums again without a silo that does not answer; the difference would "
            f"show its model, so {name} does not allow that: choose --absent wait or stop, or give "
            "--dp"
        )
    number = len(agreed.clients)
    limits = file.limits
    least = file.least_clients(measured=bool(agreed.measures))
    if not least <= number <= limits.clients:
        raise UserError(
            f"the run has {number} silos, {name} allows {least} to {limits.clients} "
            "(limits.min_clients and limits.clients in its silo.toml)"
        )
    if agreed.skips and number == least:
        raise UserError(
            f"the run goes on without silos that do not answer, {name} wants all {number}: choose "
            f"--absent wait or stop, or let its owner write min_clients = {number - 1} under "
            "[limits] in its silo.toml"
        )
    method = agreed.recipe.method
    steps = method.steps(number)
    if steps > limits.steps:
        raise UserError(
            f"the run has {steps} steps, {name} allows {limits.steps} (limits.steps in its "
            "silo.toml)"
        )
    if not agreed.measures:
        _check_method(file, agreed.recipe)
    allowed = divisions(file.limits.subgroups)
    if foreign := [one for one in divisions(agreed.by) if one not in allowed]:
        raise UserError(
            f"the run asks for subgroups by {foreign[0].text()[:80]}, {name} reports "
            f"{', '.join(one.text() for one in allowed) or 'none'} (limits.subgroups in its "
            "silo.toml)"
        )
    budget.check(file, agreed)
    budget.check_measured(file, agreed)
    _check_keys(file, agreed)


def level_of(file: SiloFile, recipe: Recipe[Method]) -> Level:
    """Return the level that training by a recipe needs at this silo."""
    bounded = file.limits.epsilon is not None if recipe.dp else None
    return levels.needed(recipe.method, file.limits.min_active, bounded=bounded)


def _check_method(file: SiloFile, recipe: Recipe[Method]) -> None:
    """Refuse values of hyperparameters, and what a method tells about samples, that the silo's file
    does not allow.
    """
    method = recipe.method
    name = file.name
    limits = file.limits
    # a class in a file may have the title of another method
    title = recipe.name.removesuffix(LAP)
    for field, allowed in file.allow.get(title, {}).items():
        if (value := getattr(method, field)) not in allowed:
            raise UserError(
                f"{title} has {field} = {value!r}, {name} allows only "
                f"{', '.join(map(repr, allowed))} (allow.{title} in its silo.toml)"
            )
    wanted = level_of(file, recipe)
    if not levels.allows(limits.level, wanted):
        better = ""
        if recipe.dp:
            better = "let its owner bound the noise by limits.epsilon, or "
        raise UserError(
            f'{method.title()} needs level = "{wanted}", {name} has "{limits.level}": {better}let '
            "its owner write "
            f'level = "{wanted}" under [limits] in its silo.toml, which lets out '
            f"{levels.TELLS[wanted]}"
        )


def told_by(file: SiloFile, agreed: Agreement, client: ClientData) -> list[ToldSums]:
    """Return what a run reports about the silo's training samples without noise, which has to be the
    same in all runs: at the level of models the members of sums alone, as models show samples.
    """
    recipe = agreed.recipe
    method = agreed.recipe.method
    level = file.limits.level
    if agreed.measures or recipe.dp or level == "all":
        return []
    rows = client.train.digest.hex()
    members = ", ".join(sorted(agreed.clients))
    agreed_to = partial(released, file, agreed)
    if level == "models":
        if not method.gives_sums:
            return []
        return [ToldSums(f"training samples {rows[:32]}", {"members": members}, agreed_to)]
    about: list[Any] = [recipe.seed, recipe.model, recipe.pretrained, agreed.inputs]
    if isinstance(method, FixedFeatures):
        names = {field.name for field in fields(FixedFeatures)} - {"order", "bytes"}
        about += [getattr(method, name) for name in sorted(names)]
    features = custody.digest([json.dumps(about).encode()])[:32]
    same = {"rows": rows, "features": features, "members": members}
    return [ToldSums(f"training samples of shape {agreed.shape}", same, agreed_to)]


def measured_by(
    file: SiloFile, agreed: Agreement, client: ClientData, members: Iterable[str]
) -> list[ToldSums]:
    """Return which test samples of the silo a run counts without noise of its own, and among whom,
    which has to be the same in all runs: the counts of two versions of them, or of two lists of
    silos, subtracted, are those of single samples, or of one silo.
    """
    if has_own_noise(agreed.measured_dp) or not agreed.measured_steps:
        return []
    part, what = (client.val, "validation") if agreed.validation else (client.test, "test")
    same = {"rows": part.digest.hex()}
    shared = agreed.measured_dp is not None  # the difference of two lists has one share of noise
    shown = file.limits.level == "all" or file.limits.own_figures
    if shared or not shown:
        same["members"] = ", ".join(sorted(members))
    kind = f"{what} samples {agreed.data}".rstrip()
    return [ToldSums(kind, same, partial(released, file, agreed))]


def has_own_noise(dp: DP | None) -> bool:
    """Return whether what a silo tells has all its noise from itself."""
    return dp is not None and dp.honest == 1


def check_members(file: SiloFile, agreed: Agreement, members: Collection[str]) -> None:
    """Refuse a sum of a part of the silos: that of all, less that, is what the others gave."""
    if {*members} != {*agreed.clients}:
        raise UserError(
            f"{file.name} gives its part to sums of all silos of a run, not of "
            f"{', '.join(sorted(members))[:200]}: two sums, subtracted, could show one silo"
        )


def binds_members(file: SiloFile, agreed: Agreement) -> bool:
    """Return whether all sums of a run have to be of all its silos."""
    return file.limits.level != "all" and not has_own_noise(DP.parse(agreed.recipe.dp))


def released(file: SiloFile, agreed: Agreement) -> bool:
    """Return whether the silo that a run leaves out, or adds, agrees to sums with and without
    it.
    """
    revision = agreed.revision
    if revision is None:
        return False
    return masking.released(agreed, keys.read_public(file.peers / f"{revision.client}.pub"))


def check_span(file: SiloFile, agreed: Agreement, client: ClientData, network: nn.Module) -> None:
    """Refuse exact sums from which single samples follow: of too many features, or over columns of
    a regression.
    """
    method = agreed.recipe.method
    name = file.name
    least = file.limits.min_active
    if agreed.measures or not least:
        return
    if method.least is None and file.limits.level == "sums":
        _check_columns(cast(Linear, network), client.train.x, name, least)
    if not is_spanned(agreed):
        return
    assert isinstance(method, FixedFeatures)
    most = most_features(method, client.train, agreed.labels, agreed.outputs)
    width = features_of(network).width
    if 0 < most < width:
        raise UserError(
            f"sums of {width} features show which samples {name} has: give --width {most} or less, "
            "or leave this silo out (limits.min_active in its silo.toml)"
        )


def _check_columns(network: Linear, x: Tensor, name: str, least: int) -> None:
    """Refuse columns that differ in few rows, and rows that differ from all others: their products
    show these.
    """
    rows = network.features(x).double()
    why = ""
    for column, values in zip(network.names, rows.T, strict=True):
        if 0 < len(values) - int(values.unique(return_counts=True)[1].max()) < least:
            why = f"column {column!r} differs from its usual value in fewer than {least} rows: join rare categories, or"
    span, size, _ = torch.linalg.svd(
        torch.nn.functional.pad(rows, (0, 1), value=1.0), full_matrices=False
    )
    if not why and float(span[:, size > size.max() * 1e-9].square().sum(1).max()) > _ALONE:
        why = "columns together single out a row: correct its values, or if a column nearly follows from others,"
    if why:
        told = f"sums over the columns of {name} would show single rows"
        more = "leave it out (limits.min_active in silo.toml)"
        raise PrivateError(
            f"{told}: {why} {more}", f"{told}; its own log says which (limits.min_active)"
        )


def is_spanned(agreed: Agreement) -> bool:
    """Return whether exact sums of features leave silos."""
    return isinstance(agreed.recipe.method, FixedFeatures) and not agreed.recipe.dp


def most_features(method: FixedFeatures, part: Subset, task: Task, outputs: int) -> int:
    """Return of how many features exact products over these samples may leave; 0: of any, as no
    sample is in them.

    Directions of few samples are hardly ever those of other samples. The number of samples is
    rounded down, so it does not show how many have rare classes. Rows of a table hold few bits: if
    the sums hold as many, all rows follow.
    """
    part = method.often_enough(part, outputs, task)
    least = method.min_active
    if not len(part) or not least:
        return 0
    most = len(part) // least * least // _EACH
    if part.samples.x.ndim == 2:
        rows, bits = part.variety
        most = min(most, isqrt(int(rows // least * least * bits * 2 / _BITS)))
    return max(1, most)


def numbers_told(file: SiloFile, agreed: Agreement, task: str, value: Any) -> int:
    """Return how many numbers a task tells about the silo's samples alone, in a run whose method
    does not keep k samples behind each of them. Models among them are judged by their level.
    """
    if gives_of(agreed.recipe.method, task) != "summary" or level_of(file, agreed.recipe) != "all":
        return 0
    return _numbers(value) - sum(map(_numbers, models_in(value)))


def most_numbers(part: Subset, least: int) -> int:
    """Return how many numbers runs may tell about these samples alone: one for k of theirs.

    However they are computed, they are too few to hold more than one sample in k.
    """
    shape = part.samples.x.shape[1:]
    held = len(part) * prod(shape)
    if len(shape) == 1:  # rows of a table hold few bits
        rows, bits = part.variety
        held = min(held, int(rows * bits / _BITS))
    return held // least


def _numbers(value: Any) -> int:
    leaves = wire.leaves(value)
    return sum(leaf.numel() if isinstance(leaf, Tensor) else 1 for leaf in leaves)


def plan_of(
    file: SiloFile, agreed: Agreement, setup: Setup, absent: Sequence[Absence] = ()
) -> Outline | None:
    """Return what the method will ask for without the missing clients; None if that is not known
    beforehand.
    """
    if not agreed.clients:
        return None
    steps = setup.method.steps(len(agreed.clients))
    if absent and not agreed.skips:
        raise UserError("a silo is said to be missing in a run that waits for all: refused")
    for step, client in absent:
        if not 0 <= step < steps or client not in agreed.clients:
            raise UserError(
                f"{client[:80]!r} is said to be missing in step {step + 1} of {steps}: refused"
            )
    away = frozenset(absent)
    try:
        return outline(setup, agreed.clients, None, lambda *place: place in away, file.limits.tasks)
    except TooLong:
        raise UserError(
            f"the run asks for more than {file.limits.tasks} tasks, which is all that {file.name} "
            "allows, or moves "
            f"more than {EACH} values for each of these (limits.tasks in its silo.toml)"
        ) from None


def check_size(file: SiloFile, setup: Setup) -> nn.Module:
    """Refuse a model above the silo's limits, without allocating it; return its network on the
    device `meta`.

    `model_bytes` limits the part that travels. The network with its frozen part, which stays, must
    fit into `memory`.
    """
    module = on_meta(setup.build)
    size = sum(t.numel() * t.element_size() for t in module.state_dict().values())
    both = size + sum(t.numel() * t.element_size() for _, t in frozen.fixed(module))
    for what, found, limit in (
        ("model", size, "model_bytes"),
        ("network with its frozen part", both, "memory"),
    ):
        if found > (most := getattr(file.limits, limit)):
            raise UserError(
                f"the {what} has {found} bytes, {file.name} allows {most} (limits.{limit} in its "
                "silo.toml)"
            )
    return module


def check_values(file: SiloFile, agreed: Agreement, setup: Setup) -> None:
    """Refuse a run whose frozen or pretrained values differ from the silo's own."""
    if agreed.has_values and (own := values_digest(setup.build())) != agreed.values:
        raise UserError(
            f"{file.name} has other values of {agreed.recipe.model[:80]} ({own[:8]}) than the run "
            f"({agreed.values[:8]}): install the same at all parties"
        )


def check_data(file: SiloFile, agreed: Agreement, held: Held) -> None:
    """Refuse a run over other samples than the silo holds."""
    dataset, _ = held
    task = replace(dataset.task, metric=agreed.labels.metric)
    if agreed.weighted:
        task = balanced(task, file.agreed.classes, dataset.classes)
    # Features of values near a threshold are those of single samples, and a scaling moves all
    # thresholds: so a run that trains has the silo's own scaling.
    but: tuple[str, ...] = ("augment",)
    if agreed.measures:
        but = ("augment", "mean", "std")
    if found := sample_terms(file, replace(dataset, task=task)).difference(agreed, *but):
        raise UserError(f"{file.name} and the run are of different {found}")


def sample_terms(file: SiloFile, dataset: Dataset) -> SampleTerms:
    """Return what a silo says about its samples to all who ask."""
    name = dataset.name
    if file.data.path:
        name = Path(file.data.path).stem
    return SampleTerms(
        dataset=name,
        shape=dataset.shape,
        classes=dataset.classes,
        mean=tuple(map(float, dataset.mean)),
        std=tuple(map(float, dataset.std)),
        augment=dataset.augment,
        inputs=terms(dataset.inputs),
        task=task_terms(dataset.task),
        schema=file.schema,
    )


def check_lists(name: str, agreed: Agreement, ask: Ask) -> None:
    """Refuse more absences, readers or members than the run can have: each one costs time, before
    it is refused.
    """
    silos = len(agreed.clients)
    # The server reads, too, and the result after the end.
    most = (agreed.recipe.method.steps(silos) + 1) * (silos + 1)
    for what, found in (
        ("absences", ask.absent),
        ("readers", ask.readers),
        ("members of a sum", ask.members),
    ):
        if len(found) > most:
            raise UserError(
                f"{len(found)} {what} in a run of {silos} silos, {name} takes {most} at most: "
                "refused"
            )


def check_task(method: Method, task: str) -> None:
    """Refuse a task of which the method does not say what it gives, or that it does not use as it
    is run here.
    """
    if gives_of(method, task) is None:
        raise UserError(
            f"{method.title()} as it is run here declares nothing that {task!r} gives: refused"
        )


def check_request(
    name: str, agreed: Agreement, plan: Outline | None, ask: Ask, arguments: bytes
) -> None:
    """Refuse a task, an order or an input value that the method's outer loop would not ask for.

    This is known only if the server reads no values during the run. The request says which clients
    were missing.
    """
    if plan is None:
        return
    expected = plan.request(ask.step, ask.call, name)
    if expected is None or expected.task != ask.task or wire.encode(expected.args) != arguments:
        raise UserError(
            f"{agreed.method} does not ask this of {name} in step {ask.step + 1}: refused"
        )


def kept(name: str, plan: Outline | None, ask: Ask) -> frozenset[str]:
    """Return the values of final steps that the silo keeps: those in the request, and those the
    method still needs.
    """
    keep = frozenset(ask.keep)
    if plan is None:
        return keep
    return keep.union(ref.key for ref in plan.needed(ask.settled) if ref.owner == name)


def check_readers(
    file: SiloFile,
    agreed: Agreement,
    full: Outline | None,
    plan: Outline | None,
    key: str,
    readers: Sequence[Reader],
) -> None:
    """Refuse readers who do not need a value, as far as `check_request` can tell.

    The server may read only the result: the silo's last value in a run in which no client is
    missing. Otherwise a coordinator could claim that all later silos are missing, and read every
    hand-off. `full` is what the method asks for if no client is missing, if that is known, and
    `plan` the same without those said to be missing.
    """
    name = file.name
    value: Ref[Any] = Ref(name, key)
    for reader in readers:
        if reader.name not in (SERVER, *agreed.clients):
            raise UserError(
                f"{reader.name[:80]!r} takes no part in the run: {name} shows it nothing"
            )
        if full is None or plan is None:
            continue
        if reader.name != SERVER:
            if (reader.name, reader.step) not in plan.users(value):
                raise UserError(
                    f"in {agreed.method} {reader.name} does not use {key[:80]!r} in step "
                    f"{reader.step + 1}: {name} does not show it"
                )
            continue
        last = [ref for ref in full.result if _place(ref) == _place(value)]
        if value not in plan.result or not last:
            raise UserError(
                f"in {agreed.method} the server reads only the result, not {key[:80]!r}: {name} "
                "does not show it"
            )
        work = plan.contributors(value)
        if len(work) < min(file.least_clients(), len(full.contributors(last[0]))):
            raise UserError(
                f"the result would be the work of {', '.join(sorted(work))} alone, {name} shows "
                f"the server that of {file.least_clients()} silos or more (limits.min_clients in "
                "its silo.toml)"
            )


def check_result(
    agreed: Agreement, plan: Outline, initial: str, digests: Sequence[str], records: Sequence[str]
) -> None:
    """Refuse to measure models that are not the run's result; the owners' signatures prove which
    are.

    Each model has a digest, and a record of the chain of custody.
    """
    if not len(digests) == len(records) == len(plan.models):
        raise UserError(
            f"in {agreed.method} silos measure only the result, {len(plan.models)} models: refused"
        )
    for model, found, line in zip(plan.models, digests, records, strict=True):
        if model == INITIAL:
            good = found == initial
        elif isinstance(model, Ref):
            good = agreed.hop_of(model, line).model == found
        else:
            good = found == custody.digest(wire.chunks(model))
        if not good:
            raise UserError(
                f"in {agreed.method} silos measure only the result, and this model is another one: "
                "refused"
            )


def check_measured(file: SiloFile, agreed: Agreement, ask: Ask) -> None:
    """Refuse measurements that the plan does not name, and those of a part of the silos."""
    steps = agreed.measured_steps
    if ask.step not in steps:
        raise UserError(
            f"the plan measures models after step {', '.join(map(str, steps))[:80]}, not after "
            f"step {ask.step}: {file.name} refuses"
        )
    if not agreed.skips:
        check_members(file, agreed, [member.name for member in ask.members])


def _place(ref: Ref[Any]) -> tuple[str, str, str]:
    """Return owner, step and task of a value. Its call number is left out: it depends on which
    clients are missing.
    """
    step, _, task = ref.key.split("-", 2)
    return ref.owner, step, task


def _check_keys(file: SiloFile, agreed: Agreement) -> None:
    """Compare the keys in the terms with those that the silo was given; store none."""
    if file.name not in agreed.clients:
        raise UserError(
            f"the run is among {', '.join(agreed.clients)[:200]}, not {file.name}: refused"
        )
    for name, public in agreed.silos.items():
        if name == file.name:
            if not keys.same(public, keys.public_of(file.key)):
                raise UserError(
                    f"the run knows another key of {name} than it has: give the coordinator "
                    f"{name}.pub"
                )
            continue
        keys.check(public)
        path = file.peers / f"{name}.pub"
        if not keys.same(keys.read_public(path), public):
            raise UserError(
                f"the run says that {name} has the key {keys.fingerprint(public)}, {file.name} "
                f"knows another ({path}): ask {name}, and replace the file only if its key is new"
            )
