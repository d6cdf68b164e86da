"""Tokenizers of others run within bounds of time and memory."""

import json
from pathlib import Path
from typing import Any

import pytest

from ekiden.core.base.errors import UserError
from ekiden.readers.kinds import texts
from ekiden.readers.kinds.texts import tokens_for


def tokenizer(folder: Path, pattern: str) -> str:
    """A tokenizer that splits texts by an expression of its own."""
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    values: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": model}
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split]}
    values |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return str(folder)


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN_LIKE = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}]+(?i:'s|'t)?|\p{N}|\(\)*"


@pytest.mark.parametrize("pattern", [GPT2, LLAMA3, QWEN_LIKE])
def test_expressions_of_known_tokenizers_are_read(pattern: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra text: pip install 'ekiden[text]'")
    tokens = tokens_for(tokenizer(tmp_path, pattern), 16)
    assert tokens.encode(["a b"]).shape[0] == 1


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a*){2,}c", "a*a*a*a*a*a*b", r"\w*\w*\w*\w*x"])
def test_an_expression_that_takes_forever_is_one_line(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some end in a panic of Rust, others would take days."""
    pytest.importorskip("tokenizers", reason="needs the extra text: pip install 'ekiden[text]'")
    monkeypatch.setattr(texts, "_SECONDS", 3)
    with pytest.raises(UserError, match=r"takes too long|retry-limit") as told:
        tokens_for(tokenizer(tmp_path, pattern), 16).encode(["a" * 3000 + " bxc"])
    assert "\n" not in str(told.value)
