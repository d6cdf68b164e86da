"""The container files name commands and files that exist, and let a silo do what it must, with no
right more."""

import re
from pathlib import Path
from typing import Any

import pytest

from ekiden.cli.app import COMMANDS
from ekiden.cli.federations import FederationStartOptions
from ekiden.cli.flags import parse
from ekiden.cli.silos import SiloStartOptions

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
SERVICES: dict[str, Any] = yaml.safe_load(
    (ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8")
)["services"]


def test_the_image_is_made_of_what_is_here_and_is_not_run_by_root() -> None:
    copied = [
        words.split() for words in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.MULTILINE)
    ]
    assert copied
    for *files, _ in copied:
        assert all((ROOT / file).exists() for file in files)
    assert re.findall(r"^USER (\d+)$", DOCKERFILE, re.MULTILINE)[-1] != "0"


def test_nothing_but_the_sources_is_sent_to_the_builder() -> None:
    """Neither keys nor runs nor data that lie next to them."""
    kept = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert kept[0] == "*"
    allowed = {line.removeprefix("!") for line in kept[1:] if line.startswith("!")}
    needed = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    assert allowed == {file for line in needed for file in line.split()}


def test_services_run_commands_and_have_few_rights() -> None:
    assert set(SERVICES) == {"silo", "coordinator"}
    for name, service in SERVICES.items():
        command = service["command"]
        assert " ".join(command[:2]) in COMMANDS
        assert service["cap_drop"] == ["ALL"]
        assert service["read_only"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["tmpfs"] == ["/tmp:exec,mode=1777"], (
            "Docker's default does not let a silo start its programs"
        )
        assert ("ports" in service) == (name == "coordinator"), "a silo accepts no connection"
    assert SERVICES["coordinator"]["ports"] == ["0.0.0.0:8000:8000"], (
        "the coordinator's own port stays inside"
    )
    silo = parse(SiloStartOptions, SERVICES["silo"]["command"][2:], "ekiden silo start")
    health = SERVICES["silo"]["healthcheck"]["test"][-1]
    assert f"127.0.0.1:{silo.metrics_port}/health" in health, "without a line in silo.toml"
    started = parse(
        FederationStartOptions, SERVICES["coordinator"]["command"][2:], "ekiden federation start"
    )
    assert (
        f"127.0.0.1:{started.metrics_port}/health"
        in SERVICES["coordinator"]["healthcheck"]["test"][-1]
    )
