"""The commands on docs/deployment.md and in the tutorial on hospitals, as a user types them."""

import re
import shlex
import time
from pathlib import Path

import pytest

from tests.e2e.silos import BIN, ROOT, Federation, free_ports, wait_for
from tests.pages import DOCS, agrees, blocks

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("flower")]


def commands() -> list[str]:
    page = (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- one machine -->\n```\n(.*?)```", page, re.DOTALL)
    assert found
    return found[1].splitlines()


def test_four_silos_run_by_the_commands_on_the_page(tmp_path: Path) -> None:
    """As on the page, except for two ports that are free here."""
    first, link, *silos, run = commands()
    assert len(silos) == 4
    assert len(silos) + 3 <= 8
    shell = Federation(tmp_path)
    port, control = free_ports(2)

    def words(line: str) -> list[str]:
        name, *rest = shlex.split(line)
        assert name == "ekiden"
        return rest

    try:
        shell.ekiden(*words(first), "--port", str(port), "--control-port", str(control))
        shell.start("link", [str(BIN / "ekiden"), *words(link)])
        wait_for(tmp_path / "link.log", "silos reach the SuperLink at", 120)
        for i, line in enumerate(silos):
            shell.start(f"silo-{i}", [str(BIN / "ekiden"), *words(line)])
        said = shell.ekiden(*words(run), timeout=500)
        (folder,) = (tmp_path / "runs").iterdir()
        assert (folder / "model.safetensors").exists(), said
        said = shell.ekiden("verify", str(folder), "--keys", "fed/keys")
        assert (
            "verified: 5 tasks, each signed by its silo, and the result is what they gave"
            in " ".join(said.split())
        )
    finally:
        end(shell)


def end(shell: Federation) -> None:
    """End everything that was started."""
    for process in shell.processes.values():
        process.terminate()
    time.sleep(5)
    for name in list(shell.processes):
        shell.kill(name)


@pytest.mark.parametrize("page", ["clinical-study"])
def test_hospitals_as_the_tutorial_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From top to bottom, except for two ports that are free here; what the page says is refused is
    refused.

    DIGEST is that of the plan that the command before it has listed.
    """
    monkeypatch.chdir(tmp_path)
    shell, (port, control), said = Federation(tmp_path), free_ports(2), ""
    names: dict[str, object] = {}
    try:
        for block in blocks(DOCS / "tutorials" / f"{page}.md"):
            if block.title:
                Path(block.title).write_text(block.text, encoding="utf-8")
            lines = (
                [shlex.split(line) for line in block.text.splitlines()]
                if block.language in ("sh", "console")
                else []
            )
            if block.language == "python":
                exec(compile(block.text, block.place, "exec"), names)
            for words in lines:
                match words:
                    case ["ekiden", "federation", "init", *rest]:
                        said = shell.ekiden(
                            *words[1:], "--port", str(port), "--control-port", str(control)
                        )
                    case ["ekiden", *rest, "&"]:
                        shell.start(rest[-1].replace("/", "-"), [str(BIN / "ekiden"), *rest])
                        if rest[0] == "federation":
                            wait_for(tmp_path / "fed.log", "silos reach the SuperLink at", 120)
                    case ["ekiden", *rest, "DIGEST"]:
                        said = shell.ekiden(*rest, said.split("plan ")[1].split()[0])
                    case ["ekiden", *rest]:
                        said = shell.ekiden(*rest, timeout=500)
                    case ["echo", text, ">>", file]:
                        with open(file, "a") as limits:
                            limits.write(f"{text}\n")
                    case ["$", "ekiden", *rest]:
                        said = shell.ekiden(*rest, timeout=500)
                        assert agrees(block.text.split("\n", 1)[1], said), said
            if block.language == "text":
                assert agrees(block.text, said), (
                    f"{block.place} shows\n{block.text}\nbut there came\n{said}"
                )
    finally:
        end(shell)
