"""The test part of data that come without one."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ekiden.readers.holdout import by_strata, divided


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
