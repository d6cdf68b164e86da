"""Texts as tokens: hashed words, or those of a model."""

import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import ekiden
from ekiden.core.base.errors import UserError
from ekiden.core.tasks import LanguageModelling
from ekiden.data import load, split
from ekiden.methods import FedAvg
from ekiden.readers.kinds import Tokens
from tests.readers.own_data import sentences

pytestmark = pytest.mark.usefixtures("no_data")


@pytest.mark.parametrize("model", ["auto", "text_transformer"])
def test_texts_are_learned(model: str) -> None:
    data = split(load(sentences(120), text_column="text", group_column="site"), "natural")
    assert isinstance(data.dataset.inputs, Tokens)
    assert data.dataset.train.x.dtype == torch.int64
    training = ekiden.Training(lr=5e-3, batch_size=16)
    result = ekiden.run(FedAvg(rounds=2, epochs=4), data, model, training=training)
    assert result.accuracy > 0.9


def test_batches_of_texts_are_of_similar_length_and_trimmed() -> None:
    from ekiden.core.base.settings import Hardware
    from ekiden.core.training.feed import Feed
    from ekiden.core.training.fit import shuffled

    rows = sentences(64)
    rows["text"] = ["word " * (1 + k) for k in range(64)]
    data = load(rows, text_column="text", drop_columns="site")
    silo = split(data, "iid", 1, val_fraction=0.0).clients[0].train
    feed = Feed(data, Hardware())
    lengths = feed.lengths(silo)
    assert lengths is not None
    torch.manual_seed(0)
    widths = []
    for batch in shuffled(len(silo), 8, lengths):
        x, y = feed.batch(silo, batch, train=True)
        assert x.shape[1] == int(lengths[batch].max())
        assert len(y) == len(x)
        widths.append(x.shape[1] - int(lengths[batch].min()))
    assert max(widths) < 20  # at random, about 45
    seen = torch.cat(list(shuffled(len(silo), 8, lengths)))
    assert sorted(seen.tolist()) == list(range(len(silo)))


def test_words_need_no_agreement_and_short_texts_are_padded() -> None:
    tokens = Tokens()
    one, two = (
        tokens.encode(["A fine film."]),
        tokens.encode(["A fine film.", "so much more than that, is it not?"]),
    )
    assert one.shape[1] == 4
    assert torch.equal(two[0, :4], one[0])
    assert tokens.lengths(two).tolist() == [4, 10]


def test_a_models_own_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[PAD]": 0, "[UNK]": 1, "film": 2, "fine": 3}, "[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    data = load(sentences(), text_column="text", drop_columns="site", tokenizer=str(tmp_path))
    tokens = data.inputs
    assert isinstance(tokens, Tokens)
    assert (tokens.vocabulary, tokens.pad) == (4, 0)
    assert set(data.train.x.flatten().tolist()) <= {0, 1, 2, 3}
    assert tokens.encode(["fine film"]).tolist() == [[3, 2]]
    made.add_tokens(["more"])
    made.save(str(tmp_path / "other.json"))
    other = replace(tokens, tokenizer=str(tmp_path / "other.json"))
    with pytest.raises(UserError, match="holds another tokenizer"):
        other.encode(["fine"])


def test_texts_without_labels_are_for_language_modelling() -> None:
    rows = {"text": sentences()["text"], "site": sentences()["site"]}
    data = load(rows, text_column="text", group_column="site", task="language-modelling")
    assert isinstance(data.task, LanguageModelling)
    assert isinstance(data.inputs, Tokens)
    assert data.task.vocabulary == data.inputs.vocabulary
    assert ((data.train.y == -100) == (data.train.x == 0)).all()


def test_one_text_has_the_same_tokens_in_any_form_of_its_characters() -> None:
    text = "Élève: café brûlé"
    for other in (unicodedata.normalize("NFD", text), "Él\u00adève:\u200b café brûlé\ufeff"):
        assert torch.equal(Tokens().encode([other]), Tokens().encode([text]))
