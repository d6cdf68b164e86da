"""Whole runs with networks of transformers from a folder: trained, shown, predicted with, exported,
resumed."""

import io
import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

import ekiden
from ekiden.core.engine.folder import read_lines
from tests.core.models.hf_folders import decoder, encoder
from tests.readers.own_data import sentences

pytestmark = pytest.mark.skipif(
    not find_spec("peft"), reason="needs the extra hf: pip install 'ekiden[hf]'"
)
Command = Callable[..., tuple[int, str]]
WORDS = " ".join(sentences()["text"]).replace(",", " , ").split()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a table of texts and two networks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    pd.DataFrame(sentences(120)).rename(columns={"label": "mood"}).to_csv(
        "reviews.csv", index=False
    )
    encoder(tmp_path / "models" / "bert", WORDS)
    decoder(tmp_path / "models" / "gpt", WORDS)
    return tmp_path


def ekiden_(command: Command, *typed: str) -> str:
    code, said = command(*typed)
    assert code == 0, said
    return said


DATA = (
    "--data",
    "reviews.csv",
    "--text-column",
    "text",
    "--group-column",
    "site",
    "--batch-size",
    "16",
)


@pytest.mark.parametrize(
    "train",
    [
        "head",
        *(
            pytest.param(part, marks=pytest.mark.slow)
            for part in ("lora:r=4,targets=query+value", "all")
        ),
    ],
)
def test_an_encoder_is_trained_and_used(train: str, place: Path, command: Command) -> None:
    flags = (
        *DATA,
        "--label-column",
        "mood",
        "--model",
        "hf:models/bert",
        "--train",
        train,
        "--lr",
        "2e-2",
    )
    ekiden_(
        command, "run", "fedseq", *flags, "--epochs", {"head": "30", "all": "6"}.get(train, "16")
    )
    run = place / "runs" / "fedseq-reviews-seed0"
    config = json.loads((run / "config.json").read_text())
    trained = {"head": 17 * 2, "lora:r=4,targets=query+value": 17 * 2 + 4 * 16 * 4}.get(train)
    if trained:  # only what is trained travels: 4 bytes a value
        assert config["model_bytes"] == 4 * trained
    accuracy = read_lines(run / "metrics.jsonl")[-1]["accuracy"]
    least = 0.6 if train == "head" else 0.75  # of a network with random values little can be read
    assert accuracy > least
    ekiden_(command, "predict", str(run), "reviews.csv", "-o", "answers.csv")
    answers, truth = pd.read_csv("answers.csv"), pd.read_csv("reviews.csv")
    assert len(answers) == len(truth)
    assert (answers.prediction == truth.mood).mean() > least
    ekiden_(command, "export", str(run), "--to", "hf", "-o", "exported")


@pytest.mark.slow
def test_a_causal_model_is_trained_and_foresees_texts(place: Path, command: Command) -> None:
    flags = (
        *DATA,
        "--drop-columns",
        "mood",
        "--task",
        "language-modelling",
        "--model",
        "hf:models/gpt",
    )
    ekiden_(
        command, "run", "fedseq", *flags, "--train", "lora:r=4", "--lr", "2e-2", "--epochs", "4"
    )
    run = place / "runs" / "fedseq-reviews-seed0"
    last = read_lines(run / "metrics.jsonl")[-1]
    words = len(set(WORDS)) + 2
    assert last["perplexity"] < words / 2
    said = ekiden_(command, "predict", str(run), "reviews.csv", "--column", "text")
    found = pd.read_csv(io.StringIO(said))
    assert list(found) == ["file", "row", "tokens", "loss", "perplexity", "prediction"]
    assert len(found) == 120
    assert found.perplexity.to_numpy() == pytest.approx(
        found.loss.map(math.exp).to_numpy(), rel=1e-4
    )
    assert set(found.prediction) <= {"[PAD]", "[UNK]", *WORDS}

    # On the run's own test data the loss is the run's.
    model = ekiden.load_model(run)
    data = ekiden.load(
        "reviews.csv",
        text_column="text",
        group_column="site",
        drop_columns=["mood"],
        task="language-modelling",
        tokenizer="models/gpt",
    )
    from ekiden.runs.predictions import Answers

    columns = Answers(model)(data.test.x)
    total = sum(n * loss for n, loss in zip(columns["tokens"], columns["loss"], strict=True))
    assert total / sum(columns["tokens"]) == pytest.approx(last["loss"], rel=1e-5)


def test_a_text_of_one_token_has_no_perplexity(place: Path, command: Command) -> None:
    flags = (
        *DATA,
        "--drop-columns",
        "mood",
        "--task",
        "language-modelling",
        "--model",
        "hf:models/gpt",
    )
    ekiden_(command, "run", "fedseq", *flags, "--train", "head", "--epochs", "1")
    (place / "one.txt").write_text("film")
    (place / "empty.txt").write_text("")
    found = pd.read_csv(
        io.StringIO(
            ekiden_(command, "predict", "runs/fedseq-reviews-seed0", "one.txt", "empty.txt")
        )
    )
    assert found.tokens.tolist() == [0, 0]
    assert found.loss.isna().all()
