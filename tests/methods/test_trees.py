"""Trees from summed histograms: equal to pooled ones and to XGBoost's, and what a silo's sums show.

`python -m tests.methods.test_trees` prints what XGBoost (3.2.0) says, which is kept in
`trees.json`. It needs xgboost."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score
from torch import Tensor

from ekiden import FederatedData, Hardware, Training, Trees, UserError, federate, predict, run
from ekiden.core.engine.setup import of_method
from ekiden.core.engine.worker import Job, Setup, Worker
from ekiden.core.tasks import Regression
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods.exact.trees import (
    Bins,
    Histogram,
    Splits,
    _derivatives,
    _ends,
    _refined,
    grouped,
)

REFERENCE = Path(__file__).parent / "trees.json"
SMALL = Trees(rounds=2, trees=1, depth=3, bins=32, columns=1.0)
CASES = {
    "binary": "classification",
    "classes": "classification",
    "labels": "multi-label",
    "numbers": "regression",
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* equal a training row", "ignore:.* with one value"
)


def samples(case: str, n: int = 240) -> tuple[Tensor, Tensor]:
    """Whole numbers from 0 to 7, of a bin each, and labels that depend on them."""
    r = np.random.default_rng(11)
    x = r.integers(0, 8, (n, 5))
    score = 0.6 * x[:, 0] - 0.4 * x[:, 1] * (x[:, 2] > 3) + 0.3 * (x[:, 3] == 5) + r.normal(0, 1, n)
    two = np.stack([score, np.roll(x[:, 4], 0) - 0.5 * x[:, 0] + r.normal(0, 1, n)], 1)
    y = {
        "binary": (score > 1).astype(int),
        "classes": (score > 0).astype(int) + (score > 2),
        "labels": (two > 1).astype(int),
        "numbers": two.round(3),
    }[case]
    return torch.tensor(x).float(), torch.tensor(y)


def held(case: str, cuts: tuple[int, ...] = (70, 150)) -> FederatedData:
    x, y = samples(case)
    silos = list(zip(torch.tensor_split(x, cuts), torch.tensor_split(y, cuts), strict=True))
    return federate(silos, test=(x, y), val_fraction=0.0, task=CASES[case])


def outputs(
    method: Trees, case: str, cuts: tuple[int, ...] = (70, 150), **options: Any
) -> tuple[Tensor, Weights]:
    result = run(method, held(case, cuts), evaluate_every=10**9, **options)
    with torch.no_grad():
        return result.model(samples(case)[0]), result.weights  # type: ignore[return-value]


def same(a: Weights, b: Weights) -> bool:
    return all(torch.equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_they_are_the_trees_of_pooled_data(case: str) -> None:
    method = replace(SMALL, trees=2, columns=0.6)
    apart = outputs(method, case)[1]
    assert same(apart, outputs(method, case, ())[1])
    assert same(apart, outputs(replace(method, order="reversed"), case, (200,))[1])
    assert int(apart.counters.sum())


@cache
def reference() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(REFERENCE.read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_they_are_the_trees_of_xgboost(case: str) -> None:
    """Without its rounding to float32, and with several outputs in one tree."""
    found = outputs(SMALL, case)[0]
    found = (found[:, 1:] - found[:, :1]) if case == "binary" else found
    wanted = torch.tensor(reference()[case]).view(len(found), -1)
    if case == "classes":
        found, wanted = (part - part.mean(1, keepdim=True) for part in (found, wanted))
    assert torch.allclose(found, wanted, atol=2e-5)


def transcript(
    method: Trees, x: Tensor, y: Tensor, news: Sequence[Bins | Splits], task: str = ""
) -> list[Histogram]:
    """What a silo gives in the first laps if all others give zeros and choose what it is told: a
    grid, bins, splits."""
    data = federate([(x, y), (x[:1], y[:1])], test=(x, y), val_fraction=0.0, task=task or None)
    build = of_method(Tiny, method, tuple(x.shape[1:]), data.dataset.outputs, 2, data.dataset.task)
    setup = Setup(method, build, data.dataset, Training(), Hardware(threads=1))
    worker, initial = Worker(setup, {c.name: c for c in data.clients}), Network(build()).weights()
    found, kept = [], None
    for step, told in enumerate([None, *news]):
        args: tuple[Any, ...] = (initial, told, None)
        name = "count" if step < 2 else "begin"
        if isinstance(told, Splits):
            name, args = "grow", (told, None)
        outcome = worker.execute(Job(step, 0, data.clients[0].name, name, args, kept))
        found.append(outcome.value)
        kept = outcome.private
    return found


def crafted(method: Trees, width: int, seed: int) -> list[Bins | Splits]:
    """A grid, bins, splits and leaves that others may choose, whatever the sums were."""
    draw = torch.Generator().manual_seed(seed)
    news: list[Bins | Splits] = [
        Bins(
            torch.randn(width, edges, generator=draw).sort(1).values, torch.tensor([-30.0]).double()
        )
        for edges in (1023, method.bins - 1)
    ]
    for lap in range(method.rounds * method.depth - 1):
        nodes = 2 ** (lap % method.depth)
        column, edge = (
            torch.randint(most, (method.trees, nodes), generator=draw)
            for most in (width, method.bins - 1)
        )
        last = nodes == 2 ** (method.depth - 1)
        leaves = 15 * torch.randn(method.trees, 2 * nodes * last, 1, generator=draw)
        news.append(Splits(column, edge, leaves))
    return news


def records() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(60, 4, generator=draw)
    return x, (x[:, 0] + torch.randn(60, generator=draw) > 0).long()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_that_a_silo_gives_depends_on_more_than_its_groups(seed: int) -> None:
    """Coordinator and all other silos together: records of a group may change their numbers and
    labels with others."""
    method = replace(SMALL, rounds=3, trees=2, columns=0.9, depth=2, min_active=10)
    x, y = records()
    group = torch.unique(grouped(x.double(), 10, 0), dim=0, return_inverse=True)[1]
    assert group.bincount().min() >= 10
    draw, changed, labels = torch.Generator().manual_seed(seed), x.clone(), y.clone()
    for one in torch.unique(group):
        rows = (group == one).nonzero()[:, 0]
        for column in range(x.shape[1]):
            changed[rows, column] = x[rows[torch.randperm(len(rows), generator=draw)], column]
        labels[rows] = y[rows[torch.randperm(len(rows), generator=draw)]]
    news = crafted(method, 4, seed)
    before, after = transcript(method, x, y, news), transcript(method, changed, labels, news)
    assert all(
        torch.equal(a.cells, b.cells) and torch.equal(a.labels, b.labels)
        for a, b in zip(before, after, strict=True)
    )
    without = replace(method, min_active=0)
    before, after = transcript(without, x, y, news), transcript(without, changed, labels, news)
    assert not all(torch.equal(a.cells, b.cells) for a, b in zip(before, after, strict=True))


def singled_out(method: Trees) -> int:
    """How many records two crafted trees make stand out: those whose second derivative is not 0."""
    x, y = records()
    edges = torch.zeros(4, method.bins - 1)
    for column, place in (
        (0, -2),
        (1, 30),
    ):  # the two highest in one column, the lower half in the other
        edges[column] = x[:, column].sort().values[place] - 1e-4
    news: list[Bins | Splits] = [
        Bins(part, torch.tensor([-80.0]).double()) for part in (torch.zeros(4, 1023), edges)
    ]
    for column, leaves in ((0, [0.0, 40.0]), (1, [40.0, 0.0])):
        news.append(
            Splits(
                torch.tensor([[column]]), torch.tensor([[0]]), torch.tensor(leaves).view(1, 2, 1)
            )
        )
    last = transcript(method, x, y, news)[-1].cells[0, 0, 0, :, 1].sum()
    return round(float(last) / 2**26)


def test_crafted_trees_single_out_a_record_only_without_groups() -> None:
    method = replace(SMALL, rounds=3, depth=1)
    assert singled_out(method) in (1, 2)
    found = singled_out(replace(method, min_active=10))
    assert found == 0 or found >= 10


def test_whether_sums_have_room_does_not_tell_the_target_of_a_record() -> None:
    """The last silo starts the trees so far away that a record with a smaller target than it
    guesses has no room."""
    method, x = replace(SMALL, min_active=10), records()[0]
    y = x[:, :1].clone()
    y[0] = -30
    task = federate(
        [(x, y), (x[:1], y[:1])], test=(x, y), val_fraction=0.0, task="regression"
    ).dataset.task
    smallest = float(task.targets(y, 1).min())
    refused = []
    for guess in (smallest + 0.1, smallest - 0.1):
        with pytest.raises(
            UserError, match="an output of the trees received is 512 or more"
        ) as error:
            transcript(
                method,
                x,
                y,
                [
                    Bins(torch.zeros(4, edges), torch.tensor([1024 + guess]).double())
                    for edges in (1023, 31)
                ],
                "regression",
            )
        refused.append(str(error.value))
    assert refused[0] == refused[1]
    near = torch.full((1, 1), 511.0, dtype=torch.float64)
    assert _derivatives(Regression(), near, torch.tensor([[-511.0]]))[0, 0] == 1022 * 2**28
    with pytest.raises(UserError, match="a target is 512 or more"):
        _derivatives(Regression(), near, torch.tensor([[-513.0]]))


def test_a_silo_of_fewer_samples_gives_zeros() -> None:
    method = replace(SMALL, rounds=1, depth=1, min_active=61)
    assert not any(
        part.cells.any() or part.labels.any()
        for part in transcript(method, *records(), crafted(method, 4, 0))
    )


def test_groups_are_of_similar_records() -> None:
    x = torch.tensor(
        [[0.0, 3], [0, 3], [1, 3], [9, 1], [9, 1], [9, 2], [9, 1]], dtype=torch.float64
    )
    found = grouped(x, 3, 1)
    assert found[:3].tolist() == [[pytest.approx(1 / 3), 3]] * 3
    assert found[3:].tolist() == [[9, 1]] * 4


def test_groups_of_another_size_single_out_no_record() -> None:
    """Whoever chooses k asks for groups of 10, 12 and 13 rows in three runs, and subtracts what is
    inside of what."""
    for seed in (8, 14):
        draw = torch.Generator().manual_seed(seed)
        flags = [
            (torch.rand(80, generator=draw) < share).double() for share in (0.12, 0.15, 0.2, 0.3)
        ]
        more = (
            torch.randint(0, 4, (80,), generator=draw).double(),
            torch.randn(80, generator=draw).double(),
        )
        x = torch.stack([*flags, *more], 1)
        found = {
            k: torch.unique(grouped(x, k, 0), dim=0, return_inverse=True)[1]
            for k in (10, 12, 13, 30)
        }
        for small, large in combinations(found.values(), 2):
            assert min(small.bincount()) >= 10
            assert all(len(large[small == one].unique()) == 1 for one in small.unique())
    assert len(found[30].unique()) > 1


def test_a_table_with_gaps_and_categories_is_learned(tmp_path: Path) -> None:
    """What is missing, and a category in the middle, decide here; the model is kept, read and
    exported."""
    r = np.random.default_rng(0)
    site, age = r.choice(["a", "b", "c", "d"], 300), r.normal(50, 10, 300)
    age[r.random(300) < 0.2] = np.nan
    sick = np.isnan(age) | (site == "b")
    table = {"site": list(site), "age": list(age), "sick": list(np.where(sick, "yes", "no"))}
    silos: list[Any] = [
        {k: v[s] for k, v in table.items()} for s in (slice(0, 140), slice(140, 300))
    ]
    data = federate(silos, tests=silos, val_fraction=0.0, label_column="sick")
    method = replace(SMALL, depth=2, rounds=4, shrinkage=1.0)
    result = run(method, data, folder=tmp_path / "run", evaluate_every=10**9)
    assert result.metrics[-1]["accuracy"] == 1
    rows = {"site": ["b", "c", "a"], "age": [40.0, None, 50.0]}
    assert [row["prediction"] for row in predict(tmp_path / "run", rows)] == ["yes", "yes", "no"]


@pytest.mark.filterwarnings("ignore:.*another unit")
@pytest.mark.parametrize("min_active", [0, 10])
def test_a_value_far_from_all_others_costs_little(min_active: int) -> None:
    """It moves the mean by 17 deviations of the other 599, and makes the deviation 400 of them."""
    r = np.random.default_rng(1)
    x = r.normal(size=(1200, 3))
    sick = (abs(x[:, 0]) > 0.7) ^ (r.random(1200) < 0.1)
    aurocs = []
    for far in (0.0, 1e4, -1e6):
        x[0, 0] = far or x[0, 0]
        parts: list[Any] = [
            {"a": rows[:, 0], "b": rows[:, 1], "c": rows[:, 2], "sick": labels}
            for rows, labels in zip(
                np.split(x, 6), np.split(np.where(sick, "yes", "no"), 6), strict=True
            )
        ]
        data = federate(parts[:3], tests=parts[3:], val_fraction=0.0, label_column="sick")
        method = Trees(rounds=5, min_active=min_active)
        result = run(method, data, metric="auroc", evaluate_every=10**9)
        aurocs.append(result.metrics[-1]["auroc"])
    assert aurocs[0] > 0.85
    assert min(aurocs) > aurocs[0] - 0.02


def test_cells_are_where_samples_are() -> None:
    """In the second lap a cell has few samples, whatever the scale and the place, and each code of
    a category has a cell of its own."""
    normal = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    codes = torch.arange(4000) % 200
    x = torch.stack([1e-6 * normal, 1e6 * normal, 17 + normal / 10, codes], 1).T.contiguous()

    def counts(edges: Tensor) -> Tensor:
        return torch.stack([row.bincount(minlength=1024) for row in torch.searchsorted(edges, x)])

    first = counts(_ends()[1:-1].repeat(4, 1))
    edges = _refined(first.cumsum(1).double())
    assert (edges.diff() >= 0).all()
    found = counts(edges)
    assert first[2].max() == 4000
    assert (found[:3].max(1).values < 80).all()
    assert found[3].max() == 20
    assert _refined(torch.zeros(2, 1024).double()).isfinite().all(), "of no samples"


def test_other_models_and_tasks_are_refused() -> None:
    with pytest.raises(UserError, match=r"columns .*below 1"):
        Trees(trees=2, columns=1.0)
    with pytest.raises(UserError, match="a model of its own"):
        run(SMALL, held("binary"), "table_mlp")
    with pytest.raises(UserError, match="other trees"):
        transcript(
            SMALL,
            *records(),
            [*crafted(SMALL, 4, 0)[:2], crafted(replace(SMALL, trees=2, columns=0.9), 4, 0)[2]],
        )
    for laps in (0, 1):
        with pytest.raises(UserError, match="other columns"):
            transcript(SMALL, *records(), crafted(SMALL, 4, 0)[:laps] + crafted(SMALL, 5, 0)[laps:])
    with pytest.raises(UserError, match="int64"):
        Histogram(torch.zeros(2), torch.zeros(0, dtype=torch.int64))


def test_weights_of_classes_count() -> None:
    plain, weighted = (
        outputs(SMALL, "binary", training=Training(class_weights=kind))[0].softmax(1)[:, 1].mean()
        for kind in ("none", "balanced")
    )
    assert abs(weighted - 0.5) < abs(plain - 0.5) / 2


@pytest.mark.slow
def test_it_is_as_good_as_scikit_learn_on_tumours() -> None:
    x, y = load_breast_cancer(return_X_y=True)
    scores: dict[str, list[float]] = {"trees": [], "sklearn": []}
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(x))
        train, test = order[:380], order[380:]
        model = HistGradientBoostingClassifier(random_state=0).fit(x[train], y[train])
        scores["sklearn"].append(roc_auc_score(y[test], model.predict_proba(x[test])[:, 1]))
        z = torch.tensor((x - x[train].mean(0)) / x[train].std(0)).float()
        parts: list[Any] = [(z[part], torch.tensor(y[part])) for part in np.array_split(train, 3)]
        data = federate(parts, test=(z[test], torch.tensor(y[test])), val_fraction=0.0)
        scores["trees"].append(
            run(Trees(), data, metric="auroc", evaluate_every=10**9).metrics[-1]["auroc"]
        )
    assert np.mean(scores["trees"]) > np.mean(scores["sklearn"]) - 0.005


def _xgboost() -> None:
    import xgboost  # type: ignore[import-not-found,unused-ignore]

    kinds = {"binary": "binary:logistic", "classes": "multi:softprob", "labels": "binary:logistic"}
    found = {}
    for case, task in CASES.items():
        x, y = (part.numpy() for part in samples(case))
        if case == "numbers":
            y = (y - y.mean(0)) / y.std(0)
        share = (
            (np.bincount(y.astype(int).flatten()) + 0.5) if task == "classification" else np.ones(1)
        )
        margin = np.zeros((len(x), {"binary": 1, "classes": 3}.get(case, 2)))
        if case == "binary":
            margin += np.log(share[1] / share[0])
        elif case == "classes":
            margin += np.log(share) - np.log(share).mean()
        elif case == "labels":
            margin += np.log((y.sum(0) + 0.5) / (len(y) + 1 - (y.sum(0) + 0.5)))
        data = xgboost.DMatrix(x, y, base_margin=margin)
        options = {
            "objective": kinds.get(case, "reg:squarederror"),
            "tree_method": "hist",
            "max_bin": 64,
            "multi_strategy": "multi_output_tree",
            "max_depth": SMALL.depth,
            "eta": SMALL.shrinkage,
            "lambda": SMALL.ridge,
            "min_child_weight": SMALL.min_hessian,
            "base_score": 0.0 if case == "numbers" else 0.5,
        }
        options |= {"num_class": 3} if case == "classes" else {}
        model = xgboost.train(options, data, SMALL.rounds)
        found[case] = model.predict(data, output_margin=True).astype(float).round(7).tolist()
    REFERENCE.write_text(json.dumps(found))


if __name__ == "__main__":
    _xgboost()
