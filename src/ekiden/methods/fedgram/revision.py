"""FedGram: the outer loops of a client that leaves a finished run, and of one that joins it."""

from collections.abc import Iterator
from dataclasses import replace

from ekiden.engine.federation import Fed
from ekiden.engine.method import INITIAL, State
from ekiden.methods.fedgram.fedgram import FedGram
from ekiden.methods.fedgram.handed import Handoff, Summing


def forget(method: FedGram, fed: Fed, s: Summing, client: str, heir: str) -> Iterator[State]:
    """The outer loop of forgetting `client`, from the last state of a run: two steps, and personal heads.

    The client measures its sums again, and whoever holds the totals takes them out. If that is the client itself,
    it hands the rest to `heir`.
    """
    if isinstance(s.totals, Handoff):  # a star
        own = fed.get(fed.call(method.measure, client, INITIAL, s.totals.settled, None))
        s = s.next(model=None, totals=Handoff(s.totals.settled, s.totals.sums.minus(own)))
    else:
        assert s.totals is not None, "a run that has ended has totals"
        holder = s.totals.owner
        part = fed.call(method.measure, client, INITIAL, fed.call(method.tell, holder, s.totals), None)
        rest = fed.call(method.without, holder, s.totals, part)
        s = s.next(model=None, totals=fed.call(method.keep, heir, rest) if holder == client else rest)
    s = replace(s, personal=())
    yield s
    yield from method.finish(fed, s, [name for name in fed.clients if name != client])


def join(method: FedGram, fed: Fed, s: Summing, client: str) -> Iterator[State]:
    """The outer loop of adding `client`, from the last state of a run: one more hop or reply, and the solution."""
    if isinstance(s.totals, Handoff):  # a star
        own = fed.get(fed.call(method.measure, client, INITIAL, s.totals.settled, None))
        s = s.next(model=None, totals=Handoff(s.totals.settled, s.totals.sums.plus(own)))
    else:
        s = s.next(model=None, totals=fed.sum(method.add, [client], INITIAL, None, plus=s.totals))
    s = replace(s, personal=())
    yield s
    yield from method.finish(fed, s, fed.clients)
