"""Classes of which few samples are positive: weights of classes, and epochs chosen by AUROC, as in
simulation."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression

from ekiden import Hardware, Training
from ekiden import run as run_here
from ekiden.core.base.errors import UserError
from ekiden.core.engine.method import Method
from ekiden.core.engine.setup import with_weights
from ekiden.core.tasks import Classification
from ekiden.data import FederatedData
from ekiden.methods import FedAvg, FedGram, FedSeq
from ekiden.runs.recipe import Recipe
from ekiden.runs.result import Result
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.remote_plan import Measuring, RemotePlan
from ekiden.silos.coordinator.session import terms_for
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import Held, read
from ekiden.silos.trust import agreement as agreements
from tests.silos.across.test_attacks import Attacker, terms_in
from tests.silos.across.test_networks_of_a_run import refused
from tests.silos.fakes import FakeNodes, evaluate
from tests.silos.sessions import same

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")

SILO = """name = "{name}"
[data]
path = "{name}.csv"
label_column = "died"
val_fraction = 0.3
min_count = 3
agreed = "agreed.json"
[limits]
level = "models"
min_positives = 1
min_samples = 1
exact_evaluation = true
[hardware]
threads = 1
"""
TRAINING = Training(lr=0.01, batch_size=32)
BALANCED = replace(TRAINING, class_weights="balanced")


class Nodes(FakeNodes):
    """Silos that read their tables once."""

    def silo(self, node: int) -> Silo:
        return Silo(self.files[node], {"": self.held[node]})

    @cached_property
    def held(self) -> dict[int, Held]:
        return {node: file.load() for node, file in self.files.items()}


@pytest.fixture
def silos(tmp_path: Path, command: Callable[..., tuple[int, str]]) -> Nodes:
    """Two silos with a table each, in which 3 % died; they have agreed on its scale."""
    rng = np.random.default_rng(0)
    for name, rows in (("a", 400), ("b", 300)):
        risk = rng.normal(size=(rows, 4))
        order = (risk[:, 0] + rng.normal(size=rows)).argsort()
        died = np.where(np.isin(np.arange(rows), order[-round(0.03 * rows) :]), "yes", "no")
        lines = [
            f"{a:.3f},{b:.3f},{c:.3f},{d:.3f},{y}"
            for (a, b, c, d), y in zip(risk, died, strict=True)
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,bmi,urea,rate,died", *lines]) + "\n")
        (tmp_path / f"{name}.toml").write_text(
            SILO.format(name=name).replace('agreed = "agreed.json"\n', "")
        )
        assert command("silo", "sums", str(tmp_path / f"{name}.toml"))[0] == 0
        (tmp_path / f"{name}.toml").write_text(SILO.format(name=name))
    sums = (str(tmp_path / f"{name}-sums.json") for name in "ab")
    code, said = command("federation", "agree", *sums, "--out", str(tmp_path / "agreed.json"))
    assert code == 0, said
    return Nodes([read(tmp_path / f"{name}.toml") for name in "ab"])


def here(
    silos: Nodes, method: Method, training: Training, metric: str = "", model: str = "mlp"
) -> Result:
    held = list(silos.held.values())
    data = FederatedData(held[0][0], tuple(client for _, client in held))
    how: dict[str, Any] = {
        "training": training,
        "hardware": Hardware(threads=1),
        "seed": 3,
        "metric": metric,
    }
    return run_here(method, data, model=model, **how)


def far(
    silos: Nodes,
    folder: Path,
    method: Method,
    training: Training,
    metric: str = "",
    model: str = "mlp",
) -> Result:
    recipe = Recipe(method, model=model, training=training, seed=3, metric=metric, evaluate_every=0)
    # Few test rows died, and noise may hide them: then AUROC is not defined.
    plan = RemotePlan(recipe, "a,b", evaluate_dp="exact")
    return session.run(plan, silos, folder, silos.public, lambda line: None, poll=0)


def test_weights_of_classes_are_those_of_one_machine(silos: Nodes, tmp_path: Path) -> None:
    counts = json.loads((tmp_path / "agreed.json").read_text())["classes"]
    held = list(silos.held.values())
    labels = np.concatenate([client.train.y.numpy() for _, client in held])
    assert counts == dict(zip(held[0][0].classes, np.bincount(labels).tolist(), strict=True))
    together = with_weights(FederatedData(held[0][0], tuple(client for _, client in held)))
    result = far(silos, tmp_path / "run", FedAvg(rounds=2, epochs=1), BALANCED)
    expected = here(silos, FedAvg(rounds=2, epochs=1), BALANCED)
    assert same(result.weights, expected.weights)
    assert not same(result.weights, here(silos, FedAvg(rounds=2, epochs=1), TRAINING).weights)
    terms = agreements.parse((tmp_path / "run" / "agreement.json").read_text())
    assert terms.labels == together.dataset.task
    assert terms.labels.weights == pytest.approx(  # type: ignore[attr-defined]
        [sum(counts.values()) / (2 * n) for n in counts.values()]
    )
    measuring, _ = terms_for(
        terms, Measuring(str(tmp_path / "run")), ("b",), silos.public
    )  # other silos may have agreed on other counts
    assert measuring.labels == Classification()


def test_a_silo_trains_only_with_the_weights_that_follow_from_its_own_counts(
    silos: Nodes, tmp_path: Path
) -> None:
    far(silos, tmp_path / "run", FedSeq(epochs=1), BALANCED)
    attacker = Attacker(silos, terms_in(silos))
    own = json.loads(attacker.terms.task)
    assert "different task" in refused(attacker, task=json.dumps(own | {"weights": [1e-9, 1e9]}))
    assert "different task" in refused(attacker, task="")
    with pytest.raises(
        UserError, match="fedgram does not train on a loss in which classes have weights: leave out"
    ):
        far(silos, tmp_path / "other", FedGram(), BALANCED)
    file = tmp_path / "agreed.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"classes": {}}))
    with pytest.raises(
        UserError, match="class_weights needs counts of classes, which silos agree on"
    ):
        far(silos, tmp_path / "other", FedSeq(epochs=1), BALANCED)
    assert not (tmp_path / "other").exists()


def unlike(folder: Path, kind: str) -> None:
    """Two silos of images or texts; most are ill at one and few at the other."""
    draw = np.random.default_rng(0)
    for name, counts in (("a", {"ill": 5, "well": 25}), ("b", {"ill": 12, "well": 10})):
        place = folder / name
        if kind == "images":
            for label, n in counts.items():
                (place / label).mkdir(parents=True)
                for k in range(n):
                    shown = draw.integers(0, 100, (4, 4), dtype=np.uint8) + (
                        100 if label == "ill" else 0
                    )
                    Image.fromarray(shown.astype(np.uint8)).save(place / label / f"{k}.png")
        else:
            words = {"ill": "fever cough pain", "well": "calm rest fine"}
            rows = [f"{words[label]} {k},{label}" for label, n in counts.items() for k in range(n)]
            (folder / f"{name}.csv").write_text("\n".join(["text,label", *rows]) + "\n")
        where = (
            f'path = "{name}"' if kind == "images" else f'path = "{name}.csv"\ntext_column = "text"'
        )
        lines = (
            f'name = "{name}"',
            "[data]",
            where,
            "min_count = 3",
            "val_fraction = 0.2",
            "[hardware]",
            "threads=1",
            "[limits]",
            'level = "models"',
        )
        (folder / f"{name}.toml").write_text("\n".join(lines))


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_silos_of_images_and_texts_agree_on_counts_of_classes(
    kind: str, tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    unlike(tmp_path, kind)
    for name in "ab":
        code, said = command("silo", "sums", str(tmp_path / f"{name}.toml"))
        assert code == 0, said
        told = json.loads((tmp_path / f"{name}-sums.json").read_text())
        assert {k for k, v in told.items() if v} == {"classes", "silo"}
    sums = [str(tmp_path / f"{name}-sums.json") for name in "ab"]
    code, said = command("federation", "agree", *sums, "--out", str(tmp_path / "agreed.json"))
    assert code == 0, said
    assert "training samples of 2 classes" in said
    files = [read(tmp_path / f"{name}.toml") for name in "ab"]
    files = [replace(file, data=replace(file.data, agreed="agreed.json")) for file in files]
    silos = Nodes(files)
    result = far(silos, tmp_path / "run", FedSeq(epochs=1), BALANCED, model="auto")
    assert same(result.weights, here(silos, FedSeq(epochs=1), BALANCED, model="auto").weights)
    assert not same(result.weights, here(silos, FedSeq(epochs=1), TRAINING, model="auto").weights)
    labels = np.concatenate([client.train.y.numpy() for _, client in silos.held.values()])
    counts = np.bincount(labels)
    terms = agreements.parse((tmp_path / "run" / "agreement.json").read_text())
    assert terms.labels.weights == pytest.approx(labels.size / (2 * counts))  # type: ignore[attr-defined]
    if kind == "images":  # few more images, and the difference of two sums is their label
        for k in range(2):
            Image.fromarray(np.full((4, 4), k, dtype=np.uint8)).save(
                tmp_path / "a" / "ill" / f"new{k}.png"
            )
        code, said = command("silo", "sums", str(tmp_path / "a.toml"))
        assert code == 2
        assert "sums of labels were told with other rows before" in said


@pytest.mark.slow  # measures the AUROC of each epoch
def test_epochs_are_chosen_by_the_metric_between_silos_too(silos: Nodes, tmp_path: Path) -> None:
    """By accuracy, guessing that nobody dies is the best epoch; by AUROC a later one is."""
    found, slow = {}, replace(TRAINING, lr=3e-4)
    for metric in ("accuracy", "auroc"):
        found[metric] = far(silos, tmp_path / metric, FedSeq(epochs=8), slow, metric)
        assert same(found[metric].weights, here(silos, FedSeq(epochs=8), slow, metric).weights)
    assert not same(found["accuracy"].weights, found["auroc"].weights)
    assert (
        found["auroc"].metrics[-1]["metrics"]["auroc"]
        > found["accuracy"].metrics[-1]["metrics"]["auroc"]
    )
    assert found["accuracy"].metrics[-1]["accuracy"] == pytest.approx(
        found["accuracy"].metrics[-1]["majority"]
    )


def test_a_recalibration_follows_from_counts_of_validation_samples(
    silos: Nodes, tmp_path: Path
) -> None:
    run, held = tmp_path / "run", list(silos.held.values())
    result = far(silos, run, FedSeq(epochs=2), BALANCED)
    exactly: dict[str, Any] = {"validation": True, "evaluate_dp": "exact", "poll": 0}
    row = evaluate(
        run, ("a", "b"), silos, run / "evaluations" / "one", silos.public, print, **exactly
    )
    x, y = (torch.cat([getattr(client.val, part) for _, client in held]) for part in "xy")
    assert row["figures"]["samples"] == len(y)
    with torch.inference_mode():
        z = result.model.eval()(x)
    line = LogisticRegression(C=1e9, tol=1e-9, solver="newton-cholesky").fit(
        (z[:, 1] - z[:, 0])[:, None], y
    )
    wanted = [float(line.coef_[0, 0]), float(line.intercept_[0])]
    assert row["figures"]["recalibration"]["platt"] == pytest.approx(wanted, abs=0.05)  # of a bin
    assert "validation samples and subgroups are for finished models" in refused(
        Attacker(silos, terms_in(silos)), validation=True, measures=""
    )
