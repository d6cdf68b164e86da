"""Partitions, their spelling, and the split of a data set by them."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator
from numpy.typing import NDArray

import ekiden
from ekiden.cli.flags import texts_below
from ekiden.cli.runs import DataOptions
from ekiden.core.base.errors import DataWarning, UserError
from ekiden.data import (
    Dataset,
    Dirichlet,
    Domains,
    FederatedData,
    Iid,
    Natural,
    Partition,
    Pathological,
    Samples,
    load,
    parse,
    split,
)
from ekiden.readers import partition as partition_file
from ekiden.readers.kinds import of_tensor
from ekiden.runs.plan import Plan
from tests.fuzz import examples

DOMAINS = ("photo", "art", "cartoon", "sketch")


def toy(
    n: int = 400,
    classes: int = 5,
    *,
    test: int = 100,
    domains: bool = False,
    owners: int = 0,
    seed: int = 0,
) -> Dataset:
    """Samples whose only feature is their own row number."""
    rng = np.random.default_rng(seed)

    def samples(size: int) -> Samples:
        def draw(high: int) -> torch.Tensor:
            values = np.concatenate([np.arange(high), rng.integers(0, high, max(size - high, 0))])[
                :size
            ]
            return torch.from_numpy(rng.permutation(values))

        x = torch.arange(size, dtype=torch.float32).reshape(-1, 1)
        return Samples(
            x, draw(classes), draw(4) if domains else None, draw(owners) if owners else None
        )

    names = tuple(str(c) for c in range(classes))
    return Dataset(
        "toy",
        samples(n),
        samples(test),
        names,
        DOMAINS if domains else (),
        inputs=of_tensor(samples(1).x),
    )


def held(fed: FederatedData) -> list[list[int]]:
    """Training and validation rows of each client."""
    return [c.val.rows.tolist() + c.train.rows.tolist() for c in fed.clients]


KINDS = {
    kind
    for kind in vars(partition_file).values()
    if isinstance(kind, type) and hasattr(kind, "assign") and kind is not Partition
}


def test_each_partition_is_tried_and_named_where_users_look() -> None:
    assert {type(one) for one, _ in EVERY} == KINDS
    helps = [texts_below(record)["partition"] for record in (Plan, DataOptions)]
    for one, _ in EVERY:
        assert parse(str(one)) == one
        for text in (partition_file.SPELLINGS, *helps):
            assert str(one).split(":")[0] in text
    assert {kind.__name__ for kind in KINDS} <= set(ekiden.data.__all__)
    assert {Natural, Domains} | {k for k in KINDS if issubclass(k, partition_file.Mixing)} == KINDS


def flat(rows: list[list[int]]) -> list[int]:
    return sorted(r for part in rows for r in part)


EVERY: list[tuple[Partition, int]] = [
    (Iid(), 7),
    (Dirichlet(0.5), 7),
    (Dirichlet(0.05, min_size=1), 3),
    (Domains(), 4),
    (Domains(("sketch", "photo", "art", "cartoon")), 8),
    (Domains(skew=Dirichlet(0.1, min_size=1)), 8),
    (Pathological(2), 7),
    (Natural(), 6),
    (Natural(), 4),
]


class Halves(Iid):
    """A partition of a user's own."""

    def assign(self, dataset: Dataset, clients: int, rng: Generator) -> list[NDArray[np.int64]]:
        return np.array_split(np.arange(len(dataset.train)), clients)


def test_a_run_names_only_a_partition_that_its_name_gives_back(digits: Dataset) -> None:
    known = split(digits, Iid(), 3).origin
    assert known is not None
    assert known.partition == "iid"
    assert split(digits, Halves(), 3).origin is None


@pytest.mark.parametrize(("partition", "clients"), EVERY, ids=str)
def test_every_row_belongs_to_exactly_one_client(partition: Partition, clients: int) -> None:
    dataset = toy(domains=True, owners=6)
    fed = split(dataset, partition, clients, seed=3)
    assert len(fed.clients) == clients
    assert flat(held(fed)) == list(range(400))
    assert flat([c.test.rows.tolist() for c in fed.clients]) == list(range(100))
    for client in fed.clients:
        n = len(client.train) + len(client.val)
        assert n > 0
        assert len(client.val) == int(0.1 * n)
    assert len({c.name for c in fed.clients}) == clients


@pytest.mark.parametrize(("partition", "clients"), EVERY, ids=str)
def test_the_seed_decides(partition: Partition, clients: int) -> None:
    dataset = toy(domains=True, owners=6)
    first, again, other = (held(split(dataset, partition, clients, seed=s)) for s in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize(("partition", "clients"), EVERY, ids=str)
def test_rows_are_shuffled_before_validation_is_cut(partition: Partition, clients: int) -> None:
    for rows in held(split(toy(domains=True, owners=6), partition, clients, seed=0)):
        assert len(rows) < 5 or rows != sorted(rows)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 6),
    st.integers(1, 60),
    st.integers(1, 12),
    st.sampled_from(
        [Dirichlet(0.1, 1), Dirichlet(3.0, 1), Pathological(1), Pathological(3), Natural()]
    ),
    st.integers(0, 9),
)
def test_any_small_set_is_divided_or_refused(
    n: int, classes: int, test: int, clients: int, partition: Partition, seed: int
) -> None:
    dataset = toy(n, classes, test=test, owners=4)
    try:
        fed = split(dataset, partition, clients, seed=seed)
    except UserError:
        assert clients > 1 or isinstance(partition, Natural | Pathological)
        return
    assert flat(held(fed)) == list(range(n))
    assert flat([c.test.rows.tolist() for c in fed.clients]) == list(range(test))
    assert all(len(c.train) > 0 for c in fed.clients)


# IID


def test_iid_sizes_differ_by_at_most_one_and_classes_mix(digits: Dataset) -> None:
    fed = split(digits, Iid(), seed=0)
    sizes = [len(rows) for rows in held(fed)]
    assert len(sizes) == 10
    assert max(sizes) - min(sizes) <= 1
    assert all(int((c.train.class_counts(10) > 0).sum()) == 10 for c in fed.clients)


# Dirichlet


def reference(
    labels: list[int], clients: int, beta: float, least: int, rng: Generator
) -> list[list[int]]:
    """The published rule, sample by sample."""
    n = len(labels)
    while True:
        parts: list[list[int]] = [[] for _ in range(clients)]
        for c in range(max(labels) + 1):
            rows = [int(r) for r in rng.permutation([i for i, y in enumerate(labels) if y == c])]
            p = [float(v) for v in rng.dirichlet([beta] * clients)]
            p = [0.0 if len(part) >= n / clients else v for v, part in zip(p, parts, strict=True)]
            total, so_far, cuts = np.sum(p), 0.0, [0]
            for v in p:
                so_far += v / total
                cuts.append(int(so_far * len(rows)))
            cuts[-1] = len(rows)
            for k in range(clients):
                parts[k] += rows[cuts[k] : cuts[k + 1]]
        if min(len(part) for part in parts) >= least:
            return [[int(r) for r in rng.permutation(part)] for part in parts]


@pytest.mark.parametrize(
    ("beta", "clients", "seed"),
    [(0.5, 10, 0), (0.5, 10, 1), (0.1, 5, 2), (0.3, 20, 3), (10.0, 3, 4)],
)
def test_dirichlet_is_the_published_rule(beta: float, clients: int, seed: int) -> None:
    dataset = toy(1000, 10)
    got = Dirichlet(beta).assign(dataset, clients, np.random.default_rng(seed))
    expected = reference(dataset.train.y.tolist(), clients, beta, 10, np.random.default_rng(seed))
    assert [g.tolist() for g in got] == expected


def test_dirichlet_tries_again_until_all_have_enough() -> None:
    dataset = toy(120, 3)
    rng = np.random.default_rng(0)
    assert all(min(map(len, Dirichlet(0.1).assign(dataset, 6, rng))) >= 10 for _ in range(5))
    sizes = [min(map(len, Dirichlet(0.1, 1).assign(dataset, 6, rng))) for _ in range(20)]
    assert min(sizes) < 10


@pytest.mark.parametrize("seed", range(5))
def test_dirichlet_gives_nothing_more_to_a_client_that_has_its_share(seed: int) -> None:
    dataset = toy(1000, 10)
    for rows in Dirichlet(0.2).assign(dataset, 5, np.random.default_rng(seed)):
        counts = torch.bincount(dataset.train.y[rows], minlength=10)
        before = torch.cumsum(counts, 0) - counts
        assert (
            int(counts[before >= 1000 / 5].sum()) <= 10
        )  # except for truncation to int at the last client


def test_dirichlet_holds_a_client_of_exactly_its_share_for_full() -> None:
    labels = (
        torch.arange(80) // 20
    )  # so small a beta gives whole classes: two of the four make half of all
    dataset = Dataset(
        "four",
        Samples(torch.zeros(80, 1), labels),
        toy().test,
        tuple("0123"),
        inputs=of_tensor(toy().test.x),
    )
    for seed in range(30):
        parts = Dirichlet(1e-3, 1).assign(dataset, 2, np.random.default_rng(seed))
        assert [len(p) for p in parts] == [40, 40]


def test_a_small_beta_is_more_skewed_than_a_large_one(digits: Dataset) -> None:
    def largest(beta: float) -> float:
        fed = split(digits, Dirichlet(beta), 10, seed=0)
        shares = [c.train.class_counts(10).max() / len(c.train) for c in fed.clients]
        return float(np.mean(shares))

    assert largest(0.1) > largest(0.5) > largest(100.0)
    assert largest(100.0) < 0.25


def test_dirichlet_that_cannot_be_met_ends_in_seconds(
    monkeypatch: pytest.MonkeyPatch, digits: Dataset
) -> None:
    draws, draw = Counter[str](), Dirichlet._draw

    def counted(*args: Any) -> list[NDArray[np.int64]]:
        draws["all"] += 1
        return draw(*args)

    monkeypatch.setattr(Dirichlet, "_draw", counted)
    with pytest.raises(
        UserError, match="leaves some of 100 clients with fewer than 10 of 1438 samples"
    ):
        split(digits, "dirichlet:0.01", 100)
    assert draws["all"] == 500  # of 5,000, since each takes longer for as many clients


def test_dirichlet_says_what_to_change() -> None:
    with pytest.raises(UserError, match=r"fewer than 10 of 50 samples: .*dirichlet:0.5:1"):
        split(toy(50), Dirichlet(0.5), 10, seed=0)
    with pytest.raises(UserError, match="larger beta"):
        split(toy(50, 1), Dirichlet(1e-4, 25), 2, seed=0)
    assert len(split(toy(50), Dirichlet(0.5, 1), 10, seed=0).clients) == 10


# Domains


@pytest.mark.parametrize("clients", [4, 8, 20, 40])
def test_clients_take_domains_in_turn(clients: int) -> None:
    """Table 6 of FedELMY: photo, art, cartoon, sketch, photo, art, ..."""
    dataset = toy(domains=True)
    fed = split(dataset, Domains(), clients, seed=0)
    assert dataset.train.domain is not None
    assert dataset.test.domain is not None
    for k, (client, rows) in enumerate(zip(fed.clients, held(fed), strict=True)):
        name = DOMAINS[k % 4]
        assert client.name == (name if clients == 4 else f"{name}-{k // 4}")
        assert set(dataset.train.domain[rows].tolist()) == {k % 4}
        assert set(dataset.test.domain[client.test.rows].tolist()) <= {k % 4}
    for d in range(4):
        train, test = (
            [len(part) for part in parts[d::4]]
            for parts in (held(fed), [c.test for c in fed.clients])
        )
        assert max(train) - min(train) <= 1
        assert max(test) - min(test) <= 1


def test_labels_are_skewed_within_each_domain() -> None:
    """Each of three clients of a domain holds rows of that domain alone, and most of a class is at
    one of them."""
    dataset = toy(4000, domains=True)
    fed = split(dataset, "domains:dirichlet:0.01:1", 12, seed=0)
    assert dataset.train.domain is not None
    for d in range(4):
        clients = held(fed)[d::4]
        assert {d} == {int(domain) for rows in clients for domain in dataset.train.domain[rows]}
        counts = torch.stack(
            [torch.bincount(dataset.train.y[rows], minlength=5) for rows in clients]
        )
        assert (counts.amax(0) / counts.sum(0)).mean() > 0.9
    assert len(split(dataset, "domains:dirichlet:0.5").clients) == 8, (
        "two for each domain by default"
    )


def test_domains_in_a_given_order() -> None:
    fed = split(toy(domains=True), parse("domains:sketch,art,photo,cartoon"), seed=0)
    assert [c.name for c in fed.clients] == ["sketch", "art", "photo", "cartoon"]


@pytest.mark.parametrize(
    ("partition", "clients", "message"),
    [
        (Domains(), 6, "6 clients cannot share 4 domains evenly: take a multiple of 4"),
        (
            Domains(("photos", "art", "cartoon", "sketch")),
            4,
            "unknown domain 'photos': did you mean 'photo'?",
        ),
        (Domains(("photo", "art")), 2, "must name each domain once"),
        (Domains(("photo", "photo", "art", "cartoon", "sketch")), 5, "must name each domain once"),
        (
            Domains(skew=Dirichlet(0.1)),
            4,
            "domains:dirichlet:0.1 skews labels among the clients of a domain: take 8",
        ),
    ],
)
def test_domain_errors(partition: Partition, clients: int, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        split(toy(domains=True), partition, clients, seed=0)


# Classes


@settings(max_examples=examples(25), deadline=None)
@given(st.integers(1, 5), st.integers(1, 25), st.integers(0, 99))
def test_pathological_deals_all_classes_evenly(k: int, clients: int, seed: int) -> None:
    dataset = toy(500, 5)
    if k * clients < 5:
        with pytest.raises(UserError, match="cannot give all 5 classes"):
            split(dataset, Pathological(k), clients, seed=seed)
        return
    fed = split(dataset, Pathological(k), clients, seed=seed)
    classes = [set(dataset.train.y[rows].tolist()) for rows in held(fed)]
    assert all(len(c) == k for c in classes)
    dealt = Counter(c for have in classes for c in have)
    assert max(dealt.values()) - min(dealt.values()) <= 1
    counts = [torch.bincount(dataset.train.y[rows], minlength=5).tolist() for rows in held(fed)]
    for c in range(5):
        shares = [n[c] for n in counts if n[c]]
        assert max(shares) - min(shares) <= 1


def test_pathological_refuses_more_classes_than_there_are() -> None:
    with pytest.raises(UserError, match="from 1 to 5 classes a client"):
        split(toy(), Pathological(6), 10, seed=0)


@pytest.mark.parametrize("clients", [1, 7, 10])
def test_iid_gives_the_shards_of_flower(clients: int) -> None:
    from datasets import Dataset as Table
    from flwr_datasets.partitioner import IidPartitioner

    dataset = toy()
    partitioner = IidPartitioner(clients)
    rows = np.random.default_rng(3).permutation(len(dataset.train))
    partitioner.dataset = Table.from_dict({"row": rows})
    expected = [list(partitioner.load_partition(i)["row"]) for i in range(clients)]
    assert [
        part.tolist() for part in Iid().assign(dataset, clients, np.random.default_rng(3))
    ] == expected


# Natural


def test_natural_gives_one_owner_a_client_as_flower_does() -> None:
    from datasets import Dataset as Table
    from flwr_datasets.partitioner import NaturalIdPartitioner

    dataset = toy(owners=9)
    assert dataset.train.group is not None
    partitioner = NaturalIdPartitioner("owner")
    partitioner.dataset = Table.from_dict(
        {"row": list(range(400)), "owner": dataset.train.group.tolist()}
    )
    expected = [partitioner.load_partition(i)["row"] for i in range(9)]
    fed = split(dataset, Natural(), seed=0)
    assert [sorted(rows) for rows in held(fed)] == [list(rows) for rows in expected]
    assert dataset.test.group is not None
    assert [set(dataset.test.group[c.test.rows].tolist()) for c in fed.clients] == [
        {i} for i in range(9)
    ]


def test_natural_with_fewer_clients_keeps_owners_whole() -> None:
    dataset = toy(owners=9)
    assert dataset.train.group is not None
    owners = [
        set(dataset.train.group[rows].tolist())
        for rows in held(split(dataset, Natural(), 4, seed=0))
    ]
    assert sorted(map(len, owners)) == [2, 2, 2, 3]
    assert sorted(o for have in owners for o in have) == list(range(9))


def test_natural_errors() -> None:
    with pytest.raises(UserError, match="10 clients are more than the 9 natural owners"):
        split(toy(owners=9), Natural(), 10, seed=0)
    with pytest.raises(UserError, match="'toy' has no natural owners"):
        split(toy(), Natural(), seed=0)


# Test rows


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 999), st.integers(1, 12), st.sampled_from([0.1, 1.0]))
def test_test_rows_follow_training_rows_class_by_class(
    seed: int, clients: int, beta: float
) -> None:
    dataset = toy(600, 6, test=150, seed=seed)
    fed = split(dataset, Dirichlet(beta, 1), clients, seed=seed)
    train = np.array(
        [torch.bincount(dataset.train.y[rows], minlength=6).tolist() for rows in held(fed)]
    )
    test = np.array([c.test.class_counts(6).tolist() for c in fed.clients])
    exact = train / train.sum(axis=0) * test.sum(axis=0)
    assert np.abs(test - exact).max() < 1
    assert (test[train == 0] == 0).all()


def test_equal_remainders_go_to_those_with_the_fewest_test_rows() -> None:
    labels = torch.arange(10).repeat_interleave(10)
    dataset = Dataset(
        "even",
        Samples(torch.zeros(100, 1), labels),
        toy(1, 1, test=10).test,
        tuple("0123456789"),
        inputs=of_tensor(torch.zeros(1, 1)),
    )
    dataset.test.y.copy_(torch.arange(10))  # one test row a class
    parts = [np.arange(k, 100, 10) for k in range(10)]  # one training row of each class a client

    class Fixed:
        def assign(self, dataset: Dataset, clients: int, rng: Generator) -> list[NDArray[np.int64]]:
            return parts

    assert [len(c.test) for c in split(dataset, Fixed(), 10, seed=0).clients] == [1] * 10


def test_test_rows_of_classes_that_nobody_trains_go_round_robin() -> None:
    train = Samples(torch.zeros(30, 1), torch.zeros(30, dtype=torch.int64))
    test = Samples(torch.zeros(7, 1), torch.ones(7, dtype=torch.int64))
    fed = split(
        Dataset("odd", train, test, ("0", "1"), inputs=of_tensor(train.x)), Iid(), 3, seed=0
    )
    assert [c.test.rows.tolist() for c in fed.clients] == [[0, 3, 6], [1, 4], [2, 5]]


def test_natural_falls_back_to_labels_where_the_test_part_has_other_owners() -> None:
    dataset = toy(owners=5)
    assert dataset.test.group is not None
    dataset.test.group.add_(100)
    with pytest.warns(
        DataWarning,
        match=r"no group of the test part of toy \(100, 101, .*divided .* by their labels",
    ):
        fed = split(dataset, Natural(), seed=0)
    assert flat([c.test.rows.tolist() for c in fed.clients]) == list(range(100))


def test_natural_refuses_test_rows_of_groups_that_training_lacks() -> None:
    dataset = toy(owners=5)
    assert dataset.test.group is not None
    dataset.test.group[:3] = 7
    with pytest.raises(
        UserError, match=r"3 test rows of toy are of groups that training does not have \(7\)"
    ):
        split(dataset, Natural(), seed=0)


def test_owners_without_test_rows_may_be_all_that_are_left(tmp_path: Path) -> None:
    rows = pandas.DataFrame({"sex": ["f", "m"] * 30, "age": range(60), "label": ["a", "b"] * 30})
    rows["site"] = ["A"] * 30 + ["B"] * 30
    rows.to_csv(tmp_path / "t_train.csv", index=False)
    rows[:20].to_csv(tmp_path / "t_test.csv", index=False)
    data = load(tmp_path / "t_train.csv", label_column="label", group_column="site")
    fed = split(data, Natural())
    assert fed.among is not None
    left = fed.among(["B"]).clients[0]
    assert (len(left.train) + len(left.val), len(left.test)) == (30, 0)


# Small and wrong


def lopsided() -> Dataset:
    """Nineteen samples of class 0 and one of class 1."""
    labels = torch.tensor([0] * 19 + [1])
    return Dataset(
        "lopsided",
        Samples(torch.zeros(20, 1), labels),
        toy().test,
        ("0", "1"),
        inputs=of_tensor(toy().test.x),
    )


def test_one_sample_and_one_class_are_enough() -> None:
    dataset = toy(3, 1, test=2)
    fed = split(dataset, Iid(), 3, seed=0)
    assert [(len(c.train), len(c.val)) for c in fed.clients] == [(1, 0)] * 3
    assert [len(c.test) for c in fed.clients] == [1, 1, 0]


def test_the_validation_share_is_a_choice() -> None:
    assert [len(c.val) for c in split(toy(100), Iid(), 2, seed=0, val_fraction=0.25).clients] == [
        12,
        12,
    ]
    assert [len(c.val) for c in split(toy(100), Iid(), 2, seed=0, val_fraction=0).clients] == [0, 0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: split(toy(5), Iid(), 6, seed=0),
            "6 clients cannot share 5 training samples: take from 1 to 5",
        ),
        (lambda: split(toy(5), Iid(), 0, seed=0), "0 clients"),
        (lambda: split(toy(5), Iid(), -1, seed=0), "-1 clients"),
        (lambda: split(toy(), Iid(), 2, seed=-1), "seed must be 0 or more; it is -1"),
        (lambda: split(toy(), Iid(), 2, seed=0, val_fraction=1.0), "val_fraction"),
        (lambda: split(toy(), Domains(), seed=0), "'toy' has no domains"),
        (
            lambda: split(lopsided(), Pathological(1), 10, seed=0),
            "would hold no training samples: take fewer clients",
        ),
        (lambda: Dirichlet(0), "beta 0 is out of range: it must be greater than 0"),
        (lambda: Dirichlet(float("nan")), "beta nan is out of range"),
        (lambda: Pathological(0), "classes-per-client 0 is out of range: it must be 1 or more"),
    ],
)
def test_errors_are_one_line_for_the_user(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


# Spelling


@settings(max_examples=examples(60))
@given(
    st.one_of(
        st.just(Iid()),
        st.just(Natural()),
        st.builds(Pathological, st.integers(1, 100)),
        st.builds(Dirichlet, st.floats(1e-6, 1e6), st.integers(1, 100)),
        st.builds(
            Domains,
            st.lists(st.from_regex(r"[a-z_0-9]+", fullmatch=True), max_size=5).map(tuple),
            st.none() | st.builds(Dirichlet, st.floats(1e-6, 1e6), st.integers(1, 100)),
        ),
    )
)
def test_what_is_written_is_read_back(partition: Partition) -> None:
    assert parse(str(partition)) == partition


@pytest.mark.parametrize(
    "text",
    [
        "iid",
        "dirichlet:0.5",
        "dirichlet:1",
        "dirichlet:0.1:1",
        "domains",
        "domains:photo,art",
        "classes:2",
        "natural",
        "domains:dirichlet:0.5",
        "domains:photo,art:dirichlet:0.1:1",
    ],
)
def test_spellings_are_kept(text: str) -> None:
    assert str(parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "idd", "iid:3", "dirichlet", "dirichlet:", "dirichlet:x", "dirichlet:1:2:3", "dirichlet:1:x",
             "domains:", "domains:a,,b", "domains:dirichlet:x", "domains:a:b:dirichlet:1", "classes", "classes:two",
             "classes:1.5", "natural:1"]
)  # fmt: skip
def test_a_bad_spelling_shows_the_good_ones(text: str) -> None:
    with pytest.raises(
        UserError, match=r"is not a partition: give one of iid, dirichlet:0\.5, domains"
    ) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_a_bad_number_in_a_good_spelling() -> None:
    with pytest.raises(UserError, match=r"dirichlet:-1: beta -1\.0 is out of range"):
        parse("dirichlet:-1")
    with pytest.raises(UserError, match="0 is out of range: it must be 1 or more"):
        parse("classes:0")
