"""Whoever has a record knows whether it is in sums of too many features, and finds records from
such sums.

The attackers are all silos but one: they subtract their own sums from the totals. They know other
digits, which are not in the sums."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ekiden.core.data.samples import Subset
from ekiden.core.models.catalogue import build
from ekiden.core.tasks import Classification
from ekiden.data import load
from ekiden.methods import FedCOF, FedGram, FedKrylov, FedRAN
from ekiden.methods.exact import fedkrylov
from ekiden.methods.exact.blocks.fixed_features import FixedFeatures, features_of, with_rows
from ekiden.methods.exact.blocks.whole_features import RandomReLU
from ekiden.methods.exact.fedran import Scatter
from ekiden.silos.silo.policy import most_features
from tests.silos.across.test_crafted_features import SAFE, Tampering, smoothed
from tests.silos.fakes import NAMES, mine, with_keys
from tests.silos.sessions import far

VICTIM = NAMES[1]


def features(width: int, seed: int = 0) -> RandomReLU:
    """Features that follow from the seed."""
    torch.manual_seed(seed)
    network = FedGram(width=width, **SAFE).own_network(
        build("mlp", (1, 8, 8), 10), (1, 8, 8), 10, Classification()
    )
    found = features_of(network)
    assert isinstance(found, RandomReLU)
    return found


@cache
def samples(silo: str) -> tuple[Subset, Tensor]:
    """A silo's samples in sums, and other digits of the same classes."""
    digits = load("digits").train
    part = mine(silo)[1].train if silo else Subset(digits, torch.arange(600))
    part = FedGram(**SAFE).often_enough(part, 10, Classification())
    others = torch.arange(480 if silo else 600, len(digits.y))
    return part, digits.x[others[torch.isin(digits.y[others], part.y)]]


def told(
    kind: type[FixedFeatures], silo: str, width: int, directions: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return S (D, any), whose products SSᵀ the sums tell, or whose span; and the features of
    members and of others."""
    part, others = samples(silo)
    units = features(width)
    with torch.no_grad():
        phi, rest = (units(x.float() / 255).double() for x in (part.x, others))
    shown = FedGram(**SAFE).active(phi.to(torch.int8))
    phi, rest = phi[:, shown], rest[:, shown]
    means = phi.T @ torch.nn.functional.one_hot(part.y, 10).double()
    if kind is FedCOF:
        return means, phi, rest
    if kind is FedKrylov:
        draw = torch.Generator().manual_seed(0)
        chosen = torch.randint(-127, 128, (phi.shape[1], directions), generator=draw).double()
        return torch.cat([means, phi.T @ (phi @ chosen)], 1), phi, rest
    if kind is FedRAN:
        scatter = Scatter.read(Scatter.of(phi, part.y, 10).told(directions))
        return torch.cat([scatter.rows, scatter.means * scatter.counts.sqrt()], 1), phi, rest
    return phi.T, phi, rest


@pytest.mark.parametrize(
    ("kind", "silo", "width", "directions", "least", "most"),
    [
        (FedGram, VICTIM, 139, 0, 0.9, 1),
        (FedKrylov, VICTIM, 400, 70, 0.7, 1),
        (FedRAN, VICTIM, 400, 70, 0.9, 1),
        (FedGram, VICTIM, 65, 0, 0, 0.05),
        (FedKrylov, VICTIM, 65, 40, 0, 0.05),
        (FedRAN, VICTIM, 65, 40, 0, 0.05),
        (FedCOF, VICTIM, 400, 0, 0, 0.05),
        (
            FedGram,
            "",
            300,
            0,
            0.1,
            0.25,
        ),  # more samples hide less, although there are as many for each feature
        (FedGram, "", 150, 0, 0, 0.01),
    ],
)
def test_who_has_a_record_knows_whether_it_is_in_sums_of_too_many_features(
    kind: type[FixedFeatures], silo: str, width: int, directions: int, least: float, most: float
) -> None:
    """The share of members that are told from all others: hardly any with half as many features as
    samples."""
    found, *both = told(kind, silo, width, directions)
    allowed = most_features(FedGram(**SAFE), samples(silo)[0], Classification(), 10)
    assert (width > allowed) == (most == 1) or kind is FedCOF
    u, s, _ = torch.linalg.svd(found, full_matrices=False)
    basis, s = u[:, s > 1e-9 * s.max()], s[s > 1e-9 * s.max()]
    inside = [(part @ basis).norm(dim=1) / part.norm(dim=1) for part in both]
    leverage = [-(part @ basis / s).square().sum(1) for part in both]
    share = max(
        float((members > others.max()).double().mean()) for members, others in (inside, leverage)
    )
    print(
        f"{kind.__name__}, {width} features: {share:.3f} of {len(both[0])} samples are told from "
        "all others"
    )
    assert least <= share <= most


@pytest.mark.slow
@pytest.mark.parametrize("width", [1600, 60])
def test_the_first_silo_and_the_last_find_images_from_fewer_directions_than_samples(
    width: int, tmp_path: Path
) -> None:
    """FedKrylov tells at most K directions a lap. They show images even if they are half the number
    of samples."""
    files, public = with_keys(
        tmp_path, NAMES, '[limits]\nlevel = "models"\nmin_active = 0\n', trusting=False
    )
    own, totals, noted = list[Tensor](), list[Tensor](), list[Any]()
    columns, problem, span, rows = (
        FedKrylov._columns,
        FedKrylov._problem,
        FedKrylov._span,
        with_rows,
    )

    def attacker(patch: pytest.MonkeyPatch) -> None:
        def noted(method: FedKrylov, sums: Tensor) -> Any:
            own.append(sums)
            return columns(method, sums)

        patch.setattr(FedKrylov, "_columns", noted)

    def first(patch: pytest.MonkeyPatch) -> None:
        def opened(method: FedKrylov, opening: Any, client: Any) -> Any:
            if not totals:
                totals.append(opening.sums.matrix())
            return problem(method, opening, client)

        def lapped(method: FedKrylov, client: Any, lap: Any) -> Any:
            totals.append(lap.sums.matrix())
            found, settled = span(method, client, lap)
            noted.append(settled.centre)
            return found, settled

        def solved(network: Any, *args: Any) -> Any:
            noted.append(features_of(network))
            return rows(network, *args)

        def chosen(step: Tensor, *args: Any) -> Tensor:
            draw = torch.Generator().manual_seed(len(totals))
            return torch.randint(-127, 128, (len(step), 9), generator=draw, dtype=torch.int8)

        attacker(patch)
        patch.setattr(fedkrylov, "next_directions", chosen)
        patch.setattr(fedkrylov, "with_rows", solved)
        patch.setattr(FedKrylov, "_problem", opened)
        patch.setattr(FedKrylov, "_span", lapped)

    method = FedKrylov(width=width, laps=8, sums="whole", **SAFE)
    far(method, Tampering(files, {NAMES[0]: first, NAMES[2]: attacker}), tmp_path / "run", public)
    sums = [total - sum(own[2 * lap : 2 * lap + 2]) for lap, total in enumerate(totals)]
    victims = torch.cat([sums[0][:, :10], *sums[1:]], 1)  # without sums of squares
    basis, s, _ = torch.linalg.svd(victims.double(), full_matrices=False)
    basis = basis[:, s > 1e-9 * s.max()].float()
    x = samples(VICTIM)[0].x.float().flatten(1) / 255
    assert basis.shape[1] < 0.5 * len(x)
    smooth, centre = smoothed(noted[-1]), noted[0]
    shown = sums[0][:, 10].square() < (len(x) - 0.5) * sums[0][:, 11]  # others do not vary

    def outside(guess: Tensor) -> Tensor:
        phi = smooth(guess) * shown - centre
        part: Tensor = (phi - phi @ basis @ basis.T).norm(dim=1) / phi.norm(dim=1)
        return part

    guess = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    descent = torch.optim.Adam([guess], lr=0.05)
    for _ in range(300):
        descent.zero_grad()
        torch.autograd.backward(outside(guess).sum())
        descent.step()
    alike = (
        torch.nn.functional.normalize(guess.detach(), dim=1)
        @ torch.nn.functional.normalize(x, dim=1).T
    )
    found = len({int(k) for k in alike.argmax(1)[alike.amax(1) > 0.98]})
    print(
        f"{width} features, {basis.shape[1]} directions: a search ends at {found} of {len(x)} "
        "images"
    )
    assert found >= 3 if width > len(x) else found == 0
