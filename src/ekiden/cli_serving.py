"""The command line for what comes after a run: `ekiden predict`, `export` of models, `card`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from ekiden import outside
from ekiden.cli_console import console, parse
from ekiden.core.files import write
from ekiden.errors import UserError
from ekiden.serving import card as cards
from ekiden.serving import predictions
from ekiden.serving.loading import load_model, open_run
from ekiden.serving.model import ModelSource, not_finished

_Out = Annotated[str, tyro.conf.arg(aliases=["-o"])]


@dataclass(frozen=True)
class PredictOptions:
    """What the model of a run says of files: a class and its probability for each, as a table."""

    run: Positional[Path]
    """run folder"""
    files: Positional[tuple[Path, ...]]
    """what the model takes: images of any size and folders of them, Parquet or CSV files, texts, NumPy arrays (.npy)"""
    out: _Out = predictions.STDOUT
    """file to write, .parquet or .csv; -: CSV to the standard output"""
    client: str = ""
    """the personal model of this client instead of the global one"""
    column: str = ""
    """column of tables that holds the images or texts; by default image or text"""
    network: str = ""
    """FILE.py:NAME, the network of a run that was started from Python with a module of its own"""
    overwrite: bool = False
    """replace the file if it is there"""


@dataclass(frozen=True)
class CardOptions:
    """A model card in Markdown: what was trained on how many samples of whom, how, how good it is, what is not known."""

    run: Positional[Path]
    """run folder"""
    out: _Out = predictions.STDOUT
    """file to write; -: the standard output"""
    overwrite: bool = False
    """replace the file if it is there"""


def predict(args: Sequence[str]) -> None:
    """`ekiden predict RUN FILES... [-o OUT]`."""
    options = parse(PredictOptions, args, "ekiden predict")
    predictions.check_out(options.out, options.overwrite)
    model = load_model(options.run, client=options.client, network=own_network(options.network))
    warn(options.run)
    count = predictions.predict(
        model, options.files, options.out, column=options.column, overwrite=options.overwrite
    )
    if options.out != predictions.STDOUT:
        console.print(f"{count} predictions written to {options.out}", soft_wrap=True, highlight=False)


def card(args: Sequence[str]) -> None:
    """`ekiden card RUN [-o FILE]`."""
    options = parse(CardOptions, args, "ekiden card")
    if options.out != predictions.STDOUT:
        predictions.check_free(Path(options.out), options.overwrite)
    text = cards.card(open_run(options.run))
    if options.out == predictions.STDOUT:
        print(text, end="")
        return
    write(Path(options.out), [text.encode()])
    console.print(f"model card written to {options.out}", soft_wrap=True, highlight=False)


def own_network(name: str) -> ModelSource | None:
    """What `--network` names.

    Raises:
        UserError: it is none in a file.
    """
    if not name:
        return None
    if not outside.is_file(name):
        raise UserError(f"--network {name!r} names no file: give FILE.py:NAME")
    outside.trust(name)
    found: ModelSource = outside.load(name)
    return found


def warn(folder: Path) -> None:
    """Say on the standard error that a run has not ended."""
    if line := not_finished(open_run(folder).config, open_run(folder).state.step):
        print(f"ekiden: {line}", file=__import__("sys").stderr)
