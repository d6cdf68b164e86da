"""The real data sets of `$EKIDEN_DATA`, where they are."""

from collections.abc import Callable

import pytest
import torch

from ekiden.core.data.augment import Augment
from ekiden.data import Dataset, Dirichlet, Domains, Samples, split

Real = Callable[[str], Dataset]

SETS = [
    ("mnist", (1, 28, 28), 60_000, 10_000, 10),
    ("cifar10", (3, 32, 32), 50_000, 10_000, 10),
    ("cifar100", (3, 32, 32), 50_000, 10_000, 100),
    ("pacs", (3, 32, 32), 7_993, 1_998, 7),
    ("office_caltech10", (3, 32, 32), 2_027, 506, 10),
    ("tiny_imagenet20", (3, 64, 64), 10_000, 1_000, 20),
]
MANY = ("cifar", "mnist", "pacs", "tiny")
"""how the names of sets begin whose many images take seconds to decode"""


def both(dataset: Dataset) -> Samples:
    train, test = dataset.train, dataset.test
    domain = (
        None
        if train.domain is None or test.domain is None
        else torch.cat([train.domain, test.domain])
    )
    return Samples(torch.cat([train.x, test.x]), torch.cat([train.y, test.y]), domain)


def moments(dataset: Dataset) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of the training images by channel, from 0 to 1."""
    x = dataset.train.x.transpose(0, 1).flatten(1)[:, ::7].double() / 255
    return [round(v, 2) for v in x.mean(1).tolist()], [round(v, 2) for v in x.std(1).tolist()]


@pytest.mark.parametrize(
    ("name", "shape", "train", "test", "classes"),
    [
        pytest.param(*s, id=s[0], marks=[pytest.mark.slow] if s[0].startswith(MANY) else [])
        for s in SETS
    ],
)
def test_sizes(
    real: Real, name: str, shape: tuple[int, ...], train: int, test: int, classes: int
) -> None:
    """Slow where many images are decoded."""
    dataset = real(name)
    assert dataset.name == name
    assert dataset.shape == shape
    assert (len(dataset.train), len(dataset.test), len(dataset.classes)) == (train, test, classes)
    for part in dataset.train, dataset.test:
        assert part.x.dtype == torch.uint8
        assert set(part.y.tolist()) == set(range(classes))


@pytest.mark.slow
def test_mnist(real: Real) -> None:
    """Slow: see `test_sizes`."""
    dataset = real("mnist")
    assert dataset.train.y[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert moments(dataset) == ([0.13], [0.31])
    assert (dataset.mean, dataset.std, dataset.augment) == ((0.0,), (1.0,), Augment())


@pytest.mark.slow
def test_cifar10(real: Real) -> None:
    """Slow: see `test_sizes`."""
    dataset = real("cifar10")
    assert dataset.classes[:3] == ("airplane", "automobile", "bird")
    assert dataset.train.y.bincount().tolist() == [5000] * 10
    assert moments(dataset) == ([0.49, 0.48, 0.45], [0.25, 0.24, 0.26])
    assert (dataset.mean, dataset.std, dataset.augment) == (
        (0.0,),
        (1.0,),
        Augment(crop=4, flip=True),
    )


@pytest.mark.slow
def test_cifar100(real: Real) -> None:
    """Slow: see `test_sizes`."""
    dataset = real("cifar100")
    assert (dataset.classes[0], dataset.classes[-1]) == ("apple", "worm")
    assert dataset.test.y.bincount().tolist() == [100] * 100


@pytest.mark.slow
def test_pacs(real: Real) -> None:
    dataset = real("pacs")
    assert dataset.classes == ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    assert dataset.domains == ("photo", "art_painting", "cartoon", "sketch")
    domain = both(dataset).domain
    assert domain is not None
    assert domain.bincount().tolist() == [1670, 2048, 2344, 3929]
    assert dataset.mean == (0.485, 0.456, 0.406)
    assert dataset.augment == Augment(crop=4, flip=True, rotation=15)


def test_office_caltech10(real: Real) -> None:
    dataset = real("office_caltech10")
    assert dataset.domains == ("amazon", "caltech10", "dslr", "webcam")
    domain = both(dataset).domain
    assert domain is not None
    assert domain.bincount().tolist() == [958, 1123, 157, 295]
    assert dataset.mean == (0.0,)


@pytest.mark.slow
def test_tiny_imagenet20(real: Real) -> None:
    dataset = real("tiny_imagenet20")
    assert dataset.classes[0] == "n02124075 Egyptian cat"
    assert dataset.train.y.bincount().tolist() == [500] * 20
    assert dataset.augment == Augment(flip=True, rotation=20)
    x = both(dataset).x
    grey = (x[:, 0] == x[:, 1]).flatten(1).all(1) & (x[:, 0] == x[:, 2]).flatten(1).all(1)
    assert int(grey.sum()) >= 153


@pytest.mark.slow
def test_the_clients_of_the_papers(real: Real) -> None:
    fed = split(real("pacs"), Domains(), seed=0)
    assert [c.name for c in fed.clients] == ["photo", "art_painting", "cartoon", "sketch"]
    for client, size in zip(fed.clients, (1670, 2048, 2344, 3929), strict=True):
        assert len(client.train) + len(client.val) + len(client.test) == size
        assert abs(len(client.test) - 0.2 * size) < 7  # each of the seven classes is rounded


@pytest.mark.slow
def test_label_skew_at_full_size(real: Real) -> None:
    for clients in 10, 100:
        fed = split(real("cifar10"), Dirichlet(0.5), clients, seed=0)
        assert sum(len(c.train) + len(c.val) for c in fed.clients) == 50_000
        assert sum(len(c.test) for c in fed.clients) == 10_000
        assert min(len(c.train) + len(c.val) for c in fed.clients) >= 10
