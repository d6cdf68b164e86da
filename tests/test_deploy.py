"""The container files name commands and files that exist, and let a silo do what it must, with no
right more."""

import re
from pathlib import Path
from typing import Any

import pytest

from ekiden.cli.app import COMMANDS
from ekiden.cli.federations import FederationStartOptions
from ekiden.cli.flags import parse

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
    started = parse(
        FederationStartOptions, SERVICES["coordinator"]["command"][2:], "ekiden federation start"
    )
    assert (
        f"127.0.0.1:{started.metrics_port}/health"
        in SERVICES["coordinator"]["healthcheck"]["test"][-1]
    )
