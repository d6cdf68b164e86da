"""Matching of units: exact scores, assignments and atoms of one-dimensional units; caps, ties and
bad input."""

import pytest
import torch
from torch import Tensor

from ekiden.core.base.errors import UserError
from ekiden.methods import PFNM
from ekiden.methods.one_shot.blocks import matching as matching_block
from ekiden.methods.one_shot.blocks.matching import (
    Matching,
    best,
    class_shares,
    compact,
    gather,
    match,
    scores,
)

ONE = torch.ones(1, dtype=torch.float64)
A, B = (torch.tensor(values, dtype=torch.float64)[:, None] for values in ([1.0, -1.0], [-0.9, 5.0]))


def found(process: PFNM, *units: Tensor, seed: int = 0) -> Matching:
    """The matching of one-dimensional units with σ = 1 and prior mean 0."""
    return match(
        units, [ONE] * len(units), process.prior(1, 0), process, torch.Generator().manual_seed(seed)
    )


def table(process: PFNM, others: Tensor, rows: Tensor) -> Tensor:
    prior = process.prior(1, 0)
    return scores(
        rows,
        ONE,
        gather([others], [ONE], {0: torch.arange(len(others))}, prior),
        prior,
        process.gamma,
        2,
    )


FIRST = (-0.496667, 0.703333, -0.981294, -2.367589)


def test_scores() -> None:
    expected = torch.tensor([FIRST, (11.5, 4.833333, 11.113706, 9.727411)], dtype=torch.float64)
    torch.testing.assert_close(table(PFNM(gamma=1.0), A, B), expected, atol=1e-6, rtol=0)
    expected = torch.tensor((11.5, 4.833333, 11.638434, 10.252140), dtype=torch.float64)
    torch.testing.assert_close(table(PFNM(gamma=1.3), A, B)[1], expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("gamma", "units", "atoms"),
    [
        (1.0, [1, 0], [2.0, -0.633333]),
        (1.3, [1, 2], [0.5, -0.633333, 2.5]),
        (50.0, [2, 3], [0.5, -0.5, -0.45, 2.5]),
    ],
)
def test_assignment_and_atoms(gamma: float, units: list[int], atoms: list[float]) -> None:
    matching = found(PFNM(gamma=gamma, sweeps=0), A, B)
    assert [u.tolist() for u in matching.units] == [[0, 1], units]
    torch.testing.assert_close(
        matching.atoms[:, 0], torch.tensor(atoms, dtype=torch.float64), atol=1e-6, rtol=0
    )
    swept = found(PFNM(gamma=gamma), A, B).atoms[:, 0]  # the same atoms, in another order perhaps
    torch.testing.assert_close(swept.sort().values, matching.atoms[:, 0].sort().values)


def test_equal_clients_match_unit_by_unit_and_shrink() -> None:
    process = PFNM(gamma=1.0)
    expected = torch.tensor([[0.833333, -0.5], [-0.5, 0.833333]], dtype=torch.float64)
    torch.testing.assert_close(table(process, A, A)[:, :2], expected, atol=1e-6, rtol=0)
    for clients in (2, 3, 12):  # 12: more than the 10 at which popularity ends
        matching = found(process, *[A] * clients)
        first = matching.units[0]
        assert all(torch.equal(u, first) for u in matching.units)
        torch.testing.assert_close(matching.atoms[first], A * clients / (clients + 1))


def test_the_square_is_expanded_rightly() -> None:
    draw = torch.Generator().manual_seed(1)
    units = [torch.randn(n, 5, generator=draw, dtype=torch.float64) for n in (4, 3, 2)]
    known = [torch.rand(5, generator=draw, dtype=torch.float64) for _ in units]
    known[2][1] = 0  # a class that this client does not have
    process = PFNM(gamma=0.7, sigma0=2.0)
    prior = process.prior(3, 1, 1)
    atoms = gather(units, known, {0: torch.arange(4), 1: torch.tensor([1, 5, 4])}, prior)
    assert atoms.members.tolist() == [1, 2, 1, 1, 1, 1]
    result = scores(units[2], known[2], atoms, prior, process.gamma, 3)
    for row, w in enumerate(units[2]):
        for i in range(6):
            g, s, c = atoms.total[i], atoms.precision[i], float(atoms.members[i])
            direct = ((known[2] * w + g) ** 2 / (known[2] + s) - g**2 / s).sum()
            direct += torch.tensor(c / (3 - c), dtype=torch.float64).log()
            torch.testing.assert_close(result[row, i], direct)
    assert result.shape == (2, 8)


def test_permuted_units_permute_the_assignment() -> None:
    draw = torch.Generator().manual_seed(2)
    a, b = (torch.randn(6, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    order = torch.randperm(6, generator=draw)
    process, known = PFNM(gamma=1.0), [torch.ones(3, dtype=torch.float64)] * 2
    one, other = (
        match([a, rows], known, process.prior(3, 0), process, torch.Generator().manual_seed(0))
        for rows in (b, b[order])
    )
    torch.testing.assert_close(one.atoms[one.units[1]][order], other.atoms[other.units[1]])
    torch.testing.assert_close(one.atoms[one.units[0]], other.atoms[other.units[0]])
    assert len(one.atoms) == len(other.atoms)


def test_the_widest_client_comes_first_and_nobody_shares_an_atom() -> None:
    draw = torch.Generator().manual_seed(3)
    units = [torch.randn(n, 2, generator=draw, dtype=torch.float64) for n in (2, 7, 4)]
    known = [torch.ones(2, dtype=torch.float64)] * 3
    process = PFNM(gamma=1.0)
    matching = match(units, known, process.prior(2, 0), process, torch.Generator().manual_seed(0))
    taken = [u.tolist() for u in matching.units]
    assert all(len(set(u)) == len(u) for u in taken)
    assert set().union(*taken) == set(range(len(matching.atoms)))
    assert 7 <= len(matching.atoms) <= 13


def test_beyond_the_cap_units_are_merged_and_all_find_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (
        len(
            found(
                PFNM(gamma=1e300), torch.arange(30.0)[:, None], torch.arange(20.0)[:, None] + 100
            ).atoms
        )
        == 50
    )
    monkeypatch.setattr(matching_block, "_ATOMS", 1)
    matching = found(
        PFNM(gamma=1e300), torch.arange(30.0)[:, None], torch.arange(20.0)[:, None] + 100
    )
    assert len(matching.atoms) <= 31
    monkeypatch.setattr(matching_block, "_ATOMS", 5)
    wide = found(
        PFNM(gamma=1.0), torch.arange(3.0)[:, None], torch.arange(9.0)[:, None], ONE[:, None]
    )
    assert [len(u) for u in wide.units] == [3, 9, 1]


def test_a_single_client_keeps_its_units() -> None:
    matching = found(PFNM(gamma=1.0), A)
    assert torch.equal(matching.atoms, A)
    assert matching.units[0].tolist() == [0, 1]


def test_atoms_that_nobody_has_are_left_out() -> None:
    result = compact({2: torch.tensor([5, 0]), 0: torch.tensor([3, 5, 9])})
    assert {j: a.tolist() for j, a in result.items()} == {2: [2, 0], 0: [1, 2, 3]}


def test_shares_of_classes() -> None:
    shares = class_shares(torch.tensor([[30, 0, 0], [10, 20, 0]]))
    assert shares.tolist() == [[0.75, 0, 0], [0.25, 1, 0]]


def test_what_is_refused() -> None:
    with pytest.raises(UserError, match="different shape"):
        match(
            [A, torch.zeros(2, 2)],
            [ONE, torch.ones(2)],
            PFNM(gamma=1.0).prior(1, 0),
            PFNM(gamma=1.0),
            torch.Generator(),
        )
    with pytest.raises(UserError, match="NaN"):
        found(PFNM(gamma=1.0), A, A * float("nan"))
    with pytest.raises(UserError, match="NaN"):
        best(torch.tensor([[float("inf")]]))
    for changes in ({"gamma": 0}, {"sigma": 0}, {"sigma0": -1}, {"sweeps": -1}):
        with pytest.raises(UserError, match=f"{next(iter(changes))}"):
            PFNM(**({"gamma": 1.0} | changes))  # type: ignore[arg-type]
