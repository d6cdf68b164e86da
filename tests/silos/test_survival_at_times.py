"""Predicted survival compared at silos with what was observed: what their files allow, and what
verify finds."""

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ekiden.clinic.curves import Curve
from ekiden.core.base.errors import UserError
from ekiden.data import federate
from ekiden.methods import FedSeq
from ekiden.readers.followed import Followed
from ekiden.silos.coordinator.session import EVALUATIONS
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import Limits
from tests.methods.survival_reference import CUT, cohort
from tests.silos.fakes import NAMES, FakeNodes, evaluate, with_keys
from tests.silos.test_remote import far

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.* equal a training row", "ignore:.* with one value"
)
TWO = NAMES[:2]
TABLE = cohort()
ROWS = {"client-0": slice(CUT), "client-1": slice(CUT, None)}
LABELS = ["days", "died"]
LIMITS = "[limits]\ntimes = [200, 220, 500]\n"


class Nodes(FakeNodes):
    def silo(self, node: int) -> Silo:
        silos: list[Any] = [
            {name: list(values[rows]) for name, values in TABLE.items()} for rows in ROWS.values()
        ]
        both = federate(
            silos,
            tests=silos,
            names=[*ROWS],
            val_fraction=0.0,
            label_column=LABELS,
            task="survival",
        )
        client = next(one for one in both.clients if one.name == self.files[node].name)
        return Silo(self.files[node], (both.dataset, client))


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Nodes, dict[str, str], Path]:
    folder = tmp_path_factory.mktemp("study")
    files, public = with_keys(folder, TWO, LIMITS)
    nodes = Nodes(files)
    far(FedSeq(epochs=1), nodes, folder / "run", public, clients=",".join(TWO))
    return nodes, public, folder / "run"


def measured(
    study: tuple[Nodes, dict[str, str], Path], to: str, *times: float, **more: Any
) -> dict[str, Any]:
    nodes, public, run = study
    at = {time: time * log(2) / 500 for time in times}
    return evaluate(
        run,
        TWO,
        nodes,
        run / EVALUATIONS / to,
        public,
        lambda line: None,
        at=at,
        seconds=1.0,
        poll=0.0,
        **more,
    )


def test_silos_compare_predicted_survival_with_what_they_observed(
    study: tuple[Nodes, dict[str, str], Path],
) -> None:
    row = measured(study, "all", 200, 500, evaluate_dp="exact")
    found = row["figures"]["survival"]
    assert [one["time"] for one in found] == [200, 500]
    y = np.stack([TABLE["days"], TABLE["died"]], 1)
    for one in found:
        shares = [Curve.of(Followed.of(y[rows], [one["time"]], 1)) for rows in ROWS.values()]
        mean = sum(curve.at_risk[0] * curve.survival[0] for curve in shares) / len(y)
        assert one["whole"]["samples"] == len(y)
        assert one["whole"]["observed"] == pytest.approx(
            mean, abs=sum(curve.error[0] for curve in shares) / 2 + 0.01
        )
    run = study[2]
    assert verify(run, study[1]).wrong == ()
    found[0]["brier"] = 0.01
    (run / EVALUATIONS / "all" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    changed = "evaluations/all: metrics.jsonl, line 1, says "
    assert verify(run).wrong[0].startswith(changed)


def test_by_default_they_compare_it_with_noise(
    study: tuple[Nodes, dict[str, str], Path],
) -> None:
    exact = measured(study, "exact", 200, evaluate_dp="exact")["figures"]["survival"]
    noisy = measured(study, "noisy", 200, evaluate_dp="epsilon=2,delta=1e-5")
    (one,) = noisy["figures"]["survival"]
    assert one["whole"]["samples"] == exact[0]["whole"]["samples"]
    assert one["whole"]["observed"] == pytest.approx(exact[0]["whole"]["observed"], abs=0.25)
    assert one != exact[0]
    assert not any("noisy" in line for line in verify(study[2]).wrong)


@pytest.mark.parametrize(
    ("times", "more", "said"),
    [
        (
            (365.0,),
            {},
            r"survival at 365, client-0 reports it at 200, 220, 500 \(limits.times in its "
            r"silo.toml\)",
        ),
        pytest.param(
            (200.0,), {"validation": True}, "times are for finished models", marks=pytest.mark.slow
        ),
        pytest.param((200.0,), {"by": ["sex"]}, "and not for subgroups", marks=pytest.mark.slow),
    ],
)
def test_silos_tell_survival_only_at_the_times_in_their_files(
    times: tuple[float, ...],
    more: dict[str, Any],
    said: str,
    study: tuple[Nodes, dict[str, str], Path],
) -> None:
    with pytest.raises(UserError, match=said):
        measured(study, "other", *times, **more)


def test_a_file_lists_times_in_order() -> None:
    assert Limits().times == ()
    with pytest.raises(UserError, match=r"write them in ascending order, such as \[365, 730\]"):
        replace(Limits(), times=(500.0, 200.0))
