"""Every mistake in a silo.toml is reported in one line that names it."""

import ast
import io
import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import ekiden
from ekiden.core.base.errors import PrivateError, UserError, command_line
from ekiden.core.base.settings import Training
from ekiden.data import Dataset
from ekiden.methods import FedSeq
from ekiden.readers.kinds import terms
from ekiden.runs.recipe import Recipe
from ekiden.runs.result import Result
from ekiden.silos.coordinator.remote_plan import RemotePlan
from ekiden.silos.coordinator.session import run
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.silo import silo_file
from ekiden.silos.silo.silo_file import Limits, read
from tests.silos.fakes import FakeNodes
from tests.silos.silo_files import TABLE, sums_of, tables

GOOD = 'name = "a"\n[data]\npath = "digits"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "silo.toml"
    path.write_text(text)
    return path


def test_a_full_file(tmp_path: Path) -> None:
    text = GOOD + 'val_fraction = 0\n[limits]\nmodel_bytes = 5\nmethods = ["fedseq"]\nepochs = 2\n'
    file = read(
        write(tmp_path, text + '[link]\naddress = "h:1"\nkey = "a.key"\n[hardware]\nthreads = 1\n')
    )
    assert (file.name, file.limits.model_bytes, file.limits.methods, file.limits.epochs) == (
        "a",
        5,
        ("fedseq",),
        2,
    )
    assert file.folder == tmp_path / "a-silo"
    assert file.key == tmp_path / "a.key"
    dataset, client = file.load()
    assert client.name == "a"
    assert len(client.train) == len(dataset.train)
    assert len(client.val) == 0


def test_the_defaults_allow_no_method_that_pools_data(tmp_path: Path) -> None:
    methods = read(write(tmp_path, GOOD)).limits.allowed_methods
    assert "fedelmy" in methods
    assert "centralized" not in methods


def test_a_path_that_is_not_there_is_named_with_the_file(tmp_path: Path) -> None:
    file = read(write(tmp_path, GOOD.replace("digits", "data")))
    with pytest.raises(
        UserError, match=r"silo\.toml: data\.path: unknown data set 'data': .* no file or folder"
    ):
        file.load()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name = ", "is not valid TOML"),
        ("", "is not the name of a silo"),
        ('name = "../x"\n', "is not the name of a silo"),
        ("name = 3\n", "is not the name of a silo"),
        ('name = "*"\n', "is not the name of a silo"),
        (GOOD.replace('"a"', '"server"'), "no silo can be called 'server'"),
        ('name = "a"\n', "by path, sql or python in"),
        ('name = "a"\n[data]\npath = "x"\npython = "y.py:z"\n', "by path, sql or python in"),
        ('nam = "a"\n', "did you mean 'name'"),
        (GOOD + "siz = 3\n", "did you mean 'size'"),
        (
            GOOD + 'size = "3"\n',
            "data.size '3' is of the wrong type: it must be a whole number, 0 or more",
        ),
        (
            GOOD + "size = true\n",
            "data.size True is of the wrong type: it must be a whole number, 0 or more",
        ),
        (
            GOOD + "val_fraction = 1\n",
            "data.val_fraction 1 is out of range: it must be 0 or more and below 1",
        ),
        (
            GOOD + '[limits]\nmethods = "fedseq"\n',
            "limits.methods 'fedseq' is of the wrong type: it must be a list",
        ),
        (GOOD + '[limits]\nmethods = ["fedsec"]\n', "did you mean 'fedseq'"),
        (GOOD + "[limits]\nepochs = 0\n", "limits.epochs 0 is out of range: it must be 1 or more"),
        (
            GOOD + "[limits]\nmodel_bytes = 1.5\n",
            "limits.model_bytes 1.5 is of the wrong type: it must be a whole number",
        ),
        (
            GOOD + "[hardware]\nthreads = -1\n",
            "hardware.threads -1 is out of range: it must be 0 or more",
        ),
        ("limits = 3\n" + GOOD, "limits must be a table"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, reason: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=reason) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert "silo.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "spelling", "reason"),
    [
        ("", "no.py:f", "there is no file .*no.py"),
        ("", "own.py", "FILE.py:FUNCTION"),
        ("", "own.py:f", "unknown name in .*own.py 'f'"),
        ("def f(): return 3", "own.py:f", "returned a int"),
        (
            "def f(): raise ValueError('x')",
            "own.py:f",
            "own.py, line 1, fails: ValueError: x",
        ),
        (
            "import nowhere",
            "own.py:f",
            "own.py, line 1, fails: ModuleNotFoundError: No module named 'nowhere'",
        ),
    ],
)
def test_mistakes_in_the_data_function(
    tmp_path: Path, source: str, spelling: str, reason: str
) -> None:
    (tmp_path / "own.py").write_text(source)
    file = read(write(tmp_path, f'name = "a"\n[data]\npython = "{spelling}"\n'))
    with pytest.raises(PrivateError, match=reason) as refused:
        file.load()
    assert refused.value.told == "it cannot read its data; its own log says why"


def test_messages_about_its_data_name_keys_and_not_flags(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,dead\n40,no\n50,yes\n")
    file = read(write(tmp_path, 'name = "a"\n[data]\npath = "a.csv"\n'))
    with (
        command_line(),
        pytest.raises(UserError, match=r"which one holds the labels \(label_column\)"),
    ):
        file.load()


@pytest.mark.parametrize("limit", [field.name for field in fields(Limits)])
def test_each_limit_is_read(limit: str) -> None:
    """One that nothing checks would allow all."""
    room = Path(silo_file.__file__).parents[1]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in room.rglob("*.py")]
    read_there = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("limits")
    }
    assert limit in read_there


def test_the_file_is_utf_8_in_every_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "silo.toml"
    path.write_text(GOOD.replace("digits", "Zürich"), encoding="utf-8")
    monkeypatch.setattr(io, "text_encoding", lambda encoding, *_: encoding or "latin-1")
    assert read(path).data.path == "Zürich"


def test_classes_get_the_numbers_that_all_silos_share(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import torch\nfrom ekiden.data import from_tensors\n"
        "def f():\n    x = torch.rand(40, 3); y = torch.arange(40) % 2\n"
        "    return from_tensors((x, y), (x, y), classes=('dog', 'cat'))\n"
    )
    text = 'name = "a"\n[data]\npython = "own.py:f"\nclasses = ["bird", "cat", "dog"]\n'
    dataset, _ = read(write(tmp_path, text)).load()
    assert dataset.classes == ("bird", "cat", "dog")
    assert torch.equal(dataset.test.y, torch.tensor([2, 1] * 20))
    with pytest.raises(UserError, match="unknown class in the data 'dog'"):
        read(write(tmp_path, text.replace(', "dog"', ', "cow"'))).load()


SEVERAL = """name = "a"
[data.labs]
path = "digits"
[data.xray]
path = "mnist"
val_fraction = 0.2
"""


def test_a_file_may_name_several_data_sets(tmp_path: Path) -> None:
    file = read(write(tmp_path, SEVERAL))
    assert [*file.named] == ["labs", "xray"]
    assert [
        (file.holding(name).data.path, file.holding(name).data.val_fraction) for name in file.named
    ] == [
        ("digits", 0.1),
        ("mnist", 0.2),
    ]
    for name, line in (("", "choose by"), ("ct", "a holds no data set 'ct', but labs, xray")):
        with pytest.raises(UserError, match=line):
            file.holding(name)
    only = read(write(tmp_path, 'name = "a"\n[data]\npath = "digits"\n'))
    assert only.holding("") is only
    with pytest.raises(UserError, match="one without a name: choose by"):
        only.holding("labs")
    for wrong, line in (
        (SEVERAL.replace('path = "mnist"', ""), r"by path, sql or python in \[data.xray\]"),
        (SEVERAL.replace("val_fraction", "val_fractoin"), "data.xray"),
        (SEVERAL.replace("[data.labs]", '[data]\npath = "digits"\n[data.labs]'), "data"),
    ):
        with pytest.raises(UserError, match=line):
            read(write(tmp_path, wrong))


def test_rows_of_several_silos_are_found_by_salted_fingerprints(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who knows the salt can test a guess of a row; who does not learns only how many rows there
    are."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    twice = [f"{rng.normal():.6f},{'fm'[k % 2]},w,{('no', 'yes')[k % 2]}" for k in range(5)]
    more = 'fingerprints = "a secret of the silos"'
    for name in "ab":
        own = [f"{rng.normal():.6f},{'fm'[k % 2]},w,{('no', 'yes')[k % 2]}" for k in range(45)]
        (tmp_path / f"{name}.csv").write_text("age,sex,ward,died\n" + "\n".join(own + twice) + "\n")
    found: dict[str, list[str]] = {}
    for name, salt in (("a", more), ("b", more), ("c", more.replace("secret", "password"))):
        text = TABLE.format(name=name, more=salt).replace('"c.csv"', '"a.csv"')
        (tmp_path / f"{name}.toml").write_text(text)
        code, said = command("silo", "sums", f"{name}.toml")
        assert code == 0, said
        found[name] = json.loads((tmp_path / f"{name}-sums.json").read_text())["rows"]
    assert len(found["a"]) == 50
    assert found["a"] == sorted(found["a"])  # not in the order of the file
    assert len(set(found["a"]) & set(found["b"])) == 5
    assert not set(found["a"]) & set(found["c"])  # the same rows with another salt
    code, said = command("federation", "agree", "a-sums.json", "b-sums.json")
    assert code == 0
    assert "silos hold equal rows: a and b 5 rows" in said
    said = command("federation", "agree", "a-sums.json", "c-sums.json")[1]
    assert (
        "rows of a, c are not compared: write the same secret into [data] fingerprints at all silos"
        in said
    )
    (tmp_path / "b.toml").write_text(TABLE.format(name="b", more=""))
    command("silo", "sums", "b.toml")
    assert (
        "rows of b are not compared"
        in command("federation", "agree", "a-sums.json", "b-sums.json")[1]
    )
    (tmp_path / "b.toml").write_text(TABLE.format(name="b", more='fingerprints = "short"'))
    assert "data.fingerprints is a secret of 16 to 64 bytes" in command("silo", "sums", "b.toml")[1]


def test_texts_of_all_silos_have_one_length(tmp_path: Path) -> None:
    for name, words in (
        ("a", "short text"),
        ("b", "a text that is much longer than the other one"),
    ):
        (tmp_path / f"{name}.csv").write_text(
            "text,label\n" + "\n".join(f"{words},{'xy'[k % 2]}" for k in range(20))
        )
        (tmp_path / f"{name}.toml").write_text(
            f'name = "{name}"\n[data]\npath = "{name}.csv"\ntext_column = "text"\ntext_length = '
            "12\n"
        )
    (one, _), (two, _) = (read(tmp_path / f"{name}.toml").load() for name in "ab")
    assert one.shape == two.shape == (12,)
    assert terms(one.inputs) == terms(two.inputs)


def test_a_silo_that_holds_one_of_the_agreed_classes_takes_part(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = tables(tmp_path)
    (tmp_path / "b.csv").write_text((tmp_path / "b.csv").read_text().replace("yes", "no"))
    assert "all labels in" in command("silo", "sums", "b.toml")[1]
    classes = 'classes = ["no", "yes"]\n'
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text(TABLE.format(name=name, more=classes))
        code, said = command("silo", "sums", f"{name}.toml")
        assert code == 0, said
    assert list(json.loads((tmp_path / "b-sums.json").read_text())["classes"]) == ["no"]
    assert command("federation", "agree", "a-sums.json", "b-sums.json")[0] == 0
    more = classes + 'agreed = "agreed.json"\n[limits]\nlevel = "models"'
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text(TABLE.format(name=name, more=more))
    held, client = read(files[1]).load()
    assert held.classes == ("no", "yes")
    assert set(client.train.y.tolist()) == {0}
    plan: RemotePlan[Any] = RemotePlan(
        Recipe(FedSeq(epochs=1), training=Training(lr=0.01, batch_size=16), evaluate_every=0), "a,b"
    )
    nodes = FakeNodes([read(file) for file in files])
    result = run(plan, nodes, tmp_path / "run", nodes.public, lambda line: None, poll=0)
    assert 0 <= result.accuracy <= 1
    one = ekiden.load({"v": [1.0, 2.0] * 10, "label": ["no"] * 20}, classes=["no", "yes"])
    assert one.classes == ("no", "yes")
    images = tmp_path / "images"
    for k in range(6):
        (images / "cat").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 20 * k, dtype=np.uint8)).save(images / "cat" / f"{k}.png")
    (tmp_path / "c.toml").write_text(
        'name = "c"\n[data]\npath = "images"\nclasses = ["ant", "cat"]\n'
    )
    held, client = read(tmp_path / "c.toml").load()
    assert (held.classes, set(client.train.y.tolist())) == (("ant", "cat"), {1})


def test_silos_whose_classes_differ_in_case_only_are_told_which(tmp_path: Path) -> None:
    for name, labels in (("a", ("Yes", "No")), ("b", ("yes", "No"))):
        lines = "\n".join(f"{name} text {k},{labels[k % 2]}" for k in range(20))
        (tmp_path / f"{name}.csv").write_text("text,label\n" + lines + "\n")
        more = "text_length = 4\n[hardware]\nthreads = 1\n"
        more += '[limits]\nlevel = "models"\napprove = false\n'
        text = f'name = "{name}"\n[data]\npath = "{name}.csv"\ntext_column = "text"\n'
        (tmp_path / f"{name}.toml").write_text(text + more)
    plan: RemotePlan[Any] = RemotePlan(Recipe(FedSeq(epochs=1), evaluate_every=0), "a,b")
    nodes = FakeNodes([read(tmp_path / f"{name}.toml") for name in "ab"])
    with pytest.raises(
        UserError, match=r"different classes: .*: 'Yes' and 'yes' are names that differ in case"
    ):
        run(plan, nodes, tmp_path / "run", nodes.public, lambda line: None, poll=0)


def test_a_silo_keeps_its_subjects_and_times_apart(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = [f"p{k // 3},{k},{rng.normal():.4f},{'xy'[k // 3 % 2]}" for k in range(120)]
    (tmp_path / "a.csv").write_text("patient,day,v,label\n" + "\n".join(rows) + "\n")
    text = (
        'name = "a"\n[data]\npath = "a.csv"\ndrop_columns = ["day"]\nsubject_column = "patient"\n'
    )
    found = read(write(tmp_path, text)).read()
    assert isinstance(found, Dataset)
    assert found.train.subject is not None
    assert found.test.subject is not None
    assert len(found.test) == 24
    assert not set(found.train.subject.tolist()) & set(found.test.subject.tolist())
    text = text.replace('drop_columns = ["day"]', 'time_column = "day"')
    found = read(write(tmp_path, text)).read()
    assert isinstance(found, Dataset)
    assert found.train.time is not None
    assert found.test.time is not None
    assert float(found.train.time.max()) < float(found.test.time.min())


def test_spellings_at_a_silo_follow_the_agreed_names(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = tables(tmp_path)
    sums_of(tmp_path, command)
    assert command("federation", "agree", "a-sums.json", "b-sums.json")[0] == 0
    rows = (tmp_path / "b.csv").read_text()
    (tmp_path / "b.csv").write_text(rows.replace(",f,", ",F,").replace("yes", "Yes "))
    more = 'classes = ["no", "yes"]\nagreed = "agreed.json"\n'
    files[1].write_text(TABLE.format(name="b", more=more))
    with pytest.raises(
        UserError, match=r"the label 'died' has 'yes' \(agreed\) and 'Yes ' .*; column 'sex' has"
    ):
        read(files[1]).load()
    files[1].write_text(TABLE.format(name="b", more=more + 'spelling = "merge"\n'))
    merged, client = read(files[1]).load()
    (tmp_path / "b.csv").write_text(rows)
    files[1].write_text(TABLE.format(name="b", more=more))
    plain, same = read(files[1]).load()
    assert merged.classes == plain.classes
    assert torch.equal(client.train.x, same.train.x)
    assert torch.equal(client.train.y, same.train.y)


@pytest.mark.slow
def test_a_run_over_tables_of_silos(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    files = tables(tmp_path)
    for file in files:
        command("silo", "sums", str(file))
    out = tmp_path / "agreed.json"
    command(
        "federation", "agree", *(str(tmp_path / f"{n}-sums.json") for n in "ab"), "--out", str(out)
    )
    more = 'agreed = "agreed.json"\n[hardware]\nthreads = 1\n[limits]\nlevel = "models"\nexact_evaluation = true'
    for file, name in zip(files, "ab", strict=True):
        file.write_text(TABLE.format(name=name, more=more))

    def go(folder: str) -> Result:
        plan: RemotePlan[Any] = RemotePlan(
            Recipe(FedSeq(epochs=10), training=Training(lr=0.01, batch_size=16), evaluate_every=0),
            "a,b",
        )
        nodes = FakeNodes([read(file) for file in files])
        return run(plan, nodes, tmp_path / folder, nodes.public, lambda line: None, poll=0)

    result = go("run")
    assert result.accuracy > 0.8
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["inputs"]["kind"], config["network"]) == ("table", "table_mlp")
    assert verify(tmp_path / "run").wrong == ()
    for entry, value in (("vocabularies", [["f"]]), ("centre", [0.0])):
        other = config | {"inputs": config["inputs"] | {entry: value}}
        (tmp_path / "run" / "config.json").write_text(json.dumps(other))
        assert "config.json says inputs" in "; ".join(verify(tmp_path / "run").wrong)
    made = json.loads(out.read_text())
    made["table"]["centre"][0] += 1
    (tmp_path / "other.json").write_text(json.dumps(made))
    files[1].write_text(TABLE.format(name="b", more=more.replace("agreed.json", "other.json")))
    with pytest.raises(UserError, match=r"a and b hold data of different (inputs|counts)"):
        go("again")
