"""A plan: everything that identifies a run over a named or stored data set, so that the run can be repeated."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from ekiden import api, models
from ekiden.base import outside
from ekiden.base.checks import BelowOne, Checked, Count, CountOrZero, plain
from ekiden.base.errors import UserError, at
from ekiden.base.settings import Hardware, Training
from ekiden.data import NAMED, Dataset, FederatedData, Reading, join, load, parse, silos, split
from ekiden.engine import networks
from ekiden.engine.drive import Row
from ekiden.engine.evaluation import EvaluateOn, TestSet
from ekiden.engine.folder import read_config
from ekiden.engine.method import Method
from ekiden.engine.setup import check_labels, check_model, resolved_hardware, why_unusable
from ekiden.engine.worker import Setup, Watch, Worker
from ekiden.methods import name_of, plan_of
from ekiden.models import training_part

M = TypeVar("M", bound=Method)
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
    --group-column, by domain where the data have domains, else dirichlet:0.5"""
    clients: Count | None = None
    """N, number of clients; by default one per domain or natural owner, else 10"""
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
            given = silos(self.data, val_fraction=self.val_fraction, seed=self.seed)
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
        auto = "natural" if dataset.groups else "domains" if dataset.domains else "dirichlet:0.5"
        partition = parse(auto if self.partition == "auto" else self.partition)
        return split(dataset, partition, self.clients, seed=self.seed, val_fraction=self.val_fraction)

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
        about: Mapping[str, Any] | None = None,
        track: Sequence[str] = (),
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
            config={"plan": self.to_json(), **(about or {})},
            watch=watch,
            on_step=on_step,
            keep_trained=self.keep_trained,
            evaluate_on=self.evaluate_on,
            train=self.train,
            pretrained=self.pretrained,
            track=track,
            quiet=True,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        name = name_of(type(self.method))
        values = plain(self) | {"method": name, "hyperparameters": plain(self.method)}
        values |= {"reading": self.reading.chosen()}
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
    if "plan" not in config and config.get("on") == "flower":
        raise UserError(f"{where} is a run over silos, which keep its data: `ekiden show` prints what they measured")
    if "plan" not in config:
        raise UserError(f"{where} was made from Python with its own data: continue it by `ekiden.run(..., folder=...)`")
    with at(str(where)):
        return from_json(config["plan"])


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
