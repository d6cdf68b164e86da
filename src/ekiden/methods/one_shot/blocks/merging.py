"""What methods share that merge models by the Fisher information or the inputs of the clients' layers."""

import logging
from collections.abc import Sequence

from ekiden.methods.blocks.one_shot import Trained
from ekiden.training.layout import Layout


def shares(sent: Sequence[Trained]) -> list[float]:
    """Return p_k, which sum to 1: n_k/n, or 1/N if clients report no numbers of samples."""
    counts = [float(t.counts.sum()) if t.counts.numel() else 1.0 for t in sent]
    return [n / sum(counts) for n in counts]


def note_averaged(method: str, layout: Layout) -> None:
    """Warn that layers that are neither linear nor convolutional are averaged."""
    others = [layer.name for layer in layout.layers if layer not in layout.dense]
    if others:
        logging.getLogger("ekiden").warning("%s averages layers that it cannot treat: %s", method, ", ".join(others))
