"""A method, a network and data from the user's own file, or from another package."""

import importlib
import importlib.util
import json
import py_compile
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ekiden
from ekiden import UserError
from ekiden.core.base import outside
from ekiden.data import load, silos
from ekiden.methods import method_named, name_of
from tests.pages import DOCS, blocks

PAGE = DOCS / "own.md"

MINE = '''
from dataclasses import dataclass

import torch
from ekiden.core.base.checks import Count
from ekiden.core.engine.method import Method, on_client
from ekiden.data import from_tensors
from ekiden.core.training.weights import Weights


@dataclass(frozen=True)
class Relay(Method):
    """Hand a model on."""

    laps: Count = 1
    """L, how often each client trains"""

    def run(self, fed, s):
        while s.step < self.steps(len(fed.clients)):
            s = s.next(model=fed.call(self.train, fed.clients[s.step % len(fed.clients)], s.model))
            yield s

    @on_client
    def train(self, client, model: Weights) -> Weights:
        return client.fit(model, epochs=1)

    def steps(self, clients):
        return self.laps * clients

    def cost(self, clients, model):
        return (self.laps * clients - 1) * model


def net(shape, classes):
    return torch.nn.Linear(shape[0], classes)


def points(n=40):
    y = torch.arange(n) % 2
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) + 3 * y[:, None], y


def houses():
    return [points(40), points(60)]


def pooled():
    return points(200), points(40)
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the user's own, in the current folder; nothing is trusted yet."""
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path / "mine.py"


Command = Callable[..., tuple[int, str]]
RUN = ("run", "mine.py:Relay", "--model", "mine.py:net", "--data", "mine.py:houses")


def test_all_commands_know_a_file(
    mine: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = "run mine.py:Relay --model mine.py:net --data mine.py:houses --laps 2 --lr 0.1 --batch-size 8"
    code, text = command(*run.split())
    assert code == 0, text
    assert "mine.py:Relay (laps=2" in text
    folder = "runs/relay-mine-seed0"
    monkeypatch.chdir(mine.parent / "runs")  # the names mean the same from elsewhere
    for args in (["show"], ["compare"], ["evaluate"], ["resume"], ["report"]):
        code, text = command(
            *args, "relay-mine-seed0", *(["-o", "page"] if args == ["report"] else [])
        )
        assert code == 0, text
    model = ekiden.load_model(mine.parent / folder)
    x, y = load(f"{mine}:pooled").test.x, load(f"{mine}:pooled").test.y
    assert (model(x).argmax(1) == y).float().mean() > 0.9


def test_an_imported_method_is_found_again_and_one_of_the_program_is_warned_of(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(mine.parent)
    monkeypatch.setitem(sys.modules, "mine", sys)  # whatever the name holds is put back
    monkeypatch.delitem(sys.modules, "mine")
    kind = importlib.import_module("mine").Relay
    data = [(torch.randn(20, 3), torch.arange(20) % 2)] * 2
    ekiden.run(kind(), data, folder="there", quiet=True)
    with pytest.raises(
        UserError, match="ekiden trust"
    ):  # another program may have put another file there
        ekiden.open_run("there")
    outside.trust(f"{mine}:Relay")
    assert ekiden.open_run("there").config["recipe"]["method"] == f"{mine}:Relay"
    kind.__module__ = "__main__"
    with pytest.warns(
        UserWarning, match="nothing but this program can open here later, because Relay"
    ):
        ekiden.run(kind, data, folder="here", quiet=True)


@pytest.mark.slow
def test_worker_processes_and_sweeps_know_a_file(mine: Path, command: Command) -> None:
    (mine.parent / "table.toml").write_text(
        'title = "t"\nseeds = [0]\n[settings]\nmodel = "mine.py:net"\ndata = "mine.py:pooled"\n'
        "clients = 2\nworkers = 2\n"
        '[[row]]\nlabel = "relay"\nmethod = "mine.py:Relay"\nlaps = 2\n'
    )
    # The table may come from anybody, so what it names must be allowed once.
    code, text = command("sweep", "table.toml", "--out", "out")
    assert code == 2
    assert f"`ekiden trust {mine}`" in text
    assert not (mine.parent / "out").exists()
    assert command("trust", "mine.py")[0] == 0
    code, text = command("sweep", "table.toml", "--out", "out")
    assert code == 0, text
    assert "relay" in text


def test_a_run_folder_executes_no_code_that_the_user_did_not_ask_for(
    mine: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = command(*RUN)
    assert code == 0, text
    folder = mine.parent / "runs" / "relay-mine-seed0"
    evil = mine.parent / "evil.py"
    evil.write_text(MINE + f"\nopen({str(mine.parent / 'executed')!r}, 'w')\n")
    config = json.loads((folder / "config.json").read_text())
    text = json.dumps(config).replace(str(mine), str(evil))
    config = json.loads(text)
    config["plan"]["code"] = outside.digests(
        [f"{evil}:Relay"]
    )  # whoever made the folder knows the digest
    (folder / "config.json").write_text(json.dumps(config))
    for args in ("show", "compare", "evaluate", "resume", "report"):
        code, text = command(args, str(folder), *(["-o", "page"] if args == "report" else []))
        assert code == 0 or "`ekiden trust" in text
    with pytest.raises(UserError, match="ekiden trust"):
        ekiden.load_model(folder)
    assert not (mine.parent / "executed").exists()
    assert command("trust", str(evil))[0] == 0
    assert command("evaluate", str(folder))[0] == 0
    assert (mine.parent / "executed").exists()


def test_a_compiled_copy_next_to_a_trusted_file_is_not_executed(mine: Path) -> None:
    """Whoever sends a folder with a file that the user trusts may put anything into its
    `__pycache__`."""
    sent = mine.parent / "sent" / "mine.py"
    sent.parent.mkdir()
    sent.write_text(MINE)
    evil = mine.parent / "evil.py"
    evil.write_text(MINE + f"\nopen({str(mine.parent / 'executed')!r}, 'w')\n")
    compiled = importlib.util.cache_from_source(str(sent))
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH  # Python compares it with no source
    py_compile.compile(str(evil), cfile=compiled, invalidation_mode=unchecked)
    outside.trust(f"{mine}:Relay")
    assert method_named(f"{sent}:Relay").title() == "relay"
    assert not (mine.parent / "executed").exists()
    assert Path(compiled).exists()


def test_a_file_that_changed_is_refused_by_its_runs(mine: Path, command: Command) -> None:
    assert command(*RUN)[0] == 0
    mine.write_text(MINE + "\n# changed\n")
    outside.trust(f"{mine}:Relay")
    for args in ("resume", "evaluate"):
        code, text = command(args, "runs/relay-mine-seed0")
        assert (code, "has changed since the run began" in text) == (2, True)


def test_a_run_of_a_method_that_is_not_at_hand_can_be_shown(mine: Path, command: Command) -> None:
    assert command(*RUN)[0] == 0
    mine.unlink()
    for args in ("show", "compare"):
        code, text = command(args, "runs/relay-mine-seed0")
        assert code == 0, text
        assert "laps=1" in text
        assert "0 finished" not in text


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ("run mine.py:Relai", "did you mean 'Relay'"),
        ("run mine.py:net", "is not a method"),
        ("run nothing.py:Relay", "there is no file"),
        ("run fails.py:Relay", "fails.py, line 2, fails: ZeroDivisionError"),
        ("run broken.py:Relay", "broken.py, line 1, fails: SyntaxError"),
        (
            "run mine.py:Relay --data mine.py:houses --model mine.py:houses",
            "gives list, not a torch.nn.Module",
        ),
        ("run mine.py:Relay --data mine.py:houses --clients 3", "leave out --partition, --clients"),
        ("run mine.py:Relay --data mine.py:net", "takes 2 arguments"),
        ("run mine.py:Relay --data mine.py:pooled --size 8", "leave out --size"),
        ("run mine.py:Relay --data late.py:data", "late.py, line 2, fails: KeyError"),
    ],
)
def test_mistakes_get_one_line(mine: Path, command: Command, args: str, line: str) -> None:
    (mine.parent / "fails.py").write_text("x = 0\n1 / x\n")
    (mine.parent / "late.py").write_text("def data():\n    return {}['a']\n")
    (mine.parent / "broken.py").write_text("def (\n")
    code, text = command(*args.split())
    assert code == 2, text
    assert line in text
    assert "Traceback" not in text
    assert not (mine.parent / "runs").exists() or not list((mine.parent / "runs").iterdir())


def test_entry_points_of_other_packages(
    mine: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (mine.parent / "theirs.py").write_text(MINE)
    info = mine.parent / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ekiden.methods]\ntheir-relay = theirs:Relay\n[ekiden.models]\ntheir-net = theirs:net\n"
        "[ekiden.datasets]\ntheir-houses = theirs:houses\n"
    )
    monkeypatch.syspath_prepend(str(mine.parent))
    outside._points.cache_clear()
    try:
        kind = method_named("their-relay")
        assert name_of(kind) == "their-relay"
        data = silos("their-houses")
        assert data is not None
        assert [len(c.train) + len(c.val) + len(c.test) for c in data.clients] == [40, 60]
        result = ekiden.run("their-relay", data, "their-net")
        assert result.weights is not None
        assert len(result.weights.params) == 8
    finally:
        outside._points.cache_clear()
        sys.modules.pop("theirs", None)


def _own_code() -> str:
    """Return the page's code without that of files of their own, which need other packages."""
    return "\n".join(block.text for block in blocks(PAGE, "python") if not block.title)


def test_the_page_on_ones_own_code_runs_as_it_stands(mine: Path, command: Command) -> None:
    mine.write_text(_own_code())
    flags = (
        "--model",
        "mine.py:net",
        "--data",
        "mine.py:hospitals",
        "--epochs",
        "1",
        "--keep",
        "0.3",
    )
    code, text = command("run", "mine.py:HalfSeq", *flags)
    assert code == 0, text
    assert "keep=0.3" in text


def test_the_pages_loop_over_steps_runs_as_it_stands(
    mine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine.write_text(_own_code())
    loop = next(block.text for block in blocks(PAGE, "py") if "ekiden.steps" in block.text)
    two_silos = loop.replace('"dirichlet:0.5", 10', '"iid", 2')
    assert two_silos != loop
    monkeypatch.delenv("EKIDEN_DATA", raising=False)
    monkeypatch.syspath_prepend(mine.parent)
    monkeypatch.setitem(sys.modules, "mine", sys)  # whatever the name holds is put back
    monkeypatch.delitem(sys.modules, "mine")
    exec(compile(two_silos, "own.md", "exec"), {"__name__": "own"})
    assert capsys.readouterr().out.startswith("1 ")
