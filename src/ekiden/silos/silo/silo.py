"""A silo. It answers what the coordinator asks, if the silo's own file allows it."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ekiden.core.base.errors import PrivateError, UserError
from ekiden.core.base.files import is_held
from ekiden.core.engine import wire
from ekiden.core.engine.folder import code_version
from ekiden.methods import FedGram
from ekiden.silos.silo import approval, measuring, participation, policy
from ekiden.silos.silo.participation import Admission, Agreed, sign, take_part
from ekiden.silos.silo.shelf import Shelf, drop_old_runs
from ekiden.silos.silo.silo_file import Held, SiloFile
from ekiden.silos.silo.tasks import SiloTasks
from ekiden.silos.trust import sealing
from ekiden.silos.trust.agreement import Agreement
from ekiden.silos.trust.parcel import HELLO, Answer, Ask, Hello, pack, signed_text, unpack
from ekiden.silos.trust.sealing import KEY

log = logging.getLogger("ekiden")


def check_bound(file: SiloFile, terms: Agreement) -> None:
    """Refuse other terms than those with which the run began here."""
    Admission(file, terms).check()


ADMISSION: tuple[Callable[[SiloFile, Agreement], None], ...] = (
    policy.check_terms,
    check_bound,
    # keeps the plan to be read, so what the file does not allow is refused before
    approval.check,
)
"""What each request of a run must pass, before the silo's data are read or anything is built: what
the operator changes in the file, a key that is taken away and an approval that ends count for runs
that have begun. What depends on data, which cannot change within a run, `take_part` checks at the
run's first request."""


class Silo:
    """Answers requests."""

    def __init__(self, file: SiloFile, held: Mapping[str, Held] | None = None) -> None:
        """Make a silo; `held` has its data sets by name, as far as they are loaded."""
        self._own = file
        self._file = file
        """with the data set of the request that is answered"""
        self._loaded = dict(held or {})
        self._name = ""

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a request. If anything is wrong with the request, the answer says so
        on one line.
        """
        what = "a message"
        ask = Ask("")
        try:
            ask, body = unpack(data, Ask)
            what = ask.kind[:40]
            if ask.kind == HELLO:
                return self._greeting(ask, self._hello(ask))
            terms = approval.read_terms(self._own, ask.agreement)
            what += f" of run {terms.run}"
            self._choose(terms.data)
            if ask.kind == "status":
                Admission(self._file, terms).check()
                return pack(Answer(self._file.name, busy=is_held(self._runs / terms.run / "lock")))
            run = self._agreed(terms)
            policy.check_lists(self._file.name, terms, ask)
            shelf = Shelf(self._runs / terms.run, run.worker.setup.method.traits.private)
            with shelf.held():
                approval.take(self._file, terms)
                run.admission.count()
                if ask.kind in ("task", "value") and terms.measures:
                    raise UserError("the run only measures a model: refused")
                match ask.kind:
                    case "task":
                        return SiloTasks(run, shelf).do(ask, body, data)
                    case "value":
                        return SiloTasks(run, shelf).show(ask)
                    case "evaluate":
                        return measuring.evaluate(run, ask, body)
            raise UserError(f"no silo can do {ask.kind[:40]!r}")
        except UserError as error:
            reason = str(error).replace("\n", " ")
            log.warning("refused: %s", reason)
            self._note(f"refused {what}: {reason}")
            if isinstance(error, PrivateError):
                reason = error.told
        # from torch or from the user's own data function
        except Exception as error:
            log.exception("a request failed")
            self._note(f"failed at {what}: {type(error).__name__}: {error}")
            # The text may hold a sample's value.
            reason = f"it failed with {type(error).__name__}; its own log says why"
        return self._refused(ask, reason)

    @property
    def _runs(self) -> Path:
        return self._file.folder / "runs"

    def _choose(self, name: str) -> None:
        """Answer with the data set of this name."""
        self._file = self._own.holding(name)
        self._name = name

    def _held(self) -> Held:
        if self._name not in self._loaded:
            self._loaded[self._name] = self._file.load()
        return self._loaded[self._name]

    def _note(self, line: str) -> None:
        participation.log_request(self._file.folder, line)

    def _hello(self, ask: Ask) -> Hello:
        """Tell who this silo is and what it holds, in numbers, and whether it agrees to the terms,
        if there are any.
        """
        drop_old_runs(self._runs)
        terms = approval.read_terms(self._own, ask.agreement) if ask.agreement else None
        self._choose(terms.data if terms else ask.data)
        self._note(f"hello{f' of run {terms.run}, agreed to' if terms else ''}")
        # nothing is read before the silo's file allows it
        if ask.plan:
            policy.check_terms(self._file, approval.read_terms(self._own, ask.plan))
        run = self._agreed(terms) if terms else None
        dataset, client = self._held()
        file = self._file
        hello = Hello(
            code_version(),
            policy.sample_terms(file, dataset),
            (len(client.train), len(client.val), len(client.test)),
            counts=dict(file.agreed.classes),
            features=policy.most_features(
                FedGram(min_active=file.limits.min_active),
                client.train,
                dataset.task,
                dataset.outputs,
            ),
        )
        if run:
            key = sealing.public_of(run.sealer.private)
            hello = replace(
                hello,
                sealing=key,
                proof=sign(file, KEY, sealing.key_text(run.terms.run, file.name, key)),
            )
        return hello

    def _refused(self, ask: Ask, reason: str) -> bytes:
        if ask.kind == HELLO:
            # a silo that proves its name is believed at once
            with suppress(UserError):
                return self._greeting(ask, Hello(code_version()), reason)
        return pack(Answer(self._file.name, error=reason))

    def _greeting(self, ask: Ask, hello: Hello, error: str = "") -> bytes:
        """Return the answer to a hello, with a signature that proves the silo's name."""
        name = self._file.name
        hello = replace(hello, signature=sign(self._file, HELLO, signed_text(ask.nonce, name)))
        return pack(Answer(name, error), wire.chunks(hello))

    def _agreed(self, terms: Agreement) -> Agreed:
        """Return the run with these terms, if the silo agrees to it."""
        for check in ADMISSION:
            check(self._file, terms)
        return take_part(self._file, self._held(), terms)
