"""FedGram on the body of a finished run's model: the second lap, what it is equal to, and what it
refuses."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import ekiden
from ekiden import Hardware, UserError, federate, load_model
from ekiden.cli.app import main
from ekiden.core.base.settings import Training
from ekiden.core.engine.folder import read_config
from ekiden.core.engine.setup import read_model
from ekiden.core.models.split import as_split
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedGram, FedSeq, Local
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from ekiden.silos.trust.agreement import parse
from tests.methods.test_fedgram import bits
from tests.silos.fakes import NAMES, FakeNodes, with_keys
from tests.silos.sessions import assert_equal, far, here, same

FLAGS = ("--data", "digits", "--clients", "3", "--seed", "0")


def command(*words: str) -> int:
    """The exit code of a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["ekiden", *words])
        try:
            main()
        except SystemExit as end:
            return int(str(end.code))
    return 0


def ran(out: Path, method: str, *flags: str) -> Path:
    """The folder of a run on the command line, which must succeed."""
    before = set(out.glob("*"))
    assert command("run", method, *FLAGS, *flags, "--out", str(out)) == 0
    (folder,) = set(out.glob("*")) - before
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of FedSeq on digits."""
    return ran(tmp_path_factory.mktemp("trained"), "fedseq", "--epochs", "1")


@pytest.fixture
def source(trained: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(trained, tmp_path / "source"))


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command says that must fail with one line."""
    assert command(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.slow
def test_the_features_are_those_of_the_run(source: Path, tmp_path: Path) -> None:
    lap = ran(tmp_path, "fedgram", "--features", f"run:{source}")
    before, after = load_model(source).network, load_model(lap).network
    x = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    frozen = as_split(after).features.get_submodule("network")
    with torch.no_grad():
        assert torch.equal(frozen(x), as_split(before).features(x).flatten(1))
    file = str(source / "model.safetensors")
    plain = ran(tmp_path, "fedgram", "--features", "network", "--pretrained", file)
    assert (lap / "model.safetensors").read_bytes()[-1000:] == (
        plain / "model.safetensors"
    ).read_bytes()[-1000:]
    accuracy = [
        json.loads((f / "metrics.jsonl").read_text().splitlines()[-1])["accuracy"]
        for f in (source, lap)
    ]
    assert accuracy[1] > accuracy[0] + 0.1


def test_a_changed_source_is_noticed(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lap = ran(tmp_path / "out", "fedgram", "--features", f"run:{source}")
    config = read_config(lap)
    assert config["recipe"]["hyperparameters"]["features"].startswith("run:")
    assert config["recipe"]["pretrained"] == str(source / "model.safetensors")
    for word in ("resume", "evaluate"):
        assert command(word, str(lap)) == 0
    other = ran(tmp_path / "other", "fedseq", "--epochs", "2")
    shutil.copy(other / "model.safetensors", source)
    capsys.readouterr()
    for word in ("resume", "evaluate"):
        assert "put back the model.safetensors of that run" in refused(capsys, word, str(lap))
    with pytest.raises(UserError, match="put back the model"):
        load_model(lap)
    (source / "model.safetensors").unlink()
    assert "restore it, or run again" in refused(capsys, "resume", str(lap))


@pytest.mark.slow
def test_what_does_not_fit_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, config = str(tmp_path / "out"), json.loads((source / "config.json").read_text())
    named = f"run:{source}"

    def said(*more: str, features: str = named) -> str:
        line = refused(
            capsys, "run", "fedgram", *FLAGS, "--features", features, "--out", out, *more
        )
        assert not Path(out).exists()
        return line

    def with_config(**changes: Any) -> str:
        recipe = config["recipe"] | {
            name: changes.pop(name) for name in config["recipe"].keys() & changes.keys()
        }
        (source / "config.json").write_text(json.dumps(config | changes | {"recipe": recipe}))
        return said()

    assert "is not a run folder" in said(features=f"run:{tmp_path / 'nowhere'}")
    assert "unknown features 'networks': did you mean 'network'?" in said(features="networks")
    assert "is a run of mlp, not of cnn_tiny: leave out --model" in said("--model", "cnn_tiny")
    assert "leave out --pretrained" in said("--pretrained", "x.safetensors")
    assert "is for samples of shape [1, 8, 8], these data have [1, 16, 16]" in said("--size", "16")
    assert "trained only a part of its network (--train head)" in with_config(train="head")
    assert "trained a network of its own" in with_config(network=None)
    (source / "config.json").write_text(json.dumps(config))
    (source / "model.safetensors").write_bytes(b"broken")
    assert "cannot be read" in said()
    (source / "model.safetensors").unlink()
    assert "has no model: finish it by `ekiden resume" in said()


def in_python(
    folder: Path, method: Any, classes: list[str], mean: float = 0.0, **more: Any
) -> ekiden.Result:
    """A run on small data given in Python."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.rand(90, 1, 8, 8, generator=draw), torch.arange(90) % 3
    data = federate(
        [(x[:50], y[:50]), (x[50:], y[50:])], val_fraction=0.0, classes=classes, mean=[mean]
    )
    return ekiden.run(method, data, folder=folder, hardware=Hardware(threads=1), seed=3, **more)


def test_from_python_for_the_same_classes_and_scale_alone(tmp_path: Path) -> None:
    classes, training = ["a", "b", "c"], Training(batch_size=16)
    in_python(tmp_path / "run", FedSeq(epochs=1), classes, model="mlp", training=training)
    method = FedGram(features=f"run:{tmp_path / 'run'}", width=220)
    result = in_python(tmp_path / "lap", method, classes)
    file = tmp_path / "run" / "model.safetensors"
    again = in_python(
        tmp_path / "as",
        FedGram(features="network", width=220),
        classes,
        model="mlp",
        pretrained=file,
    )
    assert bits(result) == bits(again)
    with pytest.raises(
        UserError, match=r"for the classes \['a', 'b', 'c'\], these data have \['a', 'b', 'd'\]"
    ):
        in_python(tmp_path / "no", method, ["a", "b", "d"])
    with pytest.raises(UserError, match="another scale"):
        in_python(tmp_path / "no", method, classes, mean=0.5)
    with pytest.raises(UserError, match="no network of your own"):
        in_python(tmp_path / "no", method, classes, model=Tiny)
    in_python(tmp_path / "local", Local(epochs=1), classes, model="mlp", training=training)
    with pytest.raises(UserError, match="has no model"):
        in_python(tmp_path / "no", FedGram(features=f"run:{tmp_path / 'local'}"), classes)
    assert not (tmp_path / "no").exists()
    named = str(result.config["recipe"]["hyperparameters"]["features"])
    with pytest.raises(UserError, match="has no model of a run: give features run:FOLDER"):
        in_python(tmp_path / "no", FedGram(features=named, width=220), classes, model="mlp")


@pytest.mark.slow
def test_in_an_experiment_file(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "laps.toml"
    file.write_text(
        'title = "laps"\nseeds = [0]\n[settings]\nmethod = "fedgram"\ndata = "digits"\nclients = '
        "3\n"
        f'[[column]]\nlabel = "lap"\nfeatures = "run:{source}"\n[[row]]\nlabel = "digits"\n'
    )
    assert command("sweep", str(file), "--out", str(tmp_path / "sweep"), "--cores", "1") == 0
    (folder,) = (p.parent for p in (tmp_path / "sweep").glob("*/model.safetensors"))
    plan = Plan(Recipe(FedGram(features=f"run:{source}")), data="digits", clients=3)
    assert read_config(folder)["recipe"]["hyperparameters"] == asdict(plan.recipe.method)


@pytest.mark.slow
def test_between_machines(trained: Path, tmp_path: Path) -> None:
    method = FedGram(features=f"run:{trained}", width=220)
    toml, public = with_keys(tmp_path, NAMES)
    (tmp_path / "pretrained").mkdir()
    shutil.copy(trained / "model.safetensors", tmp_path / "pretrained")
    result = far(method, FakeNodes(toml), tmp_path / "run", public)
    assert_equal(result, here(method))
    terms = parse((tmp_path / "run" / "agreement.json").read_text())
    assert terms.recipe.to_json()["hyperparameters"]["features"].startswith("run:")
    assert str(trained) not in json.dumps(terms.recipe.to_json()["hyperparameters"])
    other = ran(tmp_path / "other", "fedseq", "--epochs", "2")
    shutil.copy(other / "model.safetensors", tmp_path / "pretrained")
    with pytest.raises(UserError, match="put back"):
        far(method, FakeNodes(toml), tmp_path / "again", public)
    assert same(result.weights, read_model(tmp_path / "run", "model.safetensors", result.build))
