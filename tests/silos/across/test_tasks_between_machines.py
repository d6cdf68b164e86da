"""Tasks other than classification between machines: the same bits, and no more reported about test
samples."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ekiden import Hardware
from ekiden import run as run_here
from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.federation import Fed
from ekiden.core.engine.folder import read_config
from ekiden.core.engine.method import Method
from ekiden.core.models.catalogue import NETWORKS, Known
from ekiden.core.models.split import SplitNetwork
from ekiden.core.tasks import LanguageModelling, Regression, named
from ekiden.core.tasks import terms as task_terms
from ekiden.data import FederatedData, federate
from ekiden.methods import GLM, DFedAvgM, FedAvg, FedGram, FedOV, FedPer, FedSeq, Trees
from ekiden.methods.exact.closing import with_lap
from ekiden.readers.kinds import Tokens
from ekiden.runs.recipe import Recipe
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.remote_plan import RemotePlan
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import read
from ekiden.silos.trust.agreement import EXACT, NOISE
from ekiden.silos.trust.parcel import Answer, unpack
from ekiden.silos.trust.report import Reported
from tests.silos.across.test_attacks import Attacker, terms_in
from tests.silos.across.test_networks_of_a_run import refused
from tests.silos.fakes import NAMES, FakeNodes, with_keys
from tests.silos.sessions import TRAINING, same
from tests.silos.silo_files import tables

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")

MODELS = {
    "multi-label": "mlp",
    "regression": "mlp",
    "survival": "mlp",
    "segmentation": "tiny_pixels",
    "language-modelling": "tiny_tokens",
}
METHODS = [FedSeq(epochs=2), FedAvg(rounds=2, epochs=1), DFedAvgM(rounds=2, epochs=1)]


@cache
def data(kind: str) -> FederatedData:
    """Three silos of real data, of unequal sizes."""
    from sklearn.datasets import load_diabetes, load_digits

    digits = load_digits()
    images, number = (
        torch.tensor(digits.images / 16, dtype=torch.float32)[:900, None],
        torch.tensor(digits.target)[:900],
    )
    x: Tensor
    match kind:
        case "regression":  # how far diabetes progressed within a year
            found = load_diabetes()
            x, y = torch.tensor(found.data * 20).float(), torch.tensor(found.target).float()
        case "survival":
            found = load_diabetes()
            x, target = torch.tensor(found.data * 20).float(), torch.tensor(found.target).float()
            y = torch.stack([400 - target, (target > 80).float()], 1)
        case "multi-label":
            x, y = (
                images,
                torch.stack([number % 2 == 0, number > 4, number % 3 == 0], dim=1).float(),
            )
        case "segmentation":  # background, ink, the edge between
            y = (images[:, 0] > 0.1).long() + (images[:, 0] > 0.7).long()
            x = images + 0.2 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
        case _:
            x = y = (images[:, 0] * 5).long().flatten(1)[:, :24]
    cuts = [len(x) // 2, len(x) // 3, len(x) - len(x) // 2 - len(x) // 3]
    parts = list(zip(torch.split(x, cuts), torch.split(y, cuts), strict=True))
    return federate(parts, names=NAMES, task=kind)


class Pixels(nn.Module):
    """(B, 1, H, W) to (B, 3, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.features(x))
        return found


@pytest.fixture(autouse=True)
def networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks of another package, installed at all parties."""

    def tokens(texts: Tokens, outputs: int) -> SplitNetwork:
        return SplitNetwork(
            nn.Sequential(nn.Embedding(texts.vocabulary, 16)), nn.Linear(16, outputs)
        )

    monkeypatch.setitem(NETWORKS, "tiny_pixels", Known(lambda shape, classes: Pixels(), side=1))
    monkeypatch.setitem(NETWORKS, "tiny_tokens", Known(tokens, reads=Tokens))


class Nodes(FakeNodes):
    """Silos that hold the data of a task."""

    def __init__(self, folder: Path, kind: str, more: str = "") -> None:
        super().__init__(with_keys(folder, NAMES, more)[0])
        self.data = {client.name: (data(kind).dataset, client) for client in data(kind).clients}

    def silo(self, node: int) -> Silo:
        file = self.files[node]
        return Silo(file, {"": self.data[file.name]})


def far(
    method: Method,
    nodes: Nodes,
    folder: Path,
    kind: str,
    said: list[str] | None = None,
    **more: Any,
) -> Any:
    plan: RemotePlan[Method] = RemotePlan(
        Recipe(method, model=MODELS[kind], training=TRAINING, seed=3, evaluate_every=0),
        ",".join(NAMES),
        **{"evaluate_dp": "exact", **more},  # as on one machine
    )
    tell: Callable[[str], None] = said.append if said is not None else lambda line: None
    return session.run(plan, nodes, folder, nodes.public, tell, poll=0)


def here(method: Method, kind: str) -> Any:
    return run_here(
        method,
        data(kind),
        model=MODELS[kind],
        training=TRAINING,
        hardware=Hardware(threads=1),
        seed=3,
    )


def assert_same(one: Any, other: Any) -> None:
    """Bit by bit, except for what is measured."""
    assert same(one.weights, other.weights)
    assert len(one.personal) == len(other.personal)
    assert all(same(a, b) for a, b in zip(one.personal, other.personal, strict=True))
    assert one.ledger == other.ledger


def cases() -> Iterator[Any]:
    """Yield all pairs; each task is fast with one method, and each method with a task."""
    for i, kind in enumerate(MODELS):
        for k, method in enumerate(METHODS):
            fast = kind != "survival" and i % len(METHODS) == k
            yield pytest.param(
                kind, method, marks=[] if fast else pytest.mark.slow, id=f"{kind}-{method.title()}"
            )


@pytest.mark.parametrize(("kind", "method"), [*cases()])
def test_tasks_are_equal_to_one_process_and_verified(
    kind: str, method: Method, tmp_path: Path
) -> None:
    """The same bits and ledger; metrics as close as the coarse counts allow; nothing else is
    reported."""
    nodes, said = Nodes(tmp_path, kind), list[str]()
    result = far(method, nodes, tmp_path / "run", kind, said, evaluate_dp="exact")
    expected = here(method, kind)
    assert_same(result, expected)
    assert verify(tmp_path / "run", nodes.public).wrong == ()
    assert read_config(tmp_path / "run")["task"]["kind"] == kind
    row, wanted = result.metrics[-1], expected.metrics[-1]
    once = isinstance(
        method, FedSeq
    )  # what silos report about a model that nobody can have made up is exact
    assert row["loss"] == pytest.approx(
        wanted["loss"], rel=1e-4 if once else 0.1, abs=1e-4 if once else 0.1
    )
    assert ("accuracy" in row) == (kind not in ("regression", "survival"))
    metric, near = wanted["metric"], 2e-3
    if kind == "survival":  # silos compare their own samples only
        near = 0.05
    assert row["metric"] == metric
    bins = (
        0.0 if once else 0.15
    )  # bins of few samples are joined, which draws scores of a few rows towards guessing
    assert (
        row[metric]
        == result.score
        == pytest.approx(wanted[metric], rel=near if once else 0.1, abs=bins)
    )
    assert row["client_mean"] == pytest.approx(
        wanted["client_mean"], rel=5e-3 if once else 0.1, abs=bins
    )
    assert f"step {row['step']} of {row['step']}, {metric} " in repr(result)
    assert any(
        line.startswith(f"step {row['step']} of ") and f", {metric} " in line for line in said
    )
    if not result.personal:
        assert row["metrics"].keys() == wanted["metrics"].keys() == row["silo_means"].keys()
        for name, value in wanted["metrics"].items():
            assert row["metrics"][name] == pytest.approx(
                value, rel=near if once else 0.15, abs=1e-4
            ), name
    given = [wire.decode(unpack(answer, Answer)[1], Reported) for answer in nodes.said[-3:]]
    assert all(
        one.shown is None and one.masked is not None for one in given
    )  # nothing about a single silo
    assert not {"clients", "client_worst", "client_std"} & set(row)
    assert "client" not in row.get("groups", {})


@pytest.mark.parametrize(
    "method", [FedGram(), with_lap(FedSeq(epochs=1))], ids=lambda method: method.title()
)
def test_sums_of_numbers_to_predict(method: Method, tmp_path: Path) -> None:
    """The classifier of fixed features, which is a regression here."""
    nodes = Nodes(tmp_path, "regression")
    result = far(method, nodes, tmp_path / "run", "regression")
    assert_same(result, here(method, "regression"))
    assert verify(tmp_path / "run", nodes.public).wrong == ()


def test_personal_models_of_another_task(tmp_path: Path) -> None:
    nodes, method = Nodes(tmp_path, "multi-label"), FedPer(rounds=1, epochs=1)
    result = far(method, nodes, tmp_path / "run", "multi-label")
    assert_same(result, here(method, "multi-label"))
    assert verify(tmp_path / "run", nodes.public).wrong == ()
    assert result.metrics[-1]["consensus"] > 0


def two_targets(nodes: Nodes) -> Regression:
    """Give all silos a second target."""
    task = Regression((0.0, 0.0), (100.0, 50.0))
    for name, (dataset, client) in nodes.data.items():

        def two(part: Any) -> Any:
            return replace(
                part,
                samples=replace(part.samples, y=torch.stack([part.samples.y, -part.samples.y], 1)),
            )

        nodes.data[name] = (
            replace(dataset, task=task, classes=("a", "b")),
            replace(client, train=two(client.train), val=two(client.val), test=two(client.test)),
        )
    return task


def test_errors_of_several_targets(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "regression")
    two_targets(nodes)
    result = far(FedSeq(epochs=1), nodes, tmp_path / "run", "regression")
    row = result.metrics[-1]
    assert row["metric"] == "rmse"
    assert row["groups"]["class"].keys() == {"a", "b"}
    each = [values["rmse"] for values in row["groups"]["class"].values()]
    assert row["rmse"] == pytest.approx(sum(each) / 2)
    assert verify(tmp_path / "run", nodes.public).wrong == ()


@pytest.mark.parametrize("noise", [EXACT, NOISE])
def test_nothing_is_told_of_few_samples_of_any_task(noise: str, tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "regression", "[limits]\nmin_samples = 1000\n")
    result = far(FedSeq(epochs=1), nodes, tmp_path / "run", "regression", evaluate_dp=noise)
    assert not {"loss", "rmse", "clients"} & set(result.metrics[-1])


CLAIMS = {
    "another task": task_terms(named("multi-label")),
    "classification": "",
    "another scale": task_terms(Regression((0.0,), (1e-9,))),
    "a larger network": task_terms(LanguageModelling(vocabulary=10**12)),
    "no scale": '{"kind": "regression", "mean": [NaN], "std": [1.0]}',
    "a scale of 0": '{"kind": "regression", "mean": [0.0], "std": [0.0]}',
    "no task": "[1]",
    "none there is": '{"kind": "pickle"}',
    "more fields": '{"kind": "regression", "more": 1}',
    "deep": "[" * 50_000,
}


def test_a_run_has_the_silos_own_task(tmp_path: Path) -> None:
    """Others, a scale of targets that shows single errors, a metric that is code: refused before
    anything is built."""
    marker, code = tmp_path / "executed", tmp_path / "metric.py"
    code.write_text(
        f"import pathlib\npathlib.Path({str(marker)!r}).touch()\ndef f(a, y): return 0\n"
    )
    nodes = Nodes(tmp_path, "regression")
    far(FedSeq(epochs=1), nodes, tmp_path / "run", "regression")
    attacker = Attacker(nodes, terms_in(nodes))
    for what, task in CLAIMS.items():
        assert refused(attacker, task=task), what
    own = json.loads(attacker.terms.task)
    for metric in (f"{code}:f", "auroc"):
        assert "has no metric" in refused(attacker, task=json.dumps(own | {"metric": metric}))
    assert not marker.exists()
    assert (
        "has other terms at client-0"
        in attacker.under(task="").ask(100, "value", key="0-0-train")[0].error
    )


def test_silos_of_other_tasks_do_not_work_together(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "regression")
    dataset, client = nodes.data["client-1"]
    nodes.data["client-1"] = replace(dataset, task=Regression((0.0,), (5.0,))), client
    with pytest.raises(
        UserError,
        match=r"client-0 and client-1 hold data of different task; .* agree on the scale of targets",
    ):
        far(FedSeq(epochs=1), nodes, tmp_path / "run", "regression")
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_between_machines_is_one_line(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, "regression")
    with pytest.raises(
        UserError, match="fedov needs one class for each sample, the task is regression: use one of"
    ):
        far(FedOV(epochs=1), nodes, tmp_path / "run", "regression")
    pixels = Nodes(tmp_path / "pixels", "segmentation")
    plan: RemotePlan[Method] = RemotePlan(
        Recipe(FedSeq(epochs=1), model="mlp", training=TRAINING, evaluate_every=0), ",".join(NAMES)
    )
    with pytest.raises(
        UserError, match=r"silo client-0: the model gives \(3,\) per sample, but segmentation"
    ):
        session.run(plan, pixels, tmp_path / "run", pixels.public, lambda line: None, poll=0)
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "pixels").glob("client-*-silo/runs/*"))


def test_silos_agree_on_the_scale_of_what_is_predicted(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    """From files: sums of the targets, too; then a run."""
    files = tables(tmp_path)
    text = {
        file: file.read_text().replace('"died"', '"age"').replace('["ward"]', '["ward", "died"]')
        for file in files
    }
    for file in files:
        lines = (tmp_path / f"{file.stem}.csv").read_text().splitlines()
        (tmp_path / f"{file.stem}.csv").write_text(
            "\n".join(
                [
                    "more," + lines[0],
                    *(f"{k % 7}.5,{line}" for k, line in enumerate(lines[1:]) if line[0] != ","),
                ]
            )
        )
        file.write_text(text[file] + 'task = "regression"\n')
        with pytest.raises(
            UserError, match="agree on the scaling of a table, and of numbers to predict"
        ):
            read(file).load()
        assert command("silo", "sums", str(file))[0] == 0
    out = tmp_path / "agreed.json"
    code, said = command(
        "federation", "agree", *(str(tmp_path / f"{n}-sums.json") for n in "ab"), "--out", str(out)
    )
    assert code == 0, said
    assert "1 to predict" in said
    for file in files:
        file.write_text(
            text[file]
            + 'task = "regression"\nagreed = "agreed.json"\n'
            + '[limits]\nlevel = "models"\napprove = false\n[hardware]\nthreads = 1\n'
        )
    (one, a), (two, b) = (read(file).load() for file in files)
    assert one.task == two.task
    y = torch.cat([a.train.y, b.train.y]).double()
    assert isinstance(one.task, Regression)
    assert one.task.mean == pytest.approx([float(y.mean())])
    assert one.task.std == pytest.approx([float(y.std(correction=0))])
    plan: RemotePlan[Any] = RemotePlan(
        Recipe(FedSeq(epochs=10), training=replace(TRAINING, batch_size=16), evaluate_every=0),
        "a,b",
        evaluate_dp="exact",
    )
    nodes = FakeNodes([read(f) for f in files])
    result = session.run(plan, nodes, tmp_path / "run", nodes.public, lambda line: None, poll=0)
    assert 0 < result.metrics[-1]["rmse"] < 30
    made = json.loads(out.read_text())
    for targets in (
        {},
        {"other": [0.0, 1.0]},
        {"age": [0.0, 0.0]},
        {"age": [0.0, float("nan")]},
        {"age": "x"},
    ):
        out.write_text(json.dumps(made | {"targets": targets}))
        with pytest.raises(UserError, match="agreed"):
            read(files[0]).load()


def test_trees_from_masked_sums_are_those_of_one_machine(tmp_path: Path) -> None:
    nodes, method = Nodes(tmp_path, "regression"), Trees(rounds=2, trees=2, depth=2, min_active=10)
    plan: RemotePlan[Method] = RemotePlan(Recipe(method, seed=3, evaluate_every=0), ",".join(NAMES))
    result = session.run(plan, nodes, tmp_path / "run", nodes.public, lambda line: None, poll=0)
    there, one = result.weights, run_here(method, data("regression"), seed=3).weights
    assert there
    assert one
    assert there.params.any()
    assert all(
        torch.equal(a, b) for a, b in zip(vars(there).values(), vars(one).values(), strict=True)
    )
    assert verify(tmp_path / "run", nodes.public).wrong == ()


@pytest.mark.parametrize(
    "family",
    ["linear", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cox", "poisson"))],
)
def test_a_regression_from_masked_sums_is_that_of_one_machine(family: Any, tmp_path: Path) -> None:
    kind = "survival" if family == "cox" else "regression"
    nodes, method = (
        Nodes(tmp_path, kind),
        GLM(family=family, times="100,200,300" if family == "cox" else ""),
    )
    plan: RemotePlan[Method] = RemotePlan(Recipe(method, seed=3, evaluate_every=0), ",".join(NAMES))
    result = session.run(plan, nodes, tmp_path / "run", nodes.public, lambda line: None, poll=0)
    there, one = result.coefficients, run_here(method, data(kind), seed=3).coefficients
    assert there == one
    assert same(
        result.weights, run_here(method, data(kind), seed=3).weights
    )  # the baseline hazard, too
    assert len(there) == (10 if family == "cox" else 11)
    assert verify(tmp_path / "run", nodes.public).wrong == ()


def test_a_silo_that_alone_is_told_another_last_lap_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In laps after convergence silos give zeros, except in the last one. A coordinator that names the
    last lap to one silo alone would read its part, if masks were not bound to the flag."""
    true = Fed.sum

    def crafted(
        self: Fed, task: Any, clients: Any, model: Any, at: Any, last: bool, **more: Any
    ) -> Any:
        return true(self, task, clients, model, at, last != (clients == [NAMES[1]]), **more)

    nodes = Nodes(tmp_path, "regression")
    recipe: Recipe[Method] = Recipe(GLM(family="linear"), seed=3, evaluate_every=0)
    monkeypatch.setattr(Fed, "sum", crafted)
    with pytest.raises(UserError, match="does not open"):
        session.run(
            RemotePlan(recipe, ",".join(NAMES)),
            nodes,
            tmp_path / "run",
            nodes.public,
            lambda line: None,
            poll=0,
        )
    assert not (tmp_path / "run" / "model.safetensors").exists()
