"""Figures of the models that a run has written: their features, their pool, and the loss around them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from matplotlib.colors import LogNorm
from numpy.typing import NDArray
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data import Dataset, FederatedData, Reading
from ekiden.engine.evaluation import TestSet
from ekiden.engine.setup import check_same_data
from ekiden.engine.store import read_trained
from ekiden.reporting.figures import distances
from ekiden.reporting.runs import Group
from ekiden.reporting.style import HEAT, MARKERS, SERIES, Drawing, Missing, Value, bare, blank, legend, shown
from ekiden.results.result import ModelSource, Result
from ekiden.runs.plan import TaskName, loaded, stored
from ekiden.runs.summary import Summary
from ekiden.serving.loading import open_models
from ekiden.training.weights import Weights, mean

SHOWN = 400  # test samples in a picture of features
_GRIDS = ((15, 256), (13, 192), (11, 128), (9, 96), (7, 64), (7, 32))  # (points per side, test samples)
_FLOPS = 2e11  # for one loss surface: seconds on one core
_MOST_CLASSES = 21  # colours and marks cannot distinguish more


@dataclass(frozen=True)
class Opened:
    """A finished run with its data and models."""

    run: Summary  # its numbers
    data: FederatedData  # who holds what
    test: TestSet  # measures models
    models: tuple[Weights, ...]  # the global model, or else the personal models
    personal: bool  # whether these are personal models

    @property
    def whose(self) -> str:
        """Name the model that is drawn where a figure shows one model."""
        return f"the model of {next(iter(self.run.config['clients']))}" if self.personal else "the final model"


@dataclass(frozen=True)
class Opener:
    """Reads the data and models of a run."""

    data: FederatedData | None = None  # the data of runs that were given them in Python
    network: ModelSource | None = None  # their network, if it is not in the library

    def __call__(self, run: Summary) -> Opened:
        """Open a finished run."""
        result = open_models(run.folder, network=self.network)
        data = self._of(run, result)
        test = result.judge(data)
        personal = bool(result.personal)
        models = result.personal if personal or result.weights is None else (result.weights,)
        return Opened(run, data, test, models, personal)

    def _of(self, run: Summary, result: Result) -> FederatedData:
        if "plan" in run.config:
            plan = stored(run.folder)
            reading = plan.reading.for_model(plan.recipe.model)
            data = plan.federation(_dataset(plan.data, plan.silos, plan.size, reading, plan.task))
        elif self.data is None:
            return result.data()
        else:
            data = self.data
        check_same_data(run.config, result.build.method, data, run.folder)
        return data


@lru_cache(maxsize=2)
def _dataset(data: str, silos: tuple[str, ...], size: int | None, reading: Reading, task: TaskName) -> Dataset:
    """Read and decode the data once for all runs of a report."""
    return loaded(data, silos, size, reading, task)


def accuracies(opened: Opened) -> dict[str, Mapping[str, tuple[int, float]]]:
    """Return test samples and headline metric by class, and by domain if there are any; of personal models the mean."""
    scores = [opened.test.scores(model, personal=opened.personal) for model in opened.models]
    kinds = {"class": opened.test.by_class, "domain": opened.test.by_domain}
    found: dict[str, Mapping[str, tuple[int, float]]] = {}
    for kind, measure in kinds.items():
        each = [measure(s) for s in scores]
        found[kind] = {g: (n, float(np.mean([one[g][1] for one in each]))) for g, (n, _) in each[0].items()}
    return found


def embedding(opened: Opened) -> tuple[NDArray[np.float32], Tensor]:
    """Return t-SNE of the inputs of the head: (k, 2) places and the (k,) rows of the test samples."""
    from sklearn.manifold import TSNE  # noqa: PLC0415  (it takes a second)

    rows = _rows(opened, SHOWN)
    if len(rows) < 30:
        raise UserError("fewer than 30 test samples")
    try:
        features = opened.test.features(opened.models[0], rows, personal=opened.personal).numpy()
    except UserError:
        raise UserError("the result does not say which part of it is the classifier") from None
    if not np.isfinite(features).all():
        raise UserError("the features are not finite")
    places = TSNE(perplexity=min(30.0, len(rows) / 4), init="pca", random_state=0, max_iter=500).fit_transform(features)
    return places, rows


def trained(opened: Opened) -> list[tuple[str, list[Weights]]]:
    """Return, for each client that trained, the model that its last task started from and all that it trained."""
    found = []
    for client in opened.run.config["clients"]:
        folder = opened.run.folder / "clients" / client
        if (folder / "journal").exists():
            step, models = read_trained(folder)
            found.append((step, client, models))
    if not found:
        raise UserError("run with --keep-trained")
    return [(client, models) for _, client, models in sorted(found, key=lambda one: one[0])]


@dataclass(frozen=True)
class Surface:
    """The loss over the plane through three models."""

    x: NDArray[np.float64]  # (side,) first coordinate of the grid, in units of distance between parameters
    y: NDArray[np.float64]  # (side,) second coordinate
    loss: NDArray[np.float64]  # (side, side) mean loss at [y, x]
    value: NDArray[np.float64]  # (side, side) headline metric, shares in per cent
    places: NDArray[np.float64]  # (k, 2) where the models are
    samples: int  # number of test samples
    metric: str = "accuracy"  # name of the headline metric


def surface(opened: Opened, corners: Sequence[Weights], others: Sequence[Weights] = (), *, own: bool) -> Surface:
    """Measure the plane through three models, of clients' `own` kind or results.

    `others` are shown where they fall on it. Running statistics at a point are those of the corners, mixed by its
    barycentric coordinates cut off at 0.
    """
    if len({len(model.params) for model in corners}) > 1 or not _fits(opened, corners[0], own):
        raise UserError("the three models are of different networks, or parts of one")
    origin, first, second = (model.params.double() for model in corners)
    u = first - origin
    v = second - origin
    side = float(u.norm())
    v = v - u * (v.dot(u) / side**2) if side else v
    if not side or float(v.norm()) < 1e-3 * side:
        raise UserError("the three models lie on one line")
    u, v = u / side, v / v.norm()
    places = np.array([[float((m.params.double() - origin).dot(w)) for w in (u, v)] for m in (*corners, *others)])
    points, samples = _effort(opened, corners[0], own)
    rows = _rows(opened, samples)
    centre, reach = (places.max(0) + places.min(0)) / 2, 0.7 * float(np.ptp(places, axis=0).max())
    x, y = (np.linspace(c - reach, c + reach, points) for c in centre)
    loss, value = np.empty((points, points)), np.empty((points, points))
    for i, b in enumerate(y):
        for j, a in enumerate(x):
            mixed = mean(corners, _barycentric(places[:3], a, b))
            point = mixed.with_params((origin + a * u + b * v).float())
            scores = opened.test.scores(point, personal=own, rows=rows)
            loss[i, j], value[i, j] = scores.mean_loss(), opened.test.task.headline.scale * scores.score()
    return Surface(x, y, loss, value, places, len(rows), opened.test.task.headline.name)


def _fits(opened: Opened, model: Weights, own: bool) -> bool:
    """Return whether a model fits the clients' network (`own`) or the result's."""
    module = opened.test.own() if own else opened.test.build()
    return sum(p.numel() for p in module.parameters() if p.requires_grad) == len(model.params)


def _effort(opened: Opened, model: Weights, own: bool) -> tuple[int, int]:
    """Return how fine a grid and how many samples the network allows; the same on every machine."""
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415  (it takes a second)

    counter = FlopCounterMode(display=False)
    with counter:
        opened.test.scores(model, personal=own, rows=_rows(opened, 8))
    cost = counter.get_total_flops() / 8
    for points, samples in _GRIDS:
        if points**2 * samples * cost <= _FLOPS:
            return points, samples
    raise UserError("the network is too large to be measured at many points in seconds")


def _rows(opened: Opened, most: int) -> Tensor:
    """Return some test samples, the same at every call."""
    n = len(opened.data.dataset.test)
    return torch.randperm(n, generator=torch.Generator().manual_seed(0))[:most].sort().values


def _barycentric(corners: NDArray[np.float64], x: float, y: float) -> list[float]:
    """Return the weights of three corners at a point of their plane; negative ones become 0."""
    system = np.vstack([corners.T, np.ones(3)])
    weights = np.linalg.solve(system, np.array([x, y, 1.0])).clip(min=0)
    return [float(w) for w in weights]


def features(group: Group, opened: Opened, number: int) -> list[Drawing | Missing]:
    """Draw t-SNE of the final model's features of test samples, by class and by domain."""
    try:
        places, rows = embedding(opened)
    except UserError as error:
        return [Missing(group.name, str(error))]
    data = opened.data.dataset
    kinds = [("class", data.test.y, data.classes)] if data.task.kind == "classification" else []
    if data.test.domain is not None:
        kinds.append(("domain", data.test.domain, data.domains))
    drawn: list[Drawing | Missing] = []
    for kind, labels, names in kinds:
        picked = labels[rows].cpu().numpy()
        figure, axes = blank(4.4, 3.5)
        for i, name in enumerate(names[:_MOST_CLASSES]):
            here = picked == i
            colour, marker = SERIES[i % len(SERIES)], MARKERS[i % len(MARKERS)]
            axes.scatter(
                *places[here].T, s=15, color=colour, marker=marker, linewidths=0, alpha=0.85, label=shown(name)
            )
        axes.set(xticks=[], yticks=[])
        bare(axes)
        legend(figure, axes, markers=1.8)
        beyond = f"; the first {_MOST_CLASSES} of {len(names)}" if len(names) > _MOST_CLASSES else ""
        note = f"{len(rows)} test samples seen by {opened.whose}, marked by {kind}{beyond}."
        table: list[list[Value]] = [[float(x), float(y), names[k]] for (x, y), k in zip(places, picked, strict=True)]
        title = f"{group.name}, by {kind}" if len(kinds) > 1 else group.name
        drawn.append(Drawing(f"features-{number}-{kind}", title, note, figure, ["x", "y", kind], table))
    return drawn


def last_pool(group: Group, opened: Opened, number: int) -> Drawing | Missing:
    """Draw the distances between the models that the last client received, trained and handed on."""
    try:
        client, models = trained(opened)[-1]
    except UserError as error:
        return Missing(group.name, str(error))
    if len(models) < 3:
        return Missing(group.name, "clients train one model a task: there is no pool")
    names = ["received", *(f"model {i}" for i in range(1, len(models)))]
    vectors = [m.params.numpy() for m in models]
    note = f"The model that {client} received, the {len(models) - 1} that it trained, and the result."
    if not opened.personal and len(opened.models[0].params) == len(vectors[0]):
        names, vectors = [*names, "result"], [*vectors, opened.models[0].params.numpy()]
    return distances(f"pool-{number}", group.name, note, vectors, names)


def own_surface(group: Group, opened: Opened, number: int) -> Drawing | Missing:
    """Draw the loss around the models of one run: its pool, or its clients' models."""
    try:
        corners, names, text = _corners(opened)
        found = surface(opened, corners, [mean(corners)], own=True)
    except UserError as error:
        return Missing(group.name, str(error))
    return _surface(f"surface-{number}", group.name, f"{text} ", found, [*names, "their mean"])


def shared_surface(groups: Sequence[Group], opened: Sequence[Opened], number: int) -> Drawing | Missing:
    """Draw the loss through the final models of three methods that began with the same model."""
    try:
        found = surface(opened[0], [o.models[0] for o in opened], own=False)
    except UserError as error:
        return Missing(", ".join(g.name for g in groups), str(error))
    seed = groups[0].first.recipe["seed"]
    text = f"Through the final models of three methods that began with the same one, seed {seed}. "
    return _surface(f"surface-{number}-shared", "Between methods", text, found, [g.name for g in groups])


def _corners(opened: Opened) -> tuple[list[Weights], list[str], str]:
    """Return three models of a run, their names, and a sentence about them."""
    if opened.personal:
        clients = list(opened.run.config["clients"])[:3]
        if len(clients) < 3:
            raise UserError("fewer than three personal models")
        return list(opened.models[:3]), clients, "Through the personal models of three clients."
    kept = trained(opened)
    client, models = kept[-1]
    if len(models) >= 3:
        names = ["received", "model 1", f"model {len(models) - 1}"]
        return [models[0], models[1], models[-1]], names, f"Through three models of the pool of {client}."
    if len(kept) < 3:
        raise UserError("fewer than three clients trained")
    clients = [name for name, _ in kept[-3:]]
    return [own[-1] for _, own in kept[-3:]], clients, "Through the last models that three clients trained."


def _surface(name: str, title: str, text: str, found: Surface, names: Sequence[str]) -> Drawing | Missing:
    """Draw contours of the loss and the places of the models."""
    finite = found.loss[np.isfinite(found.loss)]
    if not finite.size:
        return Missing(title, "the loss is not finite anywhere")
    figure, axes = blank(4.4, 3.4)
    loss = np.nan_to_num(found.loss, nan=finite.max(), posinf=max(1e6, finite.max())).clip(min=1e-6)
    low, high = float(loss.min()), float(min(loss.max(), 1e3 * loss.min()))
    levels = np.geomspace(low, high, 13) if high > 1.001 * low else np.array([low, low * 1.01])
    drawn = axes.contourf(
        found.x, found.y, loss.clip(max=high), levels=levels, cmap=f"{HEAT}_r", norm=LogNorm(low, levels[-1])
    )
    for place, model, marker in zip(found.places, names, MARKERS, strict=False):
        axes.plot(
            *place, marker, color=SERIES[1], markeredgecolor="#fefefe", markersize=9, linestyle="", label=shown(model)
        )
    axes.set(xlabel="distance", ylabel="distance")
    axes.set_aspect("equal")
    axes.grid(False)
    ticks = levels[::3]
    bar = figure.colorbar(drawn, ax=axes, fraction=0.05, pad=0.02, label="loss", ticks=ticks)
    bar.ax.minorticks_off()
    bar.ax.set_yticklabels([f"{t:.2f}" if t < 10 else f"{t:.0f}" for t in ticks])
    bar.outline.set_visible(False)
    legend(figure, axes)
    note = f"{text}{found.samples} test samples at {len(found.x)} × {len(found.y)} points."
    rows: list[list[Value]] = [
        [float(x), float(y), float(found.loss[i, j]), float(found.value[i, j])]
        for i, y in enumerate(found.y)
        for j, x in enumerate(found.x)
    ]
    return Drawing(name, title, note, figure, ["x", "y", "loss", found.metric], rows)
