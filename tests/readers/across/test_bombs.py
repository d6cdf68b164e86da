"""Files that ask for far more than they are: refused by what they declare, before
anything is allocated."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ekiden.core.base.errors import UserError
from ekiden.readers import frames, raster
from ekiden.readers.kinds import Images, texts
from ekiden.readers.kinds.texts import tokens_for


def test_a_parquet_file_of_billions_of_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Callable[..., tuple[int, str]]
) -> None:
    """Missing values take almost no room in the file."""
    file = tmp_path / "a.parquet"
    pq.write_table(pa.table({name: pa.nulls(1_000_000, pa.float64()) for name in "xy"}), file)
    assert file.stat().st_size < 20_000
    monkeypatch.setattr(frames, "_MOST_VALUES", 1_999_999)
    monkeypatch.setattr(pq.ParquetFile, "read", lambda *_: pytest.fail("it was read"))
    with pytest.raises(UserError, match=r"says that it holds 2,000,000 values"):
        frames.arrow(file, "a")
    code, said = command("data", str(file), "--label-column", "y")
    assert (code, said.count("\n")) == (2, 1)


def test_a_parquet_file_that_memory_cannot_hold_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 20000000000 failed")

    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "a.parquet")
    monkeypatch.setattr(pq.ParquetFile, "read", full)
    with pytest.raises(UserError, match="needs more memory than its size allows"):
        frames.arrow(tmp_path / "a.parquet", "a")


@pytest.mark.parametrize("stored", [False, True])
def test_a_parquet_file_whose_strings_unpack_to_gigabytes_is_one_line(
    stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kilobyte with one long string in each row, as text, or as categories."""
    monkeypatch.setattr(frames, "_ROOM", 1 << 28)
    file, rows = tmp_path / "a.parquet", 10_000
    once = pa.DictionaryArray.from_arrays(pa.array([0] * rows), pa.array(["a" * (1 << 20)]))
    pq.write_table(pa.table({"x": once}), file, compression="zstd", store_schema=stored)
    assert file.stat().st_size < 3_000
    with pytest.raises(UserError, match=r"a\.parquet .*more memory than its size allows"):
        frames.arrow(file, "a")


def tokenizer(folder: Path, pattern: str) -> str:
    """A tokenizer that splits texts by an expression of its own."""
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "a": 1}, "unk_token": "[UNK]"}
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    values: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": model}
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split]}
    values |= dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    (folder / "tokenizer.json").write_text(json.dumps(values))
    return str(folder)


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN_LIKE = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}]*[\p{Ll}]+(?i:'s|'t)?|\p{N}|\(\)*"


@pytest.mark.parametrize("pattern", [GPT2, LLAMA3, QWEN_LIKE])
def test_expressions_of_known_tokenizers_are_read(pattern: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs the extra text: pip install 'ekiden[text]'")
    tokens = tokens_for(tokenizer(tmp_path, pattern), 16)
    assert tokens.encode(["a b"]).shape[0] == 1


@pytest.mark.parametrize("pattern", ["(a+)+b", "(a*){2,}c", "a*a*a*a*a*a*b", r"\w*\w*\w*\w*x"])
def test_an_expression_that_takes_forever_is_one_line(
    pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some end in a panic of Rust, others would take days."""
    pytest.importorskip("tokenizers", reason="needs the extra text: pip install 'ekiden[text]'")
    monkeypatch.setattr(texts, "_SECONDS", 3)
    with pytest.raises(UserError, match=r"takes too long|retry-limit") as told:
        tokens_for(tokenizer(tmp_path, pattern), 16).encode(["a" * 3000 + " bxc"])
    assert "\n" not in str(told.value)


def test_a_huge_picture_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of 13,000 x 13,000 took a minute. A PNG that names an orientation was decoded to find
    it."""
    file, exif = tmp_path / "a.png", Image.Exif()
    exif[0x0112] = 6
    Image.new("1", (9_000, 9_000)).save(file, exif=exif)
    assert file.stat().st_size < 50_000
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(UserError, match="9000 x 9000 pixels, 67108864 are read at most"):
        Images().encode([file])
    for read in (raster.look, raster.load, raster.mask):
        with pytest.raises(UserError, match="9000 x 9000 pixels"):
            read(file)


READS = """
import resource, threading, time
from pathlib import Path
from ekiden.readers import frames

for name in "ab":
    Path(name + ".csv").write_text("v,w\\n" + "1,2\\n" * 200_000)

def read(name, wait):
    time.sleep(wait)
    frames.arrow(Path(name + ".csv"), name)

threads = [threading.Thread(target=read, args=(name, 0.01 * k)) for k, name in enumerate("abab")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(resource.getrlimit(resource.RLIMIT_DATA) == (resource.RLIM_INFINITY,) * 2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits a process's data")
def test_small_tables_fit_in_a_new_process_and_leave_no_limit(tmp_path: Path) -> None:
    """Arrow takes a gigabyte for its first cell; four threads read at once."""
    done = subprocess.run(
        [sys.executable, "-c", READS], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["True"], "")
