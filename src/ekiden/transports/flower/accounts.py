"""Check what silos report about their work before it counts: numbers, and accounts that their keys signed."""

from typing import Any

from ekiden.base.errors import UserError
from ekiden.engine import wire
from ekiden.engine.wire import Ref
from ekiden.transports.flower import custody
from ekiden.transports.flower.agreement import Agreement
from ekiden.transports.flower.custody import Record, SignedTally, Tally
from ekiden.transports.flower.parcel import Answer, Count
from ekiden.transports.flower.shelf import is_place


def check_answer(ref: Ref[Any], answer: Answer) -> None:
    """Refuse numbers that no task can have."""
    if min(answer.size, answer.forward, answer.backward) < 0:
        raise unusable(ref.owner, f"account of {ref.key}", "a count in it is negative")
    if answer.state and not is_place(answer.state):
        raise unusable(ref.owner, f"account of {ref.key}", "it names no place of its private state")


def counts_in(body: memoryview, client: str, models: int) -> list[Count]:
    """Return what a silo counted for each of some models."""
    try:
        found: list[Count] = wire.decode(body, list[Count])
    except wire.WireError as error:
        raise unusable(client, "count of right answers", str(error)) from None
    if len(found) != models:
        raise UserError(f"silo {client} measured {len(found)} of {models} models")
    if any(not 0 <= count.right <= count.samples for count in found):  # the loss of a model may be NaN
        raise unusable(client, "count of right answers", "it is negative, or above that of samples")
    return found


def tally(
    agreed: Agreement,
    client: str,
    line: str,
    step: int,
    results: int,
    digests: tuple[str, ...],
    counts: tuple[Count, ...],
) -> SignedTally:
    """Return a silo's account of what it measured, for the chain of custody."""
    found = custody.parse_measured(line)
    said = Tally(agreed.run, agreed.digest, client, step, results, digests, counts, found.tally.data)
    if found.tally.text() != said.text() or not found.signed_by(agreed.silos[client]):
        raise UserError(f"silo {client} gives no account of what it measured that its key signed: refused")
    return found


def record(agreed: Agreement, ref: Ref[Any], answer: Answer) -> Record:
    """Return a silo's account of what it did, for the chain of custody."""
    record = custody.parse(answer.record)
    hop = record.hop
    same = (hop.run, hop.terms, hop.client, hop.key) == (agreed.run, agreed.digest, ref.owner, ref.key)
    counted = (hop.size, hop.forward, hop.backward) == (answer.size, answer.forward, answer.backward)
    if not (same and counted) or not record.signed_by(agreed.silos[ref.owner]):
        raise UserError(f"silo {ref.owner} gives no account of {ref.key} that its key signed: refused")
    return record


def unusable(client: str, what: str, why: str) -> UserError:
    """Return the error for something impossible that a silo sent."""
    return UserError(f"silo {client} sent a {what} that cannot be used ({why}): fix that silo or run without it")
