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

import json
from collections.abc import Callable, Iterator, Sequence
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

_BLOCK = 1 << 20  # numbers that are masked at a time
_LIST = "members-"  # beginning of the names of files with lists of members
LISTS = "lists"  # folder in the silo's folder, which stays when runs go
MARK = 32  # hexadecimal digits at the beginning of a release
Words = list["np.ndarray[Any, Any]"]
Members = np.ndarray[Any, np.dtype[np.uint64]]
"""(n,) numbers that name what is in a sum; what is in it twice is there twice"""
_KINDS = 16  # of members, by which combinations of sums are told apart quickly


@dataclass(frozen=True)
class PartMasks:
    """Masks for what a silo gives to the sums of one task."""

    party: Party  # the silo, with its key of the run
    members: tuple[Reader, ...]  # all who give a part, with their keys
    # fewest members of a sum. Two lists of members must differ by this number of silos, too.
    fewest: int
    name: str  # name of a sum that begins with this task
    # the run's folder at the silo, where it keeps which masks it has used, and for which members
    folder: Path
    # whether a silo agrees that sums of some silos are opened with it and without it
    released: Callable[[str, Sequence[str]], bool] = lambda name, silos: False
    # beginning of the names of files with lists of members that must differ by `fewest` silos
    lists: str = _LIST
    # whether another sum of the run may have other members, and a sum is formed again without those
    # who are missing.
    # Then a list counts when the part leaves this silo (`leave`), and one list a sum.
    regroups: bool = False

    @cached_property
    def digest(self) -> str:
        """The digest of the list of members and their keys."""
        return custody.digest([json.dumps([[m.name, m.key] for m in self.members]).encode()])

    def added(self, before: Any, own: Any, about: Any) -> Any:
        """Return the sum `before` with the silo's `own` part under its mask; if complete, the
        total.

        The masks depend on `about`: what others chose for the part, or None. Whoever chooses it in
        another way for one silo, so that the other parts are known, gets a sum that does not open.
        """
        self._check_members()
        if before is not None and not isinstance(before, Masked):
            raise UserError(f"{self.party.name} received a sum that is not masked: refused")
        part, name = summands(own), before.sum if before else self.name
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
        adds = names.index(self.party.name) < names.index(other.name)
        pair = (self.party.name, other.name) if adds else (other.name, self.party.name)
        bound = [self.party.run, self.party.terms, self.digest, name, chosen, *pair]
        text = json.dumps(bound, separators=(",", ":"))
        stream = sealing.stream(self.party.private, other.key, b"ekiden mask\n" + text.encode())
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
        me, names = self.party.name, [m.name for m in self.members]
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
                "(limits.min_clients in its silo.toml, "
                "or honest of --dp)"
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

    def _check_lists(self) -> None:
        """Refuse a list that differs from an earlier one by too few silos, of any run here.

        The difference of the two totals would be the part of these silos, unless they agree to
        that. The same holds for combinations of up to four sums, as far as this silo gave its part
        to all of them.
        """
        names = [m.name for m in self.members]
        if self.regroups and self._opened.exists():
            self._check_opened(self._opened.read_bytes())
        runs = self.folder.parent
        files = [*runs.glob(f"*/{self.lists}*"), *(runs.parent / LISTS).glob(f"{self.lists}*")]
        kept = {
            file.read_text(encoding="utf-8"): file
            for file in sorted(files)
            if file.parent != self.folder
        }
        lists, places = [text.split(",") for text in kept], [*kept.values()]
        for used, apart in self._shown(names, lists):
            if all(self.released(name, names) for name in apart):
                continue
            sums = " and of ".join(sorted(",".join(sorted(lists[place])) for place in used))
            how = (
                "the difference"
                if len(used) == 1
                else "what is left if they are added and subtracted"
            )
            raise UserError(
                f"{self.party.name} gave its part to a sum of {sums}: with a sum of "
                f"{','.join(sorted(names))}, {how} "
                f"would be the part of {','.join(apart)}, who did not agree to that (`ekiden silo "
                "release`); see "
                f"limits.min_clients, or {places[used[0]]}"
            )

    def _shown(
        self, names: Sequence[str], lists: Sequence[Sequence[str]]
    ) -> Iterator[tuple[tuple[int, ...], list[str]]]:
        """Yield which of the earlier lists show too few silos together with this list of names, and
        these silos.

        If two lists share enough silos for a sum, and a few silos are in one of them alone, those
        of the other list who know their own sum, or give it to a sum without this silo, see the
        part of these few.
        """
        for place, one in enumerate(lists):
            shared, sides = {*names} & {*one}, ({*names} - {*one}, {*one} - {*names})
            apart = sorted(name for side in sides if len(side) < self.fewest for name in side)
            both = len(shared) >= self.fewest and not any(shared == {*other} for other in lists)
            if apart and (both or len(sides[0] | sides[1]) < self.fewest):
                yield (place,), apart
        known = sorted({*names, *(name for one in lists for name in one)})
        now, *before = (
            np.array([known.index(name) for name in one], "<u8") for one in (names, *lists)
        )
        for used, left in nearly_cancelled(now, before, self.fewest):
            if len(used) > 1:
                yield used, [known[int(one)] for one in left]

    def leave(self) -> None:
        """Note the list of members, before the part leaves this silo; the coordinator could open
        the sum then.
        """
        self._check_lists()
        names = ",".join(m.name for m in self.members).encode()
        kept = self.folder.parent.parent / LISTS
        if self.regroups:  # where a silo allows differences, there may be one in each round
            self._check_opened(write_once(self._opened, names))
            kept = self.folder
        kept.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_once(kept / f"{self.lists}{self.digest[:32]}", names)

    @property
    def _opened(self) -> Path:
        """The file with the list under which the part of this sum has left the silo."""
        return self.folder / f"opened-{custody.digest([self.name.encode()])[:32]}"

    def _check_opened(self, before: bytes) -> None:
        if before != (names := ",".join(m.name for m in self.members)).encode():
            raise UserError(
                f"{self.party.name} gave its part of sum {self.name} to {before.decode()}, and "
                "gives none of it to "
                f"{names}: the difference could be the part of one silo; start the missing silos, "
                "then `ekiden resume`"
            )

    def _use(self, name: str, part: str) -> None:
        """Note that the masks of a sum are used for a part with this digest."""
        if self.regroups:
            self._check_lists()
        else:
            self.leave()
        file = self.folder / f"mask-{custody.digest([self.digest.encode(), name.encode()])[:32]}"
        if write_once(file, part.encode()) != part.encode():
            raise UserError(
                f"{self.party.name} has given another part to sum {name}: the same masks are never "
                "used twice; start "
                "a new run"
            )


def release_text(
    name: str, mark: str, run: str, recipe: Recipe[Method], data: str, silos: Sequence[str]
) -> bytes:
    """Return what a silo signs if it agrees that one run replaces another, without it or with it.

    Args:
        name: the silo.
        mark: a random text, so that each agreement is another one.
        run: id of the run that is replaced.
        recipe: of the new run.
        data: the data set of all silos, see `Agreement.data`.
        silos: all of the new run.
    """
    about = [name, mark, run, recipe.to_json(), data, sorted(silos)]
    return b"ekiden release\n" + json.dumps(about, separators=(",", ":"), sort_keys=True).encode()


def released(
    terms: Agreement, public: Callable[[str], str], folder: Path, name: str, silos: Sequence[str]
) -> bool:
    """Return whether a silo agrees to the sums of this run among `silos`, next to those of the run
    that it replaces.

    An agreement is for the first run that uses it; `folder` keeps which one that is.
    """
    revision = terms.revision
    if revision is None or revision.client != name or {*silos} != {*terms.clients}:
        return False
    mark, signature = revision.release[:MARK], revision.release[MARK:]
    text = release_text(name, mark, revision.run, terms.recipe, terms.data, silos)
    if not keys.proves(public(name), text, signature):
        return False
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    used = write_once(
        folder / f"release-{custody.digest([text])[:32]}", terms.run.encode()
    ).decode()
    if used != terms.run:
        raise UserError(
            f"{name} agreed to one run, which is {used}: let it sign again (`ekiden silo release`)"
        )
    return True


def nearly_cancelled(
    now: Members, before: Sequence[Members], least: int
) -> Iterator[tuple[tuple[int, ...], Members]]:
    """Yield which earlier sums, at most three, combined with a new one leave some members, but
    fewer than `least`.

    Single ones come first. Each sum is given by its members, and may be added or subtracted. What
    is yielded: places of the earlier sums, and the members that are left.
    """
    kinds = [
        np.bincount((one % np.uint64(_KINDS)).astype(np.int64), minlength=_KINDS)
        for one in (now, *before)
    ]
    signed = np.stack(
        [np.zeros_like(kinds[0]), *kinds[1:], *(-each for each in kinds[1:])]
    )  # the first stands for none
    sizes, k = signed.sum(1), len(before)
    same = [
        place for place, one in enumerate(before, 1) if np.array_equal(np.sort(now), np.sort(one))
    ]
    for a in range(2 * k + 1):
        # Few combinations leave few in all, and fewer leave few of each kind.
        b, c = np.nonzero(
            np.triu(np.abs(len(now) + sizes[a] + sizes[a:, None] + sizes[a:]) < least)
        )
        near = np.abs(kinds[0] + signed[a] + signed[b + a] + signed[c + a]).sum(1) < least
        for found in np.stack([np.full_like(b, a), b + a, c + a], 1)[near].tolist():
            used = [place for place in found if place]
            if {place - k for place in used} & {*used, *same}:
                continue  # one is added and subtracted
            sums = [now, *(before[(place - 1) % k] for place in used)]
            signs = [1, *(1 if place <= k else -1 for place in used)]
            members, which = np.unique(np.concatenate(sums), return_inverse=True)
            rest = np.abs(
                np.bincount(which, np.repeat(signs, [*map(len, sums)]), len(members))
            ).astype(np.int64)
            if 0 < rest.sum() < least:
                yield tuple((place - 1) % k for place in used), np.repeat(members, rest)
