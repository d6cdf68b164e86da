"""Batches: many looked up at once are those looked up alone, and layouts follow a rule."""

from dataclasses import replace

import pytest
import torch

from ekiden import Augment, Hardware
from ekiden.core.models import catalogue
from ekiden.core.training.feed import Feed, feed_for
from ekiden.data import Dataset, Subset, from_tensors

HARDWARE = Hardware(threads=1)


def dataset(shape: tuple[int, ...], n: int) -> Dataset:
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(n, *shape, generator=draw), torch.arange(n) % 3
    return from_tensors((x, y), (x, y))


@pytest.mark.parametrize(
    ("shape", "active"), [((5,), False), ((16,), False), ((3, 8, 8), False), ((3, 8, 8), True)]
)
def test_an_epoch_of_batches_is_what_single_batches_are(
    shape: tuple[int, ...], active: bool
) -> None:
    augment = Augment(crop=2, flip=True) if active else Augment()
    feed = Feed(replace(dataset(shape, 70), augment=augment), HARDWARE)
    samples = feed.dataset.train
    train = Subset(samples, torch.randperm(70, generator=torch.Generator().manual_seed(0)))
    rows = list(torch.split(torch.arange(70), 16))
    torch.manual_seed(9)
    together = [(x.clone(), y, x.data_ptr() % 64) for x, y in feed.epoch(train, rows)]
    torch.manual_seed(9)
    for part, (x, y, place) in zip(rows, together, strict=True):
        alone, labels = feed.batch(train, part, train=True)
        assert torch.equal(x, alone)
        assert torch.equal(y, labels)
        assert place == 0


@pytest.mark.parametrize(
    ("network", "last"), [("lenet", True), ("resnet18", False), ("vgg11", False)]
)
def test_large_networks_keep_their_own_layout_on_a_cpu(network: str, last: bool) -> None:
    data = dataset((3, 32, 32), 3)
    feed = feed_for(data, HARDWARE, catalogue.build(network, (3, 32, 32), 3))
    x, _ = feed.batch(Subset(data.train, torch.arange(3)), slice(None), train=True)
    assert x.is_contiguous(memory_format=torch.channels_last) == last
    assert x.is_contiguous() != last


def test_no_network_has_a_layout_that_was_switched_off() -> None:
    data = dataset((3, 32, 32), 3)
    feed = feed_for(data, Hardware(channels_last=False), catalogue.build("lenet", (3, 32, 32), 3))
    x, _ = feed.batch(Subset(data.train, torch.arange(3)), slice(None), train=True)
    assert x.is_contiguous()
