"""Sums between silos are masked: whoever works together reads the total, and the part of no other
silo."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ekiden.cli.app import call
from ekiden.core.base.errors import UserError
from ekiden.core.base.sums import Masked, digest, wide
from ekiden.core.engine import wire
from ekiden.core.engine.client import Client
from ekiden.core.engine.method import Method
from ekiden.core.engine.transport import opened, summands
from ekiden.core.engine.wire import SERVER
from ekiden.core.engine.worker import Worker
from ekiden.core.training.gram import AnySums, Rounding, Sums, TargetSums, measure, measure_targets
from ekiden.methods import Average, DeepAFL, FedGram, FedKrylov, FedSeq, FedTasuki
from ekiden.methods.exact.closing import with_lap
from ekiden.runs import summary
from ekiden.runs.result import Result
from ekiden.silos.coordinator import remote_plan, session
from ekiden.silos.coordinator.courier import Lost
from ekiden.silos.coordinator.transport import Remote
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.silo import told
from ekiden.silos.trust import custody, sealing
from ekiden.silos.trust.agreement import AGREEMENT, Roster
from ekiden.silos.trust.masking import PartMasks
from ekiden.silos.trust.parcel import Answer, Ask, unpack
from ekiden.silos.trust.sealing import Party, Reader
from tests.silos.fakes import NAMES, FakeNodes, with_keys
from tests.silos.sessions import assert_equal, far, here

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")
from ekiden.silos.trust import keys

SILOS = tuple("abcdef")
MaskedBy = dict[str, PartMasks]


@pytest.fixture(scope="module")
def silo_keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("keys")
    for name in SILOS:
        keys.generate(folder / name)
    return {name: folder / name for name in SILOS}


def group(
    silo_keys: dict[str, Path], folder: Path, names: Sequence[str] = SILOS, run: str = "run"
) -> dict[str, PartMasks]:
    """The masks of silos in a run: each has its own key of the run, and all public ones."""
    public = {name: keys.read_public(Path(f"{silo_keys[name]}.pub")) for name in names}
    parties = {
        name: Party(
            name,
            run,
            "terms",
            sealing.new_private(),
            public,
            partial(keys.sign, silo_keys[name]),
        )
        for name in names
    }
    members = tuple(reader(parties[name]) for name in names)
    for name in names:
        (folder / name / "runs" / run).mkdir(parents=True, exist_ok=True)
    return {
        name: PartMasks(parties[name], members, 2, "3-add", folder / name / "runs" / run)
        for name in names
    }


def reader(party: Party) -> Reader:
    key = sealing.public_of(party.private)
    assert party.sign is not None
    return Reader(
        party.name, 0, key, party.sign(sealing.KEY, sealing.key_text(party.run, party.name, key))
    )


def samples(seed: int, width: int = 5, n: int = 30) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, (n, width), generator=draw).float(), torch.randint(
        3, (n,), generator=draw
    )


def exact(seed: int) -> Sums:
    return measure([samples(seed)], 3, 5)


def rounded(seed: int, bits: int = 16) -> Sums:
    return measure([samples(seed)], 3, 5, rounding=Rounding(bits, 64))


def targets(seed: int) -> TargetSums:
    x, y = samples(seed)
    return measure_targets([(x, torch.stack([y, -y], 1).float())], 2, 5)


KINDS: dict[str, Any] = {
    "exact": exact,
    "rounded": rounded,
    "12 bits": lambda s: rounded(s, 12),
    "targets": targets,
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def bits(value: Any) -> bytes:
    return wire.encode(value)


def numbers(value: Any) -> list["np.ndarray[Any, Any]"]:
    """All whole numbers of a payload, or of a masked one, as unsigned words."""
    if isinstance(value, Masked):
        return [wide(t, b) for t, b in zip(value.numbers, value.bits, strict=True)]
    return summands(value).words


@each_kind
@pytest.mark.parametrize("shape", ["chain", "star"])
def test_only_the_total_of_all_opens_and_has_the_bits_of_the_plain_sum(
    kind: str, shape: str, silo_keys: dict[str, Path], tmp_path: Path
) -> None:
    masks, own = group(silo_keys, tmp_path), {name: KINDS[kind](i) for i, name in enumerate(SILOS)}
    total: Any = None
    plain: Any = None
    for i, name in enumerate(SILOS):
        plain = own[name] if plain is None else plain.plus(own[name])
        if shape == "chain":
            total = masks[name].added(total, own[name], None)
        else:
            part = masks[name].added(None, own[name], None)
            total = part if total is None else total.plus(part)
        if i < len(SILOS) - 1:
            assert isinstance(total, Masked)
            assert wire.size(total) == wire.size(plain)
            assert wire.decode(bits(total), type(plain)).given == list(SILOS[: i + 1])
            for hidden, shown in zip(numbers(total), numbers(plain), strict=True):
                assert (hidden == shown).mean() < 0.2
            with pytest.raises(UserError, match="sum 3-add has only the parts of a"):
                _ = total.gram
    total = opened(total, type(plain)) if shape == "star" else total
    assert bits(total) == bits(plain)


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(SILOS), size=st.integers(2, 6), seed=st.integers(0, 99))
def test_any_order_of_any_members(
    order: Sequence[str], size: int, seed: int, silo_keys: dict[str, Path], tmp_path_factory: Any
) -> None:
    names = order[:size]
    masks, total, plain = group(silo_keys, tmp_path_factory.mktemp("run"), names), None, None
    for i, name in enumerate(order[:size]):
        own = exact(seed + i)
        total, plain = (
            masks[name].added(total, own, None),
            own if plain is None else plain.plus(own),
        )
    assert bits(total) == bits(plain)


# Who works together, and what they hold.


def unmasked_by(coalition: Sequence[str], masks: MaskedBy, victim: str, part: Masked) -> list[Any]:
    """What some parties make of a victim's part: they take off the masks of all pairs of which they
    have a key."""
    words, check = numbers(part), np.array([0], dtype="<u8")
    names = [m.name for m in masks[victim].members]
    for thief in coalition:
        # The thief computes the stream from its own private key and the victim's public one, and
        # takes it off.
        taken, chosen = [np.zeros_like(w) for w in words], custody.digest(wire.chunks(None))
        masks[thief]._mask(
            masks[victim].members[names.index(victim)], part.sum, chosen, [*taken, check]
        )
        # The thief's sign is the opposite of the victim's.
        words = [w + noise for w, noise in zip(words, taken, strict=True)]
    return words


@pytest.mark.parametrize("colluding", range(6))
def test_all_but_one_must_work_together_to_read_a_part(
    colluding: int, silo_keys: dict[str, Path], tmp_path: Path
) -> None:
    """Those who work together lack exactly the pairs of the victim with honest silos; with these it
    would open."""
    masks, own = group(silo_keys, tmp_path), exact(7)
    part = masks["c"].added(None, own, None)
    others = [n for n in SILOS if n != "c"]
    coalition, honest = others[:colluding], others[colluding:]
    seen, true = unmasked_by(coalition, masks, "c", part), numbers(own)
    readable = [bool((s == t).all()) for s, t in zip(seen, true, strict=True)]
    assert readable == [not honest] * len(
        true
    )  # five of six work together: not protected, and said so
    both = unmasked_by(others, masks, "c", part)  # the pairs that they lack, and no others, hide it
    assert all((a == b).all() for a, b in zip(both, true, strict=True))


def test_what_is_seen_of_a_part_is_uniform(silo_keys: dict[str, Path], tmp_path: Path) -> None:
    """Two bytes of each number, over many numbers: the counts of all values are as even as chance
    allows."""
    x = torch.ones(40, 160)
    own = measure([(x, torch.zeros(40, dtype=torch.int64))], 1, 160)  # all numbers are the same
    masks = group(silo_keys, tmp_path, SILOS[:3])
    part = masks["a"].added(None, own, None)
    seen = unmasked_by(["b"], masks, "a", part)[0].view(np.uint8)
    counts = np.bincount(seen, minlength=256)
    expected = len(seen) / 256
    assert ((counts - expected) ** 2 / expected).sum() < 256 + 6 * np.sqrt(2 * 256)  # chi-squared
    assert len(seen) > 50_000


def test_masks_of_two_sums_runs_and_pairs_differ(
    silo_keys: dict[str, Path], tmp_path: Path
) -> None:
    masks, own = group(silo_keys, tmp_path, SILOS[:3]), exact(1)
    other_run = {n: replace(m, party=replace(m.party, run="another")) for n, m in masks.items()}
    signed = tuple(reader(m.party) for m in other_run.values())
    one = masks["a"].added(None, own, None)
    two = replace(masks["a"], name="4-add").added(None, own, None)
    three = replace(other_run["a"], members=signed).added(None, own, None)
    fewer = replace(masks["a"], members=masks["a"].members[:2]).added(None, own, None)
    found = [numbers(part)[0] for part in (one, two, three, fewer)]
    for a, b in itertools.combinations(found, 2):
        assert not (a == b).any()


def test_the_same_masks_never_hide_two_values(silo_keys: dict[str, Path], tmp_path: Path) -> None:
    """Their difference would be the difference of the values."""
    masks = group(silo_keys, tmp_path)
    one = masks["b"].added(None, exact(1), None)
    assert bits(masks["b"].added(None, exact(1), None)) == bits(one)  # asked again
    with pytest.raises(
        UserError,
        match="b has given another part to sum 3-add: the same masks are never used twice",
    ):
        masks["b"].added(None, exact(2), None)
    before = masks["a"].added(None, exact(3), None)
    with pytest.raises(UserError, match="never used twice"):
        masks["b"].added(before, exact(2), None)
    assert isinstance(masks["b"].added(before, exact(1), None), Masked)


def test_lists_of_members_that_would_show_a_part_are_refused(
    silo_keys: dict[str, Path], tmp_path: Path
) -> None:
    masks, own = group(silo_keys, tmp_path), exact(1)
    mine, (a, b, *others) = masks["a"], masks["a"].members
    thief = sealing.public_of(sealing.new_private())
    foreign = replace(b, name="coordinator", key=thief)
    for members, message in (
        ((), "the request names no members"),
        ((a,), r"a sum of 1 silos, a allows 2 or more \(limits.min_clients"),
        ((a, a), "a must be there once"),
        ((b, *others), "a must be there once, as all others"),
        ((a, b, b, *others), "a must be there once, as all others"),
        (
            (a, replace(b, key=thief), *others),
            "the key of 'b' for masks is not signed by a silo of the run",
        ),
        ((a, replace(b, key=thief, proof=""), *others), "the key of 'b' for masks is not signed"),
        ((a, replace(b, proof=a.proof), *others), "the key of 'b' for masks is not signed"),
        ((a, foreign, *others), "the key of 'coordinator' for masks is not signed"),
        (
            (a, replace(foreign, name=SERVER, proof=""), *others),
            "the key of 'server' for masks is not signed",
        ),
        (
            (reader(replace(mine.party, private=sealing.new_private())), b, *others),
            "another key of a than it has",
        ),
    ):
        with pytest.raises(UserError, match=message) as refused:
            replace(mine, members=members).added(None, own, None)
        assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match=r"a sum of 6 silos, a allows 7 or more"):
        replace(mine, fewest=7).added(None, own, None)
    with pytest.raises(UserError, match="a received a sum that is not masked"):
        mine.added(exact(2), own, None)
    with pytest.raises(UserError, match="a would give a part to sum 3-add twice"):
        mine.added(mine.added(None, own, None), own, None)


def test_parts_under_other_lists_do_not_add_up(silo_keys: dict[str, Path], tmp_path: Path) -> None:
    masks = group(silo_keys, tmp_path)
    fewer = replace(masks["a"], members=masks["a"].members[:4])
    with pytest.raises(UserError, match="the silos got other lists of members"):
        masks["b"].added(fewer.added(None, exact(1), None), exact(2), None)
    total = fewer.added(None, exact(1), None)
    for name in SILOS[1:]:
        total = total.plus(
            replace(masks[name].added(None, exact(2), None), members=total.members)
        )  # claims the same list
    with pytest.raises(UserError, match="sum 3-add does not open: a number in it is too large"):
        opened(total, Sums)


def test_totals_that_do_not_fit_are_refused(silo_keys: dict[str, Path], tmp_path: Path) -> None:
    """Modulo 2^32 they would be taken for others."""
    full = torch.full((1, 2), 127.0)
    one = measure([(full, torch.zeros(1, dtype=torch.int64))], 1, 2)
    large = Sums(torch.tensor([2**31 - 1, -5, 9], dtype=torch.int32), one.classes, one.counts)
    masks = group(silo_keys, tmp_path, SILOS[:2])
    with pytest.raises(UserError, match=r"a sum of products does not fit into 32 bits"):
        large.plus(one)
    with pytest.raises(
        UserError, match=r"3-add does not open: a number in it is too large \(leave out silos"
    ):
        masks["b"].added(masks["a"].added(None, large, None), one, None)


def test_a_total_is_checked_when_it_is_opened(silo_keys: dict[str, Path], tmp_path: Path) -> None:
    one = exact(1)
    negative = object.__new__(Sums)
    for name, value in (
        ("gram", one.gram),
        ("classes", one.classes),
        ("counts", one.counts - 1000),
    ):
        object.__setattr__(negative, name, value)
    masks = group(silo_keys, tmp_path, SILOS[:2])
    with pytest.raises(
        wire.WireError, match=r"impossible Sums \(sums of squares or counts are negative"
    ):
        masks["b"].added(masks["a"].added(None, negative, None), one, None)


def test_only_whole_numbers_are_masked(silo_keys: dict[str, Path], tmp_path: Path) -> None:
    masks = group(silo_keys, tmp_path)
    for value, message in (
        ((torch.tensor(1), torch.ones(2)), "a sum of torch.float32 cannot be masked"),
        ([1.5], "a float in a sum cannot be masked: add up whole numbers"),
        ([True], "a bool in a sum cannot be masked"),
    ):
        with pytest.raises(UserError, match=message):
            masks["a"].added(None, value, None)


@pytest.mark.parametrize(
    "changed",
    [
        {"bits": [64]},
        {"bits": []},
        {"given": []},
        {"given": ["a", "a"]},
        {"given": ["a\nb"]},
        {"check": -1},
        {"check": 2**64},
        {"sum": "../../etc"},
        {"form": "x" * 2**17},
        {"numbers": [torch.ones(1, 1, dtype=torch.int32)]},
        {"numbers": [torch.ones(1)]},
    ],
    ids=str,
)
def test_masked_sums_from_others_are_checked(changed: dict[str, Any]) -> None:
    good = Masked("{}", [torch.ones(3, dtype=torch.int32)], [32], [], 5, "3-add", "f" * 64, ["a"])
    with pytest.raises(UserError, match=r"a masked sum is not as it must be|would give a part"):
        replace(good, **changed)


@pytest.mark.parametrize(
    "form",
    [
        "",
        "{}",
        "[]",
        '{"tree":{"number":3},"shapes":[]}',
        '{"tree":{"tensor":0},"shapes":[[7]]}',
        '{"tree":{},"shapes":[[3]]}',
    ],
)
def test_a_crafted_form_is_refused(form: str) -> None:
    words = torch.ones(3, dtype=torch.int32)
    good = Masked(form, [words], [32], [], 0, "3-add", "f" * 64, ["a"])
    with pytest.raises(UserError, match=r"cannot be read|does not hold"):
        opened(replace(good, check=digest([words.numpy()])), Sums)


# Runs between silos.

METHODS: dict[str, Method] = {
    "chain": FedGram(width=40),
    "star": FedGram(width=40, topology="star"),
    "chain, 16 bits": FedGram(width=40, bits=16, samples=2000),
    "star, 16 bits": FedGram(width=40, bits=16, samples=2000, topology="star"),
    "laps": FedKrylov(width=40, laps=3, sums="whole"),
    "layers": DeepAFL(layers=1, width=8, random_features=8),
    "closing lap": with_lap(FedTasuki(epochs=1)),
    "closing lap, server": with_lap(Average(epochs=1)),
}


@pytest.fixture
def own_parts(monkeypatch: pytest.MonkeyPatch) -> dict[str, AnySums]:
    """What each silo gave, before masks."""
    seen: dict[str, AnySums] = {}
    added = Client.added

    def noted(self: Client, before: Any, own: Any, *more: Any) -> Any:
        seen[self.name] = own
        return added(self, before, own, *more)

    monkeypatch.setattr(Client, "added", noted)
    return seen


def go(case: str, nodes: FakeNodes, folder: Path, public: dict[str, str], **plan: Any) -> Result:
    return far(METHODS[case], nodes, folder, public, **plan)


FAST = ("chain", "closing lap, server")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in FAST else pytest.mark.slow) for c in METHODS]
)
def test_masked_runs_have_the_bits_of_plain_ones(case: str, tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    result, expected = go(case, FakeNodes(files), tmp_path / "run", public), here(METHODS[case])
    assert_equal(result, expected)
    assert verify(tmp_path / "run", public).wrong == ()


@pytest.mark.parametrize(
    "case",
    [
        "chain",
        *(pytest.param(c, marks=pytest.mark.slow) for c in ("chain, 16 bits", "closing lap")),
    ],
)
def test_silos_of_a_chain_read_masked_sums_alone(
    case: str, own_parts: dict[str, AnySums], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes to the second and the last silo, opened with their own keys."""
    taken: list[tuple[str, Any]] = []
    execute = Worker.execute

    def noted(self: Worker, job: Any, *more: Any) -> Any:
        taken.extend((job.client, arg) for arg in job.args if hasattr(arg, "sums"))
        return execute(self, job, *more)

    monkeypatch.setattr(Worker, "execute", noted)
    files, public = with_keys(tmp_path, NAMES)
    go(case, FakeNodes(files), tmp_path / "run", public)
    *way, (_, total) = taken
    assert [type(arg.sums) for _, arg in way] == [Masked, Masked]
    assert not isinstance(total.sums, Masked)
    parts = [numbers(own) for own in own_parts.values()]
    for _, arg in way:
        for own in parts:
            assert all(
                (hidden == true).mean() < 0.2
                for hidden, true in zip(numbers(arg.sums), own, strict=True)
            )
    # The neighbours of client-1 subtract what it received from what it handed on: its part is still
    # masked.
    (one, two), own = (numbers(arg.sums) for _, arg in way), numbers(own_parts["client-1"])
    if case != "closing lap":  # there the order differs
        for before, after, true in zip(one, two, own, strict=True):
            assert ((after - before) == true).mean() < 0.2


def test_a_server_reads_masked_parts_and_the_total_alone(
    own_parts: dict[str, AnySums], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Any] = []
    value = Remote.value

    def noted(self: Remote, ref: Any) -> Any:
        read.append(value(self, ref))
        return read[-1]

    monkeypatch.setattr(Remote, "value", noted)
    files, public = with_keys(tmp_path, NAMES)
    far(METHODS["star"], FakeNodes(files), tmp_path / "run", public)
    parts = [v for v in read if isinstance(v, Masked)]
    assert [p.given for p in parts] == [[name] for name in NAMES]
    assert not any(isinstance(v, Sums) for v in read)
    for part, own in itertools.product(parts, own_parts.values()):
        assert all(
            (hidden == true).mean() < 0.2
            for hidden, true in zip(numbers(part), numbers(own), strict=True)
        )


def test_a_relay_sees_no_part(own_parts: dict[str, AnySums], tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    nodes = FakeNodes(files)
    far(METHODS["chain"], nodes, tmp_path / "run", public)
    seen = b"".join([*(data for _, data in nodes.log), *nodes.said])
    for own in own_parts.values():
        assert isinstance(own, Sums)
        assert isinstance(own.gram, Tensor)
        for part in (own.gram, own.classes):
            assert part.numpy().tobytes()[:64] not in seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DataWarning")
def test_a_run_without_a_silo_or_with_it_again_needs_its_agreement(tmp_path: Path) -> None:
    """A run minus the run without client-2 would be the sums of client-2."""
    names = (*NAMES, "client-3")
    files, public = with_keys(tmp_path, names, "[limits]\nmin_clients = 2\n", trusting=False)
    (tmp_path / "four.py").write_text(
        (tmp_path / "own.py").read_text().replace(", 3, seed=0", ", 4, seed=0")
    )
    files[3] = replace(files[3], data=replace(files[3].data, python="four.py:mine"))
    run = tmp_path / "run"
    method = FedGram(width=20, dictionary="seed", min_active=10)
    far(method, FakeNodes(files[:3]), run, {name: public[name] for name in NAMES})

    def without(folder: str, release: Path | None = None) -> Result:
        plan, left = (
            remote_plan.without(run, "client-2", release),
            {name: public[name] for name in NAMES[:2]},
        )
        return session.run(
            plan, FakeNodes(files[:2]), tmp_path / folder, left, lambda line: None, poll=0
        )

    refused = "were told with other members before: the difference could show"
    with pytest.raises(UserError, match=refused):
        without("refused")

    def sign(signer: str, folder: str) -> Path:
        call(
            [
                "silo",
                "release",
                str(tmp_path / f"{signer}.toml"),
                str(tmp_path / folder / AGREEMENT),
            ]
        )
        return tmp_path / f"{signer}-release.txt"

    for signer in "client-1", "client-3":
        with pytest.raises(UserError, match=refused):  # another silo leaves, or joins
            without(f"refused-{signer}", sign(signer, "run"))
    left = sign("client-2", "run")
    assert without("two", left).weights is not None

    def again(folder: str, client: int, release: Path | None = None) -> Result:
        plan = remote_plan.with_one_more(tmp_path / "two", f"client-{client}", release)
        three = {name: public[name] for name in (*NAMES[:2], f"client-{client}")}
        nodes = FakeNodes([*files[:2], files[client]])
        return session.run(plan, nodes, tmp_path / folder, three, lambda line: None, poll=0)

    # client-3 was never there: nobody signed, and then another silo.
    for file in (None, left):
        with pytest.raises(UserError, match=refused):
            again(f"with-{file is left}", 3, file)
    with pytest.raises(UserError, match=refused):
        again("three", 2, left)  # it agreed to a run without it
    assert again("three again", 2, sign("client-2", "two")).weights is not None


@pytest.mark.filterwarnings("ignore::ekiden.core.base.errors.DataWarning")
def test_an_agreement_to_leave_one_run_is_for_no_other(tmp_path: Path) -> None:
    """A coordinator keeps the file of client-2 and uses it again: for the same run, other settings,
    or a later run."""
    files, public = with_keys(tmp_path, NAMES, "[limits]\nmin_clients = 2\n", trusting=False)
    method = FedGram(width=20, dictionary="seed", min_active=10)
    two = {name: public[name] for name in NAMES[:2]}

    def without(folder: str, release: Path, **changed: Any) -> Result:
        plan = remote_plan.without(tmp_path / folder, "client-2", release)
        plan = replace(plan, recipe=replace(plan.recipe, **changed))
        return session.run(
            plan, FakeNodes(files[:2]), tmp_path / token_hex(4), two, lambda line: None, poll=0
        )

    far(method, FakeNodes(files), tmp_path / "run", public)
    far(method, FakeNodes(files), tmp_path / "later", public)
    call(["silo", "release", str(tmp_path / "client-2.toml"), str(tmp_path / "run" / AGREEMENT)])
    signed = tmp_path / "client-2-release.txt"
    refused = "were told with other members before: the difference could show"
    with pytest.raises(UserError, match=r"told with other (members|features) before"):
        without("run", signed, seed=4)
    with pytest.raises(UserError, match=refused):
        without("later", signed)
    assert without("run", signed).weights is not None
    assert without("run", signed).weights is not None, "nothing new: the same rows and silos"
    for file in files:
        (file.folder / told.FILE).write_text("")
    far(method, FakeNodes(files), tmp_path / "again", public)
    text = signed.read_text()
    signed.write_text("0" * 32 + text[32:])
    with pytest.raises(UserError, match=refused):
        without("run", signed)


def test_what_a_silo_cannot_release(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    terms, other = tmp_path / "run" / AGREEMENT, tmp_path / "other.json"
    far(METHODS["chain"], FakeNodes(files), tmp_path / "run", public)
    other.write_text(terms.read_text().replace('"seed":3', '"seed":4'))
    roster = tmp_path / "roster.json"
    roster.write_text(Roster("", NAMES, tuple(public.values())).to_json())
    for file, message in (
        (other, "has other terms at client-0"),
        (tmp_path / "none.json", "is not the agreement.json of a run's folder"),
        (tmp_path / "client-0.toml", "the terms of the run cannot be read"),
        (roster, "they do not say what is run, as the agreement.json of a run's folder does"),
    ):
        with pytest.raises(UserError, match=message) as error:
            call(["silo", "release", str(tmp_path / "client-0.toml"), str(file)])
        assert "\n" not in str(error.value)
    assert not [*tmp_path.glob("*release*")]


@pytest.mark.parametrize("topology", ["chain", "star"])
@pytest.mark.parametrize("change", ["none", "one", "itself", "swapped"])
def test_a_coordinator_that_names_other_members_gets_nothing(
    topology: Any, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks for parts under no masks, for a sum of one silo, or under masks of which it has a
    key."""
    thief = sealing.public_of(sealing.new_private())
    true = Remote._members_of

    def crafted(self: Remote, request: Any) -> Any:
        members = true(self, request)
        if not members:
            return ()
        mine = next(m for m in members if m.name == request.client)
        other = next(m for m in members if m.name != request.client)
        swapped = {
            "swapped": replace(other, key=thief),
            "itself": replace(other, name=SERVER, key=thief, proof=""),
        }
        if change in swapped:
            return tuple(swapped[change] if m == other else m for m in members)
        return {"none": (), "one": (mine,)}[change]

    monkeypatch.setattr(Remote, "_members_of", crafted)
    files, public = with_keys(tmp_path, NAMES)
    nodes = FakeNodes(files)
    with pytest.raises(
        UserError, match=r"names no members|a sum of 1 silos|is not signed by a silo of the run"
    ):
        far(FedGram(width=40, topology=topology), nodes, tmp_path / "run", public)
    assert not list(tmp_path.glob("client-*-silo/runs/*/mask-*"))


@pytest.mark.parametrize("case", [pytest.param("chain", marks=pytest.mark.slow), "star"])
def test_a_sum_is_of_all_silos_or_not_opened(case: str, tmp_path: Path) -> None:
    """Also where the run may go on without a silo: it stops with nothing opened, and goes on when
    the silo is back."""
    files, public = with_keys(tmp_path, NAMES)
    nodes = FakeNodes(files)

    def lose(node: int, data: bytes) -> Lost | None:
        return (
            Lost("unsent")
            if node == 101 and unpack(data, Ask)[0].task in ("add", "measure")
            else None
        )

    nodes.lose = lose
    with pytest.raises(
        UserError, match=r"client-1 did not answer .* \(a sum under masks opens only with the parts"
    ):
        go(case, nodes, tmp_path / "run", public, absent="skip", patience=0.01)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    nodes.lose = lambda node, data: None
    assert_equal(
        go(case, nodes, tmp_path / "run", public, absent="skip", patience=0.01), here(METHODS[case])
    )


@pytest.mark.slow
def test_show_says_whether_sums_were_masked(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    go("chain", FakeNodes(files), tmp_path / "run", public)
    far(FedSeq(epochs=1), FakeNodes(files), tmp_path / "models", public)
    here(METHODS["laps"], folder=tmp_path / "here")
    for folder, said in (
        ("run", "sums: masked; only totals over all silos could be read"),
        ("models", ""),
        ("here", "sums: not masked (all clients were on one machine)"),
    ):
        assert summary.sums(summary.summarise(tmp_path / folder)) == said


def test_sums_that_cannot_be_masked_do_not_leave_a_silo(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    with pytest.raises(
        UserError, match=r"a sum of torch.float32 cannot be masked: .* \(FedKrylov: sums='whole'\)"
    ):
        far(FedKrylov(width=40), FakeNodes(files), tmp_path / "run", public)


def test_a_silo_that_is_asked_again_gives_the_same_bits(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, NAMES)
    nodes = FakeNodes(files)
    far(METHODS["star"], nodes, tmp_path / "run", public)
    again = [
        (node, data)
        for node, data in nodes.log
        if (ask := unpack(data, Ask)[0]).task == "measure" and ask.kind == "task"
    ]
    assert len(again) == 3
    before = {p: p.read_bytes() for p in tmp_path.glob("client-*-silo/runs/*/outcome-*measure*")}
    for node, data in again:
        assert unpack(nodes.silo(node).answer(data), Answer)[0].error == ""
    for path in before:  # also if it is made again
        path.unlink()
    for node, data in again:
        assert unpack(nodes.silo(node).answer(data), Answer)[0].error == ""
    assert {p: p.read_bytes()[-2000:] for p in before} == {
        p: data[-2000:] for p, data in before.items()
    }
