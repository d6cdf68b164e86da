"""Describe the copies of the data that results were made with: their files, the notes next to them, and duplicates."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from textwrap import fill

from PIL import Image
from torch import Tensor

from ekiden.data.holdings import hold
from ekiden.data.named import NAMED, Named
from ekiden.data.raw import Raw
from ekiden.data.reading import Reading
from ekiden.data.sources import load

NOTES = "info.json"
_NOTED = ("fidelity", "split")  # entries of such a file that say what was done to the images
_HEAD = (
    "**Data.** The copies that lay where this page was written. A test image equals a training image if all pixels are "
    "the same, at the size that the networks are given."
)
_LINE = re.compile(r"^- `([^`]+)`: .*(?:\n  .*)*", flags=re.MULTILINE)


def paragraph(names: Iterable[str], old: str = "") -> list[str]:
    """Return the lines of a Markdown paragraph about data sets; none if there is nothing to say.

    Args:
        names: names of data sets. Only those in `$EKIDEN_DATA` are described.
        old: a text with such a paragraph. Its lines about data sets that are not there are kept.
    """
    said = {found[1]: found[0] for found in _LINE.finditer(old)}
    for name in dict.fromkeys(names):
        if copy := describe(name):
            said[name] = fill(f"- `{name}`: {copy}", 118, subsequent_indent="  ", break_on_hyphens=False)
    return [fill(_HEAD, 118), "", *(said[name] for name in sorted(said)), ""] if said else []


def describe(name: str) -> str:
    """Describe the copy of a data set in `$EKIDEN_DATA`; empty if there is none."""
    root = os.environ.get("EKIDEN_DATA")
    folder = Path(root).expanduser() / name if root else Path(name)
    if not root or not folder.is_dir() or Path(name).is_absolute():
        return ""
    spec = NAMED.get(name, Named())
    parts = hold(folder, Reading(), usual=spec.columns).parts
    data = load(name)
    train, test = len(data.train), len(data.test)
    equal = shared(data.train.x, data.test.x)
    first = f"{train} training and {test} test images, {_encoding(parts)}"
    shown = f"the networks get {spec.size} x {spec.size} pixels" if spec.size else ""
    same = f"{equal} of the {test} test images equal{'s' if equal == 1 else ''} a training image"
    return f"{'; '.join(filter(None, [first, *_noted(folder), shown]))}. {same[0].upper()}{same[1:]}."


def shared(train: Tensor, test: Tensor) -> int:
    """Return how many of the test images equal a training image, pixel by pixel."""
    known = {_digest(image) for image in train}
    return sum(_digest(image) in known for image in test)


def _digest(image: Tensor) -> bytes:
    return blake2b(image.numpy().tobytes(), digest_size=16).digest()


def _encoding(parts: Iterable[Raw]) -> str:
    """Return formats and sizes of the files' images, such as "JPEG of 32 x 32 pixels"."""
    kinds: Counter[str] = Counter()
    for encoded in (image for part in parts for image in part.images):
        if isinstance(encoded, bytes | Path):
            with Image.open(BytesIO(encoded) if isinstance(encoded, bytes) else encoded) as image:
                kinds[f"{image.format} of {image.width} x {image.height} pixels"] += 1
    common = [kind if len(kinds) == 1 else f"{n} {kind}" for kind, n in kinds.most_common(3)]
    return ", ".join([*common, "others"] if len(kinds) > len(common) else common)


def _noted(folder: Path) -> list[str]:
    """Return what is noted next to the files."""
    try:
        notes = json.loads((folder / NOTES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    values = [notes.get(key) for key in _NOTED] if isinstance(notes, dict) else []
    texts = [" ".join(value.split()) if isinstance(value, str) else "" for value in values]
    return [f"{key} as noted: {text}" for key, text in zip(_NOTED, texts, strict=False) if text]
