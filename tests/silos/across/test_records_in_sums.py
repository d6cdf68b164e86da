"""What exact sums show of single records, and that silos refuse the sums that show them.

The attackers know all but the records: features that follow from the seed, columns, categories, the
sums."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment, nnls
from sklearn.datasets import load_breast_cancer
from torch import Tensor

from ekiden import GLM, federate, run
from ekiden.core.base.errors import UserError
from ekiden.core.data.samples import Samples, Subset
from ekiden.core.engine.method import Method
from ekiden.core.models.catalogue import build
from ekiden.core.models.tables_and_texts import linear
from ekiden.core.tasks import Classification
from ekiden.data import FederatedData, load
from ekiden.methods import FedGram
from ekiden.methods.exact.blocks.fixed_features import features_of
from ekiden.methods.exact.blocks.whole_features import WholeFeatures
from ekiden.methods.statistics.newton import derivatives, start
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.remote_plan import RemotePlan
from ekiden.silos.silo.policy import most_features
from ekiden.silos.silo.silo import Silo
from tests.methods.test_glm import cohort, held
from tests.silos.across.test_crafted_features import SAFE, smoothed
from tests.silos.fakes import NAMES, FakeNodes, with_keys

pytestmark = pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DataWarning")


def features(width: int, shape: tuple[int, ...], seed: int = 0) -> WholeFeatures:
    torch.manual_seed(seed)
    method = FedGram(width=width, **SAFE)
    return features_of(method.own_network(build("mlp", shape, 2), shape, 2, Classification()))


@pytest.mark.parametrize("sizes", [(2, 2, 3, 4, 5), (40, 2, 3)])
def test_sums_of_a_table_are_all_its_rows_unless_there_are_few(sizes: tuple[int, ...]) -> None:
    """Which of all possible rows there are, and how often: whole numbers, at least 0, that explain
    the sums.

    Many runs of few features, with other seeds, show no more than one with as many sums; six of
    that one show all."""
    cells = torch.tensor(
        [*product(*((np.arange(n) - (n - 1) / 2) * 3.5 / n for n in sizes))]
    ).float()
    draw = np.random.default_rng(0)
    rows = draw.choice(len(cells), 150, p=draw.dirichlet(np.full(len(cells), 0.3)))
    table = Subset(
        Samples(cells[rows], torch.zeros(len(rows), dtype=torch.int64)), torch.arange(len(rows))
    )
    few = most_features(FedGram(**SAFE), table, Classification(), 2)
    assert few < 12
    truth = np.bincount(rows, minlength=len(cells))
    within = [(width, 1) for width in (few, 5, 3, 1)]
    for width, runs in (*within, (24, 1), (few, 6)):
        known = [torch.full((1, len(cells)), 100.0)]
        for seed in range(runs):
            phi = features(width, (len(sizes),), seed)(cells)
            a, b = torch.triu_indices(width, width)
            known += [(phi[:, a] * phi[:, b]).T, phi.T]
        sums = torch.cat(known).double().numpy()
        sums /= np.abs(sums).max(1, keepdims=True).clip(1)
        guess = np.rint(nnls(sums, sums @ truth, maxiter=10_000)[0])
        once = (truth == 1).sum()
        right = ((guess == 1) & (truth == 1)).sum() / once
        hidden = (width, runs) in within
        assert right < 0.4 if hidden else right == 1, (
            f"{width} x {runs}: {right:.2f} of {once} rows that are there once"
        )


@pytest.mark.slow
@pytest.mark.parametrize(("width", "most"), [(6000, 0.03), (60, 1.0)])
def test_class_means_of_many_features_show_images(width: int, most: float) -> None:
    """From noise, the ten images of a class whose features have the mean that FedCOF tells, all
    together."""
    digits = load("digits").train
    x = digits.x[digits.y == 3].float().flatten(1) / 255
    x, others = x[:10], x[100:]
    smooth, mean = smoothed(found := features(width, (1, 8, 8))), found(x.view(-1, 1, 8, 8)).mean(0)
    guess = others.mean(0) + 0.15 * torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    guess.requires_grad_()
    search = torch.optim.LBFGS(
        [guess], max_iter=5000, max_eval=6000, history_size=50, line_search_fn="strong_wolfe"
    )

    def loss() -> Any:
        search.zero_grad()
        outside = guess.clamp(max=0).square().sum() + (guess - 1).clamp(min=0).square().sum()
        found = (smooth(guess).mean(0) - mean).square().mean() + 0.5 * outside
        torch.autograd.backward(found)
        return found

    search.step(loss)  # type: ignore[no-untyped-call]

    def apart(images: Tensor) -> Tensor:
        return torch.cdist(images, x, p=1) / 64

    errors = apart(guess.detach().clamp(0, 1))
    error, alike = (
        float(errors[linear_sum_assignment(errors)].mean()),
        float(apart(others).amin(0).mean()),
    )
    print(
        f"{width} features: images are wrong by {error:.3f}, the most similar other images by "
        f"{alike:.3f}"
    )
    assert error < min(most, alike / 2) if most < 1 else error > alike


class Tables(FakeNodes):
    """Three silos that hold rows of one table."""

    def __init__(self, folder: Path, data: FederatedData, more: str = "") -> None:
        super().__init__(with_keys(folder, NAMES, more, trusting=False)[0])
        held = zip(NAMES, data.clients, strict=True)
        self.held = {name: (data.dataset, replace(client, name=name)) for name, client in held}

    def silo(self, node: int) -> Silo:
        file = self.files[node]
        return Silo(file, {"": self.held[file.name]})


@pytest.mark.parametrize("column", ["site", "months"])
def test_a_regression_shows_no_record_that_differs_from_all_others(
    column: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Products with a column that one row has are this row, also if two columns differ in it
    alone."""
    table, one = cohort(), np.arange(200) == 70
    changed = (
        np.where(one, "x", table["site"]) if column == "site" else 12 * table["age"] + 5.0 * one
    )
    data = held("days", [slice(0, 60), slice(60, 120), slice(120, 200)], **{column: changed})
    network, part = linear(data.dataset.shape, 1, data.dataset.inputs), data.clients[1].train
    x = torch.nn.functional.pad(network.features(part.x).double(), (0, 1), value=1.0)
    at = start("linear", 1, x.shape[1])
    products = derivatives("linear", x, part.y.double()[:, None], at).real()[1][0]
    if column == "site":
        isolates = torch.nn.functional.one_hot(
            torch.tensor(network.names.index("site = other")), x.shape[1]
        ).double()
    else:  # months minus twelve times the age, and a constant
        last = x[:, network.names.index("months")]
        others = x[:, [network.names.index("age"), -1]]
        rest = last - others @ torch.linalg.lstsq(others, last[:, None]).solution[:, 0]
        alone = torch.zeros(60, dtype=torch.float64).index_fill(0, rest.abs().argmax(), 1)
        isolates = torch.linalg.lstsq(x, alone[:, None], driver="gelsd").solution[:, 0]
    who = int((x @ isolates).argmax())
    assert torch.allclose(products @ isolates, x[who], atol=1e-3)
    nodes = Tables(tmp_path, data, '[limits]\nmethods = ["glm"]\n')
    recipe: Recipe[Method] = Recipe(GLM(family="linear"), evaluate_every=0)
    said = "client-1 would show single rows; its own log says which"
    with pytest.raises(UserError, match=said) as refused:
        session.run(
            RemotePlan(recipe, ",".join(NAMES)),
            nodes,
            tmp_path / "run",
            nodes.public,
            lambda line: None,
            poll=0,
        )
    why = (
        "'site = other' differs from its usual value in fewer than 10"
        if column == "site"
        else "single out a row"
    )
    assert why in caplog.text, "the silo's operator reads which"
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.glob("client-1-silo/*/*")), "nothing was computed"


@pytest.mark.slow
@pytest.mark.parametrize("quartiles", [False, True])
def test_few_features_of_a_table_cost_little_accuracy(quartiles: bool) -> None:
    """Tumours of the breast, four silos of 100 rows: 30 columns of numbers, or eight of
    quartiles."""
    found = load_breast_cancer()
    x = {f"column {k}": one for k, one in enumerate(found.data.T[: 8 if quartiles else 30])}
    if quartiles:
        x = {
            k: np.array(list("abcd"))[np.searchsorted(np.quantile(v, [0.25, 0.5, 0.75]), v)]
            for k, v in x.items()
        }
    x["label"] = np.array(["malign", "benign"])[found.target]
    right = list[tuple[float, float]]()
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(len(found.target))
        silos: list[Any] = [
            {k: v[order[100 * i : 100 * i + 100]].tolist() for k, v in x.items()} for i in range(4)
        ]
        rest: Any = {k: v[order[400:]].tolist() for k, v in x.items()}
        data = federate(silos, tests=[rest] * 4, val_fraction=0.0, label_column="label")
        method = FedGram(**SAFE)
        few = min(most_features(method, c.train, data.dataset.task, 2) for c in data.clients)
        widths = [few, 50]
        both = [
            run(replace(method, width=width), data, seed=seed, evaluate_every=10**9)
            for width in widths
        ]
        right.append((both[0].metrics[-1]["accuracy"], both[1].metrics[-1]["accuracy"]))
    mean = np.mean(right, 0)
    print(f"{few} features: {mean[0]:.1%}, 50 features: {mean[1]:.1%}")
    assert mean[0] > mean[1] - 0.04
