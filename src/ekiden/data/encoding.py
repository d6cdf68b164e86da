"""Make the tensors of one data set from undecoded samples of several sources."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.data import cache, tables, texts
from ekiden.data.decode import decode
from ekiden.data.inputs import Images, Inputs, Table, Tokens, of_tensor
from ekiden.data.raw import Raw
from ekiden.data.reading import Reading


def encode(
    sides: Sequence[Sequence[Raw]],
    reading: Reading,
    size: int | None,
    known: Inputs | None,
    shape: tuple[int, ...] = (),
) -> tuple[list[Tensor], Inputs]:
    """Return the samples of the training side and of the test side, and what they are.

    Args:
        sides: what the sources hold for training, and for the test.
        reading: how they were read.
        size: side of images in pixels.
        known: what samples become, if the silos have agreed on that.
        shape: shape of the samples that a trained model takes; () without one.
    """
    raws = [raw for side in sides for raw in side]
    match raws[0].kind:
        case "images":
            images = known if isinstance(known, Images) else reading.images(size)
            return decode(sides, images, cache.room, shape=shape), images
        case "tokens":
            tokens = (
                known
                if isinstance(known, Tokens)
                else texts.tokens_for(reading.tokenizer or "words", reading.text_length)
            )
            return _padded([[texts.encode(raw.images, tokens) for raw in side] for side in sides], tokens), tokens
        case "arrays":
            x = [_stacked(side, raws[0]) for side in sides]
            return x, of_tensor(x[0])
    if size:
        raise UserError("--size is the side of images, but the data are a table: leave it out")
    if isinstance(known, Table):
        return [torch.cat([tables.encode(*tables.rows(raw, known), known) for raw in side]) for side in sides], known
    table, tensors = tables.unscaled(raws, reading.missing)
    cut = len(sides[0])
    return [torch.cat(tensors[:cut]), torch.cat(tensors[cut:])], table


def _padded(sides: Sequence[Sequence[Tensor]], tokens: Tokens) -> list[Tensor]:
    """Return the texts padded to one length."""
    longest = max(part.shape[1] for side in sides for part in side)
    out = []
    for side in sides:
        whole = torch.full((sum(map(len, side)), longest), tokens.pad)
        at = 0
        for part in side:
            whole[at : at + len(part), : part.shape[1]] = part
            at += len(part)
        out.append(whole)
    return out


def _stacked(side: Sequence[Raw], first: Raw) -> Tensor:
    parts = [torch.as_tensor(raw.images) for raw in side]
    wanted = _form(torch.as_tensor(first.images))
    for raw, form in zip(side, map(_form, parts), strict=True):
        if form != wanted:
            raise UserError(
                f"samples of {raw.source} are {form}, those of {first.source} {wanted}: give all samples one shape and "
                "type"
            )
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _form(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape[1:])}"
