"""Every task over real SuperNodes: silos with several data sets, and the metrics of scikit-learn on
pooled samples."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics
from sklearn.datasets import load_digits

from ekiden import load_model
from ekiden.data import FederatedData, federate
from tests.e2e.silos import NAMES, Federation, running
from tests.silos.across.test_tasks_between_machines import data

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("flower")]
METRICS = {
    "classification": "auroc",
    "multi-label": "macro_f1",
    "regression": "r2",
    "segmentation": "miou",
    "survival": "c_index",
}
OWN = "from tests.e2e.test_every_task import silos\n" + "".join(
    f"\ndef {kind.replace('-', '_')}():\n    return silos({kind!r})\n" for kind in METRICS
)


def silos(kind: str) -> FederatedData:
    """Real data of each task; of digits the ten classes."""
    if kind != "classification":
        return data(kind)
    digits = load_digits()
    x, y = (
        torch.tensor(digits.images / 16, dtype=torch.float32)[:, None],
        torch.tensor(digits.target),
    )
    return federate([(x[k::6], y[k::6]) for k in range(3)], names=NAMES)


def start(federation: Federation, name: str) -> None:
    """Two silos, each with a data set for every task."""
    file = federation.folder / f"{name}.toml"
    (federation.folder / "own.py").write_text(OWN)
    tables = "".join(
        f'[data.{kind}]\npython = "own.py:{kind.replace("-", "_")}"\n' for kind in METRICS
    )
    file.write_text(file.read_text().replace('[data]\npython = "own.py:mine"\n', tables))
    if name != NAMES[2]:
        federation.start_silo(name)


def concordance(time: Any, event: Any, risk: Any) -> tuple[float, float]:
    """Return Harrell's pairs in order, ties half, and comparable pairs; an event comes before what
    ends at its time."""
    earlier = event[:, None] & ((time[:, None] < time) | ((time[:, None] == time) & ~event))
    first, second = risk[:, None], risk[None]
    return float((earlier * ((first > second) + 0.5 * (first == second))).sum()), float(
        earlier.sum()
    )


def reference(kind: str, folder: Path) -> dict[str, float]:
    """Return scikit-learn's metrics of the run's model on the test samples of both silos."""
    model = load_model(folder)
    parts = [client.test for client in silos(kind).clients[:2]]
    x, y = (torch.cat([getattr(part, name) for part in parts]) for name in "xy")
    with torch.inference_mode():
        out = model(x)
    match kind:
        case "classification":
            p = out.softmax(1).numpy()
            return {
                "auroc": metrics.roc_auc_score(y, p, multi_class="ovr"),
                "macro_f1": metrics.f1_score(y, p.argmax(1), average="macro"),
            }
        case "multi-label":
            p = out.sigmoid().numpy()
            return {
                "auroc": metrics.roc_auc_score(y, p),
                "macro_f1": metrics.f1_score(y, p >= 0.5, average="macro"),
            }
        case "regression":
            found = model.task.answers(out, full=True).reshape(-1)
            return {"r2": metrics.r2_score(y, found), "mae": metrics.mean_absolute_error(y, found)}
        case "segmentation":
            there, found = y.reshape(-1), out.argmax(1).reshape(-1)
            return {
                "miou": metrics.jaccard_score(there, found, average="macro"),
                "dice": metrics.f1_score(there, found, average="macro"),
            }
    risks = np.split(out.reshape(-1).numpy(), [len(parts[0])])
    each = [
        concordance(p.y[:, 0].numpy(), p.y[:, 1].numpy() > 0, r)
        for p, r in zip(parts, risks, strict=True)
    ]
    return {"c_index": sum(a for a, _ in each) / sum(b for _, b in each)}


def test_each_task_has_the_metrics_of_pooled_samples(tmp_path: Path) -> None:
    (tmp_path / "flower").mkdir()
    with running(tmp_path / "flower", start) as federation:
        for kind, metric in METRICS.items():
            flags = (
                "--clients",
                ",".join(NAMES[:2]),
                "--data",
                kind,
                "--metric",
                metric,
                "--epochs",
                "2",
                "--out",
                kind,
            )
            federation.run("fedseq", *flags, timeout=570)
            (folder,) = (federation.folder / kind).iterdir()
            row = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
            assert row["metric"] == metric
            assert metric in row["figures"]["intervals"]
            for name, value in reference(kind, folder).items():
                assert row["figures"]["values"][name] == pytest.approx(value, abs=1e-3), (
                    kind,
                    name,
                )
            assert "verified: 2 tasks" in federation.ekiden("verify", str(folder), "--keys", "keys")
