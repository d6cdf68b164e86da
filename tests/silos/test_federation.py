"""What a federation's folder holds, and who may do what with it."""

import asyncio
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterable, MutableMapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ekiden.cli.app import call
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import disk_error, write
from ekiden.silos import commands, forks, supernode
from ekiden.silos.coordinator import federation
from ekiden.silos.coordinator.federation import Federation
from ekiden.silos.logs import ENDED, Log
from ekiden.silos.metrics import Metrics
from ekiden.silos.silo import silo_file
from ekiden.silos.trust import keys
from ekiden.silos.trust.agreement import ROSTER
from tests.e2e.silos import free_ports

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
SILOS = ("a", "b", "c")


@pytest.fixture
def made(tmp_path: Path) -> Federation:
    call(
        [
            "federation",
            "init",
            str(tmp_path / "fed"),
            "--silos",
            ",".join(SILOS),
            "--host",
            "link.example.org",
        ]
    )
    return federation.read(tmp_path / "fed")


def test_every_silo_gets_what_it_needs_and_no_other_silos_secret(made: Federation) -> None:
    assert (made.silos, made.link, made.address) == (
        SILOS,
        "127.0.0.1:8001",
        "link.example.org:8000",
    )
    public = {name: keys.read_public(made.keys / f"{name}.pub") for name in SILOS}
    assert len(set(public.values())) == 3
    for name in SILOS:
        file = silo_file.read(made.silo(name) / "silo.toml")
        assert (file.name, file.link.address, file.data.path) == (name, made.address, "data")
        key = file.key
        assert keys.same(keys.public_of(key), public[name])
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        peers = {path.stem: path.read_text().strip() for path in file.peers.iterdir()}
        assert peers == {other: text for other, text in public.items() if other != name}
        assert file.beside(file.link.certificate).read_bytes() == made.certificate.read_bytes()
        assert [path.name for path in made.silo(name).rglob("*.key")] == [f"{name}.key"]
    assert stat.S_IMODE((made.folder / "link.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((made.folder / "ca.key").stat().st_mode) == 0o600


def test_the_certificate_is_for_the_host_and_for_loopback(made: Federation) -> None:
    from cryptography import x509

    link = x509.load_pem_x509_certificate((made.folder / "link.crt").read_bytes())
    names = link.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["link.example.org", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    authority = x509.load_pem_x509_certificate(made.certificate.read_bytes())
    link.verify_directly_issued_by(authority)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--silos", ""], "give the public keys of the silos, .* or say (--)?silos"),
        (["--silos", "a,b,a"], "names 'a' twice"),
        (["--silos", "a,../b"], "'../b' is not the name of a silo"),
        (["--silos", "a,server"], "no silo can be called 'server'"),
        (["--silos", "a", "--host", "https://x"], "neither a name nor an IP address"),
        (
            ["--silos", "a", "--port", "0"],
            "port 0 is out of range: it must be 1 or more and at most 65535",
        ),
        (["--silos", "a", "--port", "8001"], "8001 is the silos' port"),
    ],
)
def test_nothing_is_made_of_mistakes(tmp_path: Path, flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        call(["federation", "init", str(tmp_path / "fed"), *flags])
    assert not (tmp_path / "fed").exists()


def test_a_federation_is_not_made_twice(made: Federation) -> None:
    before = (made.folder / "link.key").read_bytes()
    with pytest.raises(UserError, match=r"fed exists: choose another folder"):
        call(["federation", "init", str(made.folder), "--silos", "a"])
    assert (made.folder / "link.key").read_bytes() == before


def test_a_full_disk_lets_nobody_half_in(
    made: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call(["silo", "init", str(tmp_path / "d"), "--link", "link.example.org:8000"])
    (public,) = (tmp_path / "d").rglob("*.key.pub")
    words = ["federation", "add", str(made.folder), str(public)]

    def held() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in made.folder.rglob("*") if path.is_file()}

    before = held()

    def full(path: Path, chunks: Iterable[bytes]) -> int:
        if ROSTER in path.name:
            raise disk_error(OSError(errno.ENOSPC, ""), path)
        return write(path, chunks)

    with monkeypatch.context() as patched:
        patched.setattr(federation, "write", full)
        with pytest.raises(UserError, match="disk full while writing"):
            call(words)
    assert held() == before, "in particular no key, by which the SuperLink would let d in"
    call(words)
    assert federation.read(made.folder).silos == (*SILOS, "d")


CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "open")


def changed(found: Federation, what: str, public: Path) -> Federation:
    new = {public.name.removesuffix(".key.pub"): keys.read_public(public)}
    if what == "revoke":
        return federation.revoke(found, new)
    change = {"add": federation.add, "rotate": federation.rotate}[what]
    return change(found, new, lambda public: None)


def killed_before(number: int, folder: Path, what: str, public: Path) -> bool:
    """Change a federation in another process, which ends without warning before the change of the
    file system with this number; return whether it did."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] != 0
    left = number

    def count(event: str, about: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in CHANGES or not str(about[0]).startswith(str(folder)):
            return
        if event == "open" and not about[2] & os.O_CREAT:
            return
        if not left:
            os._exit(1)
        left -= 1

    sys.addaudithook(count)
    try:
        changed(federation.read(folder), what, public)
    finally:
        os._exit(0)


@pytest.mark.parametrize(("what", "name"), [("add", "d"), ("rotate", "b"), ("revoke", "b")])
def test_a_command_that_is_killed_changes_all_or_nothing(
    made: Federation, tmp_path: Path, what: str, name: str
) -> None:
    public = keys.generate(tmp_path / f"{name}.key")

    def held(folder: Path) -> dict[str, str]:
        files = (*folder.glob("keys/*"), folder / ROSTER, folder / federation.FILE)
        return {path.name: path.read_text() for path in files}

    whole = tmp_path / "whole"
    shutil.copytree(made.folder, whole)
    changed(federation.read(whole), what, public)
    states = [held(made.folder), held(whole)]
    seen = []
    for number in range(100):
        folder = tmp_path / f"killed-{number}"
        shutil.copytree(made.folder, folder)
        if not killed_before(number, folder, what, public):
            break
        found = federation.read(folder)
        seen.append(states.index(held(folder)))
        if not seen[-1]:
            changed(found, what, public)
            assert held(folder) == states[1]
        hidden = {path.name for path in folder.glob(".*")}
        assert hidden == {f".{federation.FILE}.lock"}
    assert seen == sorted(seen)
    assert {*seen} == {0, 1}


def test_a_key_is_registered_before_it_is_written(made: Federation, tmp_path: Path) -> None:
    public = {"d": keys.read_public(keys.generate(tmp_path / "d.key"))}

    def stop(public: Any) -> None:
        raise UserError("the SuperLink does not answer")

    with pytest.raises(UserError, match="does not answer"):
        federation.add(made, public, stop)
    assert federation.read(made.folder) == made
    asked: list[Any] = []
    federation.add(made, public, asked.append)
    assert asked == [public]


def test_a_damaged_federation_is_one_line(made: Federation, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"federation init .* makes a federation"):
        federation.read(tmp_path)
    file = made.folder / federation.FILE
    for text in (
        "x",
        'host = "a"',
        file.read_text().replace("8000", '"8000"'),
        file.read_text() + "more = 1\n",
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=str(federation.FILE)):
            federation.read(made.folder)


def test_a_port_that_is_taken_is_named(made: Federation) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        (free,) = free_ports(1)
        for ports in ((port, free), (free, port)):
            with pytest.raises(UserError, match=rf"port {port} is taken"):
                commands.start_superlink(
                    replace(made, port=ports[0], control_port=ports[1]), Log(), Metrics()
                )


def test_only_the_fleet_api_passes() -> None:
    from ekiden.silos.superlink import FleetOnly

    asked: list[str] = []

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        asked.append(scope["path"])

    def status(path: str, kind: str = "http") -> list[int]:
        found: list[int] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            found.extend([message["status"]] if "status" in message else [])

        async def receive() -> MutableMapping[str, Any]:
            return {}

        gate = FleetOnly(app, lambda key: False)
        asyncio.run(gate({"type": kind, "path": path, "headers": []}, receive, send))
        return found

    for path in (
        "/v1/control/list-runs",
        "/v1/runtime/acquire-task",
        "/docs",
        "/",
        "/v1/fleet",
        "/x/v1/fleet/get-run",
    ):
        assert status(path) == [404]
    assert status("/v1/fleet/get-run", "websocket") == status("/v1/fleet/get-run", "lifespan") == []
    assert status("/v1/fleet/get-run") == [401]
    assert asked == []


def test_the_control_api_does_not_leave_loopback(tmp_path: Path) -> None:
    from ekiden.silos import superlink

    async def app(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        raise AssertionError

    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(
            SystemExit, match=f"the Control API stays on loopback: --host 127.0.0.1, not {host}"
        ):
            superlink.run("127.0.0.1:1", app, host, superlink.KeyFolder(tmp_path), port=1)


HOLD = """
import sys, time
from pathlib import Path
from ekiden.silos import supernode
from ekiden.silos.silo import silo_file
with supernode.alone(silo_file.read(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(100)
"""


@pytest.mark.slow
def test_a_second_instance_of_a_silo_says_so(made: Federation, tmp_path: Path) -> None:
    """With the same silo.toml, or with the same key in another one; a killed process blocks
    nobody."""
    file = made.silo("a") / "silo.toml"
    twin = tmp_path / "twin.toml"
    text = file.read_text().replace("[link]", f'[link]\nkey = "{made.silo("a") / "a.key"}"')
    twin.write_text(text.replace('"ca.crt"', f'"{made.certificate}"'))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(file)], stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(
            UserError, match=r"another `ekiden silo start` is using .*a-silo/started: stop that one"
        ):
            call(["silo", "start", str(file)])
        with pytest.raises(UserError, match=r"is using .*a\.key: .* its own key"):
            call(["silo", "start", str(twin)])
        first.kill()
        first.wait()
    with supernode.alone(silo_file.read(file)):
        pass


def test_a_silo_that_cannot_start_tells_its_coordinator_why(
    made: Federation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only if there is a SuperLink to tell; it ends with its reason in both cases."""
    served: list[float | None] = []
    monkeypatch.setattr(supernode, "start", lambda file, say, seconds=None: served.append(seconds))
    file = made.silo("a") / "silo.toml"
    with monkeypatch.context() as there:
        there.setattr(supernode, "certificate_end", lambda address: datetime.now(UTC))
        with pytest.raises(UserError, match="data"):
            call(["silo", "start", str(file)])
        assert served == [supernode._TELL]
        assert "a cannot take part: " in capsys.readouterr().out
    with pytest.raises(UserError, match="data"):
        call(["silo", "start", str(file)])
    assert len(served) == 1


def test_a_refusal_is_one_line_among_flowers() -> None:
    said: list[str] = []
    heard = commands.RunOutput(said.append)
    for line in (
        "INFO :      Start `flwr-serverapp` process",
        "ekiden: step 1 of 3 done",
        f"{ENDED}silo b: b does not allow 'fedavg'",
        "Traceback (most recent call last):",
    ):
        heard(line)
    assert said == ["ekiden: step 1 of 3 done"]
    assert heard.ended == "silo b: b does not allow 'fedavg'"
    assert list(heard.others) == [
        "INFO :      Start `flwr-serverapp` process",
        "Traceback (most recent call last):",
    ]


def test_what_users_get_wrong(tmp_path: Path, made: Federation) -> None:
    with pytest.raises(UserError, match="say which SuperLink"):
        call(["ps"])
    with pytest.raises(UserError, match="say which run to stop"):
        call(["stop", "--federation", str(made.folder)])
    with pytest.raises(
        UserError, match="neither a number nor the folder of a run between machines"
    ):
        call(["stop", str(tmp_path)])
    with pytest.raises(UserError, match="unknown federation command 'strat': did you mean 'start'"):
        call(["federation", "strat", "fed"])


def test_a_superlink_that_is_not_there_is_one_line(made: Federation) -> None:
    with pytest.raises(UserError, match=r"no SuperLink at 127\.0\.0\.1:9 answers \(\S+"):
        commands.connect("127.0.0.1:9", made.certificate).runs()


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("fedseq-flower-seed3", "fedseq-flower-seed3"),
        ("fedgram-flower-seed3-without-client-0", "fedgram-flower-seed3-without-cli"),
        ("2026 run_é", "run-2026-run"),
        ("_", "run"),
        ("a" * 31 + "-b", "a" * 31),
    ],
)
def test_flower_takes_the_name_of_any_run_folder(folder: str, name: str) -> None:
    """It refuses apps whose name is longer than 32 characters, or begins with a digit."""
    assert commands.app_name(folder) == name


@pytest.mark.parametrize(
    ("ended", "said"), [(None, "was not ready after 0.1 s"), (1, "the lines above say why")]
)
def test_a_superlink_that_is_late_is_told_from_one_that_ended(ended: int | None, said: str) -> None:
    (port,) = free_ports(1)
    with pytest.raises(UserError, match=said):
        commands._await_port(SimpleNamespace(poll=lambda: ended), port, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [False, True])
def test_a_database_that_was_not_finished_stops_no_later_start(
    before: bool, made: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SuperLink ends while it makes its tables; one that had them keeps its messages."""
    file, (port, control) = made.folder / "link.db", free_ports(2)
    if before:
        file.touch()
    program = made.folder / "flower-superlink"
    program.write_text(f"#!/bin/sh\necho half > {file}\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(forks, "programs", lambda jobs: nullcontext((made.folder, ())))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(UserError, match="did not start: the lines above say why"):
        commands.start_superlink(replace(made, port=port, control_port=control), Log(), Metrics())
    assert file.exists() == before
