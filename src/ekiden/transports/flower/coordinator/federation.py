"""A federation's folder: what `ekiden federation init` makes, and `ekiden federation start` and `ekiden run` read."""

import ipaddress
import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from shutil import copy, rmtree
from typing import Annotated, TypeAlias

from ekiden.base.checks import Checked, Range, made, plain, reading
from ekiden.base.errors import UserError
from ekiden.base.files import write
from ekiden.transports.flower.silo import silo_file
from ekiden.transports.flower.trust import keys
from ekiden.transports.flower.trust.agreement import check_name
from ekiden.transports.flower.trust.keys import make_certificates

FILE = "federation.toml"
Port: TypeAlias = Annotated[int, Range(least=1, most=65535)]


@dataclass(frozen=True)
class Federation(Checked):
    """A coordinator's side of a federation.

    Attributes:
        folder: holds certificates, the SuperLink's database, `keys/NAME.pub`, and `silos/NAME` to give to each silo.
        host: name or IP address at which silos reach the SuperLink.
        port: port for silos only.
        control_port: port on loopback, for the coordinator.
        silos: names of the silos, in the order that methods see.
    """

    folder: Path
    host: str
    port: Port
    control_port: Port
    silos: tuple[str, ...]

    def __post_init__(self) -> None:
        if not _is_host(self.host):
            raise UserError(f"--host {self.host!r} is neither a name nor an IP address: give the one that silos use")
        if self.port == self.control_port:
            raise UserError(f"--control-port {self.port} is the silos' port: choose another one")
        if not self.silos:
            raise UserError("say which silos take part: --silos NAME,NAME,...")
        for name in self.silos:
            check_name(name, "--silos")
            if not silo_file.is_name(name):
                raise UserError(f"--silos: {name!r} is not a name: use letters, digits, '-', '_' and '.'")
            if self.silos.count(name) > 1:
                raise UserError(f"--silos names {name!r} twice: give each silo its own name")

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

    def silo(self, name: str) -> Path:
        """Return the folder to give to a silo."""
        return self.folder / "silos" / name


def init(federation: Federation, data: str) -> None:
    """Make the folder: certificates, key pairs, and one folder for each silo.

    Args:
        federation: what to make.
        data: each silo's data: a path (relative to its `silo.toml`), a name of a data set, or FILE.py:FUNCTION.
    """
    folder = federation.folder
    if folder.exists():
        raise UserError(f"{folder} exists: choose another folder; a federation keeps its keys")
    try:
        federation.keys.mkdir(parents=True)
        make_certificates(folder, federation.host)
        for name in federation.silos:
            federation.silo(name).mkdir(parents=True)
            public = keys.generate(federation.silo(name) / f"{name}.key")
            copy(public, federation.keys / f"{name}.pub")
        salt = token_hex(16)
        for name in federation.silos:
            _fill(federation, name, data, salt)
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in plain(federation).items() if key != "folder"]
        write(folder / FILE, ["".join(lines).encode()])
    except OSError as error:
        rmtree(folder, ignore_errors=True)
        raise UserError(f"cannot write {error.filename or folder}: {error.strerror}") from None
    except BaseException:
        rmtree(folder, ignore_errors=True)
        raise


def read(folder: Path) -> Federation:
    """Return the federation in `folder`."""
    file = folder / FILE
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"there is no federation in {folder}: `ekiden federation init {folder}` makes one") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is not valid TOML: {error}") from None
    with reading(str(file), "what `ekiden federation init` wrote"):
        return made(Federation, {"folder": folder} | values)


def _fill(federation: Federation, name: str, data: str, salt: str) -> None:
    """Write what a silo needs into its folder."""
    folder = federation.silo(name)
    copy(federation.certificate, folder / "ca.crt")
    (folder / "peers").mkdir()
    for other in federation.silos:
        if other != name:
            copy(federation.keys / f"{other}.pub", folder / "peers" / f"{other}.pub")
    where = "python" if re.search(r"\.py:\w+$", data) else "path"
    text = f"""name = {json.dumps(name)}

[data]
{where} = {json.dumps(data)}
# to let `ekiden silo sums` tell 8 bytes for each row, by which equal rows of silos are found, see docs/own-data.md:
# fingerprints = {json.dumps(salt)}

[link]
address = {json.dumps(federation.address)}
certificate = "ca.crt"
key = {json.dumps(f"{name}.key")}
peers = "peers"

[limits]
# what this silo agrees to: methods = ["fedelmy"], epochs = 1000, and others, see docs/deployment.md
"""
    write(folder / "silo.toml", [text.encode()])
    silo_file.read(folder / "silo.toml")


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names in a text, which commas separate."""
    return tuple(name.strip() for name in text.split(",")) if text else ()


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return bool(re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*", text))
    return True
