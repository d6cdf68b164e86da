"""The result of a run: its models and numbers, in memory or from a run folder; a model takes
samples as they are.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ekiden.clinic.answers import further, subgroups_of
from ekiden.clinic.recalibration import Recalibrated, Recalibration, recalibration_in
from ekiden.clinic.regressions import Baseline, Coefficient, baseline_of, coefficients
from ekiden.clinic.subgroups import check_divisions, divisions
from ekiden.core.base.checks import made
from ekiden.core.base.errors import UserError, counted, unknown, visible
from ekiden.core.base.outside import require_extra, short
from ekiden.core.data.augment import normalise
from ekiden.core.data.samples import Dataset, FederatedData, Samples, said_in
from ekiden.core.engine.drive import Row
from ekiden.core.engine.evaluation import Built, TestSet
from ekiden.core.engine.folder import PassesOf, settings_in
from ekiden.core.engine.method import State
from ekiden.core.engine.setup import as_module, check_model, resolved_hardware, why_unusable
from ekiden.core.engine.transport import Transfer
from ekiden.core.engine.worker import Setup, Worker
from ekiden.core.tasks import Metric, Task, task_of
from ekiden.core.training.weights import Weights
from ekiden.readers.kinds import Images, Inputs, Table, Tokens, from_json
from ekiden.runs.clock import Devices, Timed, devices_of, timed

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

Part = Literal["all", "test"]

ModelSource = nn.Module | Callable[[], nn.Module]
"""The module that a run was started with, or a function that makes one; its values do not
matter."""


class LoadedModel(nn.Module):
    """A trained network that takes samples as they are, in evaluation mode.

    Attributes:
        network: the network alone, which takes normalised samples.
        classes: the class names, in the order of the outputs.
        shape: shape of one sample, (C, H, W) for images.
        mean: per channel, subtracted from pixels in [0, 1].
        std: per channel, divided by.
        inputs: the kind of samples, and how raw samples become tensors:
            `model.encoded(model.inputs.encode(files))`.
        task: the meaning of the outputs: `model.task.answers(outputs, full=True)` are
            probabilities, or values.
        recalibration: what was done to the logits of two classes, with the threshold that was
            chosen; None if nothing.
        baseline: of times and events, the hazard from which survival follows; None if the model has
            none.
    """

    def __init__(
        self,
        network: nn.Module,
        classes: tuple[str, ...],
        shape: tuple[int, ...],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        inputs: Inputs,
        task: Task,
        recalibration: Recalibration | None = None,
        baseline: Baseline | None = None,
    ) -> None:
        super().__init__()
        self.baseline = baseline
        self.network = network if recalibration is None else Recalibrated(network, recalibration)
        self.recalibration = recalibration
        self.classes = classes
        self.shape = shape
        self.mean = mean
        self.std = std
        self.inputs = inputs
        self.task = task
        self.eval()

    def forward(self, x: Any) -> Tensor:
        """Return outputs (b, K) for a batch; for classes these are logits.

        Args:
            x: tensor or array (b, *shape). uint8 pixels from 0 to 255, or float pixels in [0, 1];
                or float features, if the run had such data. Mean and standard deviation are applied
                here. Texts are (b, L) int64 tokens. Or what the run's data were made of: rows of a
                table (a frame, or a dict of columns), or a list of texts. Only with tensors, and by
                `encoded`, do the outputs have gradients.

        Raises:
            UserError: samples of another shape, or of another kind than the run's.
        """
        if not isinstance(x, Tensor):
            # whoever has frames and arrays goes on with NumPy
            with torch.no_grad():
                return self.encoded(self._tensor(x))
        if isinstance(self.inputs, Table):
            raise self._nameless("a tensor")
        return self.encoded(x)

    def encoded(self, x: Tensor) -> Tensor:
        """Return the outputs for samples as `model.inputs.encode` gives them: columns of tables are
        scaled.
        """
        tokens = self.inputs.ragged and x.ndim == 2
        if tuple(x.shape[1:]) != self.shape and not tokens:
            one = ""
            if tuple(x.shape) == self.shape:
                one = ", which is one sample: give x[None]"
            raise UserError(
                f"the model takes a batch of samples of shape {self.shape}, not "
                f"{tuple(x.shape)}{one}"
            )
        if (
            isinstance(self.inputs, Images)
            and x.is_floating_point()
            and len(x)
            and (top := float(x.amax())) > 2
        ):
            raise UserError(
                f"float pixels are from 0 to 1, these go up to {top:g}: scale them, or give uint8 "
                "pixels"
            )
        logits: Tensor = self.network(normalise(x, self.mean, self.std))
        return logits

    def _tensor(self, x: Any) -> Tensor:
        """Return what is not a tensor as one; arrays have no names of columns, so they cannot be
        rows of a table.
        """
        if isinstance(self.inputs, Images) and isinstance(x, list) and x and isinstance(x[0], list):
            raise UserError(
                "pixels are a tensor or an array, not a list of lists: give np.array(x)"
            )
        if not isinstance(x, np.ndarray):
            if isinstance(self.inputs, Images):
                return self.inputs.encode(x, self.shape)
            return self.inputs.encode(x)
        if isinstance(self.inputs, Table):
            raise self._nameless("an array")
        if x.dtype.kind not in "biuf":
            raise UserError(
                f"an array of {x.dtype} holds no numbers: give pixels, features or tokens"
            )
        return torch.from_numpy(x).float() if x.dtype.kind == "f" else torch.from_numpy(x)

    def _nameless(self, what: str) -> UserError:
        """Return the refusal of rows of a table without names of columns."""
        table = Table.of(self.inputs)
        columns = ", ".join((*table.numeric, *table.categorical)[:10])
        return UserError(
            f"{what} does not say which columns it has: give a frame or a dict with {columns}"
        )


def wrapped(network: nn.Module, about: Mapping[str, Any]) -> LoadedModel:
    """Return a network with the classes and inputs of its run's configuration."""
    given = about["input"]
    shape, mean, std = (tuple(given[key]) for key in ("shape", "mean", "std"))
    names, how = tuple(about["classes"]), recalibration_in(about)
    task = task_in(about)
    baseline = Baseline.of(task, about["recipe"]["hyperparameters"], network.state_dict())
    return LoadedModel(network, names, shape, mean, std, inputs_of(about), task, how, baseline)


def inputs_of(about: Mapping[str, Any]) -> Inputs:
    """Return the kind of a run's samples."""
    inputs, network = from_json(about["inputs"]), str(about["network"])
    if isinstance(inputs, Tokens) and inputs.tokenizer == "model" and network.startswith("hf:"):
        # as each silo has its own
        return replace(inputs, tokenizer=network.removeprefix("hf:"))
    return inputs


def data_name(config: Mapping[str, Any]) -> str:
    """Return the name of a run's data set, without the folders of a file."""
    name = str(config["dataset"])
    if Path(name).is_absolute():
        return Path(name).name
    return name


def task_in(about: Mapping[str, Any]) -> Task:
    """Return what a run's labels mean."""
    return task_of(about["task"])


def not_finished(config: Mapping[str, Any], step: int) -> str:
    """Return a line about a run that stopped before its end; empty for other runs."""
    if step >= config["steps"]:
        return ""
    return f"the run stopped after step {step} of {config['steps']}: this is its model so far"


# The global model, if there is one, and the personal models
Models = tuple[Weights | None, tuple[Weights, ...]]


def _elsewhere() -> FederatedData:
    raise UserError("the run's data stayed at the silos: name test data to measure the models on")


@dataclass(frozen=True, repr=False, eq=False)
class Result:
    """The result of a run, final or so far.

    Attributes:
        state: the last state.
        metrics: one row a step, see `ekiden.core.engine.evaluation.TestSet`.
        ledger: every transfer.
        folder: the run folder, if there is one.
        build: makes a network that `weights` fits.
        config: the settings of the run, as in `config.json`.
        models: returns `weights` and `personal`.
        data: returns the run's own data.
        passes: what each task computed.
    """

    state: State
    metrics: tuple[Row, ...]
    ledger: tuple[Transfer, ...]
    folder: Path | None
    build: Built
    config: Mapping[str, Any]
    models: Callable[[], Models]
    data: Callable[[], FederatedData] = _elsewhere
    passes: PassesOf = field(default_factory=dict)

    @cached_property
    def _models(self) -> Models:
        return self.models()

    @property
    def last(self) -> Row:
        """The row of metrics of the last step; empty before the first."""
        return self.metrics[-1] if self.metrics else {}

    @property
    def weights(self) -> Weights | None:
        """The global model, or None if the method has only personal ones."""
        return self._models[0]

    @property
    def personal(self) -> tuple[Weights, ...]:
        """One model per client, if the method personalises."""
        return self._models[1]

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients' names, in their order."""
        return tuple(self.config["clients"])

    @property
    def personal_only(self) -> bool:
        """Whether the clients have personal models and no global one; read from the metrics."""
        return "consensus" in self.last and "global_loss" not in self.last

    @property
    def headline(self) -> str:
        """The metric of a step's score: the task's own, or another if silos do not report enough
        for it.
        """
        usual = task_in(self.config).headline.name
        # not every step is measured
        row = next((row for row in reversed(self.metrics) if "loss" in row), {})
        return next(
            (name for name in (usual, str(row.get("metric")), "accuracy") if name in row), usual
        )

    @property
    def model(self) -> nn.Module:
        """The global model as a module, in evaluation mode. It takes normalised samples; see
        `load_model`.

        Raises:
            UserError: the method has only personal models.
        """
        if self.weights is None:
            raise UserError(
                "this method gives no global model: take `personal`, one model per client"
            )
        return as_module(self.build, self.weights)

    @property
    def coefficients(self) -> tuple[Coefficient, ...]:
        """The table of a regression: estimates in the columns' own units, errors, p-values,
        intervals.

        Raises:
            UserError: the method makes none.
        """
        return coefficients_in(self.config, self.model.state_dict())

    @property
    def accuracy(self) -> float:
        """Accuracy on the union of all clients' test data after the last step.

        Raises:
            UserError: that step was not measured, or the task has no accuracy.
        """
        if "accuracy" in self.last:
            return float(self.last["accuracy"])
        if "metric" in self.last:
            raise UserError(f"this task has no accuracy: take `score`, the {self.last['metric']}")
        raise UserError(
            "models were not measured after this step: lower evaluate_every, or finish the run"
        )

    @property
    def majority(self) -> float | None:
        """What always giving the commonest training label would score as accuracy on the same test
        data.

        None if the run has not ended, the task has no accuracy, or the silos do not report their
        labels.
        """
        found = self.last.get("majority")
        return None if found is None else float(found)

    @property
    def score(self) -> float:
        """The headline metric on the union of all clients' test data after the last step, see
        `ekiden.run`.

        Raises:
            UserError: that step was not measured, or the metric is not defined for these data.
        """
        value = self.last.get(self.headline)
        if value is None and self.headline in self.last:
            raise UserError(f"{self.headline} is not defined for the test data: look at `metrics`")
        if value is None:
            raise UserError(
                "models were not measured after this step: lower evaluate_every, or finish the run"
            )
        return float(value)

    @property
    def diverged(self) -> bool:
        """Whether the models are far worse than guessing at the end; see
        `ekiden.core.engine.evaluation.diverged`.
        """
        return bool(self.last.get("diverged"))

    @property
    def bytes(self) -> int:
        """Bytes that the method moved."""
        return sum(row.bytes for row in self.ledger)

    def simulated(self, devices: str | os.PathLike[str] | Devices = "equal") -> Timed:
        """Return how long the run would have taken on other devices, from the bytes and passes that
        it counted.

        Args:
            devices: "equal", "hospitals", "phones", a TOML file, or `ekiden.Devices`; see
                docs/time.md.

        Raises:
            UserError: there are no such devices.
        """
        return timed(devices_of(devices), self.clients, len(self.metrics), self.ledger, self.passes)

    def load_model(self, *, client: str = "") -> LoadedModel:
        """Return the model as a module that takes raw samples; see `ekiden.load_model`.

        Args:
            client: name of a client, to get its personal model instead of the global one.

        Raises:
            UserError: there is no such model.
        """
        if not client:
            return wrapped(self.model, self.config)
        return wrapped(
            as_module(self.build.own, self._personal(client)),
            {**self.config, "recalibration": None},
        )

    def baseline(self, data: Any, times: Sequence[float], **columns: Any) -> Baseline:
        """Return Breslow's baseline hazard of other rows with times and events, for `predict`.

        So survival is that of these rows' hospital: in Cox regression, which is stratified by
        client, each client has its own. Nothing leaves the machine.

        Args:
            data: as in `evaluate`; all rows are used.
            times: at which survival is wanted.
            **columns: as in `evaluate`.

        Raises:
            UserError: the labels are not times and events, or the rows say nothing about these
                times.
        """
        dataset = silos_in(data, self.config, columns).dataset
        _check_like(dataset, self.config)
        model, parts = self.load_model(), [dataset.test]
        if dataset.train is not dataset.test:
            parts.append(dataset.train)
        baseline_of(Baseline(mean=1.0), model.task)
        with torch.inference_mode():
            risk = torch.cat(
                [
                    model.encoded(x)[:, 0].double()
                    for part in parts
                    for x in torch.split(part.x, 4096)
                ]
            )
        return Baseline.fitted(torch.cat([part.y for part in parts]).numpy(), risk.numpy(), times)

    def history(self) -> "pandas.DataFrame":
        """Return the metrics as a DataFrame with one row a step, indexed by the step.

        Values of each client are in columns such as client_accuracy_NAME; the method's notes have
        columns of their names.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            # an extra
            import pandas
        except ImportError:
            raise UserError('history needs pandas: pip install "ekiden[pandas]"') from None
        frame = pandas.DataFrame([flat(row, self.clients) for row in self.metrics])
        return frame.set_index("step") if len(frame) else frame

    @property
    def per_client(self) -> dict[str, float]:
        """The headline metric on each client's own test data (of its own model, if it has one),
        after the last step.

        Raises:
            UserError: that step was not measured, or there are more than 100 clients.
        """
        values = self.last.get("clients")
        if values is None:
            raise UserError(
                "clients were not measured one by one after this step: finish the run, or call "
                "evaluate()"
            )
        return {
            name: nan if value is None else value
            for name, value in zip(self.clients, values, strict=False)
        }

    @property
    def per_class(self) -> dict[str, float]:
        """The headline metric of each class, label or target that has test data, after the last
        step.

        Raises:
            UserError: the run has not ended, its silos do not report this, or there are more than
                100 classes.
        """
        groups = self.last.get("groups", {})
        if "class" not in groups:
            raise UserError(
                "classes were not measured one by one after this step: finish the run, or call "
                "evaluate()"
            )
        return {
            name: row[self.headline]
            for name, row in groups["class"].items()
            if self.headline in row
        }

    @cached_property
    def validation(self) -> float:
        """The headline metric on the union of all clients' validation data; choose settings by
        this, not by `score`.

        The models are measured when this is read, for a run in a folder on data that are read
        again.

        Raises:
            UserError: there are no validation data, or the run's data are not here: use `evaluate`.
        """
        return float(self.evaluate(self.data().for_tuning())[self.headline])

    def evaluate(
        self,
        data: Any = None,
        *,
        client: str = "",
        by: str | Sequence[str] = (),
        at: Sequence[float] = (),
        part: Part = "all",
        **columns: Any,
    ) -> Row:
        """Measure the models on the run's own test data, or on others.

        Args:
            data: silos, a data set, its name or path, a frame, or (x, y) with raw samples; None
                means the run's own. Other data are measured whole, except for data sets and silos
                with a test part, of which that is measured. Files and frames are read and scaled as
                the run's data were. Personal models need the same silos.
            client: name of a client whose personal model is measured instead of all models.
            by: columns that divide the test samples into subgroups, as in ["sex", "age:40:65"]:
                numbers need bounds. "domain" stands for the domains, "client" for the silos.
            at: of times and events: times at which predicted survival is compared with what was
                observed, in `figures`.
            part: "test" measures only the fifth of files and frames that a run on them would hold
                out.
            **columns: the meaning of a table's or frame's columns, as in `ekiden.load`; by default
                the meaning in the run, if its folder has that.

        Returns:
            A row of metrics like those of a step; see `ekiden.core.engine.evaluation.TestSet`. With
            `by` also what `ekiden.clinic.answers.subgroups_of` returns.

        Raises:
            UserError: the data have other classes, samples of another shape, or other silos than
                the personal models, or there is no such column.
        """
        if columns and not _has_columns(data):
            raise UserError(
                f"unknown argument {next(iter(columns))!r}: only a file or a frame has columns to "
                "name"
            )
        silos_by = said_in(self.config).get("reading", {}).get("group_column", "")
        divided = divisions((by,) if isinstance(by, str) else by, silos_by)
        if (divided or at) and (client or self.weights is None):
            raise UserError(
                "by and at are for a run's global model: leave them out, or measure another run"
            )
        silos = self.data() if data is None else silos_in(data, self.config, columns, part)
        test = self.judge(silos)
        if divided:
            check_divisions(divided, silos.dataset)
        if at:
            test = test.at_times(
                at, baseline_of(self.load_model().baseline, test.task).hazard_at(at)
            )
        if not client:
            row = test(self.weights, self.personal, last=True)
            if divided and self.weights is not None:
                found = subgroups_of(test, test.scores(self.weights, full=True), divided)
                row |= found | {"groups": row.get("groups", {}) | found["groups"]}
            return row
        scores = test.scores(self._personal(client), personal=True)
        return {
            test.task.headline.name: scores.score(),
            "loss": scores.mean_loss(),
            "samples": len(scores),
        }

    def _personal(self, client: str) -> Weights:
        """Return the personal model of a client."""
        if not self.personal:
            raise UserError("this method gives no personal models: leave out client")
        if client not in self.clients:
            raise unknown("client", client, self.clients)
        return self.personal[self.clients.index(client)]

    def judge(self, silos: FederatedData) -> TestSet:
        """Return what measures the run's models on the test samples of `silos`, prepared as in
        training.

        Raises:
            UserError: as in `evaluate`.
        """
        _check_like(silos.dataset, self.config)
        if self.personal and len(silos.clients) != len(self.clients):
            raise UserError(
                f"there is a model for each of {len(self.clients)} clients, but the data have "
                f"{len(silos.clients)}: "
                "give the clients' silos, or use load_model(client=NAME)"
            )
        worker = Worker(_setup(self.build, self.config, silos.dataset), {})
        silos = replace(silos, dataset=worker.setup.dataset)
        check_model(worker, silos)
        return TestSet(
            worker, silos, len(self.clients), self.config["recipe"]["evaluate_on"], further
        )

    def plot(self, metric: str = "", ax: "Axes | None" = None) -> "Axes":
        """Draw a metric after each step.

        Args:
            metric: a column of `history`; by default the headline metric of the run's task.
            ax: where to draw; by default new axes.

        Returns:
            The axes.

        Raises:
            UserError: no step has this metric.
        """
        require_extra("report", "plot", "matplotlib")
        # seconds
        from matplotlib import pyplot
        from matplotlib.ticker import MaxNLocator

        metric = metric or self.headline
        rows = [flat(row, self.clients) for row in self.metrics]
        found = [(row["step"], row[metric]) for row in rows if metric in row]
        if not found:
            raise unknown("metric", metric, {name for row in rows for name in row} - {"step"})
        axes = ax or pyplot.subplots()[1]
        axes.plot(
            *zip(*found, strict=True),
            marker="o" if len(found) == 1 else None,
            label=self.config["recipe"]["method"],
        )
        axes.set_xlabel("step")
        axes.set_ylabel(metric.replace("_", " "))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return axes

    def __repr__(self) -> str:
        """Say in three or four lines what was run, how far it is, and its result."""
        config, value = self.config, self.last.get(self.headline)
        step = f"step {self.state.step} of {config['steps']}"
        if value is not None:
            step += f", {self.headline} {value:.4f}"
            if self.headline == "accuracy" and self.majority is not None:
                step += f" (always the commonest class: {self.majority:.4f})"
        if self.diverged:
            step += " (diverged: far worse than guessing)"
        lines = [
            f"Result: {short(config['recipe']['method'])} on {data_name(config)}: "
            f"{counted(len(self.clients), 'client')}, "
            f"{counted(len(config['classes']), 'class', 'classes')}",
            step,
            f"{self.bytes:,} bytes moved in "
            f"{counted(sum(not row.missing for row in self.ledger), 'transfer')}",
        ]
        if self.folder:
            lines.append(f"run folder: {self.folder}")
        return "\n  ".join(lines)

    def _repr_html_(self) -> str:
        """Show in a notebook what `repr` says, and the headline metric by client and by class."""
        text = f"<pre>{_html(repr(self))}</pre>"
        metric, row = task_in(self.config).headline, self.last
        if metric.name != self.headline or "loss" not in row:
            return text
        groups = by_group(row, self.clients, metric)
        return text + "".join(
            _folded(kind, found, metric) for kind, found in groups.items() if found
        )


def coefficients_in(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Coefficient, ...]:
    """Return the table of a regression from its run's configuration and the tensors of its
    model.
    """
    if "covariance" not in tensors:
        raise UserError(
            f"{config['recipe']['method']} estimates no coefficients with errors: run glm"
        )
    family = config["recipe"]["hyperparameters"]["family"]
    return coefficients(
        tensors, family, task_in(config), inputs_of(config), tuple(map(str, config["classes"]))
    )


def by_group(
    row: Row, clients: Iterable[str], metric: Metric
) -> dict[str, dict[str, float | None]]:
    """Return a metric by client, and by what else divides the samples of a row of metrics."""
    found = {"client": dict(zip(clients, row.get("clients") or (), strict=False))}
    for kind, each in row.get("groups", {}).items():
        found[kind] = {name: values.get(metric.name) for name, values in each.items()}
    return found


def _html(text: str) -> str:
    return escape(visible(text, keep="\n"))


def _folded(kind: str, values: Mapping[str, float | None], metric: Metric) -> str:
    """Return a table in HTML, folded until it is clicked."""
    shown = {name: "–" if value is None else metric.shown(value) for name, value in values.items()}
    rows = "".join(
        f"<tr><th>{_html(name)}</th><td>{value}</td></tr>" for name, value in shown.items()
    )
    head = f"<summary>{_html(metric.name)}{metric.unit} by {kind}</summary>"
    return f"<details>{head}<table>{rows}</table></details>"


def flat(row: Row, clients: Sequence[str]) -> dict[str, Any]:
    """Return the numbers of a row of metrics by name: those of clients, and what the method noted,
    too.
    """
    numbers = {name: value for name, value in row.items() if isinstance(value, (int, float))}
    each, metric = zip(clients, row.get("clients", ()), strict=False), row.get("metric", "accuracy")
    found = {f"client_{metric}_{name}": value for name, value in each}
    for name, value in row.get("notes", {}).items():
        if isinstance(value, dict):
            found |= {f"{name} {key}": one for key, one in value.items()}
        else:
            found[name] = value
    return numbers | {name: value for name, value in found.items() if value is not None}


def _setup(build: Built, config: Mapping[str, Any], dataset: Dataset) -> Setup:
    """Return what measures a run's models on the test samples of `dataset`, prepared as in
    training.
    """
    given = config["input"]
    fed = replace(dataset, mean=tuple(given["mean"]), std=tuple(given["std"]), task=task_in(config))
    training, hardware = settings_in(config)
    if why_unusable(hardware.device):
        hardware = replace(hardware, device="cpu")
    # silos do not tell what they have
    hardware = resolved_hardware(hardware, 1, build.own)
    return Setup(build.method, build.own, fed, training, hardware, config["recipe"]["seed"])


def _has_columns(data: Any) -> bool:
    """Return whether data are a file, a folder or a frame."""
    # `import ekiden` stays light
    from ekiden.readers import frames

    return isinstance(data, str | os.PathLike) or frames.is_frame(data) or type(data) is dict


def silos_in(
    data: Any, config: Mapping[str, Any], columns: Mapping[str, Any], part: Part = "all"
) -> FederatedData:
    """Return the silos that `data` means; data that are not divided are one silo.

    Files and frames are read and scaled as the run's data were; `columns` say otherwise. Without a
    test part, all their samples are test samples, or with `part` "test" those that are held out.

    Raises:
        UserError: the run was trained on these files, so that all samples would flatter it.
    """
    # `import ekiden` stays light
    from ekiden.readers.assemble import from_tensors
    from ekiden.readers.columns import Reading
    from ekiden.readers.partition import Iid, split
    from ekiden.readers.sources import NAMED, load

    if isinstance(data, FederatedData):
        return data
    if _has_columns(data):
        inputs, said = inputs_of(config), made(Reading, said_in(config).get("reading", {}))
        chosen = {**said.with_schema().for_model(config["recipe"]["model"]).chosen(), **columns}
        # which other data need not have
        for column in (
            "schema",
            "group_column",
            "subject_column",
            "time_column",
        ):
            if column not in columns:
                chosen.pop(column, None)
        size = config["input"]["shape"][-1] if inputs.sized else None
        # whose test part is well known
        known = isinstance(data, str) and data in NAMED
        named = known and inputs.sized and not chosen
        like = None if named else _like(config)
        source = data
        data = load(data, size=size, like=like, whole=part == "all" and not known, **chosen)
        if data.train is data.test and _trained_on(source, config):
            raise UserError(
                f"the run was trained on {source}: leave it out to measure the run's test part"
            )
    if not isinstance(data, Dataset):
        data = from_tensors(data, data, classes=config["classes"])
    return split(data, Iid(), 1, seed=0, val_fraction=0)


def _trained_on(source: Any, config: Mapping[str, Any]) -> bool:
    """Return whether a path is of data that the run was trained on."""
    if not isinstance(source, str | os.PathLike):
        return False
    said = said_in(config)
    known = [said.get("data", ""), *(silo.partition("=")[2] for silo in said.get("silos", ()))]
    path = Path(source).expanduser().absolute()
    return any(path == Path(one) or path in Path(one).parents for one in known if one)


def _like(config: Mapping[str, Any]) -> Dataset:
    """Return a data set without samples that has the run's classes, scaling and task."""
    given = config["input"]
    nothing = Samples(torch.zeros(0, *given["shape"]), torch.zeros(0, dtype=torch.int64))
    mean, std, classes = (
        tuple(values) for values in (given["mean"], given["std"], config["classes"])
    )
    return Dataset(
        "",
        nothing,
        nothing,
        classes,
        mean=mean,
        std=std,
        task=task_in(config),
        inputs=inputs_of(config),
    )


def _check_like(dataset: Dataset, config: Mapping[str, Any]) -> None:
    """Refuse data that would be measured with another meaning."""
    classes, own = tuple(config["classes"]), inputs_of(config)
    if dataset.classes != classes:
        ours, theirs = (", ".join(names[:10]) for names in (classes, dataset.classes))
        raise UserError(
            f"the model gives {ours}; the labels of these data are {theirs}: evaluate on data with "
            "the same labels"
        )
    if own.agreed and dataset.inputs != own:
        raise UserError(
            "these data are scaled differently from the run's: give their path or frame to "
            "evaluate, which then "
            "reads them as the run did"
        )
