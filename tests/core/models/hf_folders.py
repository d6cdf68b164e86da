"""Tiny networks of transformers in folders, with their tokenizers: random values, real formats."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch


def tokenizer(folder: Path, words: Sequence[str]) -> int:
    """Write a tokenizer that knows these words; returns how many tokens there are."""
    tokenizers = pytest.importorskip("tokenizers")
    known = {name: k for k, name in enumerate(["[PAD]", "[UNK]", *dict.fromkeys(words)])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return len(known)


def encoder(folder: Path, words: Sequence[str]) -> Path:
    """A BERT of two layers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=tokenizer(folder, words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    torch.manual_seed(0)
    transformers.BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return folder


def decoder(folder: Path, words: Sequence[str]) -> Path:
    """A GPT-2 of two layers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=tokenizer(folder, words),
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
