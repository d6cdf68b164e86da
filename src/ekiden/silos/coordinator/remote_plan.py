"""The plan of a run over silos, and its repetition without one of them, or with one more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from ekiden.core.base import outside
from ekiden.core.base.checks import Checked, Mark, Positive, made, plain, reading
from ekiden.core.base.errors import UserError, unknown
from ekiden.core.base.files import read_text
from ekiden.core.engine.folder import read_config
from ekiden.core.engine.method import Method
from ekiden.methods import among
from ekiden.runs.recipe import Recipe, recipe_of
from ekiden.silos.coordinator.courier import Absent
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust.agreement import Revision, check_names

M = TypeVar("M", bound=Method)
_READER = "the same Ekiden at the SuperLink"


@dataclass(frozen=True)
class RemotePlan(Checked, Generic[M]):
    """The plan of a run over silos: a method, the silos, a network and how to train it."""

    recipe: Recipe[M]
    clients: str = ""
    """names of the silos, separated by commas, in the order in which methods visit
    them"""
    data: str = ""
    """which data set each silo uses, if its file names several (a table [data.NAME] for each)"""
    patience: Positive = 3600.0
    """seconds without a sign of life before a silo counts as missing"""
    absent: Absent = "stop"
    """what to do about a missing silo: wait without end; skip it, so that a hop is left out and a
    round continues with the silos that replied; or stop the run, which `ekiden resume` continues"""
    evaluate_dp: str = agreements.NOISE
    """noise of what silos tell about models, for each test sample in the whole run:
    epsilon=2,delta=1e-5 (honest=h: shared by h silos); exact, which silos refuse by default; or none:
    nothing is measured, not even the result"""
    revises: Annotated[str, Mark.HIDDEN] = ""
    """the run that this one replaces, as `ekiden forget` and `ekiden join` write it"""

    def __post_init__(self) -> None:
        if outside.is_file(self.recipe.metric):
            raise UserError(
                f"--metric {self.recipe.metric} is code, which silos do not run for others: choose "
                "a name"
            )
        if self.recipe.evaluate_on != "all":
            raise UserError(
                "--evaluate-on is for runs on one machine: silos have their own test data; leave "
                "it out"
            )
        dp = agreements.counted_with(self.evaluate_dp)
        if dp is not None:
            object.__setattr__(self, "evaluate_dp", str(dp))
        object.__setattr__(self, "recipe", self.recipe.located())
        check_names(self.names, "--clients")

    @property
    def names(self) -> tuple[str, ...]:
        """The silos' names."""
        return tuple(self.clients.split(",")) if self.clients else ()

    def to_json(self) -> dict[str, Any]:
        return plain(self) | {"recipe": self.recipe.to_json()}


@dataclass(frozen=True)
class Measuring(Checked):
    """What silos measure of a model that is finished."""

    # folder of the run, over silos or on one machine
    run: str
    # on validation samples, not on test samples
    validation: bool = False
    # columns that divide test samples into subgroups
    by: tuple[str, ...] = ()
    # safetensors file of the values that are measured instead of the run's model
    weights: str = ""


def from_json(values: Mapping[str, Any]) -> RemotePlan[Method]:
    """Return the plan with these plain values."""
    recipe = recipe_of(values.get("recipe"), _READER)
    with reading("the plan", _READER):
        return made(RemotePlan, {**values, "recipe": recipe})


def check(plan: RemotePlan[Method]) -> None:
    """Refuse a plan that cannot run between silos."""
    method = plan.recipe.method
    clients = plan.names
    if not clients:
        raise UserError("say where the silos are: --federation FOLDER, or --clients NAME,NAME,...")
    if method.traits.pools_data:
        raise UserError(
            f"{method.title()} brings all data to one place: it runs in simulation only"
        )
    if plan.absent == "skip" and not method.traits.skips:
        raise UserError(
            f"{method.title()} needs every silo in every step: choose --absent wait or stop, not "
            "skip"
        )
    method.check(clients)


def stored(folder: Path) -> RemotePlan[Method] | None:
    """Return the plan of a run folder; None if the run is not over silos."""
    config = read_config(folder)
    if config.get("on") != "flower":
        return None
    try:
        return from_json({**config["remote_plan"], "recipe": config["recipe"]})
    except (LookupError, TypeError):
        raise UserError(
            f"{folder / 'config.json'} does not say how the run goes: the run folder is damaged"
        ) from None


def without(folder: Path, client: str, release: Path | None = None) -> RemotePlan[Method]:
    """Return the plan of the run in `folder` among all its silos except `client`.

    In the file `release`, made by `ekiden silo release`, it agrees to sums with it and without it.
    """
    plan = _stored(folder)
    if client not in plan.names:
        raise unknown("silo", client, plan.names)
    if len(plan.names) == 1:
        raise UserError(f"{client} is the only silo of {folder}: delete the folder")
    return _among(folder, plan, [name for name in plan.names if name != client], client, release)


def with_one_more(folder: Path, client: str, release: Path | None = None) -> RemotePlan[Method]:
    """Return the plan of the run in `folder` among all its silos and `client`, which comes last;
    see `without`.
    """
    plan = _stored(folder)
    if client in plan.names:
        raise UserError(f"{client} is in {folder} already: name a silo that is not")
    return _among(folder, plan, [*plan.names, client], client, release)


def _stored(folder: Path) -> RemotePlan[Method]:
    plan = stored(folder)
    if plan is None:
        raise UserError(f"{folder} is of a run on one machine")
    return plan


def _among(
    folder: Path, plan: RemotePlan[Method], names: Sequence[str], client: str, release: Path | None
) -> RemotePlan[Method]:
    """Return the plan among `names`, which names the run that it replaces."""
    before = agreements.of_run(folder)
    try:
        signed = read_text(release).strip() if release else ""
    except OSError as error:
        raise UserError(
            f"cannot read {release} ({error}): `ekiden silo release` makes it"
        ) from None
    revision = Revision(
        before.run, before.digest, "with" if client in names else "without", client, signed
    )
    recipe = replace(plan.recipe, method=among(plan.recipe.method, names))
    return replace(plan, recipe=recipe, clients=",".join(names), revises=revision.text())
