"""A plan: everything that identifies a run over a named or stored data set, also as a file of
settings.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_type_hints

from ekiden.core.base import outside
from ekiden.core.base.checks import (
    BelowOne,
    Checked,
    Count,
    CountOrZero,
    all_but,
    made,
    plain,
    reading,
)
from ekiden.core.base.errors import UserError, at, unknown
from ekiden.core.base.files import read_toml
from ekiden.core.base.settings import Hardware, Training
from ekiden.core.data.samples import Dataset, FederatedData, Origin
from ekiden.core.engine.folder import read_config, settings_in, write_config
from ekiden.core.engine.method import Method
from ekiden.core.engine.setup import check_same_data
from ekiden.core.models import catalogue
from ekiden.core.tasks import task_of
from ekiden.core.training import loop as own_loop
from ekiden.methods import method_named
from ekiden.readers.columns import Reading, listed
from ekiden.readers.holdings import located_silo
from ekiden.readers.partition import Iid, Unmet, parse, split
from ekiden.readers.sources import join, load, located, silos
from ekiden.runs import api
from ekiden.runs.loaded_model import ModelSource
from ekiden.runs.recipe import Recipe, recipe_of

M = TypeVar("M", bound=Method)
GIVE_AGAIN = "as in ekiden.resume(folder, silos, network=...) and ekiden.evaluate(folder, silos)"
TaskName = Literal[
    "auto",
    "classification",
    "multi-label",
    "regression",
    "survival",
    "segmentation",
    "language-modelling",
]


@dataclass(frozen=True)
class Plan(Checked, Generic[M]):
    """A method, data, a network and how to train it."""

    recipe: Recipe[M]
    data: str = "digits"
    """name of a data set (see `ekiden list`), a folder of class folders or domain/class folders, a
    table (Parquet, CSV), or arrays (.npz, safetensors)"""
    partition: str = "auto"
    """who holds what: iid, dirichlet:BETA, domains[:A,B,...][:dirichlet:BETA] (with labels skewed
    within domains), classes:K, natural; auto: natural with --silos or --group-column, by domain
    where the data have domains, else dirichlet:0.5, or iid if samples are few"""
    clients: Count | None = None
    """N, number of clients; by default one per domain or natural owner, else 10, fewer if samples
    are few"""
    size: Count | None = None
    """side of the images in pixels, if not the data set's own"""
    without: str = ""
    """clients to leave out, with their test data, as if they had never been there: names separated
    by commas"""
    val_fraction: BelowOne = 0.1
    """share of each client's training data that is used to select epochs"""
    silos: tuple[str, ...] = ()
    """instead of --data, the files or folders of the silos; or one folder that holds a file or a
    folder for each; or a TOML file that names them"""
    task: TaskName = "auto"
    """what the labels mean; auto decides by their values"""
    reading: Reading = field(default_factory=Reading)
    hardware: Hardware = field(default_factory=Hardware)
    workers: Count = 1
    """number of processes for the independent tasks of one run"""
    data_seed: CountOrZero | None = None
    """seed of the partition, if not --seed: the same silos for all --seeds"""
    subset: Count | None = None
    """use only so many random training samples, to try a command quickly"""
    tune: bool = False
    """measure on the clients' validation data, not on the test data, to choose settings"""

    def __post_init__(self) -> None:
        """Find the run, the network and the files that the recipe names."""
        object.__setattr__(self, "recipe", self.recipe.located())
        if self.recipe.model != "auto":
            # before slow work
            catalogue.check_name(self.recipe.model)
        if self.partition != "auto":
            parse(self.partition)

    def federation(self) -> FederatedData:
        """Return the data, divided among the clients."""
        late = tuple(filter(None, self.without.split(",")))
        early: tuple[str, ...] = ()
        natural = self.partition in ("auto", "natural") and not self.clients
        if self.reading.group_column and natural:
            # read as if they had never been there
            early, late = late, early
        data = api.with_metric(self._divided(early), self.recipe.metric)
        if late:
            data = data.without(*late)
        if self.tune:
            data = data.for_tuning()
        return data

    def _divided(self, without: Sequence[str] = ()) -> FederatedData:
        if self.silos and (self.partition != "auto" or self.clients is not None):
            raise UserError(
                "--silos says which silo holds what: leave out --partition and --clients"
            )
        if not self.silos:
            given = silos(self.data, val_fraction=self.val_fraction, seed=self._data_seed)
            if given is not None:
                if (
                    self.partition != "auto"
                    or self.clients is not None
                    or self.subset is not None
                    or self.reading != Reading()
                ):
                    raise UserError(
                        f"{self.data} says which silo holds what: leave out --partition, "
                        "--clients, --subset and columns"
                    )
                if self.task not in ("auto", given.dataset.task.kind):
                    raise UserError(
                        f"{self.data} says what the labels mean ({given.dataset.task.kind}): leave "
                        "out --task"
                    )
                return given
        dataset = self.dataset(without)
        chosen = self.partition
        if chosen == "auto":
            chosen = _usual(dataset)
        how: dict[str, Any] = {"seed": self._data_seed, "val_fraction": self.val_fraction}
        try:
            return split(dataset, parse(chosen), self.clients, **how)
        except Unmet:
            if self.partition != "auto":
                raise
            # few samples: each client gets some of them
            return split(dataset, Iid(), self.clients, **how)

    @property
    def _data_seed(self) -> int:
        return self.recipe.seed if self.data_seed is None else self.data_seed

    def dataset(self, without: Sequence[str] = ()) -> Dataset:
        """Return the data before they are divided, without some natural owners."""
        columns = self.reading.for_model(self.recipe.model).chosen()
        how: dict[str, Any] = {"size": self.size, "task": self.task.replace("auto", ""), **columns}
        found = join(self.silos, **how) if self.silos else load(self.data, without=without, **how)
        if self.subset is None:
            return found
        return found.subset(self.subset, self._data_seed)

    def run(
        self,
        folder: Path,
        data: FederatedData,
        about: Mapping[str, Any] | None = None,
        how: api.How | None = None,
    ) -> api.Result:
        """Run it over `data` (from `federation`) in `folder`, or resume it; note `about` in a new
        folder. `how` says who follows the run; hardware and workers are those of the plan.
        """
        config = {**self._noted(folder), **(about or {})}
        here = replace(
            how or api.How(quiet=True),
            hardware=self.hardware,
            folder=folder,
            workers=self.workers,
            config=config,
        )
        return api.prepared(self.recipe, data, here).end()

    def _noted(self, folder: Path) -> dict[str, Any]:
        """Return what a run folder says about the plan; one from Python has an origin of data
        instead.
        """
        if (folder / "config.json").exists() and "plan" not in read_config(folder):
            return {}
        return {"plan": all_but(self.to_json(), "recipe")}

    def to_json(self) -> dict[str, Any]:
        values = plain(self) | {"recipe": self.recipe.to_json(), "reading": self.reading.chosen()}
        for name in ("data_seed", "subset"):
            if values[name] is None:
                del values[name]
        files = (
            self.recipe.name,
            self.recipe.model,
            self.data,
            self.recipe.metric,
            self.reading.sample_kind,
            own_loop.name_of(self.recipe.training.loop),
        )
        code = outside.digests(files)
        if code:
            values["code"] = code
        return values


def _usual(dataset: Dataset) -> str:
    """Return how a data set is divided if nobody says: as it came, if it has silos or domains."""
    if dataset.groups:
        return "natural"
    if dataset.domains:
        return "domains"
    return "dirichlet:0.5"


def from_json(values: dict[str, Any]) -> Plan[Method]:
    """Return the plan with these plain values."""
    outside.refuse_changed(values.get("code", {}))
    with reading("the plan"):
        return made(Plan, all_but(values, "code") | {"recipe": recipe_of(values.get("recipe"))})


def stored(folder: Path) -> Plan[Method]:
    """Return the plan of a run folder."""
    return plan_in(read_config(folder), folder)


def plan_in(config: Mapping[str, Any], where: Path) -> Plan[Method]:
    """Return the plan in the configuration of a run."""
    if config.get("on") == "flower":
        raise UserError(
            f"{where} is a run over silos, which keep its data: add --on flower, or see `ekiden "
            "show`"
        )
    with at(str(where)):
        if "plan" in config:
            return from_json({**config["plan"], "recipe": config["recipe"]})
        return _from_python(config)


def refuse_lost(plan: Plan[Any], folder: Path) -> None:
    """Refuse to go on with a run whose data are not where they were."""
    named = plan.silos or (plan.data,)
    paths = [Path(one.rpartition("=")[2]) for one in named if not outside.is_file(one)]
    if lost := next((path for path in paths if path.is_absolute() and not path.exists()), None):
        raise UserError(f"{lost}, the data of {folder}, is not there: say where by --data")


def go_on_with(folder: Path, data: Sequence[str] = (), laps: int | None = None) -> None:
    """Note where the data of a run are now, and that it may make more laps.

    Raises:
        UserError: the data are others, or the run does not stop at a limit of laps.
    """
    config = read_config(folder)
    if config.get("on") == "flower":
        raise UserError(
            f"{folder} is a run between machines, whose silos signed its laps and hold its data: "
            f"leave out --laps and --data, or start a new run with more --laps"
        )
    recipe = recipe_of(config["recipe"])
    if laps is not None:
        if recipe.method.traits.limit != "laps":
            raise UserError(f"{recipe.name} does not stop at a limit of laps: leave out --laps")
        if laps <= config["recipe"]["hyperparameters"]["laps"]:
            raise UserError(f"{folder} makes so many laps already: give more --laps than {laps}")
        if (folder / "model.safetensors").exists():
            raise UserError(f"{folder} has ended: leave out --laps")
        recipe = replace(recipe, method=replace(recipe.method, **{"laps": laps}))
        steps = recipe.method.steps(len(config["clients"]))
        config |= {"recipe": recipe.to_json(), "steps": steps}
    if data:
        plan = plan_in(config, folder)
        places = tuple(map(located_silo, data))
        one = located(data[0])
        if plan.silos:
            one = plan.data
        else:
            places = ()
        plan = replace(plan, silos=places, data=one)
        held = plan.federation()
        check_same_data(config, recipe.method, held, folder)
        if json.loads(json.dumps(held.dataset.inputs.to_json())) != config["inputs"]:
            raise UserError(
                f"columns or scale of {data[0]} differ from what {folder} was made with"
            )
        config["dataset"] = held.dataset.name
        if "plan" in config:
            config["plan"] = all_but(plan.to_json(), "recipe")
        else:
            config["origin"] = held.origin.to_json() if held.origin else {}
    write_config(folder, config)


def federation_in(config: Mapping[str, Any], where: Path) -> FederatedData:
    """Read and divide the data of a run again."""
    plan = plan_in(config, where) if "plan" in config or config.get("on") else _data_in(config)
    data = plan.federation()
    check_same_data(config, plan.recipe.method, data, where)
    return data


def _from_python(config: Mapping[str, Any]) -> Plan[Method]:
    """Return the plan of a run that was started in Python, if data and network are not of its
    session only.
    """
    plan = _data_in(config)
    if why := in_memory(config):
        raise UserError(f"{why}: give it again, {GIVE_AGAIN}")
    hardware = settings_in(config)[1]
    workers = config["workers"]
    return replace(plan, recipe=recipe_of(config["recipe"]), hardware=hardware, workers=workers)


def _data_in(config: Mapping[str, Any]) -> Plan[Method]:
    """Return a plan with the recipe and the data of a run that was started in Python."""
    origin = Origin.from_json(config.get("origin", {}))
    if not origin.kept:
        raise UserError(f"{in_memory(config)}: give them again, {GIVE_AGAIN}")
    if origin.silos:
        origin = replace(origin, partition="auto", clients=None)
    # the network may be of the session only
    return Plan(
        replace(recipe_of(config["recipe"]), model="auto"),
        data=origin.data or "digits",
        silos=origin.silos,
        partition=origin.partition,
        clients=origin.clients,
        size=origin.size,
        without=",".join(origin.without),
        val_fraction=origin.val_fraction,
        data_seed=origin.seed,
        task=origin.task or "auto",  # type: ignore[arg-type]  # Plan checks it
        reading=made(Reading, origin.reading),
        tune=origin.tune,
    )


def in_memory(config: Mapping[str, Any]) -> str:
    """Say what only the Python session had that started a run; empty if its folder tells
    everything.
    """
    if "plan" in config:
        return ""
    if config.get("on"):
        return "its data stayed at the silos"
    if not Origin.from_json(config.get("origin", {})).kept:
        return "its data were given in Python"
    if config["network"] is None:
        return f"its network ({config['recipe']['model']}) was made in Python"
    metric = config["task"].get("metric", "")
    known = task_of(config["task"]).by_name()
    if not metric or metric in known or outside.is_file(metric):
        return ""
    return f"its metric ({metric}) is a function"


def rerun(
    before: Mapping[str, Any],
    recipe: Recipe[Method],
    data: FederatedData,
    network: ModelSource | None,
    how: api.How,
) -> api.Result:
    """Run what the configuration of a run from Python says, on the hardware of that run."""
    here = replace(how, hardware=settings_in(before)[1], workers=before["workers"])
    return api.prepared(recipe, data, here, network).end()


_PARTS: dict[str, type[Any]] = {"reading": Reading, "training": Training, "hardware": Hardware}


@cache
def common_settings() -> dict[str, Any]:
    """Return the type of every setting that all methods share, by its name."""
    own = all_but(settings_of(Plan) | settings_of(Recipe), "recipe", "method", "seed", *_PARTS)
    return own | settings_of(Reading) | settings_of(Training) | settings_of(Hardware)


@cache
def settings_of(kind: type[Any]) -> dict[str, Any]:
    """Return the type of every field of a method, or of another record of settings, by its name."""
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind)}


def plan_of(method: str, values: Mapping[str, Any]) -> Plan[Method]:
    """Return the plan of `method` with these settings."""
    kind = method_named(method)
    hints = common_settings() | settings_of(kind) | {"seed": int}
    for name in values:
        if name not in hints:
            raise unknown(f"setting of {kind.title()}", name, hints)

    def of(part: type[Any]) -> dict[str, Any]:
        return listed({f.name: values[f.name] for f in fields(part) if f.name in values})  # type: ignore[no-any-return]

    parts = {name: made(part, of(part)) for name, part in _PARTS.items()}
    recipe = made(
        Recipe, of(Recipe) | {"training": parts.pop("training"), "method": made(kind, of(kind))}
    )
    plan = made(Plan, of(Plan) | parts | {"recipe": recipe})
    places = tuple(map(located_silo, plan.silos))
    data = outside.located(plan.data)
    columns = plan.reading.located()
    return replace(plan, data=data, silos=places, reading=columns)


def read(path: Path, method: str = "") -> Plan[Method]:
    """Read the plan in a file of settings."""
    values = read_toml(path, "`ekiden run METHOD --print-config` writes such a file")
    with at(str(path)):
        named = values.pop("method", method)
        if not isinstance(named, str) or not named:
            raise UserError('it names no method: add a line such as method = "fedseq"')
        if method and method_named(named) is not method_named(method):
            raise UserError(f"it is for {named}, not for {method}: leave out one of them")
        return plan_of(named, values)


def written(plan: Plan[Any]) -> str:
    """Return all settings of a plan as the text of such a file."""
    own = plain(plan)
    recipe, columns, hardware = map(own.pop, ("recipe", "reading", "hardware"))
    training = recipe.pop("training")
    hyper = recipe.pop("method")
    text = ""
    for part in ({"method": plan.recipe.name}, hyper, own, columns, recipe, training, hardware):
        for name, value in part.items():
            if value is not None:
                text += f"{name} = {_toml(value)}\n"
    return text


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
