"""Each kind of data goes through its whole life: trained, killed, resumed, measured, shown,
predicted with, exported.

In one process, and over silos that answer in this process. `test_on_flower.py` has real silos.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.special import expit, softmax

import ekiden as library
from ekiden.core.engine.drive import Row
from ekiden.core.engine.folder import read_config, read_lines
from ekiden.core.engine.method import Method
from ekiden.methods import FedAvg, FedGram, FedSeq
from ekiden.readers import kinds
from ekiden.runs.api import How
from ekiden.runs.batches import SampleReader
from ekiden.runs.plan import Plan, stored
from tests.lifecycle.conftest import ONLY
from tests.lifecycle.kinds import KINDS, ROWS, SILOS, Kind
from tests.lifecycle.silos import TRAINING, Silos, ekiden, refused, silos

for extra in ("cryptography", "onnxruntime", "pydicom", "nibabel", "transformers", "jinja2"):
    pytest.importorskip(extra)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*have several pages, frames or slices:ekiden.core.base.errors.DataWarning"
)
METHODS: dict[str, Method] = {
    "fedseq": FedSeq(epochs=4),
    "fedavg": FedAvg(rounds=2, epochs=2),
    "fedgram": FedGram(),
}
FLAGS = {"fedseq": ["--epochs", "4"], "fedavg": ["--rounds", "2", "--epochs", "2"], "fedgram": []}
"""the same for the command line"""
WIDTH = 8  # silos of 44 rows of a table refuse sums of more features
FAR = METHODS | {"fedgram": FedGram(width=WIDTH, dictionary="seed", min_active=10)}
TEST = 3 * ROWS // 5
RESULTS = ("model.safetensors", "metrics.jsonl", "ledger.jsonl")


@dataclass
class Place:
    """What was made of a kind of data so far: its silos, and a finished run of each method, here
    and over the silos."""

    name: str
    root: Path
    silos: Silos
    _runs: dict[str, Path | str] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        return self.silos.kind

    def plan(self, method: str) -> Plan[Method]:
        """The run in one process, as the command line reads it."""
        return stored(self.run(method))

    def run(self, method: str) -> Path:
        """A finished run in one process, from the command line."""
        given = self.kind.refused.get(method)
        assert given is None
        return self._made(f"{method} here", partial(self._run, method))

    def far(self, method: str) -> Path:
        """A finished run over the silos."""
        folder = self.root / f"{method}-far"

        def go() -> Path:
            self.silos.run(FAR[method], folder)
            return folder

        return self._made(f"{method} far", go)

    def put(self, name: str, folder: Path) -> None:
        """Take a finished run that was made in another way."""
        self._runs[name] = folder

    def try_run(self, method: str) -> None:
        self._run(method)

    def _run(self, method: str) -> Path:
        flags = [
            *self.kind.flags(self.silos.root),
            "--model",
            self.kind.network(self.silos.root),
            *FLAGS[method],
        ]
        out = self.root / f"{method}-here"
        training = (
            "--lr",
            str(TRAINING.lr),
            "--batch-size",
            str(TRAINING.batch_size),
            "--threads",
            "1",
        )
        ekiden("run", method, "--silos", *self.silos.paths, *flags, *training, "--out", out)
        (folder,) = out.iterdir()
        return folder

    def _made(self, name: str, make: Callable[[], Path]) -> Path:
        if name not in self._runs:
            try:
                self._runs[name] = make()
            except (
                Exception
            ) as error:  # so that a fault shows in each test of the kind, and costs its time once
                self._runs[name] = repr(error)
        found = self._runs[name]
        assert isinstance(found, Path), found
        return found


def group(kind: str) -> pytest.MarkDecorator:
    """One process makes all runs on a kind of data, and one all exports; see
    `tests/runs/test_exporting.py`."""
    exported = kind in ONLY["test_it_predicts_as_its_export_does"]
    return pytest.mark.xdist_group("export" if exported else f"kind-{kind}")


@pytest.fixture(scope="module", params=[pytest.param(k, marks=group(k)) for k in KINDS])
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    root = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield Place(request.param, root, silos(KINDS[request.param], root / "silos"))


each_method = pytest.mark.parametrize("method", METHODS)


def can(place: Place, method: str) -> bool:
    """Whether the method takes such data; otherwise it refuses them in one line and writes nothing,
    here and far."""
    wanted = place.kind.refused.get(method)
    if wanted is None:
        return True
    assert wanted in refused(lambda: place.try_run(method))
    assert not list(place.root.glob(f"{method}-here/*"))
    far = place.root / "refused"
    assert wanted in refused(lambda: place.silos.run(FAR[method], far))
    assert not far.exists()
    return False


@each_method
def test_here_it_is_trained_and_measured(place: Place, method: str) -> None:
    if not can(place, method):
        return
    last = read_lines(place.run(method) / "metrics.jsonl")[-1]
    assert np.isfinite(last["loss"])
    assert last.get("metric", "accuracy") == place.kind.metric
    config = read_config(place.run(method))
    assert list(config["clients"]) == list(SILOS)
    assert sum(test for _, _, test in config["clients"].values()) == TEST


@each_method
def test_here_it_learns(place: Place, method: str) -> None:
    """The loss is below that of guessing."""
    if method in place.kind.refused:
        return
    config, last = (
        read_config(place.run(method)),
        read_lines(place.run(method) / "metrics.jsonl")[-1],
    )
    task = library.load_model(place.run(method)).task
    assert last["loss"] < task.guess(task.outputs(config["classes"])), last


@each_method
def test_here_it_goes_on_after_a_kill(place: Place, method: str, tmp_path: Path) -> None:
    """After its first step, with the same bits; as the command line continues it."""
    if method in place.kind.refused:
        return
    plan, folder = place.plan(method), tmp_path / "run"

    class Killed(BaseException):
        pass

    def kill(row: Row) -> None:
        raise Killed

    with pytest.raises(Killed):
        plan.run(folder, plan.federation(), how=How(on_step=kill, quiet=True))
    assert len(read_lines(folder / "metrics.jsonl")) == 1
    ekiden("resume", folder)
    for name in RESULTS:
        assert (folder / name).read_bytes() == (place.run(method) / name).read_bytes(), name


@each_method
def test_here_it_is_evaluated(place: Place, method: str) -> None:
    if method in place.kind.refused:
        return
    found = json.loads(ekiden("evaluate", place.run(method), "--json"))
    last = read_lines(place.run(method) / "metrics.jsonl")[-1]
    assert found["samples"] >= TEST  # of segmentation and language, pixels and tokens
    assert found[place.kind.metric] == pytest.approx(last[place.kind.metric], rel=1e-5)


@each_method
def test_here_nothing_is_signed(place: Place, method: str) -> None:
    if method not in place.kind.refused:
        assert "is of a run on one machine" in refused(lambda: ekiden("verify", place.run(method)))


@each_method
@pytest.mark.parametrize("where", ["here", "far"])
def test_it_is_shown(place: Place, method: str, where: str) -> None:
    run = ended(place, method, where)
    if run is None:
        return
    assert place.kind.metric in ekiden("show", run)
    card = ekiden("card", run)
    assert card.startswith(f"# {method}: ")
    for name in read_config(run)["classes"]:
        assert str(name) in card
    assert str(place.root) not in card


@each_method
@pytest.mark.parametrize("where", ["here", "far"])
def test_it_is_reported(place: Place, method: str, where: str, tmp_path: Path) -> None:
    run = ended(place, method, where)
    if run is None:
        return
    ekiden("report", run, "--out", tmp_path / "page")
    assert place.kind.metric in (tmp_path / "page" / "index.html").read_text(encoding="utf-8")


@each_method
@pytest.mark.parametrize("to", ["python", "onnx", "pt2", "hf"])
@pytest.mark.parametrize("where", ["here", "far"])
def test_it_predicts_as_its_export_does(
    place: Place, method: str, where: str, to: str, tmp_path: Path
) -> None:
    """On the raw data of a silo: `ekiden predict`, and the model in Python or its file, as other
    software opens it."""
    run = ended(place, method, where)
    if run is None:
        return
    data = place.silos.paths[0]
    segments = place.kind.metric == "miou"
    column = {"embeddings": ["--column", "vector"]}.get(place.name, [])
    out = tmp_path / ("masks" if segments else "out.csv")
    ekiden("predict", run, data, "-o", out, *column)
    found = pd.read_csv(out / "masks.csv" if segments else out)
    assert len(found) == ROWS
    file = tmp_path / f"model.{to}"
    if to != "python":
        said = ekiden("export", run, "--to", to, "-o", file)
        assert "on 64 made-up samples" in said
    outputs = exported(file, to, run, data, *column[1:])
    task = read_config(run).get("task", {}).get("kind", "classification")
    if task in ("regression", "survival"):
        np.testing.assert_allclose(outputs[:, 0], found.prediction, rtol=1e-5, atol=1e-6)
    elif task == "segmentation":
        shares = np.stack(
            [(outputs.argmax(1) == k).mean((1, 2)) for k in range(outputs.shape[1])], 1
        )
        np.testing.assert_allclose(shares, found.filter(like="share_"), atol=1e-2)
    elif task == "language-modelling":
        assert outputs.shape[:1] == (ROWS,)
    else:
        answers = expit(outputs) if task == "multi-label" else softmax(outputs, axis=1)
        np.testing.assert_allclose(answers, found.filter(like="probability_"), atol=1e-4)


def exported(file: Path, to: str, run: Path, data: Path, column: str = "") -> Any:
    """The outputs of an exported file for the raw samples of a silo."""
    model = library.load_model(run)
    inputs: list[Any]
    if isinstance(model.inputs, kinds.Table):
        rows, known = pd.read_csv(data), model.inputs.vocabularies
        texts = rows[list(model.inputs.categorical)].fillna("")
        if to == "onnx":
            given = {name: rows[name].to_numpy(np.float64) for name in model.inputs.numeric}
            return onnx(file, given | {name: texts[name].to_numpy(object) for name in texts})
        if to == "python":
            outputs = model(rows).detach()
            numbers = model.task.kind == "regression"  # the module returns standardised numbers
            return (model.task.answers(outputs, full=True) if numbers else outputs).numpy()
        codes = [
            [1 + k.index(v) if v in k else 0 for v in texts[n]]
            for n, k in zip(texts, known, strict=True)
        ]
        inputs = [
            torch.tensor(rows[list(model.inputs.numeric)].to_numpy(np.float64)),
            torch.tensor(codes).T,
        ]
    else:
        reader = SampleReader(model.inputs, model.shape, column)
        inputs = [torch.cat([batch.x for batch in reader.read(reader.found([data]))])]
        if to == "onnx":
            return onnx(file, {"input": inputs[0].numpy()})
        if to == "python":
            return model(inputs[0]).detach().numpy()
    program = torch.export.load(str(file / "model.pt2" if to == "hf" else file)).module()
    with torch.no_grad():
        return program(*inputs).numpy()


def onnx(file: Path, given: dict[str, Any]) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(str(file)).run(None, given)[0]


def ended(place: Place, method: str, where: str) -> Path | None:
    """The finished run; None if the method refuses the data."""
    if method in place.kind.refused:
        return None
    return place.run(method) if where == "here" else place.far(method)


# Over silos


@each_method
def test_far_it_is_trained_and_verified(place: Place, method: str) -> None:
    run = ended(place, method, "far")
    if run is None:
        return
    last = read_lines(run / "metrics.jsonl")[-1]
    assert np.isfinite(last["loss"])
    assert last.get("metric", "accuracy") == place.kind.metric
    assert read_config(run)["dataset"] == "own data"  # each silo calls its own by its file
    assert "verified: " in ekiden("verify", run)


@each_method
def test_far_a_changed_folder_is_not_verified(place: Place, method: str) -> None:
    run = ended(place, method, "far")
    if run is None:
        return
    file, config = run / "config.json", read_config(run)
    before = file.read_text()
    try:
        file.write_text(json.dumps(config | {"classes": [*config["classes"][::-1], "more"]}))
        assert "config.json says classes" in refused(lambda: ekiden("verify", run))
    finally:
        file.write_text(before)


class Gone(Exception):
    """The coordinator's machine fails."""


@each_method
def test_far_it_goes_on_after_a_kill(place: Place, method: str, tmp_path: Path) -> None:
    """The coordinator is killed in the middle, and continues with the same bits."""
    if ended(place, method, "far") is None:
        return
    nodes, folder, sent = place.silos.nodes(), tmp_path / "run", []
    send = nodes.send

    def once(node: int, data: bytes) -> Any:
        sent.append(node)
        if (folder / "state.safetensors").exists() and not nodes.corrupt.get(-1):
            nodes.corrupt[-1] = b"gone"
            raise Gone
        return send(node, data)

    nodes.send = once  # type: ignore[method-assign]
    with pytest.raises(Gone):
        place.silos.run(FAR[method], folder, nodes)
    assert not (folder / "model.safetensors").exists()
    place.silos.run(FAR[method], folder, nodes)
    for name in ("model.safetensors", "ledger.jsonl"):
        assert (folder / name).read_bytes() == (place.far(method) / name).read_bytes(), name
    assert "verified: " in ekiden("verify", folder)


@each_method
def test_far_the_silos_measured_it(place: Place, method: str) -> None:
    """`ekiden evaluate` says who has the test data; with other data it measures."""
    run = ended(place, method, "far")
    if run is None:
        return
    assert "its data stayed at the silos: measure it in Python" in refused(
        lambda: ekiden("evaluate", run)
    )
    flags = ("--data", str(place.silos.paths[0]), *place.kind.columns)
    found = json.loads(ekiden("evaluate", run, *flags, "--json"))
    assert np.isfinite(found["loss"])
    assert place.kind.metric in found
    said = ekiden("evaluate", run, *flags, "--metric", place.kind.metric)
    assert said.startswith(place.kind.metric)
