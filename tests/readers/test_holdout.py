"""The test part of data that come without one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ekiden
from ekiden.core.base.errors import UserError
from ekiden.core.data.samples import Subset
from ekiden.data import ClientData, Dataset, FederatedData, Samples, from_tensors, parse
from ekiden.readers.holdout import by_strata, divided, held_out, hold_out
from ekiden.readers.kinds import of_tensor
from tests.fuzz import examples


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(0, 5))
def test_every_stratum_and_the_whole_are_split_80_to_20(sizes: list[int], seed: int) -> None:
    key = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    train, test = by_strata(key, None, seed=seed)
    assert sorted(train.tolist() + test.tolist()) == list(range(len(key)))
    held = torch.bincount(key[test], minlength=len(sizes))
    for n, h in zip(sizes, held.tolist(), strict=True):
        assert abs(h - 0.2 * n) < 1
        assert h < n
    if min(sizes) > 1:
        assert abs(len(test) - 0.2 * len(key)) <= 1


def test_strata_are_pairs_of_keys_and_the_seed_decides() -> None:
    domain, label = torch.arange(200) % 2, torch.arange(200) // 2 % 5
    _, test = by_strata(domain, label)
    assert torch.bincount(domain[test] * 5 + label[test]).tolist() == [4] * 10
    assert torch.equal(test, by_strata(domain, label)[1])
    assert not torch.equal(test, by_strata(domain, label, seed=1)[1])


def test_labels_divide_groups_unless_most_have_one_row() -> None:
    group, label = torch.arange(60) % 3, torch.arange(60) // 3 % 2
    _, test = divided(label, None, group)
    assert torch.bincount(group[test] * 2 + label[test]).tolist() == [2] * 6
    every, writer = torch.arange(60) // 3, torch.arange(60) % 3
    _, test = divided(every, None, writer)
    assert torch.bincount(writer[test]).tolist() == [4, 4, 4]
    assert torch.equal(test, by_strata(writer)[1])


PARTITIONS = ("iid", "dirichlet:0.5:1", "classes:2", "natural", "domains")


@st.composite
def samples(draw: st.DrawFn, times: bool = False) -> Samples:
    """Draw samples of subjects with different numbers of rows, over groups, domains and classes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    subjects = draw(st.integers(20, 60))
    sizes = rng.integers(1, draw(st.integers(2, 12)), size=subjects)
    subject = np.repeat(rng.permutation(1000)[:subjects], sizes)
    owner = np.repeat(rng.integers(0, 3, size=subjects), sizes)
    kind = np.repeat(np.arange(subjects) % 3, sizes)
    wander = draw(
        st.sampled_from((0.0, 0.3))
    )  # rows of a subject at another silo, or of another class
    for values, count in ((owner, 3), (kind, 3)):
        odd = rng.random(len(values)) < wander
        values[odd] = rng.integers(0, count, size=odd.sum())
    order = rng.permutation(len(subject))
    subject, owner, kind = subject[order], owner[order], kind[order]
    x = torch.from_numpy(rng.normal(size=(len(subject), 2)).astype(np.float32))
    when = rng.integers(0, draw(st.integers(50, 500)), size=len(subject)) if times else None
    return Samples(
        x,
        torch.from_numpy(kind),
        domain=torch.from_numpy(owner),
        group=torch.from_numpy(owner),
        subject=torch.from_numpy(subject),
        time=None if when is None else torch.from_numpy(when),
    )


def dataset(all_: Samples) -> Dataset:
    """Hold out a test part, evenly from groups and classes."""
    ((train, test),) = hold_out([all_], [all_.y], "all")
    names = ("a", "b", "c")
    return Dataset(
        "all", all_.taken(train), all_.taken(test), names, names, inputs=of_tensor(all_.x)
    )


def of(part: Subset, field: str) -> list[int]:
    values: torch.Tensor = getattr(part.samples, field)
    return [int(v) for v in values[part.rows]]


def joined(fed: FederatedData, part: str, field: str) -> set[int]:
    return {value for client in fed.clients for value in of(getattr(client, part), field)}


@given(samples(), st.sampled_from(PARTITIONS), st.integers(0, 5))
@settings(max_examples=examples(25), deadline=None)
def test_no_subject_is_in_two_parts_whatever_the_partition(
    all_: Samples, spelling: str, seed: int
) -> None:
    data = dataset(all_)
    fed = ekiden.split(data, spelling, 3, seed=seed, val_fraction=0.2)
    train, val, test = (joined(fed, part, "subject") for part in ("train", "val", "test"))
    assert not train & val
    assert not train & test
    assert not val & test
    rows = torch.cat([torch.cat([c.train.rows, c.val.rows]) for c in fed.clients])
    assert sorted(rows.tolist()) == list(range(len(data.train)))  # nothing lost, nothing doubled
    assert sorted(torch.cat([c.test.rows for c in fed.clients]).tolist()) == list(
        range(len(data.test))
    )
    assert len(data.train) + len(data.test) == len(all_)
    again = ekiden.split(data, spelling, 3, seed=seed, val_fraction=0.2)
    for one, other in zip(fed.clients, again.clients, strict=True):
        assert one.train.rows.equal(other.train.rows)
        assert one.val.rows.equal(other.val.rows)
    tuned = fed.for_tuning()
    assert not joined(tuned, "train", "subject") & joined(tuned, "test", "subject")


@given(samples(), st.sampled_from(("iid", "dirichlet:0.5:1", "classes:2")), st.integers(0, 5))
@settings(max_examples=examples(20), deadline=None)
def test_partitions_of_rows_give_whole_subjects_to_clients(
    all_: Samples, spelling: str, seed: int
) -> None:
    data = dataset(all_)
    rows = parse(spelling).assign(data, 3, np.random.default_rng(seed))
    assert data.train.subject is not None
    held = [set(data.train.subject[torch.from_numpy(r)].tolist()) for r in rows]
    assert not any(held[i] & held[j] for i in range(3) for j in range(i))
    if spelling == "iid":
        largest = int(torch.unique(data.train.subject, return_counts=True)[1].max())
        sizes = [len(r) for r in rows]
        assert max(sizes) - min(sizes) <= largest


@given(samples())
@settings(max_examples=examples(25), deadline=None)
def test_shares_are_as_near_as_whole_subjects_allow(all_: Samples) -> None:
    """At a silo whose subjects are only there, the share is at most half a subject off."""
    assert all_.subject is not None
    assert all_.group is not None
    subject, silo = all_.subject.numpy(), np.zeros(len(all_), dtype=np.int64)
    largest = int(np.unique(subject, return_counts=True)[1].max())
    for share in (0.1, 0.2, 0.5):
        held = held_out(share, silo, subject=subject)
        assert abs(held.sum() - share * len(held)) <= largest / 2
        kinds = all_.y.numpy()
        drawn = held_out(share, silo, subject=subject, strata=kinds)
        assert set(kinds[~drawn]) == set(kinds)  # every class stays in training


@given(samples(times=True), st.booleans(), st.integers(0, 3))
@settings(max_examples=examples(25), deadline=None)
def test_the_past_trains_and_the_most_recent_share_tests(
    all_: Samples, with_subjects: bool, seed: int
) -> None:
    data = from_tensors(all_ if with_subjects else replace(all_, subject=None))
    assert data.train.time is not None
    assert data.test.time is not None
    latest = int(data.train.time.max())
    if not with_subjects:
        assert latest < int(data.test.time.min())
        assert abs(len(data.test) - 0.2 * len(all_)) <= max(np.bincount(all_.time.numpy()))  # type: ignore[union-attr]
    else:  # a test subject may have older rows, but each has a row after all of training
        assert data.test.subject is not None
        for subject in set(data.test.subject.tolist()):
            assert int(data.test.time[data.test.subject == subject].max()) > latest
    fed = ekiden.split(data, "iid", 2, seed=seed, val_fraction=0.2)
    for client in fed.clients:
        _later(client, with_subjects)


def _later(client: ClientData, with_subjects: bool) -> None:
    latest = max(of(client.train, "time"))
    if not with_subjects:
        assert latest < min(of(client.val, "time"))
    else:
        last: dict[int, int] = {}
        for subject, time in zip(of(client.val, "subject"), of(client.val, "time"), strict=True):
            last[subject] = max(time, last.get(subject, time))
        assert all(time > latest for time in last.values())


@given(samples(), st.booleans())
@settings(max_examples=examples(15), deadline=None)
def test_silos_that_share_subjects_hold_out_the_same_ones(all_: Samples, dates: bool) -> None:
    """Also with times: a silo's training rows are older than what it holds out of its own."""
    assert all_.group is not None
    parts: list[Any] = [all_.taken((all_.group == k).nonzero()[:, 0]) for k in range(3)]
    if dates:
        parts = [replace(part, time=part.x[:, 0]) for part in parts]
    try:
        fed = ekiden.federate(parts, val_fraction=0.2)
    except UserError as error:  # all rows of a silo may be of recent subjects
        assert dates
        assert "no training samples" in str(error)  # noqa: PT017
        return
    train, val, test = (joined(fed, part, "subject") for part in ("train", "val", "test"))
    assert not train & val
    assert not train & test
    assert not val & test
    assert test


def rows(patients: int, visits: int) -> dict[str, list[Any]]:
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(patients), visits)
    return {
        "mrn": [f"p{k}" for k in who],
        "ward": [f"w{k % 3}" for k in who],
        "seen": [f"20{10 + j % visits:02d}-{1 + j // visits % 12:02d}-01" for j in range(len(who))],
        "v": rng.normal(size=len(who)).tolist(),
        "label": ["pq"[k // 3 % 2] for k in who],
    }


def test_patients_are_kept_apart_in_a_table() -> None:
    fed = ekiden.split(
        ekiden.load(rows(30, 10), subject_column="mrn", group_column="ward", drop_columns=["seen"]),
        "natural",
    )
    assert [c.name for c in fed.clients] == ["w0", "w1", "w2"]
    parts = [joined(fed, part, "subject") for part in ("train", "val", "test")]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 30
    assert [len(c.test) for c in fed.clients] == [20, 20, 20]
    assert [len(c.val) for c in fed.clients] == [10, 10, 10]


def test_too_few_subjects_are_one_line() -> None:
    with pytest.raises(UserError, match="the table has 1 subject, too few to hold out a test part"):
        ekiden.load(
            {**rows(1, 40), "label": ["p", "q"] * 20},
            subject_column="mrn",
            drop_columns=["ward", "seen"],
        )
    same = {**rows(10, 4), "seen": ["2020-01-01"] * 40}
    with pytest.raises(
        UserError, match="has 1 time at which subjects were last seen, too few to hold out"
    ):
        ekiden.load(same, subject_column="mrn", time_column="seen", drop_columns=["ward"])
    with pytest.raises(UserError, match="has 1 time, too few to hold out"):
        ekiden.load(same, time_column="seen", drop_columns=["ward", "mrn"])
    data = ekiden.load(rows(12, 10), subject_column="mrn", drop_columns=["ward", "seen"])
    with pytest.raises(
        UserError, match="20 clients cannot share 10 subjects: take from 1 to 10 clients"
    ):
        ekiden.split(data, "iid", 20)


def test_the_command_line_takes_subjects_and_times(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow as pa
    import pyarrow.csv as csv

    monkeypatch.chdir(tmp_path)
    csv.write_csv(pa.table(rows(30, 10)), tmp_path / "visits.csv")
    flags = ("--group-column", "ward", "--subject-column", "mrn", "--time-column", "seen")
    code, shown = command("data", "visits.csv", *flags)
    assert code == 0, shown
    code, shown = command("data", "visits.csv", "--subject-column", "who")
    assert code == 2
    assert "'who'" in shown
