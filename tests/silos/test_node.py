"""A silo notes whether it is connected, and what to do if it is not."""

import ssl
from pathlib import Path

import httpx
import pytest

from ekiden.silos.silo import connection

REQUEST = httpx.Request("POST", "https://link.example.org:8000/v1/fleet/pull-messages")


def status(code: int) -> httpx.HTTPStatusError:
    answer = httpx.Response(code, request=REQUEST)
    return httpx.HTTPStatusError(f"Client error '{code}'", request=REQUEST, response=answer)


def untrusted(why: str) -> httpx.ConnectError:
    return httpx.ConnectError(
        str(ssl.SSLCertVerificationError(f"[SSL: CERTIFICATE_VERIFY_FAILED] {why}"))
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            status(401),
            "does not know the silo's key: the coordinator lets it in by `ekiden federation add`",
        ),
        (untrusted("certificate has expired"), "has expired: the coordinator renews it"),
        (untrusted("self-signed"), "roster.json --replace ca.crt"),
        (httpx.ConnectError("refused"), "does not answer (refused): does it run"),
        (status(412), "the last connection of this silo"),
    ],
    ids=["revoked", "expired", "another authority", "not there", "too early"],
)
def test_a_silo_says_whether_it_is_connected_and_what_to_do(
    error: httpx.HTTPError, words: str, tmp_path: Path
) -> None:
    from ekiden.silos.silo.node import Noted

    assert connection.health(tmp_path) == (False, "not connected yet")
    noted = Noted(tmp_path)
    noted()
    good, said = connection.health(tmp_path)
    assert good
    assert said.startswith("connected since 2")
    began = connection.read(tmp_path).since
    noted()
    assert connection.read(tmp_path).since == began, "it did not change"
    noted(error)
    good, said = connection.health(tmp_path)
    assert not good
    assert words in said
    assert connection.read(tmp_path).since > began
    noted()
    assert connection.health(tmp_path)[0]
