"""Mask what a silo gives to a sum: only the sum of all silos can be read.

Each pair of silos derives a stream of random numbers from its X25519 keys of the run. The silo that
comes first in the list of members adds the stream to its part, the other one subtracts it, both
modulo a power of two. So all streams cancel in the sum of all parts. Of any other sum, and of a
single part, every number is uniform for those who lack the keys of one pair. There are no shares of
keys and no phase in which masks are shown: if a silo drops out, nothing of the sum was opened, and
it is repeated among the others.

Pairwise masks: Keith Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine
Learning. CCS 2017. https://eprint.iacr.org/2017/281. With fewer pairs: James Bell et al.: Secure
Single-Server Aggregation with (Poly)Logarithmic Overhead. CCS 2020.
https://eprint.iacr.org/2020/704. In a chain: Thomas Sandholm et al.: SAFE: Secure Aggregation with
Failover and Encryption. 2021. https://arxiv.org/abs/2108.05475.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ekiden.core.base.errors import UserError
from ekiden.core.base.files import write_once
from ekiden.core.base.sums import Masked
from ekiden.core.engine import wire
from ekiden.core.engine.method import Method
from ekiden.core.engine.transport import opened, summands
from ekiden.runs.recipe import Recipe
from ekiden.silos.trust import custody, keys, sealing
from ekiden.silos.trust.agreement import Agreement
from ekiden.silos.trust.sealing import Party, Reader

# the kind of what is signed
RELEASE = "release"
# numbers that are masked at a time
_BLOCK = 1 << 20
Words = list["np.ndarray[Any, Any]"]


@dataclass(frozen=True)
class PartMasks:
    """Masks for what a silo gives to the sums of one task."""

    # the silo, with its key of the run
    party: Party
    # all who give a part, with their keys
    members: tuple[Reader, ...]
    # fewest members of a sum
    fewest: int
    # name of a sum that begins with this task
    name: str
    # the run's folder at the silo, where it keeps which masks it has used
    folder: Path

    @cached_property
    def digest(self) -> str:
        """The digest of the list of members and their keys."""
        return custody.digest([keys.canonical([[m.name, m.key] for m in self.members])])

    def added(self, before: Any, own: Any, about: Any) -> Any:
        """Return the sum `before` with the silo's `own` part under its mask; if complete, the
        total.

        The masks depend on `about`: what others chose for the part, or None. Whoever chooses it in
        another way for one silo, so that the other parts are known, gets a sum that does not open.
        """
        self._check_members()
        if before is not None and not isinstance(before, Masked):
            raise UserError(f"{self.party.name} received a sum that is not masked: refused")
        part = summands(own)
        name = before.sum if before else self.name
        self._use(name, custody.digest(wire.chunks(own)))
        chosen = custody.digest(wire.chunks(about))
        masks = [w.copy() for w in part.words]
        check = np.array([part.check], dtype="<u8")
        for other in self.members:
            if other.name != self.party.name:
                self._mask(other, name, chosen, [*masks, check])
        hidden = part._replace(words=masks).tensors()
        mine = Masked(
            part.form,
            hidden,
            part.bits,
            part.shared,
            int(check[0]),
            name,
            self.digest,
            [self.party.name],
        )
        total = mine if before is None else before.plus(mine)
        return opened(total, type(own)) if len(total.given) == len(self.members) else total

    def _mask(self, other: Reader, name: str, chosen: str, words: Words) -> None:
        """Put the stream of one pair on numbers, in place."""
        names = [m.name for m in self.members]
        pair = sorted((self.party.name, other.name), key=names.index)
        adds = pair[0] == self.party.name
        bound = [self.party.run, self.party.terms, self.digest, name, chosen, *pair]
        purpose = b"ekiden mask\n" + keys.canonical(bound)
        stream = sealing.stream(self.party.private, other.key, purpose)
        for part in words:
            for start in range(0, len(part), _BLOCK):
                block = part[start : start + _BLOCK]
                noise = np.frombuffer(stream(block.nbytes), dtype=block.dtype)
                if adds:
                    block += noise
                else:
                    block -= noise

    def _check_members(self) -> None:
        """Refuse a list of members that could show the part of a silo."""
        me = self.party.name
        names = [m.name for m in self.members]
        if not names:
            raise UserError(
                f"{me} gives its part to a sum only under masks, and the request names no members: "
                "refused"
            )
        if names.count(me) != 1 or len(set(names)) != len(names):
            raise UserError(
                f"a sum of {', '.join(names)[:200]} is refused: {me} must be there once, as all "
                "others"
            )
        if len(names) < self.fewest:
            raise UserError(
                f"a sum of {len(names)} silos, {me} allows {self.fewest} or more "
                "(limits.min_clients in its silo.toml, or honest of --dp)"
            )
        for member in self.members:
            if not sealing.vouched(member, self.party.run, self.party.silos):
                raise UserError(
                    f"the key of {member.name[:80]!r} for masks is not signed by a silo of the "
                    f"run: {me} gives nothing"
                )
        own = next(m for m in self.members if m.name == me)
        if own.key != sealing.public_of(self.party.private):
            raise UserError(f"the list of members names another key of {me} than it has: refused")

    def _use(self, name: str, part: str) -> None:
        """Note that the masks of a sum are used for a part with this digest."""
        file = self.folder / f"mask-{custody.digest([self.digest.encode(), name.encode()])[:32]}"
        if write_once(file, part.encode()) != part.encode():
            raise UserError(
                f"{self.party.name} has given another part to sum {name}: the same masks are never "
                "used twice; start a new run"
            )


def release_text(
    name: str, run: str, recipe: Recipe[Method], data: str, silos: Sequence[str]
) -> bytes:
    """Return what a silo signs if it agrees that one run replaces another, without it or with it.

    Args:
        name: the silo.
        run: id of the run that is replaced.
        recipe: of the new run.
        data: the data set of all silos, see `Agreement.data`.
        silos: all of the new run.
    """
    return keys.canonical([name, run, recipe.shared(), data, sorted(silos)])


def released(terms: Agreement, public: str) -> bool:
    """Return whether the silo with this key, which a run leaves out or adds, agrees to the run next
    to the one that it replaces.
    """
    revision = terms.revision
    assert revision is not None
    text = release_text(revision.client, revision.run, terms.recipe, terms.data, terms.clients)
    return keys.proves(public, RELEASE, text, revision.release)
