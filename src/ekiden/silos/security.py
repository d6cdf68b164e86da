"""How a SuperLink is reached: with which certificate, and past which proxy."""

import ipaddress
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ekiden.core.base.errors import UserError
from ekiden.silos.trust import keys

Say = Callable[[str], None]
# days before its end from which a certificate is named
SOON = 30
# seconds for a certificate
_WAIT = 3.0
_RENEW = "`ekiden federation rotate` at the coordinator renews it"
_OWN_HOSTS = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Security:
    """How to authenticate the SuperLink."""

    # PEM file of the authority that signed its certificate; None trusts the system's authorities
    certificate: Path | None = None
    # use no TLS
    insecure: bool = False

    def flags(self) -> list[str]:
        """Return the flags for Flower's commands."""
        if self.insecure:
            return ["--insecure"]
        return ["--root-certificates", str(self.certificate.absolute())] if self.certificate else []


def checked(address: str, security: Security, say: Say, *, anywhere: bool) -> None:
    """Refuse unsafe connections, and warn about insecure ones that are allowed.

    A plain connection to another machine is allowed if the user says so (`anywhere`).
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(
            f"{address!r} is not the address of a SuperLink: give HOST:PORT, such as "
            "link.example.org:8000"
        )
    if security.insecure:
        if not _is_loopback(host) and not anywhere:
            raise UserError(
                f"--insecure to {host} would send models and requests in the clear: use a "
                "certificate, "
                "or say --insecure-anywhere"
            )
        say("WARNING: --insecure: nothing on this connection is encrypted or authenticated")
    elif security.certificate is not None and not security.certificate.is_file():
        raise UserError(
            f"there is no certificate {security.certificate}: get the SuperLink's CA certificate "
            "first"
        )
    else:
        _check_date(address, say)


def certificate_end(address: str) -> datetime | None:
    """Return when the certificate of a SuperLink ends; None if nobody answers with one."""
    host, _, port = address.rpartition(":")
    try:
        pem = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=_WAIT)
    except (OSError, ValueError):
        return None
    return keys.end_of(pem.encode())


def days_left(address: str) -> str:
    """Say for how many days a SuperLink's certificate is valid; nothing if that is not known."""
    left = _days(address)
    if left is None:
        return ""
    if left < 0:
        return f"; the SuperLink's certificate has expired: {_RENEW}"
    return f"; the SuperLink's certificate ends in {left} days"


def _days(address: str) -> int | None:
    """Return the whole days until a SuperLink's certificate ends; below 0 if it has ended."""
    end = certificate_end(address)
    return None if end is None else (end - datetime.now(UTC)).days


def _check_date(address: str, say: Say) -> None:
    """Refuse a SuperLink whose certificate has expired, and say if it soon will; nothing if nobody
    answers.
    """
    left = _days(address)
    if left is None:
        return
    if left < 0:
        raise UserError(f"the certificate of {address} has expired: {_RENEW}")
    if left < SOON:
        say(f"WARNING: the certificate of {address} ends in {left} days: {_RENEW}")


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that keep calls to this machine away from a proxy; they name what they
    named before, too.
    """
    found = {}
    for name in ("NO_PROXY", "no_proxy"):
        named = [part.strip() for part in environment.get(name, "").split(",") if part.strip()]
        found[name] = ",".join([*named, *(host for host in _OWN_HOSTS if host not in named)])
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
