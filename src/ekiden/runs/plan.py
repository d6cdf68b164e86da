"""A plan: everything that identifies a run over a named or stored data set, so that the run can be repeated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from torch import nn

from ekiden import api, models
from ekiden.base import outside
from ekiden.base.checks import BelowOne, Checked, Count, CountOrZero, made, plain
from ekiden.base.errors import UserError, at
from ekiden.base.settings import Hardware, Training
from ekiden.data import NAMED, Dataset, FederatedData, Iid, Reading, join, load, parse, silos, split
from ekiden.data import origin as origins
from ekiden.data.partition import Unmet
from ekiden.data.tasks import task_of
from ekiden.engine import networks
from ekiden.engine.drive import Row
from ekiden.engine.evaluation import EvaluateOn, TestSet
from ekiden.engine.folder import read_config, settings_in
from ekiden.engine.method import Method
from ekiden.engine.setup import check_labels, check_model, check_same_data, resolved_hardware, why_unusable
from ekiden.engine.worker import Setup, Watch, Worker
from ekiden.methods import method_of, name_of, plan_of
from ekiden.models import training_part

M = TypeVar("M", bound=Method)
GIVE_AGAIN = "as in ekiden.resume(folder, silos, network=...) and ekiden.evaluate(folder, silos)"
TaskName = Literal["auto", "classification", "multi-label", "regression", "segmentation", "language-modelling"]


@dataclass(frozen=True)
class Plan(Checked, Generic[M]):
    """A method, data, a network and how to train it."""

    method: M
    data: str = "digits"
    """name of a data set (see `ekiden list`), a folder of class folders or domain/class folders, a table (Parquet,
    CSV), or arrays (.npz, safetensors)"""
    partition: str = "auto"
    """who holds what: iid, dirichlet:BETA, domains[:A,B,...], classes:K, natural; auto: natural with --silos or
    --group-column, by domain where the data have domains, else dirichlet:0.5, or iid if samples are few"""
    clients: Count | None = None
    """N, number of clients; by default one per domain or natural owner, else 10, fewer if samples are few"""
    size: Count | None = None
    """side of the images in pixels, if not the data set's own"""
    without: str = ""
    """clients to leave out, with their test data: names separated by commas; the data of the others do not change"""
    val_fraction: BelowOne = 0.1
    """share of each client's training data that is used to select epochs"""
    silos: tuple[str, ...] = ()
    """instead of --data, the files or folders of the silos; or one folder that holds a file or a folder for each; or a
    TOML file that names them"""
    model: str = "auto"
    """network (see `ekiden list`); auto: the one that fits the data"""
    pretrained: str = ""
    """safetensors file with the network's values, by name; a head of another size is left out"""
    train: str = "all"
    """the part that is trained: all; head; last:K, the last K blocks and the head;
    lora:r=8,alpha=16,targets=query+value, adapters of low rank and the head. The rest is frozen: it does not travel,
    and stays in evaluation mode"""
    task: TaskName = "auto"
    """what the labels mean; auto decides by their values"""
    metric: str = ""
    """headline metric, which chooses epochs and which tables show: its name (see docs/tasks.md), or FILE.py:NAME of a
    function (answers, labels) -> number. If you name one, all metrics are measured. By default the task's first, such
    as accuracy"""
    reading: Reading = field(default_factory=Reading)
    training: Training = field(default_factory=Training)
    hardware: Hardware = field(default_factory=Hardware)
    seed: CountOrZero = 0
    """seed of everything random: partition, initial model, training"""
    workers: Count = 1
    """number of processes for the independent tasks of one run"""
    evaluate_every: Count = 1
    """steps between evaluations on the test data"""
    data_seed: CountOrZero | None = None
    """seed of the partition, if not --seed: the same silos for all --seeds"""
    tune: bool = False
    """measure on the clients' validation data, not on the test data, to choose settings"""
    keep_trained: bool = False
    """keep the models that each client's last task trained. `ekiden report` then shows distances in a pool and the loss
    around it"""
    evaluate_on: EvaluateOn = "all"
    """measure personal models on all test data, or each on its own client's only, in 1/N of the time. With own, the
    models that clients trained last in the step are also measured, before any averaging (client_mean_trained)"""

    def __post_init__(self) -> None:
        """Find the run, the network and the file that the settings name."""
        training_part.parsed(self.train)
        method, model, pretrained = self.method.with_source(self.model, self.pretrained)
        object.__setattr__(self, "method", method)
        object.__setattr__(self, "pretrained", models.located_file(pretrained))
        object.__setattr__(self, "model", models.located(model))
        if self.model != "auto":
            models.check_name(self.model)  # before slow work
        if self.partition != "auto":
            parse(self.partition)

    def federation(self, dataset: Dataset | None = None) -> FederatedData:
        """Return the data, divided among the clients. Pass `dataset` if the data are already loaded."""
        data = self._with_metric(self._divided(dataset))
        data = data.without(*self.without.split(",")) if self.without else data
        return data.for_tuning() if self.tune else data

    def _with_metric(self, data: FederatedData) -> FederatedData:
        """Return the data with the headline metric that the plan names."""
        task = replace(data.dataset.task, metric=self.metric) if self.metric else data.dataset.task
        _ = task.headline  # raises if there is no such metric
        return data.with_task(task) if self.metric else data

    def _divided(self, dataset: Dataset | None) -> FederatedData:
        if self.silos and (self.partition != "auto" or self.clients is not None):
            raise UserError("--silos says which silo holds what: leave out --partition and --clients")
        if dataset is None and not self.silos:
            given = silos(self.data, val_fraction=self.val_fraction, seed=self._data_seed)
            if given is not None:
                if self.partition != "auto" or self.clients is not None or self.reading != Reading():
                    raise UserError(
                        f"{self.data} says which silo holds what: leave out --partition, --clients and flags of columns"
                    )
                if self.task not in ("auto", given.dataset.task.kind):
                    raise UserError(
                        f"{self.data} says what the labels mean ({given.dataset.task.kind}): leave out --task"
                    )
                return given
        dataset = dataset or self.dataset()
        natural = "natural" if dataset.groups else "domains" if dataset.domains else "dirichlet:0.5"
        partition = parse(natural if self.partition == "auto" else self.partition)
        how: dict[str, Any] = {"seed": self._data_seed, "val_fraction": self.val_fraction}
        try:
            return split(dataset, partition, self.clients, **how)
        except Unmet:
            if self.partition != "auto":
                raise
            return split(dataset, Iid(), self.clients, **how)  # few samples: each client gets some of them

    @property
    def _data_seed(self) -> int:
        return self.seed if self.data_seed is None else self.data_seed

    def dataset(self) -> Dataset:
        """Return the data before they are divided."""
        return loaded(self.data, self.silos, self.size, self.reading.for_model(self.model), self.task)

    def other(self, data: str, own: Dataset) -> Dataset:
        """Return other data to measure a model on, read and scaled as the run's `own` data."""
        if data in NAMED and own.inputs.sized and self.reading == Reading() and not self.silos:
            task = "" if self.task == "auto" else self.task
            return load(data, size=own.shape[-1] if len(own.shape) == 3 else None, task=task)
        chosen = self.reading.with_schema().for_model(self.model).chosen()
        for column in ("schema", "group_column", "subject_column", "time_column"):  # which the other data need not have
            chosen.pop(column, None)
        return load(data, like=own, **chosen)

    def run(
        self,
        folder: Path,
        data: FederatedData,
        watch: Watch | None = None,
        on_step: Callable[[Row], None] = lambda row: None,
        on_start: Callable[[], None] = lambda: None,
        about: Mapping[str, Any] | None = None,
        track: Sequence[str] = (),
        *,
        quiet: bool = True,
    ) -> api.Result:
        """Run it over `data` (from `federation`) in `folder`, or resume it; note `about` in a new folder."""
        return api.run(
            self.method,
            data,
            self.model,
            training=self.training,
            hardware=self.hardware,
            seed=self.seed,
            folder=folder,
            workers=self.workers,
            evaluate_every=self.evaluate_every,
            config={**self._noted(folder), **(about or {})},
            watch=watch,
            on_start=on_start,
            on_step=on_step,
            keep_trained=self.keep_trained,
            evaluate_on=self.evaluate_on,
            train=self.train,
            pretrained=self.pretrained,
            track=track,
            quiet=quiet,
        )

    def _noted(self, folder: Path) -> dict[str, Any]:
        """Return what a run folder says about the plan; one from Python has an origin of data instead."""
        if (folder / "config.json").exists() and "plan" not in (config := read_config(folder)):
            return {name: value for name, value in config.items() if name in config.get("own", ())}
        return {"plan": self.to_json()}

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        name = name_of(type(self.method))
        values = plain(self) | {"method": name, "hyperparameters": plain(self.method)}
        values |= {"reading": self.reading.chosen()}
        if self.data_seed is None:
            del values["data_seed"]
        code = outside.digests((name, self.model, self.data, self.metric, self.reading.sample_kind))
        return values | ({"code": code} if code else {})


def loaded(data: str, silos: tuple[str, ...], size: int | None, reading: Reading, task: TaskName = "auto") -> Dataset:
    """Return the data that `data` names, or the files of `silos`."""
    how: dict[str, Any] = {"size": size, "task": "" if task == "auto" else task, **reading.chosen()}
    return join(silos, **how) if silos else load(data, **how)


def from_json(values: dict[str, Any]) -> Plan[Method]:
    """Return the plan with these plain values."""
    outside.refuse_changed(values.get("code", {}))
    given = {name: value for name, value in values.items() if name != "code"}
    return plan_of(Plan, given, "the version of Ekiden that wrote it")


def stored(folder: Path) -> Plan[Method]:
    """Return the plan of a run folder."""
    return plan_in(read_config(folder), folder)


def plan_in(config: Mapping[str, Any], where: Path) -> Plan[Method]:
    """Return the plan in the configuration of a run."""
    if config.get("on") == "flower":
        raise UserError(f"{where} is a run over silos, which keep its data: `ekiden show` prints what they measured")
    with at(str(where)):
        return from_json(config["plan"]) if "plan" in config else _from_python(config)


def federation_in(config: Mapping[str, Any], where: Path) -> FederatedData:
    """Read and divide the data of a run again.

    Raises:
        UserError: they were made in Python or stayed at silos, cannot be read, or have changed.
    """
    plan = plan_in(config, where) if "plan" in config or config.get("on") else _data_in(config)
    data = plan.federation()
    check_same_data(config, plan.method, data, where)
    return data


def _from_python(config: Mapping[str, Any]) -> Plan[Method]:
    """Return the plan of a run that was started in Python, if data and network are not of its session only."""
    plan = _data_in(config)
    if why := in_memory(config):
        raise UserError(f"{why}: give it again, {GIVE_AGAIN}")
    training, hardware = settings_in(config)
    return replace(
        plan,
        model=config["model"],
        keep_trained=config.get("keep_trained", False),
        train=config["train"],
        pretrained=config["pretrained"],
        metric=config["task"].get("metric", ""),
        training=training,
        hardware=hardware,
        seed=config["seed"],
        workers=config["workers"],
        evaluate_every=config["evaluate_every"],
        evaluate_on=config["evaluate_on"],
    )


def _data_in(config: Mapping[str, Any]) -> Plan[Method]:
    """Return a plan with the method and the data of a run that was started in Python."""
    origin = origins.from_json(config.get("origin", {}))
    if not origin.kept:
        raise UserError(f"{in_memory(config)}: give them again, {GIVE_AGAIN}")
    return Plan(
        method_of(config),
        data=origin.data or "digits",
        silos=origin.silos,
        partition="auto" if origin.silos else origin.partition,
        clients=None if origin.silos else origin.clients,
        size=origin.size,
        without=",".join(origin.without),
        val_fraction=origin.val_fraction,
        data_seed=origin.seed,
        task=origin.task or "auto",  # type: ignore[arg-type]  # Plan checks it
        reading=made(Reading, origin.reading),
        tune=origin.tune,
    )


def in_memory(config: Mapping[str, Any]) -> str:
    """Say what only the Python session had that started a run; empty if its folder tells everything."""
    if "plan" in config:
        return ""
    if config.get("on"):
        return "its data stayed at the silos"
    if not origins.from_json(config.get("origin", {})).kept:
        return "its data were given in Python"
    if config["network"] is None:
        return f"its network ({config['model']}) was made in Python"
    metric = config["task"].get("metric", "")
    known = {one.name for one in task_of(config["task"]).metrics}
    return "" if not metric or metric in known or outside.is_file(metric) else f"its metric ({metric}) is a function"


def rerun(
    before: Mapping[str, Any],
    method: Method,
    data: FederatedData,
    model: str | nn.Module | Callable[[], nn.Module],
    folder: Path,
    **more: Any,
) -> api.Result:
    """Run what the configuration of a run from Python says, in a new folder or in its own.

    Args:
        before: the configuration; its data, method and network are the other arguments.
        method: the method.
        data: who holds what.
        model: the network.
        folder: the run folder.
        **more: further arguments of `ekiden.run`.
    """
    training, hardware = settings_in(before)
    return api.run(
        method,
        data,
        model,
        training=training,
        hardware=hardware,
        seed=before["seed"],
        folder=folder,
        workers=before["workers"],
        evaluate_every=before["evaluate_every"],
        evaluate_on=before["evaluate_on"],
        train=before["train"],
        pretrained=before["pretrained"],
        keep_trained=before.get("keep_trained", False),
        **more,
    )


def judge(plan: Plan[Method], own: FederatedData, data: FederatedData) -> TestSet:
    """Return what measures models that `plan` trained on `own` on the test samples of `data`, on the CPU."""
    build = networks.builder(plan.model, own, plan.seed, plan.method, plan.train, plan.pretrained)
    device = "cpu" if why_unusable(plan.hardware.device) else plan.hardware.device
    hardware = resolved_hardware(replace(plan.hardware, device=device), 1, build)
    # Samples are prepared as in training, because the network knows no other scale of the pixels.
    dataset = replace(data.dataset, mean=own.dataset.mean, std=own.dataset.std, task=own.dataset.task)
    worker = Worker(Setup(plan.method, build, dataset, plan.training, hardware, plan.seed), {})
    data = replace(data, dataset=dataset)
    check_labels(data)
    check_model(worker, data)
    return TestSet(worker, data, len(own.clients))
