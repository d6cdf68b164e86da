"""Who takes part, by public key, and the terms that all agree on: each request has them; silos
refuse others.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ekiden.clinic.subgroups import check_task, divisions
from ekiden.core.base import outside
from ekiden.core.base.checks import Checked, made, plain, reading
from ekiden.core.base.errors import UserError, at
from ekiden.core.base.files import read_regular
from ekiden.core.base.settings import Hardware
from ekiden.core.data.samples import Dataset, Samples
from ekiden.core.engine.folder import code_version, values_digest
from ekiden.core.engine.method import Method
from ekiden.core.engine.setup import NamedNetwork, Prepared, of_method
from ekiden.core.engine.wire import EVERYONE, SERVER, Ref
from ekiden.core.engine.worker import Setup
from ekiden.core.models import pretrained
from ekiden.core.models.split import check_part
from ekiden.core.tasks import Task, task_of_terms
from ekiden.core.training.private.promise import DP, check_honest
from ekiden.readers import schema as schemas
from ekiden.readers.kinds import of_terms
from ekiden.runs.recipe import Recipe, recipe_of, with_code
from ekiden.silos.trust import custody, keys
from ekiden.silos.trust.custody import Entry, Hop
from ekiden.silos.trust.sample_terms import SampleTerms

# file in the run folder that holds the terms
AGREEMENT = "agreement.json"
# of counts, if nobody says anything else
NOISE = "epsilon=2,delta=1e-05,clip=1"
EXACT = "exact"
NOTHING = "none"
RUN = re.compile(r"[0-9a-f]{16}")
_CLIENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
_REVISION = re.compile(
    rf"({RUN.pattern}) ([0-9a-f]{{64}}) (with|without) ({_CLIENT.pattern}) ?([0-9a-f]{{0,400}})"
)
_MOST_TEXT = 1 << 18


@dataclass(frozen=True)
class Revision:
    """Which run this one replaces, and which client left or joined."""

    # id of the replaced run
    run: str
    # digest of its agreement
    terms: str
    # "without" or "with"
    change: str
    # the client that left or joined
    client: str
    # signature of this client: it agrees to sums with it and without it; see `masking`. May be
    # empty.
    release: str = ""

    def text(self) -> str:
        """Return the revision as an agreement writes it."""
        return f"{self.run} {self.terms} {self.change} {self.client} {self.release}".rstrip()

    def told(self) -> str:
        """Return the revision for people to read."""
        return f"run {self.run} {self.change} {self.client}"


def revision_in(text: str, clients: Sequence[str]) -> Revision | None:
    """Return the revision in the terms of a run among `clients`; None if the run replaces no
    other.
    """
    if not text:
        return None
    found = _REVISION.fullmatch(text)
    if found is None or (found[4] in clients) != (found[3] == "with"):
        raise UserError(f"revises {text[:80]!r} names no run that these clients can replace")
    return Revision(*found.groups())


@dataclass(frozen=True)
class Agreement(SampleTerms):
    """The terms of a run."""

    # id of the run, the same before and after a crash
    run: str
    # version of Ekiden with a digest of its source, see `code_version`
    version: str
    # what is run
    recipe: Recipe[Method]
    # names of the silos, in order
    clients: tuple[str, ...] = ()
    # public key of each silo
    keys: tuple[str, ...] = ()
    # whether the run continues without silos that do not answer
    skips: bool = False
    # digest of the network's frozen and pretrained values, which each silo has itself; empty if
    # there are none
    values: str = ""
    # the run that this one replaces, as `Revision.text` gives it; empty if there is none
    revises: str = ""
    # digest of the model that silos measure and do nothing else, under the terms of the run that
    # made it; empty in all other runs
    measures: str = ""
    # which of its data sets each silo uses, by the name in its file; empty: the only one
    data: str = ""
    # whether they measure it on their validation samples instead of the test samples
    validation: bool = False
    # columns by whose subgroups they also tell about it, as `Division.parse` reads them
    by: tuple[str, ...] = ()
    # noise of what silos tell about models, as `DP` reads it; "exact": without noise; "none": they
    # measure nothing
    evaluate_dp: str = NOISE

    @cached_property
    def method(self) -> str:
        """Name of the method; of one in a file with the digest of its content."""
        return str(self.recipe.shared()["method"])

    @property
    def code(self) -> list[str]:
        """Return the code in files that the run executes, each as FILE.py:NAME@DIGEST."""
        found = list[str]()

        def note(name: str) -> str:
            found.append(outside.by_content(name))
            return name

        with_code(self.recipe.to_json(), note)
        return found

    @property
    def revision(self) -> Revision | None:
        """The run that this one replaces."""
        return revision_in(self.revises, self.clients)

    @property
    def labels(self) -> Task:
        """What the labels mean."""
        return task_of_terms(self.task)

    @property
    def weighted(self) -> bool:
        """Whether classes have weights in training (`--class-weights`)."""
        return self.recipe.training.class_weights != "none" and not self.measures

    @property
    def outputs(self) -> int:
        """K, the number of outputs that the network needs."""
        return self.labels.outputs(self.classes)

    @property
    def digest(self) -> str:
        """Return the digest that names these terms."""
        return hashlib.sha256(self.text().encode()).hexdigest()

    @property
    def silos(self) -> dict[str, str]:
        """Return the public key of each silo."""
        return dict(zip(self.clients, self.keys, strict=False))

    @property
    def has_values(self) -> bool:
        """Whether the network has values that do not follow from the seed."""
        recipe = self.recipe
        return (
            recipe.train != "all"
            or bool(recipe.pretrained)
            or pretrained.is_pretrained(recipe.model)
        )

    def with_values(self) -> "Agreement":
        """Return the terms with the digest of the values that do not follow from the seed."""
        if not self.has_values:
            return self
        return replace(self, values=values_digest(self.builder()()))

    @property
    def regroups(self) -> bool:
        """Whether a sum under masks goes on without a silo that is missing; all agree to that with
        these terms.
        """
        from ekiden.methods.blocks.rounds import SecureMethod

        method = self.recipe.method
        return self.skips and isinstance(method, SecureMethod) and method.secure and method.regroups

    @property
    def subgroups(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the subgroups of which silos tell, by column."""
        inputs = of_terms(self.inputs)
        return {one.column: one.names(inputs) for one in divisions(self.by)}

    @property
    def measured_dp(self) -> DP | None:
        """What silos promise about test samples; None if their counts are exact."""
        return counted_with(self.evaluate_dp)

    @property
    def measured_steps(self) -> tuple[int, ...]:
        """The numbers of steps, counted from 1, after which silos measure models."""
        total = self.recipe.method.steps(len(self.clients))
        every = self.recipe.evaluate_every or total
        if self.evaluate_dp == NOTHING:
            return ()
        if self.measures or not every:
            return (0,)
        return tuple(sorted({*range(every, total, every), total}))

    def hop_of(self, ref: Ref[Any], record: str) -> Hop:
        """Return what the owner of a value signed about the task that gave it in this run."""
        hop: Entry | None = None
        with suppress(UserError):
            hop = custody.opened(record, self.silos)
        if not isinstance(hop, Hop) or (hop.run, hop.terms, hop.ref) != (
            self.run,
            self.digest,
            ref,
        ):
            raise UserError(
                f"silo {ref.owner} gives no account of {ref.key} that its key signed: refused"
            )
        return hop

    def ends_with(self, step: int) -> bool:
        """Return whether the models that silos measure after a step are those of the run's end."""
        return self.measured_steps[-1:] == (step,)

    def check_noise(self) -> None:
        """Refuse noise that more silos would share than take part."""
        for dp in (DP.parse(self.recipe.dp), self.measured_dp):
            check_honest(dp, self.clients)

    def text(self) -> str:
        """Return the terms as JSON, the same text for the same terms."""
        return self._text

    # asked for several times with each message
    @cached_property
    def _text(self) -> str:
        values = plain(self) | {"recipe": self.recipe.shared()}
        return json.dumps(values, separators=(",", ":"), sort_keys=True)

    def setup(self, dataset: Dataset, hardware: Hardware, pretrained: Path | None = None) -> Setup:
        """Return what a worker needs at a party that holds `dataset`; `pretrained` as in
        `builder`.
        """
        recipe = self.recipe
        build = self.builder(pretrained)
        dp = DP.parse(recipe.dp)
        return Setup(recipe.method, build, dataset, recipe.training, hardware, recipe.seed, dp=dp)

    def coordinators_setup(self) -> Setup:
        """Return what the coordinator needs, who has no samples."""
        return self.setup(no_samples(self), Hardware(threads=1))

    def builder(self, pretrained: Path | None = None) -> Callable[[], nn.Module]:
        """Return a function that makes the initial network of the run, the same at every call.

        A silo looks for networks and files with values in the folder `pretrained`, by the last part
        of their names. Without it, as at the coordinator, the names are paths.
        """
        recipe = self.recipe
        method = self.recipe.method
        check_part(recipe.train, method.title(), averages=method.traits.averages)
        model = recipe.model
        weights = recipe.pretrained
        if pretrained is not None:
            model = own_network(model, pretrained)
            weights = str(_own(weights, pretrained)) if weights else ""
        named = NamedNetwork(model, self.shape, self.outputs, recipe.seed, of_terms(self.inputs))
        prepared = Prepared(named, weights, recipe.train, recipe.seed)
        return of_method(prepared, method, self.shape, self.outputs, recipe.seed, self.labels)


def no_code(name: str) -> str:
    """Refuse code in a file."""
    raise UserError(f"the run names {outside.short(name)[:80]!r}, code in a file: refused")


def parse(text: str, own: Callable[[str], str] = no_code) -> Agreement:
    """Return the agreement in `text`.

    Args:
        text: as the coordinator wrote it.
        own: gives the path of this party's own copy of code in a file, by its content, if it may
            run here; by default none may.
    """
    if len(text) > _MOST_TEXT:
        raise UserError(
            f"the terms of the run cannot be read: they have {len(text)} characters, {_MOST_TEXT} "
            "at most"
        )
    try:
        values = json.loads(text, parse_constant=_no_number)
        version = values.get("version", code_version())
    except (ValueError, RecursionError, AttributeError) as error:
        raise UserError(f"the terms of the run cannot be read ({type(error).__name__})") from None
    if version != code_version():
        raise UserError(
            f"the run is of Ekiden {str(version)[:40]}, this silo has {code_version()}: install "
            "the same commit"
        )
    values |= {"recipe": _recipe(values.get("recipe"), own)}
    with reading("the terms of the run", _reader()):
        agreement = made(Agreement, values)
        _ = of_terms(agreement.inputs), agreement.labels, agreement.revision
        if agreement.schema:
            schemas.parse(agreement.schema)
    agreement.check_noise()
    if agreement.measures and not agreement.measured_steps:
        raise UserError("--evaluate-dp=none is for runs that train: give epsilon=2,delta=1e-5")
    if agreement.subgroups:
        check_task(agreement.labels)
    finished = agreement.measures and not (agreement.validation and agreement.by)
    if (agreement.validation or agreement.by) and not finished:
        raise UserError(
            "the terms of the run cannot be read: validation samples and subgroups are for finished "
            "models, one of them at a time"
        )
    if len(agreement.keys) != len(agreement.clients) or not RUN.fullmatch(agreement.run):
        raise UserError(
            "the terms of the run cannot be read: keys or the run's id are not as they must be"
        )
    check_names(agreement.clients, "the run")
    return agreement


def counted_with(text: str) -> DP | None:
    """Return the promise in a text such as epsilon=2,delta=1e-5; None for "exact" and "none"."""
    if text in (EXACT, NOTHING):
        return None
    dp = DP.parse(text)
    if dp is None or dp.clip != 1:
        raise UserError(f"--evaluate-dp {text!r}: write epsilon=2,delta=1e-5, exact, or none")
    return dp


def read(path: Path, own: Callable[[str], str]) -> Agreement:
    """Return the agreement in a file; `own` as in `parse`."""
    with at(str(path)):
        try:
            return parse(read_regular(path, 4 * _MOST_TEXT).decode(), own)
        except (OSError, UnicodeDecodeError):
            raise UserError(
                f"this is not the {AGREEMENT} of a run's folder, or the run did not begin"
            ) from None


def of_run(folder: Path) -> Agreement:
    """Return the terms in the folder of a run between machines."""
    return read(folder / AGREEMENT, outside.own_copy)


def _recipe(values: object, own: Callable[[str], str]) -> Recipe[Method]:
    """Return the recipe in the terms of a run. What it names of code is of the library, or in a
    file of which this party has its `own` copy: no other party sends code, or names a path.
    """
    # a roster is read without any method
    from ekiden.methods import LAP, METHODS

    if not isinstance(values, dict):
        raise UserError(
            "the terms of the run cannot be read: they do not say what is run, as the "
            f"{AGREEMENT} of a run's folder does"
        )
    # a function that a trusted file also holds must not run as something else, such as the metric
    _refuse_code(with_code(values, lambda name: ""))
    values = with_code(values, own)
    name = values.get("method")
    known = [kind.title() + lap for kind in METHODS for lap in ("", LAP)]
    if not isinstance(name, str) or not (name in known or outside.is_file(name)):
        raise UserError(
            f"the terms of the run cannot be read: {str(name)[:40]!r} is not a method that silos "
            "know"
        )
    return recipe_of(values, _reader())


def _refuse_code(values: object) -> None:
    """Refuse values, as JSON gives them, that hold the name of code in a file."""
    if isinstance(values, str) and outside.is_file(values):
        no_code(values)
    if isinstance(values, dict):
        values = [*values.values()]
    if isinstance(values, list):
        for value in values:
            _refuse_code(value)


def _reader() -> str:
    return f"Ekiden {code_version()} at all parties"


def check_name(name: object, where: str) -> str:
    """Return a silo's name. It must also do as the name of a file, and not mean another party in
    messages, such as the server, whose seals nobody signs.
    """
    if not isinstance(name, str) or not _CLIENT.fullmatch(name):
        raise UserError(
            f"{where}: {str(name)[:80]!r} is not the name of a silo: use letters, digits, '-', '_' "
            "and '.'"
        )
    if name in (SERVER, EVERYONE):
        raise UserError(
            f"{where}: no silo can be called {name!r}, which means another party; give it another "
            "name"
        )
    return name


def check_names(names: Sequence[str], where: str) -> None:
    """Refuse what is not the name of a silo, and a name that is there twice."""
    known = set[str]()
    for name in names:
        check_name(name, where)
        if name in known:
            raise UserError(f"{where} names {name!r} twice: give each silo its own name")
        known.add(name)


def no_samples(agreed: Agreement) -> Dataset:
    """Return the coordinator's data set, which has no samples."""
    inputs = of_terms(agreed.inputs)
    none = Samples(
        torch.empty(0, *agreed.shape, dtype=inputs.dtype), torch.empty(0, dtype=torch.int64)
    )
    names = agreed.classes
    scale = (agreed.mean, agreed.std)
    augment = agreed.augment
    return Dataset(
        agreed.dataset, none, none, names, (), *scale, augment, agreed.labels, inputs=inputs
    )


def own_network(name: str, folder: Path) -> str:
    """Return the name of a silo's own copy of a network. No other party chooses its files; what is
    code in a file, `parse` has found here.
    """
    if outside.is_file(name):
        kind = outside.load(name)
        # whoever trusts a file did not mean every function in it
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise UserError(
                f"{outside.short(name)} is not a class that derives from torch.nn.Module: silos call "
                "nothing else in a file as a network"
            )
    if name.startswith("timm:"):
        raise UserError(
            "the run's network comes from a hub, which a silo does not ask: use --model=hf:FOLDER"
        )
    return f"hf:{_own(name.removeprefix('hf:'), folder)}" if name.startswith("hf:") else name


def _own(name: str, folder: Path) -> Path:
    last = Path(name).name
    if not last or last == ".." or not (folder / last).exists():
        raise UserError(
            f"the run needs {last[:80]!r}, which is not in {folder}: put it there "
            "(pretrained.folder in the silo.toml)"
        )
    return folder / last


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


ROSTER = "roster.json"
_LONGEST_ROSTER = 1 << 20


@dataclass(frozen=True)
class Roster(Checked):
    """Who takes part."""

    # PEM text of the authority that signs the SuperLink's certificate
    certificate: str
    # their names, in the order that methods see
    silos: tuple[str, ...]
    # their public keys
    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        check_names(self.silos, "the roster")
        if len(self.silos) != len(self.keys):
            raise UserError("a roster names each silo with its key")
        for key in self.keys:
            keys.check(key)

    @property
    def key_of(self) -> dict[str, str]:
        """Return the public key of each silo."""
        return dict(zip(self.silos, self.keys, strict=True))

    def to_json(self) -> str:
        """Return the roster as text."""
        return json.dumps(plain(self), indent=1)


def read_roster(path: Path) -> Roster:
    """Return the roster in a file."""
    with at(str(path)):
        try:
            values = json.loads(read_regular(path, _LONGEST_ROSTER))
        except FileNotFoundError:
            raise UserError(
                "there is no such file: the coordinator's `ekiden federation init` wrote it"
            ) from None
        except (ValueError, RecursionError):
            raise UserError("this is not a roster: `ekiden federation init` writes one") from None
        with reading("the roster", "what `ekiden federation` wrote"):
            return made(Roster, values)
