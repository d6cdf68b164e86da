"""The commands of the command line as functions: what `ekiden resume`, `evaluate`, `report`, ... do, from Python."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ekiden.api import as_federation
from ekiden.base.errors import UserError
from ekiden.base.outside import require_extra
from ekiden.data import frames
from ekiden.data.samples import FederatedData
from ekiden.data.tasks import Metric
from ekiden.engine.drive import Row
from ekiden.engine.folder import read_config
from ekiden.engine.setup import check_same_data
from ekiden.methods import method_of
from ekiden.results.result import ModelSource, Result
from ekiden.runs import summary
from ekiden.runs.plan import federation_in, in_memory, plan_in, rerun
from ekiden.serving.loading import open_run

Folder = str | os.PathLike[str]


def resume(
    folder: Folder,
    data: Any = None,
    *,
    network: ModelSource | None = None,
    metric: str | Metric | Callable[[Tensor, Tensor], Any] = "",
    track: str | Sequence[str] = (),
    quiet: bool = False,
) -> Result:
    """Go on with an interrupted run; it ends as if nothing had happened.

    Args:
        folder: the run folder.
        data: who holds what, as in `ekiden.run`, if the run was given data in Python; they must be the same.
        network: the module that the run was started with, or a function that makes one, if the network is not in the
            library.
        metric: the headline metric, if that was a function.
        track: as in `ekiden.run`.
        quiet: as in `ekiden.run`.

    Raises:
        UserError: the data or the network are others, or the run is between machines.
    """
    path, config = Path(folder), read_config(Path(folder))
    trackers = (track,) if isinstance(track, str) else tuple(track)
    if config.get("on") == "flower":
        raise UserError(f"{path} is a run between machines: use `ekiden resume {path}` at its coordinator")
    if data is None and network is None and not metric:
        plan = plan_in(config, path)
        return plan.run(path, plan.federation(), track=trackers, quiet=quiet)
    held = federation_in(config, path) if data is None else as_federation(data)
    if network is None and config["network"] is None:
        raise UserError(f"{in_memory(config)}: give it as network")
    own = {name: config[name] for name in config.get("own", ())}
    more = {"metric": metric or config["task"].get("metric", ""), "track": trackers, "quiet": quiet}
    return rerun(config, method_of(config), held, network or config["model"], path, config=own, **more)


def evaluate(
    folder: Folder, data: Any = None, *, client: str = "", network: ModelSource | None = None, **columns: Any
) -> Row:
    """Measure the models of a run on its own test data or on others.

    Args:
        folder: the run folder.
        data: the run's silos, as they were given to `ekiden.run`: a digest of their samples must agree. Or other test
            data: a data set, its name or path, a frame, or (x, y). None means the run's own data, read again from their
            files.
        client: name of a client whose personal model is measured instead of all models.
        network: as in `resume`.
        **columns: as in `Result.evaluate`.

    Returns:
        A row of metrics like those of a step; see `ekiden.engine.evaluation.TestSet`.

    Raises:
        UserError: the silos are not those of the run, or the data do not fit the models.
    """
    result = open_run(folder, network=network)
    if is_silos(data):
        data = as_federation(data)
        check_same_data(result.config, method_of(result.config), data, Path(folder))
    return result.evaluate(data, client=client, **columns)


def show(folder: Folder) -> str:
    """Return what `ekiden show` prints: what was run, every step, what moved.

    Raises:
        UserError: it is not a run folder, or is damaged.
    """
    return summary.as_text(summary.shown(Path(folder)))


def report(
    folders: Folder | Sequence[Folder],
    out: Folder = "report",
    *,
    data: Any = None,
    network: ModelSource | None = None,
    details: int = 8,
) -> Path:
    """Write the page of `ekiden report`, and return its file.

    Args:
        folders: run folders, sweep folders, or folders that hold them.
        out: folder that gets index.html, figures/ and data/.
        data: the silos of runs that were given data in Python; runs whose digests differ get no figures of them.
        network: their network, if it is not in the library.
        details: number of methods with figures of their own; with 0 no data are read.

    Raises:
        UserError: there is no finished run, or the extra `report` is not installed.
    """
    require_extra("report", "report", "matplotlib", "jinja2")
    from ekiden.reporting import report as write  # noqa: PLC0415  (it needs an extra)

    given = [folders] if isinstance(folders, str | os.PathLike) else list(folders)
    held = None if data is None else as_federation(data)
    write([Path(folder) for folder in given], Path(out), details, data=held, network=network)
    return Path(out) / "index.html"


def is_silos(data: Any) -> bool:
    """Return whether data are silos, as `ekiden.run` takes them, and not one data set."""
    if isinstance(data, Mapping):  # of silos, or of columns
        kinds = (tuple, str, os.PathLike)
        return all(isinstance(one, kinds) or frames.is_frame(one) or hasattr(one, "train") for one in data.values())
    return isinstance(data, FederatedData | list)
