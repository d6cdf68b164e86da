"""A federation's folder: what `ekiden federation init` makes, and `ekiden federation start` and
`ekiden run` read.
"""

import ipaddress
import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from shutil import rmtree
from typing import Annotated, Literal, TypeAlias

from ekiden.core.base.checks import Checked, Range, made, plain, reading
from ekiden.core.base.errors import UserError, unknown
from ekiden.core.base.files import lock_file, locked, read_toml, write
from ekiden.silos.logs import numbers_in
from ekiden.silos.silo import silo_file
from ekiden.silos.silo.levels import Level
from ekiden.silos.trust import keys
from ekiden.silos.trust.agreement import ROSTER, Roster, check_names, read_roster
from ekiden.silos.trust.keys import make_certificates

FILE = "federation.toml"
SEEN = "seen.json"
# folder with the files that a change of silos brings, once it has all of them
_NEXT = ".next"
# seconds within which a connected silo asks for messages; its heartbeats come every half minute
_CONNECTED = 60.0
Port: TypeAlias = Annotated[int, Range(least=1, most=65535)]
State: TypeAlias = Literal["connected", "away", "never"]
Register: TypeAlias = Callable[[Mapping[str, str]], None]


@dataclass(frozen=True)
class Federation(Checked):
    """A coordinator's side of a federation."""

    # holds certificates, the SuperLink's database, `keys/NAME.pub`, and `silos/NAME` to give to
    # each silo
    folder: Path
    # name or IP address at which silos reach the SuperLink
    host: str
    # port for silos only
    port: Port
    # port on loopback, for the coordinator
    control_port: Port
    # names of the silos, in the order that methods see
    silos: tuple[str, ...]
    # those added later that took part in no run so far
    joining: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not _is_host(self.host):
            raise UserError(
                f"--host {self.host!r} is neither a name nor an IP address: give the one that "
                "silos use"
            )
        if self.port == self.control_port:
            raise UserError(f"--control-port {self.port} is the silos' port: choose another one")
        if not self.silos:
            raise UserError(
                "give the public keys of the silos, which `ekiden silo init` makes there, or say "
                "--silos NAME,NAME,... to make all keys here"
            )
        check_names(self.silos, "--silos")

    @property
    def link(self) -> str:
        """Address at which the coordinator reaches the SuperLink, on its own machine only."""
        return f"127.0.0.1:{self.control_port}"

    @property
    def address(self) -> str:
        """Address at which silos reach the SuperLink."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def certificate(self) -> Path:
        """Certificate of the authority that signed the SuperLink's certificate."""
        return self.folder / "ca.crt"

    @property
    def keys(self) -> Path:
        """The folder of the silos' public keys."""
        return self.folder / "keys"

    @property
    def database(self) -> Path:
        """The SuperLink's messages."""
        return self.folder / "link.db"

    def silo(self, name: str) -> Path:
        """Return the folder to give to a silo."""
        return self.folder / "silos" / name


def init(
    federation: Federation, public: Mapping[str, str], data: str, level: Level = "sums"
) -> None:
    """Make the folder: certificates, and the silos' public keys.

    Of silos without a key the pair is made here, with a folder for the silo, whose data are a path
    (relative to `silo.toml`), a name of a data set, or FILE.py:FUNCTION.
    """
    folder = federation.folder
    with keys.new_folder(folder):
        federation.keys.mkdir(parents=True)
        make_certificates(folder, federation.host)
        salt = token_hex(16)
        here = [name for name in federation.silos if name not in public]
        made = {
            name: silo_file.make(
                federation.silo(name), name, federation.address, data, salt, level, approve=False
            )
            for name in here
        }
        _store(
            federation, {**public, **{name: keys.read_public(path) for name, path in made.items()}}
        )
        for name in here:
            silo_file.join(
                silo_file.read(federation.silo(name) / "silo.toml"), read_roster(folder / ROSTER)
            )


def named_keys(files: Sequence[Path]) -> dict[str, str]:
    """Return the public keys in files NAME.pub or NAME.key.pub, by the silos' names."""
    found: dict[str, str] = {}
    for file in files:
        name = file.name.removesuffix(".pub").removesuffix(".key")
        if name in found:
            raise UserError(f"two keys are of {name!r}: give each silo its own name")
        key = keys.read_public(file, "`ekiden silo init` makes it at the silo")
        if twin := next((other for other, known in found.items() if keys.same(known, key)), ""):
            raise UserError(f"{twin} and {name} have the same key: each silo makes its own")
        found[name] = key
    return found


def add(federation: Federation, public: Mapping[str, str], register: Register) -> Federation:
    """Let further silos in; `register` tells a SuperLink that runs of their keys."""
    for name in public:
        if name in federation.silos:
            raise UserError(
                f"{name} is in the federation: `ekiden federation rotate` replaces its key"
            )
    after = replace(federation, joining=(*federation.joining, *public))
    return _changed(after, (*federation.silos, *public), public, register)


def members(federation: Federation) -> tuple[str, ...]:
    """Return the silos that runs are among unless the user names others: those that are there from
    the beginning, or took part before. The others refuse one whose key they were not given yet.
    """
    return tuple(name for name in federation.silos if name not in federation.joining)


def met(folder: Path, names: Collection[str]) -> None:
    """Note that a run among these silos has ended well: so all of them know each other's keys."""
    now = read(folder)
    if {*now.joining} & {*names}:
        after = replace(now, joining=tuple(name for name in now.joining if name not in names))
        write(folder / FILE, [_toml(after).encode()])


def rotate(federation: Federation, public: Mapping[str, str], register: Register) -> Federation:
    """Replace the keys of silos; the former keys are refused from now on. `register` as in `add`."""
    for name in public:
        if name not in federation.silos:
            raise UserError(f"{name} is not in the federation: `ekiden federation add` lets it in")
    return _changed(federation, federation.silos, public, register)


def revoke(federation: Federation, names: Iterable[str]) -> Federation:
    """Refuse silos from now on."""
    for name in names:
        if name not in federation.silos:
            raise unknown("silo", name, federation.silos)
    left = tuple(name for name in federation.silos if name not in names)
    return _changed(federation, left, {}, lambda public: None)


@dataclass(frozen=True)
class SiloStatus:
    """A silo as the SuperLink sees it."""

    name: str
    # of its key
    fingerprint: str
    # connected, away, or never seen by this SuperLink
    state: State
    # seconds since its last signed request; None if there was none
    seen: float | None


def status(federation: Federation) -> list[SiloStatus]:
    """Return which silos are connected."""
    # what the SuperLink wrote a few seconds ago; nothing if it never ran
    seen = numbers_in(federation.folder / SEEN)
    found = []
    for name, public in read_roster(federation.folder / ROSTER).key_of.items():
        ago = round(time.time() - seen[name], 1) if name in seen else None
        state: State = "away"
        if ago is None:
            state = "never"
        elif ago < _CONNECTED:
            state = "connected"
        found.append(SiloStatus(name, keys.fingerprint(public), state, ago))
    return found


def _changed(
    federation: Federation, names: tuple[str, ...], public: Mapping[str, str], register: Register
) -> Federation:
    joining = tuple(name for name in federation.joining if name in names)
    after = replace(federation, silos=names, joining=joining)
    before = read_roster(federation.folder / ROSTER).key_of
    for name, key in public.items():
        if twin := next((other for other, known in before.items() if keys.same(known, key)), ""):
            raise UserError(
                f"{twin} has the key that is given for {name}: each silo makes its own, and a new "
                "one"
            )
    # before the files: a command that is killed then can be repeated
    register(public)
    _store(after, {name: public.get(name) or before[name] for name in names})
    return after


def _store(federation: Federation, public: Mapping[str, str]) -> None:
    """Write the silos' keys, the roster, and `federation.toml`: all of them or none, whenever this
    process is killed. The SuperLink lets in who has a key there.
    """
    folder = federation.folder
    certificate = federation.certificate.read_text(encoding="utf-8")
    found = Roster(certificate, federation.silos, tuple(public[name] for name in federation.silos))
    texts = {f"{name}.pub": f"{public[name]}\n" for name in federation.silos}
    texts |= {ROSTER: found.to_json(), FILE: _toml(federation)}
    new = folder / ".new"
    with locked(lock_file(folder / FILE)):
        try:
            # of a killed command
            rmtree(new, ignore_errors=True)
            new.mkdir()
            for name, text in texts.items():
                write(new / name, [text.encode()])
            new.rename(folder / _NEXT)
        finally:
            # also on a full disk: nobody who was revoked gets in
            _drop_keys(federation.keys, federation.silos)
            rmtree(new, ignore_errors=True)
        _bring_next(folder)


def _bring_next(folder: Path) -> None:
    """Move the files of a change to their places, or those that a killed command left to move."""
    for path in (folder / _NEXT).iterdir():
        place = folder
        if path.suffix == ".pub":
            place = folder / "keys"
        path.replace(place / path.name)
    _drop_keys(folder / "keys", read_roster(folder / ROSTER).silos)
    (folder / _NEXT).rmdir()


def _drop_keys(folder: Path, silos: Collection[str]) -> None:
    """Remove the keys of all but these silos."""
    for path in folder.glob("*.pub"):
        if path.stem not in silos:
            path.unlink()


def _toml(federation: Federation) -> str:
    lines = [
        f"{key} = {json.dumps(value)}\n"
        for key, value in plain(federation).items()
        if key != "folder"
    ]
    return "".join(lines)


def read(folder: Path) -> Federation:
    """Return the federation in `folder`, after a change that a killed command left unfinished."""
    file = folder / FILE
    if (folder / _NEXT).is_dir():
        with locked(lock_file(folder / FILE)), suppress(FileNotFoundError):
            _bring_next(folder)
    values = read_toml(file, f"`ekiden federation init {folder}` makes a federation")
    with reading(str(file), "what `ekiden federation init` wrote"):
        return made(Federation, {"folder": folder} | values)


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return bool(re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", text))
    return True
