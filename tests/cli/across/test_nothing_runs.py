"""Whatever a file from somebody else names, no command runs it: only what the user types is
trusted."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import ekiden
from ekiden.cli.app import call

Command = Callable[..., tuple[int, str]]

EVIL = "open({marker!r}, 'a').write('ran')\nf = M = Net = lambda *given: None\n"
QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"(?!\s*:)|\\"[^"\\\n]*\\"')
"""A string in JSON (not a key) or in TOML, and one of TOML inside JSON."""

OF_A_RUN: Sequence[Sequence[str]] = (
    *(
        ("show",),
        ("log",),
        ("compare",),
        ("evaluate",),
        ("resume",),
        ("card", "-o", "-"),
        ("verify",),
    ),
    *(("report", "-o", "page", "--overwrite"), ("export", "-o", "rows.csv"), ("audit",)),
    *(
        ("forget", "--client", "client-0"),
        ("export", "--to", "model.pt2"),
        ("export", "--to", "model.onnx"),
    ),
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in; the user has never trusted anything."""
    monkeypatch.setenv("EKIDEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL.format(marker=str(tmp_path / "marker")))
    return tmp_path


def test_the_evil_file_does_run_where_the_user_types_its_name(home: Path, command: Command) -> None:
    """Otherwise the tests below could not fail."""
    command("run", "evil.py:M")
    assert (home / "marker").read_text() == "ran"


def test_a_text_in_python_and_a_file_of_settings_grant_nothing(
    home: Path, command: Command
) -> None:
    rows = [[float(i), float(i % 3)] for i in range(1, 41)]
    silos = {
        name: (rows[part::2], [i // 2 % 2 for i in range(20)]) for part, name in enumerate("ab")
    }
    for given in ({"metric": f"{home}/evil.py:f"}, {"model": f"{home}/evil.py:Net"}):
        with pytest.raises(ekiden.UserError, match="ekiden trust"):
            ekiden.run("fedseq", silos, quiet=True, **given)  # type: ignore[arg-type]
    with pytest.raises(ekiden.UserError, match="ekiden trust"):
        ekiden.run(f"{home}/evil.py:M", silos, quiet=True)
    (home / "plan.toml").write_text('method = "fedseq"\nmetric = "evil.py:f"\n')
    (home / "table.toml").write_text('title = "t"\n[[row]]\nlabel = "m"\nmethod = "evil.py:M"\n')
    for args in (("run", "--config", "plan.toml"), ("sweep", "table.toml", "--out", "out")):
        code, said = command(*args)
        assert (code, "ekiden trust" in said) == (2, True), said
    assert not (home / "marker").exists()


def changed(file: Path, evil: str) -> Iterator[str]:
    """The text of a file with one string after the other replaced by the name of the evil code."""
    text = file.read_text()
    for found in QUOTED.finditer(text):
        mark = '\\"' if found.group().startswith("\\") else '"'
        yield f"{text[: found.start()]}{mark}{evil}{mark}{text[found.end() :]}"


def try_all(
    files: Sequence[Path],
    commands: Sequence[Sequence[str]],
    home: Path,
    command: Command,
    every: int,
) -> int:
    """Run each `every`th pair of a changed file and a command, and return how many ran."""
    tried = count = 0
    for file in files:
        before = file.read_bytes()
        for name in ("f", "M"):
            for text in changed(file, f"{home}/evil.py:{name}"):
                for args in commands:
                    count += 1
                    if chosen(count, every):
                        file.write_text(text)
                        command(*args)
                        tried += 1
                        assert not (home / "marker").exists(), (args, text)
        file.write_bytes(before)
    return tried


def chosen(number: int, every: int) -> bool:
    """Whether a pair is tried: each one for 1, else the same few on every machine, spread over all
    commands."""
    return int(hashlib.blake2b(str(number).encode(), digest_size=4).hexdigest(), 16) % every == 0


EVERY = [pytest.param(40, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.fixture
def run(home: Path, command: Command) -> Path:
    code, said = command(
        *["run", "fedgram", "--data", "digits", "--clients", "2", "--width", "20", "--out", "runs"]
    )
    assert code == 0, said
    return (home / "runs" / "fedgram-digits-seed0").rename(home / "run")


@pytest.mark.parametrize("args", OF_A_RUN, ids=" ".join)
def test_the_headline_metric_of_a_run_folder_does_not_run(
    run: Path, home: Path, command: Command, args: Sequence[str]
) -> None:
    config = json.loads((run / "config.json").read_text())
    config["recipe"]["metric"] = config["task"]["metric"] = f"{home}/evil.py:f"
    (run / "config.json").write_text(json.dumps(config))
    command(args[0], "run", *args[1:])
    assert not (home / "marker").exists()


@pytest.mark.parametrize("every", EVERY)
def test_no_string_of_a_run_folder_runs(
    run: Path, home: Path, command: Command, every: int
) -> None:
    files = [
        run / name for name in ("config.json", "environment.json", "ledger.jsonl", "metrics.jsonl")
    ]
    commands = [(args[0], "run", *args[1:]) for args in OF_A_RUN]
    assert try_all(files, commands, home, command, every * 3) > 20


@pytest.mark.parametrize("every", EVERY)
def test_no_string_of_a_sweep_or_its_record_runs(home: Path, command: Command, every: int) -> None:
    (home / "t.toml").write_text(
        'title = "t"\nseeds = [0]\n[settings]\ndata = "digits"\nclients = 2\nwidth = 20\n'
        '[[row]]\nlabel = "a"\nmethod = "fedgram"\n'
    )
    code, said = command("sweep", "t.toml", "--out", "out", "--records", "records/t.jsonl")
    assert code == 0, said
    texts = [
        path
        for path in Path("out").rglob("*")
        if path.suffix in (".toml", ".json") and path.parent == Path("out")
    ]
    records = list(Path("records").rglob("*.jsonl"))
    assert records
    assert texts
    commands = [
        *(
            ("results", "out"),
            ("report", "out", "-o", "page", "--overwrite"),
            ("results", "records"),
        ),
        *(("report", "records", "-o", "page", "--overwrite"), ("sweep", "t.toml", "--out", "out")),
    ]
    assert try_all([*texts, *records], commands, home, command, max(every // 4, 1)) > 5


@pytest.mark.parametrize("every", EVERY)
def test_no_string_of_a_federations_files_runs(home: Path, command: Command, every: int) -> None:
    pytest.importorskip("flwr", reason="needs the extra flower: pip install 'ekiden[flower]'")
    for name in ("a", "b"):
        call(["silo", "init", name, "--link", "link.example.org:8000"])
        (home / name / "rows.csv").write_text("x,y\n" + "1,no\n2,yes\n3,no\n4,yes\n" * 10)
        file = home / name / "silo.toml"
        file.write_text(re.sub(r'(?m)^path = ".*"', 'path = "rows.csv"', file.read_text()))
    call(["federation", "init", "fed", "a/a.key.pub", "b/b.key.pub"])
    (home / "study.toml").write_text('[[column]]\nname = "x"\nkind = "number"\n')
    (home / "release.json").write_text(
        json.dumps({"silo": "a", "run": "run", "settings": "s", "silos": ["b"]})
    )
    for name in ("a", "b"):
        call(["silo", "join", f"{name}/silo.toml", "fed/roster.json"])
        command("silo", "sums", f"{name}/silo.toml")
    sums = sorted(str(path) for path in Path().rglob("*-sums.json"))
    command("federation", "agree", *sums, "--federation", "fed")
    agreed = list(Path().rglob("agreed.json"))
    commands = [
        *(("silo", "join", "a/silo.toml", "fed/roster.json"), ("federation", "status", "fed")),
        *(("federation", "agree", *sums, "--federation", "fed", "--schema", "study.toml"),),
        *(("silo", "release", "a/silo.toml", "release.json"), ("silo", "sums", "a/silo.toml")),
        *(("silo", "approve", "a/silo.toml"),),
    ]
    files = [
        home / "fed/roster.json",
        home / "study.toml",
        home / "release.json",
        *map(Path, sums),
        *agreed,
    ]
    assert try_all(files, commands, home, command, max(every // 10, 1)) > 5
