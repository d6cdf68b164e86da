"""What a silo agrees to: its own file and the method as it is installed here have the last word."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from ekiden.core import wire
from ekiden.core.files import write
from ekiden.core.method import SERVER, Ref
from ekiden.core.outline import Outline
from ekiden.errors import UserError
from ekiden.transports.flower import keys
from ekiden.transports.flower.agreement import Agreement
from ekiden.transports.flower.parcel import Ask
from ekiden.transports.flower.sealing import Reader
from ekiden.transports.flower.silo_file import Held, SiloFile

log = logging.getLogger("ekiden")


def check_terms(file: SiloFile, agreed: Agreement) -> None:
    """Refuse a run that the silo's file does not allow.

    Raises:
        UserError: says which line of it.
    """
    name = file.name
    if agreed.method not in file.limits.methods:
        raise UserError(
            f"{name} does not allow {agreed.method[:40]!r}, only {', '.join(file.limits.methods)} "
            "(limits.methods in its silo.toml)"
        )
    if file.link.key and not agreed.sealed and not file.limits.unsealed:
        raise UserError(
            f"the run does not seal models, {name} wants that: leave out --no-sealed and --insecure "
            "(limits.unsealed in its silo.toml)"
        )
    if agreed.keys:
        _check_keys(file, agreed)


def check_size(file: SiloFile, agreed: Agreement) -> None:
    """Refuse a model above the silo's limit, without allocating it.

    Raises:
        UserError: says both sizes.
    """
    with torch.device("meta"):
        module = agreed.builder(agreed.build_method())()
    size = sum(t.numel() * t.element_size() for t in module.state_dict().values())
    if size > file.limits.model_bytes:
        raise UserError(
            f"the model has {size} bytes, {file.name} allows {file.limits.model_bytes} "
            "(limits.model_bytes in its silo.toml)"
        )


def check_data(file: SiloFile, agreed: Agreement, held: Held) -> None:
    """Refuse a run over other samples than the silo holds.

    Raises:
        UserError: says what differs.
    """
    dataset, _ = held
    for what, here, there in (
        ("samples of shape", dataset.shape, agreed.shape),
        ("the classes", dataset.classes, agreed.classes),
    ):
        if here != there:
            raise UserError(f"{file.name} holds {what} {here}, the run is for {there}")


def check_request(name: str, agreed: Agreement, outline: Outline | None, ask: Ask, arguments: bytes) -> None:
    """Refuse a task, an order or a value to work on that the method's outer loop would not ask for.

    It can be told only where the server reads nothing on the way, and nobody is left out.

    Raises:
        UserError: the request is another one.
    """
    if outline is None or agreed.skips:
        return
    expected = outline.request(ask.step, ask.call, name)
    if expected is None or expected.task != ask.task or wire.encode(expected.args) != arguments:
        raise UserError(f"{agreed.method} does not ask this of {name} in step {ask.step + 1}: refused")


def kept(name: str, agreed: Agreement, outline: Outline | None, ask: Ask) -> frozenset[str]:
    """What the silo keeps of the steps that are done for good: what it is told, and what the method still needs."""
    keep = frozenset(ask.keep)
    if outline is None or agreed.skips:
        return keep
    return keep.union(ref.key for ref in outline.needed(ask.settled) if ref.owner == name)


def check_readers(name: str, agreed: Agreement, outline: Outline | None, key: str, readers: Sequence[Reader]) -> None:
    """Refuse to let somebody read a value who has no need to, as far as `check_request` can tell.

    Raises:
        UserError: the server or another silo, where the method needs no value of it there, or a stranger.
    """
    value: Ref[Any] = Ref(name, key)
    for reader in readers:
        if reader.name not in (SERVER, *agreed.clients):
            raise UserError(f"{reader.name[:80]!r} takes no part in the run: {name} shows it nothing")
        if outline is None or agreed.skips:
            continue
        if reader.name == SERVER and value not in outline.result:
            raise UserError(
                f"in {agreed.method} the server reads only the result, not {key[:80]!r}: {name} does not show it"
            )
        if reader.name != SERVER and (reader.name, reader.step) not in outline.users(value):
            raise UserError(
                f"in {agreed.method} {reader.name} does not use {key[:80]!r} in step {reader.step + 1}: "
                f"{name} does not show it"
            )


def _check_keys(file: SiloFile, agreed: Agreement) -> None:
    """Compare the keys in the terms with those that the silo knows; without `link.peers`, learn them at first sight.

    Raises:
        UserError: another key than before, or one that the silo was not given.
    """
    if file.name not in agreed.clients:
        raise UserError(f"the run is among {', '.join(agreed.clients)[:200]}, not {file.name}: refused")
    given = bool(file.link.peers)
    folder = file.beside(file.link.peers) if given else file.folder / "peers"
    for name, public in agreed.silos.items():
        if name == file.name:
            if file.link.key and not keys.same(public, keys.public_of(file.beside(file.link.key))):
                raise UserError(f"the run knows another key of {name} than it has: give the coordinator {name}.pub")
            continue
        path = folder / f"{name}.pub"
        if given or path.exists():
            if not keys.same(keys.read_public(path), public):
                raise UserError(
                    f"the run says that {name} has the key {keys.fingerprint(public)}, {file.name} knows another "
                    f"({path}): ask {name}, and replace the file only if its key is new"
                )
        else:
            keys.check(public)
            folder.mkdir(parents=True, exist_ok=True)
            write(path, [public.encode() + b"\n"])
            log.info("first run with %s, key %s: kept in %s", name, keys.fingerprint(public), path)
