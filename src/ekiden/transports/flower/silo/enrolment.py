"""A silo's way into a federation: its folder with a key of its own, and the others' keys from the roster."""

import json
import re
from collections.abc import Collection
from pathlib import Path
from shutil import rmtree

from ekiden.base.errors import UserError
from ekiden.base.files import write
from ekiden.transports.flower.silo import silo_file
from ekiden.transports.flower.silo.silo_file import SiloFile
from ekiden.transports.flower.trust import keys
from ekiden.transports.flower.trust.agreement import check_name
from ekiden.transports.flower.trust.roster import Roster

CERTIFICATE = "ca.crt"


def make(folder: Path, name: str, address: str, data: str, salt: str) -> Path:
    """Make a silo's folder, with `silo.toml` and a key pair, and return the public key's file.

    Args:
        folder: a new folder.
        name: the silo's name.
        address: HOST:PORT of the SuperLink.
        data: a path (relative to `silo.toml`), a name of a data set, or FILE.py:FUNCTION.
        salt: proposed as a secret that silos share.
    """
    check_name(name, "the silo")
    if not keys.is_name(name):
        raise UserError(f"{name!r} is not a name of a silo: use letters, digits, '-', '_' and '.'")
    if folder.exists():
        raise UserError(f"{folder} exists: choose another folder; a silo keeps its key")
    try:
        public = keys.generate(folder / f"{name}.key")
        where = "python" if re.search(r"\.py:\w+$", data) else "path"
        text = f"""name = {json.dumps(name)}

[data]
{where} = {json.dumps(data)}
# to let `ekiden silo sums` tell 8 bytes for each row, by which equal rows of silos are found, see docs/own-data.md:
# fingerprints = {json.dumps(salt)}

[link]
address = {json.dumps(address)}
certificate = "{CERTIFICATE}"
key = {json.dumps(f"{name}.key")}
peers = "peers"

[limits]
# what this silo agrees to: methods = ["fedelmy"], approve = true, and others, see docs/security.md
"""
        write(folder / "silo.toml", [text.encode()])
        silo_file.read(folder / "silo.toml")
    except BaseException:
        rmtree(folder, ignore_errors=True)
        raise
    return public


def join(file: SiloFile, roster: Roster, replace: Collection[str] = ()) -> list[str]:
    """Write the others' keys and the SuperLink's certificate to where `silo.toml` says; return what changed.

    The roster comes from the coordinator, who could give keys of its own. So known keys are not replaced unless the
    operator, who asked that silo, says so.

    Args:
        file: the silo's file.
        roster: who takes part.
        replace: names of silos whose known key may change, and `ca.crt` for the certificate.
    """
    link = file.link
    if not (link.key and link.peers and link.certificate):
        raise UserError(f"{file.path}: name key, peers and certificate under [link] first")
    own = roster.key_of.get(file.name)
    if own is None or not keys.same(own, keys.public_of(file.beside(link.key))):
        raise UserError(
            f"the roster has {'another key of' if own else 'no'} {file.name}: give the coordinator {link.key}.pub"
        )
    peers, certificate = file.beside(link.peers), file.beside(link.certificate)
    wanted = {peers / f"{name}.pub": key + "\n" for name, key in roster.key_of.items() if name != file.name}
    wanted[certificate] = roster.certificate
    for path, text in wanted.items():
        name = CERTIFICATE if path == certificate else path.stem
        if path.exists() and path.read_text(encoding="utf-8").split() != text.split() and name not in replace:
            raise UserError(
                f"{path} has another key than the roster: ask its owner, by another way than the coordinator, and "
                f"then give --replace {name}"
            )
    peers.mkdir(parents=True, exist_ok=True)
    told = []
    for path in sorted(peers.glob("*.pub")):
        if path not in wanted:
            path.unlink()
            told.append(f"{path.stem} left: its key is removed")
    for path, text in wanted.items():
        if path.exists() and path.read_text(encoding="utf-8").split() == text.split():
            continue
        write(path, [text.encode()])
        told.append(f"{path.stem} has the key {keys.fingerprint(text)}" if path != certificate else f"wrote {path}")
    return told
