"""Every mistake in a silo.toml is said in one line that names it."""

import io
from pathlib import Path

import pytest
import torch

from ekiden.base.errors import UserError
from ekiden.transports.flower.silo_file import read

GOOD = 'name = "a"\n[data]\npath = "digits"\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "silo.toml"
    path.write_text(text)
    return path


def test_a_full_file(tmp_path: Path) -> None:
    text = GOOD + 'val_fraction = 0\n[limits]\nmodel_bytes = 5\nmethods = ["fedseq"]\nepochs = 2\n'
    file = read(write(tmp_path, text + '[link]\naddress = "h:1"\nkey = "a.key"\n[hardware]\nthreads = 1\n'))
    assert (file.name, file.limits.model_bytes, file.limits.methods, file.limits.epochs) == ("a", 5, ("fedseq",), 2)
    assert file.folder == tmp_path / "a-silo"
    assert file.beside(file.link.key) == tmp_path / "a.key"
    dataset, client = file.load()
    assert client.name == "a"
    assert len(client.train) == len(dataset.train)
    assert len(client.val) == 0


def test_the_defaults_allow_no_method_that_pools_data(tmp_path: Path) -> None:
    methods = read(write(tmp_path, GOOD)).limits.methods
    assert "fedelmy" in methods
    assert "centralized" not in methods


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name = ", "is no TOML"),
        ("", "give the silo a name"),
        ('name = "../x"\n', "give the silo a name"),
        ("name = 3\n", "give the silo a name"),
        ('name = "*"\n', "give the silo a name"),
        (GOOD.replace('"a"', '"server"'), "no silo can be called 'server'"),
        ('name = "a"\n', "either path or python"),
        ('name = "a"\n[data]\npath = "x"\npython = "y.py:z"\n', "either path or python"),
        ('nam = "a"\n', "did you mean 'name'"),
        (GOOD + "siz = 3\n", "did you mean 'size'"),
        (GOOD + 'size = "3"\n', "data.size must be like 0, not '3'"),
        (GOOD + "size = true\n", "data.size must be like 0, not True"),
        (GOOD + "val_fraction = 1\n", "at least 0 and below 1"),
        (GOOD + '[limits]\nmethods = "fedseq"\n', "must be a list of texts"),
        (GOOD + '[limits]\nmethods = ["fedsec"]\n', "did you mean 'fedseq'"),
        (GOOD + "[limits]\nepochs = 0\n", "must be 1 or more"),
        (GOOD + "[limits]\nmodel_bytes = 1.5\n", "limits.model_bytes must be like"),
        (GOOD + "[hardware]\nthreads = -1\n", "--threads -1 is out of range"),
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
        ("", "no.py:f", "a file that exists"),
        ("", "own.py", "FILE.py:FUNCTION"),
        ("", "own.py:f", "has no function 'f'"),
        ("def f(): return 3", "own.py:f", "returned a int"),
        ("def f(): raise ValueError('x')", "own.py:f", "silo.toml: own.py:f failed with ValueError: x: fix it"),
        ("import nowhere", "own.py:f", "own.py:f failed with ModuleNotFoundError: No module named 'nowhere': fix it"),
    ],
)
def test_mistakes_in_the_data_function(tmp_path: Path, source: str, spelling: str, reason: str) -> None:
    (tmp_path / "own.py").write_text(source)
    file = read(write(tmp_path, f'name = "a"\n[data]\npython = "{spelling}"\n'))
    with pytest.raises(UserError, match=reason):
        file.load()


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
    with pytest.raises(UserError, match="unknown class in the silo's data 'dog'"):
        read(write(tmp_path, text.replace(', "dog"', ', "cow"'))).load()
