"""Makes what experiments/language-model.toml needs: a small network, its tokenizer, and texts of
three kinds.

    python -m benchmarks.two_languages vaderSentiment-3.2.1.tar.gz data/language models/small-gpt2

- `public.parquet`: docstrings of Python's standard library, for the tokenizer and the first
  training;
- `code.parquet`: source code of the standard library, without docstrings and comments, a few lines
  each;
- `films.parquet`: sentences of film reviews, from the sdist of vaderSentiment (see
  benchmarks/sentiment_domains.py).

The network is a GPT-2 with random values: 4 layers, width 192, 2,000 tokens (2.5 million values
with its head).
"""

import argparse
import ast
import random
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.sentiment_domains import texts

LINES = 4


def modules() -> Iterator[ast.Module]:
    """Yield the modules of the standard library."""
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield ast.parse(file.read_text(encoding="utf-8", errors="replace"))


def docstrings(module: ast.Module) -> list[str]:
    """Return the paragraphs of all docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) for node in ast.walk(module) if isinstance(node, kinds)]
    return [" ".join(part.split()) for text in found if text for part in text.split("\n\n")]


def code(module: ast.Module) -> list[str]:
    """Return the code of functions, a few lines each."""
    found = []
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = "\n".join(ast.unparse(part) for part in body).splitlines()
            found += ["\n".join(lines[k : k + LINES]) for k in range(0, len(lines), LINES)]
    return found


def chosen(found: list[str], rows: int) -> list[str]:
    """Return so many different texts that are not too short."""
    different = sorted({text for text in found if len(text) >= 40})
    random.Random(0).shuffle(different)
    return different[:rows]


def main() -> None:
    """Write texts, tokenizer and network."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sdist", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--public", type=int, default=4000)
    parser.add_argument("--rows", type=int, default=750, help="of each silo")
    given = parser.parse_args()
    trees = list(modules())
    kinds = {
        "public": chosen([text for tree in trees for text in docstrings(tree)], given.public),
        "code": chosen([text for tree in trees for text in code(tree)], given.rows),
        "films": chosen([text for text, _ in texts(given.sdist)["movies"]], given.rows),
    }
    given.data.mkdir(parents=True, exist_ok=True)
    for name, lines in kinds.items():
        pq.write_table(pa.table({"text": lines}), given.data / f"{name}.parquet")
        print(name, len(lines))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(kinds["public"], trainer)
    given.model.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(given.model / "tokenizer.json"))
    torch.manual_seed(0)
    size = tokenizer.get_vocab_size()
    config = GPT2Config(
        vocab_size=size,
        n_embd=192,
        n_layer=4,
        n_head=6,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    network = GPT2LMHeadModel(config)
    network.save_pretrained(given.model)
    print("values", sum(p.numel() for p in network.parameters()))


if __name__ == "__main__":
    main()
