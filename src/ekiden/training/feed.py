"""Batches of a data set on a device, ready for the network."""

import torch
from torch import Tensor

from ekiden.base.settings import Hardware
from ekiden.data.augment import normalise
from ekiden.data.inputs import Tokens
from ekiden.data.samples import Dataset, Samples, Subset


class Feed:
    """The samples of one data set on the training device; a batch is one index lookup.

    Attributes:
        dataset: where the samples come from.
        device: where batches are.
    """

    def __init__(self, dataset: Dataset, hardware: Hardware) -> None:
        self.dataset = dataset
        self.device = torch.device(hardware.device)
        self._channels_last = hardware.channels_last and len(dataset.shape) == 3
        self._samples: dict[int, tuple[Samples, Tensor, Tensor]] = {}

    @property
    def alike(self) -> bool:
        """Whether a sample is always fed alike: nothing is augmented."""
        return not self.dataset.augment.active

    def batch(self, subset: Subset, rows: Tensor | slice, *, train: bool) -> tuple[Tensor, Tensor]:
        """Inputs (b, ...) and labels (b,) for positions `rows` of `subset`, augmented in training.

        Inputs are float32; tokens are int64, cut to the longest text of the batch.
        """
        x, y = self._on_device(subset.samples)
        index = subset.rows[rows].to(self.device)
        inputs = x[index]
        if isinstance(self.dataset.inputs, Tokens):
            return self._trimmed(inputs, y[index], self.dataset.inputs, train)
        if train:
            inputs = self.dataset.augment(inputs)
        inputs = normalise(inputs, self.dataset.mean, self.dataset.std)
        if self._channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, y[index]

    def lengths(self, subset: Subset) -> Tensor | None:
        """(n,) lengths of texts, by which batches are put together; None of other samples."""
        tokens = self.dataset.inputs
        if not isinstance(tokens, Tokens):
            return None
        return torch.cat([tokens.lengths(subset.samples.x[rows]) for rows in torch.split(subset.rows, 4096)])

    @staticmethod
    def _trimmed(tokens: Tensor, y: Tensor, kind: Tokens, train: bool) -> tuple[Tensor, Tensor]:
        """Texts without what only fills up; with labels per token, in training alone: answers have one length."""
        if y.ndim == 2 and y.shape == tokens.shape and not train:
            return tokens, y
        longest = max(2, int(kind.lengths(tokens).max())) if len(tokens) else 2
        return tokens[:, :longest], y[:, :longest] if y.shape == tokens.shape else y

    def _on_device(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """Move whole sample sets once; the entry keeps `samples` alive, so that its id stays its own."""
        if id(samples) not in self._samples:
            self._samples[id(samples)] = (samples, samples.x.to(self.device), samples.y.to(self.device))
        return self._samples[id(samples)][1:]
