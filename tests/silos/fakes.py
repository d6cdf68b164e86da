"""Silos without an engine between them: what Flower does, without processes and sockets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.wire import SERVER, Encoded
from ekiden.data import FederatedData
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.courier import Lost
from ekiden.silos.coordinator.remote_plan import Measuring, RemotePlan
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import Held, SiloFile, read
from ekiden.silos.trust import keys, sealing
from ekiden.silos.trust.agreement import NOISE, parse
from ekiden.silos.trust.parcel import Answer, Ask, arguments_key, pack, unpack
from ekiden.silos.trust.sealing import Party, Reader

NAMES = ("client-0", "client-1", "client-2")
SILENT = ("broke off on the way there", "broke off on the way back")
SPLIT = """
from dataclasses import replace

import torch

from ekiden.data import load, parse, split

def mine():
    digits = load("digits")
    few = replace(digits, train=digits.train.taken(torch.arange(480)))
    return split(few, parse("dirichlet:0.5"), 3, seed=0)
"""


def with_keys(
    folder: Path, names: Sequence[str], more: str = "", *, trusting: bool = True
) -> tuple[list[SiloFile], dict[str, str]]:
    """Silos with keys, each of which knows those of the others, and their public keys."""
    link = '[link]\nkey = "{name}.key"\npeers = "peers"\n'
    files = [
        silo_file(folder, name, more + link.format(name=name), trusting=trusting) for name in names
    ]
    public = {f.name: keys.read_public(keys.generate(f.key)) for f in files}
    (folder / "peers").mkdir(exist_ok=True)
    for name, key in public.items():
        (folder / "peers" / f"{name}.pub").write_text(key)
    return files, public


def silo_file(folder: Path, name: str, more: str = "", *, trusting: bool = True) -> SiloFile:
    """The `silo.toml` of one of three silos that share some digits; some trust each other with the
    features."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "own.py").write_text(SPLIT)
    path = folder / f"{name}.toml"
    path.write_text(
        f'name = "{name}"\n[data]\npython = "own.py:mine"\n[hardware]\nthreads = 1\n{more}'
    )
    file = keyed(read(path))
    if not trusting:
        return file
    least = file.limits.min_clients or 2
    limits = replace(file.limits, level="all", min_active=0, min_clients=least)
    return replace(file, limits=limits)


@cache
def key_pair(name: str) -> tuple[bytes, str]:
    """The private and the public key of a silo, the same in all tests of a process."""
    with TemporaryDirectory() as folder:
        private = Path(folder) / name
        public = keys.read_public(keys.generate(private))
        return private.read_bytes(), public


def public_key(name: str) -> str:
    """The public key of a silo that `keyed` gives."""
    return key_pair(name)[1]


def keyed(file: SiloFile, names: Sequence[str] = NAMES) -> SiloFile:
    """The silo with a key, whose public half is among those of all silos in its folder; one that has
    a key stays as it is."""
    if file.link.key:
        return file
    folder, name = file.path.parent, f"{file.name}.key"
    if not (folder / name).exists():
        keys.write_secret(folder / name, key_pair(file.name)[0])
    (folder / "peers").mkdir(exist_ok=True)
    for other in {*names, file.name}:
        (folder / "peers" / f"{other}.pub").write_text(key_pair(other)[1])
    return replace(file, link=replace(file.link, key=name, peers="peers"))


def seal_for(file: SiloFile, data: bytes) -> bytes:
    """A request whose body is in the clear, as the coordinator seals it for a silo; anything else
    stays as it is."""
    try:
        ask, body = unpack(data, Ask)
        terms = parse(ask.agreement)
    except (wire.WireError, UserError):
        return data
    if ask.lock or not body or ask.length > len(body):
        return data
    reader = replace(member_of(file, terms.run), step=ask.step)
    server = Party(SERVER, terms.run, terms.digest, None, terms.silos, None)
    length = ask.length if ask.kind == "task" else len(body)
    name = arguments_key(ask) if ask.kind == "task" else "models"
    sealed, (lock,) = server.seal(Encoded.of(bytes(body[:length])), name, (reader,))
    parts, rest, at = [], [bytes(body[length:])], length
    for part in ask.parts:
        if not 0 <= part.length <= len(body) - at:
            break
        owner = Party(
            part.owner, terms.run, terms.digest, None, terms.silos, partial(sign, part.owner)
        )
        value, (one,) = owner.seal(
            Encoded.of(bytes(body[at : at + part.length])), part.key, (reader,)
        )
        at += part.length
        parts.append(replace(part, length=len(value), lock=one))
        rest = [*rest[:-1], value, bytes(body[at:])]
    changed = replace(ask, lock=lock, length=len(sealed) if ask.kind == "task" else 0)
    if len(parts) == len(ask.parts):
        changed = replace(changed, parts=tuple(parts))
    return pack(changed, (sealed, *rest))


def member_of(file: SiloFile, run: str) -> Reader:
    """A silo with its key of a run, as a reader and as a member of a sum."""
    private = sealing.kept_private(file.folder / "runs" / run)
    key = sealing.public_of(private)
    return Reader(file.name, 0, key, signed_key(file.name, run, key))


def opened_by_server(file: SiloFile, data: bytes) -> bytes:
    """The value that a silo gives for a request for a task, as the server opens it."""
    ask, body = unpack(data, Ask)
    terms, private = parse(ask.agreement), sealing.new_private()
    server = Party(SERVER, terms.run, terms.digest, private, terms.silos, None)
    ask = replace(ask, readers=(Reader(SERVER, ask.step, sealing.public_of(private)),))
    answer, value = unpack(Silo(file).answer(seal_for(file, pack(ask, (body,)))), Answer)
    assert not answer.error, answer.error
    key = f"{ask.step}-{ask.call}-{ask.task}"
    return server.open(value, answer.locks[0], file.name, key, ask.step).data


def sign(name: str, kind: str, payload: bytes) -> str:
    """The signature of a silo."""
    with TemporaryDirectory() as folder:
        keys.write_secret(Path(folder) / "key", key_pair(name)[0])
        return keys.sign(Path(folder) / "key", kind, payload)


@cache
def signed_key(name: str, run: str, key: str) -> str:
    """The signature of a silo of its key of a run."""
    return sign(name, sealing.KEY, sealing.key_text(run, name, key))


@cache
def silos() -> FederatedData:
    """What `own.py` gives all silos, loaded once as by the process that answers all messages of
    one."""
    scope: dict[str, Any] = {}
    exec(SPLIT, scope)
    found = scope["mine"]()
    assert isinstance(found, FederatedData)
    return found


def mine(name: str) -> Held:
    """What it gives one of them."""
    return silos().dataset, next(c for c in silos().clients if c.name == name)


class FakeNodes:
    """Every request is answered by a new `Silo`, as every message gets a new process."""

    def __init__(self, files: Sequence[SiloFile]) -> None:
        names = [file.name for file in files]
        self.files = {100 + i: keyed(file, names) for i, file in enumerate(files)}
        # the silos' public keys
        self.public = {f.name: keys.public_of(f.key) for f in self.files.values()}
        self.log: list[tuple[int, bytes]] = []
        self.lose: Callable[[int, bytes], Lost | None] = lambda node, data: None
        self.corrupt: dict[int, bytes] = {}
        self.said: list[bytes] = []
        self._answers: dict[str, bytes | Lost] = {}

    def ids(self) -> Sequence[int]:
        return list(self.files)

    def send(self, node: int, data: bytes) -> str | Lost:
        ticket = str(len(self.log))
        self.log.append((node, data))
        lost = self.lose(node, data)
        done = lost is None or lost.why not in ("unsent", SILENT[0])
        answer = self.silo(node).answer(data) if done and node not in self.corrupt else b""
        self.said.append(answer)
        if lost is None or lost.why not in SILENT:
            self._answers[ticket] = lost or self.corrupt.get(node, answer)
        return ticket

    def silo(self, node: int) -> Silo:
        file = self.files[node]
        return Silo(
            file, {"": mine(file.name)} if file.data.python and file.name in NAMES else None
        )

    def receive(self, tickets: Sequence[str]) -> Mapping[str, bytes | Lost]:
        return {t: self._answers.pop(t) for t in tickets if t in self._answers}


def evaluate(
    run: Path,
    names: Sequence[str],
    nodes: session.Nodes,
    out: Path,
    keys: Mapping[str, str],
    say: Callable[[str], None],
    *,
    weights: Path | None = None,
    validation: bool = False,
    by: Sequence[str] = (),
    data: str = "",
    evaluate_dp: str = "",
    seconds: float = 3600.0,
    poll: float = 1.0,
) -> dict[str, Any]:
    """Measure a model of a run at silos."""
    file = str(weights.absolute()) if weights else ""
    asked, before = Measuring(str(run), validation, tuple(by), file), session.made_by(run)
    noise = before.evaluate_dp if before.measured_steps else NOISE
    plan = RemotePlan(
        before.recipe,
        clients=",".join(names),
        data=data or before.data,
        evaluate_dp=evaluate_dp or noise,
        patience=seconds,
    )
    return session.evaluate(plan, asked, nodes, out, keys, say, poll=poll)
