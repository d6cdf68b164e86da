"""Encode texts as tokens: hashed words, or the tokens of a model's tokenizer."""

import hashlib
import json
import re
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ekiden.core.base.checks import Count, CountOrZero
from ekiden.core.base.errors import UserError, tell
from ekiden.core.base.files import read_regular
from ekiden.core.base.outside import require_extra
from ekiden.core.data.inputs import Encoding, Inputs
from ekiden.readers.cells import is_text
from ekiden.readers.kinds import tokenising
from ekiden.readers.undecoded import Raw

PAD = 0
"""the token that fills up short texts"""
# share of texts that may be cut off without a line
_CUT = 0.05
_WORD = re.compile(r"\w+|[^\w\s]")
# characters of no width: soft hyphens, byte order marks
_UNSEEN = re.compile("[\u00ad\u200b-\u200f\u2060\ufeff]")
# bytes of a tokenizer's file
_LARGEST = 1 << 28
_SECONDS = 10
"""to load a tokenizer, and then for each batch of texts; the largest load in one"""
# of hashed words; one in nine of the 1000 commonest words shares its token with another of them
_VOCABULARY = 8192


@dataclass(frozen=True)
class Tokens(Inputs):
    """Texts: (L,) int64 tokens, padded with `PAD`; batches are cut to their longest text."""

    kind = "tokens"
    words = "texts"
    suffixes = (".txt", ".md")
    column = "text"
    unlabelled = True
    ragged = True
    dtype = torch.int64

    # words: each word's hash, which silos need not agree on; or a folder with the tokenizer of a
    # model
    tokenizer: str = "words"
    # number of different tokens
    vocabulary: Count = 8192
    # largest number of tokens of a text; the rest is cut off
    length: Count = 256
    # digest of the tokenizer's file; "" for words
    digest: str = ""
    # the padding token
    pad: CountOrZero = PAD

    def encode(self, raw: Any) -> Tensor:
        """Return (n, L) int64 for texts, or for files of texts; L is the length of the longest one,
        at most `length`.
        """
        # some programs write an accent as a character
        texts = [unicodedata.normalize("NFC", _text(one)) for one in raw]
        if self.tokenizer == "words":
            each = list[Sequence[int]]()
            for text in texts:
                words = _WORD.findall(_UNSEEN.sub("", text).lower())[: self.length]
                each.append([_word(word, self.vocabulary) for word in words])
        else:
            _, digest = _file(self.tokenizer)
            if digest != self.digest:
                raise UserError(
                    f"{self.tokenizer} holds another tokenizer than the data were read with: put "
                    "it back"
                )
            each = _ask(self.tokenizer, texts, self.length)["texts"]
        longest = max([1, *map(len, each)])
        out = np.full((len(each), longest), self.pad, dtype=np.int64)
        for row, ids in enumerate(each):
            out[row, : len(ids)] = ids
        return torch.from_numpy(out)

    @property
    def continuous(self) -> bool:
        return False

    def network(self, shape: tuple[int, ...]) -> str:
        return "text_mean"

    @classmethod
    def assembled(
        cls, sides: Sequence[Sequence[Raw]], wanted: Encoding
    ) -> tuple[list[Tensor], Inputs | None]:
        """Make tokens of texts, padded to one length."""
        reading = wanted.reading
        made = wanted.known or tokens_for(reading.tokenizer or "words", reading.text_length)
        parts = list[Tensor]()
        for side in sides:
            parts.append(made.encode(chain.from_iterable(raw.images for raw in side)))
        lengths = torch.cat([*map(made.lengths, parts)])
        if (cut := int((lengths >= made.length).sum())) > _CUT * len(lengths):
            tell(
                f"{cut:,} of {len(lengths):,} texts of {sides[0][0].source} have {made.length} "
                "tokens or more, and the rest is cut off: raise --text-length"
            )
        longest = max(part.shape[1] for part in parts)
        return [made.padded(part, longest) for part in parts], made

    @classmethod
    def of_cells(cls, table: Any, source: str) -> list[str]:
        """Return the texts; a missing one is empty."""
        import pyarrow as pa

        name = table.column_names[0]
        kind = table.schema.types[0]
        if pa.types.is_null(kind):
            raise UserError(
                f"column {name!r} of {source} is empty: name the column of texts with --text-column"
            )
        if not is_text(kind):
            raise UserError(
                f"column {name!r} of {source} holds {kind}, not texts: name another with "
                "--text-column"
            )
        return [text or "" for text in table.column(0).to_pylist()]

    def takes(self, shape: Sequence[int]) -> str:
        name = Path(self.tokenizer).name
        return f"texts of up to {self.length} tokens (tokenizer: {name})."

    def terms(self) -> Inputs:
        """See `Inputs`; a tokenizer's digest stands for its path."""
        return replace(self, tokenizer="model") if self.digest else self

    def padded(self, x: Tensor, length: int = 0) -> Tensor:
        """Return tokens (n, L) with the length that all parties use, or with another one."""
        return F.pad(x, (0, (length or self.length) - x.shape[1]), value=self.pad)

    def cut(self, x: Tensor) -> Tensor:
        return x[:, : max(2, int(self.lengths(x).max())) if len(x) else 2]

    def mask(self, tokens: Tensor) -> Tensor:
        """Return (b, L) bool: true where there is text."""
        return tokens != self.pad

    def lengths(self, x: Tensor) -> Tensor:
        """Return (n,) int64: the number of tokens of each text."""
        places = torch.arange(1, x.shape[1] + 1, device=x.device)
        return (self.mask(x) * places).amax(dim=1)


def tokens_for(tokenizer: str, length: int) -> Tokens:
    """Return the `Tokens` of this tokenizer."""
    if tokenizer == "words":
        return Tokens("words", _VOCABULARY, length)
    about = _ask(tokenizer)
    path = str(Path(tokenizer).absolute())
    return Tokens(path, about["vocabulary"], length, _file(tokenizer)[1], about["pad"])


def _text(file: Path | str) -> str:
    """Return a text, or that in a file."""
    if not isinstance(file, Path):
        return file
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError("it is not UTF-8 text: convert or remove it") from None


def decode(ids: Sequence[int], tokens: Tokens) -> list[str] | None:
    """Return each token as text; None for hashed words, which nobody can tell."""
    if tokens.tokenizer == "words":
        return None
    texts: list[str] = _ask(tokens.tokenizer, ids=ids)["ids"]
    return texts


@lru_cache(1 << 18)
def _word(word: str, vocabulary: int) -> int:
    """Return a token from 1 to vocabulary - 1, the same everywhere: no silo needs to know the words
    of another.
    """
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return 1 + int.from_bytes(digest, "little") % (vocabulary - 1)


@cache
def _file(name: str) -> tuple[str, str]:
    """Return what is in the file of a tokenizer, and its digest."""
    path = Path(name).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"there is no tokenizer {name!r}: give `words`, or a folder with the tokenizer.json of "
            "a model"
        )
    require_extra("text", "a tokenizer of a model", "tokenizers")
    content = read_regular(file, _LARGEST)
    digest = hashlib.blake2b(content, digest_size=16).hexdigest()
    return content.decode(errors="replace"), digest


def _ask(
    name: str, texts: Sequence[str] = (), length: int = 1, ids: Sequence[int] = ()
) -> dict[str, Any]:
    """Return what `tokenising` answers: the tokens of texts, and the texts of tokens."""
    content, _ = _file(name)
    asked = {
        "tokenizer": content,
        "seconds": _SECONDS,
        "texts": list(texts),
        "length": length,
        "ids": list(ids),
    }
    # -P: the files next to it have names that other packages have as well
    command = [sys.executable, "-P", tokenising.__file__]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    if done.returncode == -signal.SIGALRM:
        raise UserError(
            f"the tokenizer {name} takes too long: its expressions backtrack, so use another"
        )
    if done.returncode:
        why = [*done.stderr.strip().splitlines(), "it ends without a word"][-2:][0]
        raise UserError(
            f"{name} is not a tokenizer ({why[:100]}): give the tokenizer.json of a model"
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
