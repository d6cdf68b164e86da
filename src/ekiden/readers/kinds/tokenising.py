"""Make tokens of texts with a model's tokenizer, in a process of its own: `texts` runs this file.

An expression in a tokenizer's file may backtrack for years, in code that nothing inside the same
process can stop. This process is ended by its own alarm. It imports nothing of Ekiden, which would
take longer than most texts.
"""

import json
import signal
import sys
from contextlib import suppress
from typing import Any

_PACE = 50_000
"""characters a second: tokenizers make a million"""
_BATCH = 1000
"""texts under one alarm"""
_MEMORY = 1 << 32
"""bytes; the largest tokenizers need a tenth"""
_PADDING = ("[PAD]", "<pad>", "<|endoftext|>")


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the size of the vocabulary, the padding token, and what texts and tokens are."""
    # an extra
    from tokenizers import Tokenizer

    seconds = asked["seconds"]
    texts = asked["texts"]
    _set_alarm(seconds)
    tokenizer = Tokenizer.from_str(asked["tokenizer"])
    names = [tokenizer.padding["pad_token"]] if tokenizer.padding else _PADDING
    padding = filter(None.__ne__, map(tokenizer.token_to_id, names))
    tokenizer.no_padding()
    tokenizer.enable_truncation(asked["length"])
    encoded = []
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        _set_alarm(seconds + sum(map(len, batch)) // _PACE)
        encoded += [found.ids for found in tokenizer.encode_batch(batch)]
    return {
        "vocabulary": tokenizer.get_vocab_size(),
        "pad": next(padding, 0),
        "texts": encoded,
        "ids": [tokenizer.decode([token], skip_special_tokens=False) for token in asked["ids"]],
    }


def _set_alarm(seconds: int) -> None:
    """Let this process be ended after some seconds, on systems that can do so."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


def _limit_memory() -> None:
    with suppress(ImportError):
        # Windows does not have it
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, hard))


if __name__ == "__main__":
    _limit_memory()
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
