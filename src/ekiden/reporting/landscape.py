"""Draw models: their features, their pool, and the loss around them."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import LogNorm

from ekiden.base.errors import UserError
from ekiden.reporting.maps import distances
from ekiden.reporting.models import Opened, Surface, embedding, surface, trained
from ekiden.reporting.runs import Group
from ekiden.reporting.style import HEAT, MARKERS, SERIES, Drawing, Missing, Value, blank, legend, shown
from ekiden.training.weights import Weights, mean

_MOST_CLASSES = 21  # as many as colours and marks can tell apart


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
        axes.grid(False)
        for spine in axes.spines.values():
            spine.set_visible(False)
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
    seed = groups[0].first.config["seed"]
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
