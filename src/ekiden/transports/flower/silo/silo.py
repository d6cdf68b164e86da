"""A silo. It does what the coordinator asks, if the silo's own file allows it, and does nothing twice."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ekiden.base.errors import PrivateError, UserError
from ekiden.data.kinds import terms as terms_of
from ekiden.data.tasks import terms as task_terms
from ekiden.engine import wire
from ekiden.engine.folder import code_version
from ekiden.transports.flower.silo import approval, participation, policy
from ekiden.transports.flower.silo.participation import Admission, Agreed, sign, take_part
from ekiden.transports.flower.silo.shelf import Shelf, drop_old_runs
from ekiden.transports.flower.silo.silo_file import Held, SiloFile
from ekiden.transports.flower.silo.tasks import SiloTasks, evaluate
from ekiden.transports.flower.trust import agreement as agreements
from ekiden.transports.flower.trust import sealing
from ekiden.transports.flower.trust.agreement import Agreement
from ekiden.transports.flower.trust.parcel import Answer, Ask, Hello, pack, signed_text, unpack
from ekiden.transports.flower.trust.sealing import Party

log = logging.getLogger("ekiden")


class Silo:
    """Answers requests."""

    def __init__(self, file: SiloFile, held: Held | None = None, named: Mapping[str, Held] | None = None) -> None:
        """Make a silo.

        Args:
            file: its `silo.toml`.
            held: its data if they are loaded already.
            named: the same of several data sets, by their names.
        """
        self._own = file
        self._file = file
        """with the data set of the request that is answered"""
        self._loaded = {**({"": held} if held else {}), **(named or {})}
        self._name = ""
        self._agreement: Agreed | None = None

    def answer(self, data: bytes) -> bytes:
        """Return the answer to a request. If anything is wrong with the request, the answer says so on one line."""
        what = "a message"
        try:
            ask, body = unpack(data, Ask)
            what = ask.kind[:40]
            if ask.kind == "hello":
                return self._hello(ask)
            terms = agreements.parse(ask.agreement)
            what += f" of run {terms.run}"
            self._choose(terms.data)
            if ask.kind == "status":
                Admission(self._file, terms).check()
                return pack(Answer(self._file.name, busy=Shelf(self._runs / terms.run, None).busy()))
            run = self._agreed(terms)
            shelf = Shelf(self._runs / run.terms.run, run.worker.setup.method.traits.private)
            with shelf.held():
                approval.take(self._file, terms)
                run.admission.count()
                if ask.kind in ("task", "value") and terms.measures:
                    raise UserError("the run only measures a model: refused")
                if ask.kind == "task":
                    return SiloTasks(run, shelf).do(ask, body, data)
                if ask.kind == "value":
                    return SiloTasks(run, shelf).show(ask)
                if ask.kind == "evaluate":
                    return evaluate(run, ask, body)
            raise UserError(f"no silo can do {ask.kind[:40]!r}")
        except UserError as error:
            reason = str(error).replace("\n", " ")
            log.warning("refused: %s", reason)
            self._note(f"refused {what}: {reason}")
            if isinstance(error, PrivateError):
                reason = error.told
        except Exception as error:  # from torch or from the user's own data function
            log.exception("a request failed")
            self._note(f"failed at {what}: {type(error).__name__}: {error}")
            # The text may hold a sample's value.
            reason = f"it failed with {type(error).__name__}; its own log says why"
        return pack(Answer(self._file.name, error=reason))

    @property
    def _runs(self) -> Path:
        return self._file.folder / "runs"

    def _choose(self, name: str) -> None:
        """Answer with the data set of this name."""
        self._file, self._name = self._own.holding(name), name

    def _held(self) -> Held:
        if self._name not in self._loaded:
            self._loaded[self._name] = self._file.load()
        return self._loaded[self._name]

    def _note(self, line: str) -> None:
        participation.log_request(self._file.folder, line)

    def _hello(self, ask: Ask) -> bytes:
        """Tell who this silo is and what it holds, in numbers, and whether it agrees to the terms, if there are any."""
        drop_old_runs(self._runs)
        terms = agreements.parse(ask.agreement) if ask.agreement else None
        self._choose(terms.data if terms else ask.data)
        self._note(f"hello{f' of run {terms.run}, agreed to' if terms else ''}")
        run = self._agreed(terms) if terms else None
        dataset, client = self._held()
        file = self._file
        hello = Hello(
            file.name,
            code_version(),
            dataset.name if not file.data.path else Path(file.data.path).stem,
            dataset.shape,
            dataset.classes,
            tuple(map(float, dataset.mean)),
            tuple(map(float, dataset.std)),
            (dataset.augment.crop, dataset.augment.flip, float(dataset.augment.rotation)),
            (len(client.train), len(client.val), len(client.test)),
            terms_of(dataset.inputs),
            file.limits.evaluations,
            task=task_terms(dataset.task),
            schema=file.schema,
            counts=dict(file.class_counts),
        )
        if file.link.key:
            hello = replace(hello, signature=sign(file, signed_text(ask.nonce, file.name)))
        if run and isinstance(run.sealer, Party):
            key = sealing.public_of(run.sealer.private)
            hello = replace(hello, sealing=key, proof=sign(file, sealing.key_text(run.terms.run, file.name, key)))
        return pack(Answer(file.name), wire.chunks(hello))

    def _agreed(self, terms: Agreement) -> Agreed:
        """Return the run with these terms."""
        if self._agreement is None or self._agreement.terms != terms:
            policy.check_terms(self._file, terms)
            Admission(self._file, terms).check()  # before anything is read or built for terms that are refused
            approval.check(self._file, terms)
            self._agreement = take_part(self._file, self._held(), terms)
        return self._agreement
