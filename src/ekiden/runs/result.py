"""The result of a run, and what can be done with it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import nan
from typing import TYPE_CHECKING, Any

from ekiden.clinic.regressions import Baseline, Coefficient
from ekiden.core.base.checks import checked
from ekiden.core.base.errors import UserError
from ekiden.core.data.samples import FederatedData
from ekiden.core.engine.drive import Row
from ekiden.core.engine.evaluation import TestSet
from ekiden.runs import measuring, showing
from ekiden.runs.clock import Devices, Timed, devices_of, timed
from ekiden.runs.config import coefficients_in, flat
from ekiden.runs.measuring import Part
from ekiden.runs.record import RunRecord

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes


@dataclass(frozen=True, repr=False, eq=False)
class Result(RunRecord):
    """The result of a run, final or so far: `RunRecord` has its numbers and models."""

    @property
    def coefficients(self) -> tuple[Coefficient, ...]:
        """The table of a regression: estimates in the columns' own units, errors, p-values,
        intervals.

        Raises:
            UserError: the method makes none.
        """
        return coefficients_in(self.config, self.model.state_dict())

    def simulated(self, devices: str | os.PathLike[str] | Devices = "equal") -> Timed:
        """Return how long the run would have taken on other devices, from the bytes and passes that
        it counted.

        Args:
            devices: "equal", "hospitals", "phones", a TOML file, or `ekiden.Devices`; see
                docs/time.md.

        Raises:
            UserError: there are no such devices.
        """
        chosen = devices_of(devices) or Devices()
        return timed(chosen, self.clients, len(self.metrics), self.ledger, self.passes)

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
        return measuring.baseline(self, data, times, columns)

    @checked("data")
    def evaluate(
        self,
        data: Any = None,
        *,
        client: str = "",
        by: str | Sequence[str] = (),
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
        return measuring.evaluate(self, data, client, by, part, columns)

    def judge(self, silos: FederatedData) -> TestSet:
        """Return what measures the run's models on the test samples of `silos`, prepared as in
        training.

        Raises:
            UserError: as in `evaluate`.
        """
        return measuring.judge(self, silos)

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
        return showing.plot(self, metric, ax)

    def __repr__(self) -> str:
        """Say in three or four lines what was run, how far it is, and its result."""
        return showing.as_text(self)

    def _repr_html_(self) -> str:
        """Show in a notebook what `repr` says, and the headline metric by client and by class."""
        return showing.as_html(self)
