"""Batches of a data set on a device, ready for the network."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from math import prod

import torch
from torch import Tensor, nn

from ekiden.core.base import files
from ekiden.core.base.settings import Hardware
from ekiden.core.data.augment import normalise
from ekiden.core.data.samples import Dataset, Samples, Subset
from ekiden.core.training import frozen
from ekiden.core.training.frozen import RememberedAnswers


@dataclass(eq=False)
class _Held:
    """Samples on the device, which the entry keeps alive, so that their id stays their own."""

    samples: Samples
    x: Tensor
    y: Tensor
    # of frozen parts, by their keys; None where they are too large to keep
    answers: dict[str, RememberedAnswers | None] = field(default_factory=dict)


def feed_for(dataset: Dataset, hardware: Hardware, module: nn.Module) -> "Feed":
    """Return the feed of a network, in channels-last layout where that is not slower, if it may be.

    On a CPU each step then converts the weights of convolutions, which must fit into its cache.
    """
    convolutions = (part for part in module.modules() if isinstance(part, nn.Conv2d))
    large = sum(layer.weight.numel() for layer in convolutions) >= 1_000_000
    if large and hardware.device == "cpu":
        hardware = replace(hardware, channels_last=False)
    return Feed(dataset, hardware)


class Feed:
    """The samples of one data set on the training device; a batch is one index lookup."""

    def __init__(self, dataset: Dataset, hardware: Hardware) -> None:
        # where the samples come from
        self.dataset = dataset
        # where batches are
        self.device = torch.device(hardware.device)
        self._channels_last = hardware.channels_last and len(dataset.shape) == 3
        self._precision = hardware.precision
        self._samples: dict[int, _Held] = {}

    @property
    def alike(self) -> bool:
        """Whether a sample is always the same input, because nothing is augmented."""
        return not self.dataset.augment.active

    def batch(
        self,
        subset: Subset,
        rows: Tensor | slice,
        *,
        train: bool,
        light: bool = False,
        draws: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Inputs (b, ...) and labels (b,) for positions `rows` of `subset`, augmented in training.

        Inputs are float32; tokens are int64, cut to the longest text of the batch. `light` inputs
        may hold only the numbers of the samples, for a network whose frozen part alone reads them
        (`Network.light`). Augmentation takes `draws` if they are given.
        """
        held = self._on_device(subset.samples)
        index = subset.rows[rows].to(self.device)
        if (train and not self.alike) or self._in_tokens(held):
            return self._inputs(held, index, train=train, draws=draws)
        if light and not self.dataset.inputs.ragged:
            nothing = torch.empty((), device=self.device)
            inputs = nothing.expand(len(index), *held.x.shape[1:])
            y = held.y[index]
        else:
            inputs, y = self._inputs(held, index, train=train)
        return self._marked(inputs, held, index), y

    def draw(self, subset: Subset, batches: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Return the rows (b,) of each of the training `batches`, positions in `subset`, and what
        augments it (4, b), or nothing (0,).

        All of an epoch is drawn first and moved to the device at once.
        """
        rows = self._rows(subset, batches)
        if self.alike:
            return zip(rows, repeat(torch.empty(0, device=self.device)), strict=False)
        sizes = [len(own) for own in rows]
        draws = torch.cat([self.dataset.augment.draw(size) for size in sizes], 1)
        return zip(rows, torch.split(draws.to(self.device), sizes, 1), strict=True)

    def _rows(self, subset: Subset, batches: list[Tensor]) -> Sequence[Tensor]:
        """Return the rows of each of the `batches`, positions in `subset`, on the device."""
        rows = subset.rows[torch.cat(batches)].to(self.device)
        return torch.split(rows, [len(batch) for batch in batches])

    def epoch(
        self, subset: Subset, batches: list[Tensor], *, light: bool = False
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what `batch` gives for each of the training `batches`, positions in `subset`.

        Dropout and losses may draw from the same generator as augmentation, so a batch is drawn
        when its turn comes.
        """
        held = self._on_device(subset.samples)
        indices = self._rows(subset, batches)
        sizes = [len(index) for index in indices]
        together = 1
        if self.alike and not light and not self.dataset.inputs.ragged:
            together = self._together(sizes)
        for first in range(0, len(indices), together):
            some = indices[first : first + together]
            samples = Subset(subset.samples, torch.cat([*some]))
            inputs, y = self.batch(samples, slice(None), train=True, light=light)
            if len(some) == 1:
                yield inputs, y
                continue
            own = sizes[first : first + together]
            for index, x, labels in zip(
                some, torch.split(inputs, own), torch.split(y, own), strict=True
            ):
                yield self._marked(x, held, index), labels

    def _together(self, sizes: Sequence[int]) -> int:
        """Return how many batches to look up at once, up to 1 MB, which stays in a CPU's cache.

        Each begins at a multiple of 64 bytes, as a tensor of its own does, because the bits of a
        product may depend on where its operands lie.
        """
        each = 4 * sizes[0] * prod(self.dataset.shape)
        regular = len(set(sizes[:-1])) <= 1 and each % 64 == 0
        if regular and each:
            return max(1, 2**20 // each)
        return 1

    def _marked(self, inputs: Tensor, held: _Held, index: Tensor) -> Tensor:
        """Return a batch that says which samples it has."""
        version = 0 if inputs.is_inference() else inputs._version
        setattr(inputs, frozen.SOURCE, (_Rows(self, held, index), version))
        return inputs

    def _in_tokens(self, held: _Held) -> bool:
        """Return whether labels are per token; then the length of answers differs between
        batches.
        """
        return self.dataset.inputs.ragged and held.y.shape == held.x.shape

    def _inputs(
        self, held: _Held, index: Tensor, *, train: bool, draws: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        inputs = held.x.index_select(0, index)
        y = held.y.index_select(0, index)
        if self.dataset.inputs.ragged:
            return self._trimmed(inputs, y, train)
        if train:
            inputs = self.dataset.augment(inputs, draws=draws)
        inputs = normalise(inputs, self.dataset.mean, self.dataset.std)
        if self._channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, y

    def answer(
        self, held: _Held, index: Tensor, key: str, compute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Return the outputs of the frozen part `key` for samples `index`, each computed alone."""
        # the outputs are used after an evaluation
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):

            def alone(row: int) -> Tensor:
                return self._inputs(held, torch.tensor([row], device=self.device), train=False)[0]

            if key not in held.answers:
                row = int(index[0])
                file = files.cache_folder() / self._name(held, key)
                held.answers[key] = RememberedAnswers.of(
                    compute(alone(row)), alone(row), len(held.samples), file
                )
            answers = held.answers[key]
            if answers is None:
                return compute(self._inputs(held, index, train=False)[0])
            return answers.get(index, lambda row: compute(alone(row)))

    def _name(self, held: _Held, key: str) -> str:
        """Return the name of a file for the outputs of a frozen part for these samples."""
        how = f"{self.dataset.mean} {self.dataset.std} {self.device.type} {self._precision} {self._channels_last}"
        samples = files.bytes_of(held.samples.x)
        pieces: list[str | memoryview] = [key, how, str(held.samples.x.shape), samples]
        return f"answers-{files.digest_of('answers', pieces)}.safetensors"

    def lengths(self, subset: Subset) -> Tensor | None:
        """Return (n,) lengths of texts, by which batches are put together; None for other
        samples.
        """
        if not self.dataset.inputs.ragged:
            return None
        parts = [
            self.dataset.inputs.lengths(subset.samples.x[rows])
            for rows in torch.split(subset.rows, 4096)
        ]
        return torch.cat([part for part in parts if part is not None])

    def _trimmed(self, tokens: Tensor, y: Tensor, train: bool) -> tuple[Tensor, Tensor]:
        """Return texts without padding. With labels per token only in training, because answers
        have one length.
        """
        by_token = y.shape == tokens.shape
        if by_token and not train:
            return tokens, y
        cut = self.dataset.inputs.cut(tokens)
        if by_token:
            y = y[:, : cut.shape[1]]
        return cut, y

    def _on_device(self, samples: Samples) -> _Held:
        """Move each sample set to the device once."""
        if id(samples) not in self._samples:
            self._samples[id(samples)] = _Held(
                samples, samples.x.to(self.device), samples.y.to(self.device)
            )
        return self._samples[id(samples)]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The samples of a batch: which set, and which rows."""

    feed: Feed
    held: _Held
    index: Tensor

    def answer(self, key: str, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the outputs of the frozen part `key` for the batch."""
        return self.feed.answer(self.held, self.index, key, compute)
