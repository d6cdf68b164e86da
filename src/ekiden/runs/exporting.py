"""Write a trained network as a file for other software, and check it before it is put in place.

An exported model of a table takes unscaled rows: their encoding goes into it.
"""

import io
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ekiden._version import __version__
from ekiden.core.base.checks import plain
from ekiden.core.base.errors import DataWarning, UserError, first_line
from ekiden.core.base.files import disk_error, safetensors_chunks, write
from ekiden.core.tasks import Classification, Regression, Survival, recorded
from ekiden.core.training.frozen import fixed
from ekiden.readers.dates import DAY
from ekiden.readers.kinds import Images, Table, Tokens
from ekiden.runs.card import card, usage
from ekiden.runs.loaded_model import LoadedModel, ModelSource
from ekiden.runs.loading import load_model, open_run
from ekiden.runs.predictions import check_free

_DOMAIN = "ai.onnx.ml"
_VERSION = 3
# samples that both models are compared on
_COMPARED = 64
FORMATS = ("onnx", "pt2", "hf")
RELATIVE = 1e-3
ABSOLUTE = 1e-4
"""How far an output of the exported model may be from ours: ABSOLUTE + RELATIVE · |ours|."""
# bytes in an ONNX file, which is one protobuf message
_LARGEST = 2**31 - 2**24
_EXTRA = 'pip install "ekiden[onnx]"'
Program = Callable[[Any], Tensor]
"""Returns the outputs of an exported model for raw samples: a tensor, or the rows of an Arrow
table."""


class Rows(nn.Module):
    """A model that takes unscaled rows."""

    def __init__(self, encoded: nn.Module, table: Table) -> None:
        """Wrap a model."""
        super().__init__()
        self.encoded = encoded
        self.numeric = bool(table.numeric)
        self.categorical = bool(table.categorical)
        self.gaps = [*map(table.numeric.index, table.gaps)]
        self.centre: Tensor
        self.scale: Tensor
        self.register_buffer("centre", torch.tensor(table.centre, dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(table.scale, dtype=torch.float64))

    def forward(self, *parts: Tensor) -> Tensor:
        """Return outputs (b, K).

        Args:
            *parts: (b, numeric) float64 numbers, NaN if one is missing, and (b, categorical) int64
                codes; a table without columns of a kind lacks that part.
        """
        found = []
        if self.numeric:
            numbers = parts[0]
            missing = numbers.isnan()
            scaled = (numbers - self.centre) / self.scale
            found.append(torch.where(missing, torch.zeros_like(scaled), scaled).float())
            if self.gaps:
                found.append(missing[:, self.gaps].float())
        if self.categorical:
            found.append(parts[-1].float())
        out: Tensor = self.encoded(torch.cat(found, dim=1))
        return out


def parts_of(table: Table) -> dict[str, Tensor]:
    """Return two rows of zeros, as the parts that `Rows` takes, by the names of the parts."""
    parts = dict[str, Tensor]()
    if table.numeric:
        parts["numbers"] = torch.zeros(2, len(table.numeric), dtype=torch.float64)
    if table.categorical:
        parts["codes"] = torch.zeros(2, len(table.categorical), dtype=torch.int64)
    return parts


def row_parts(raw: Any, table: Table) -> tuple[Tensor, ...]:
    """Return raw rows of an Arrow table as the parts that `Rows` takes."""
    given = row_columns(raw, table)
    numbers = list[Tensor]()
    codes = list[Tensor]()
    for name in table.numeric:
        numbers.append(torch.from_numpy(given[name]))
    for name, known in zip(table.categorical, table.vocabularies, strict=True):
        places = dict(zip(known, range(1, len(known) + 1), strict=True))
        codes.append(torch.tensor([places.get(text, 0) for text in given[name]]))
    return tuple(torch.stack(part, dim=1) for part in (numbers, codes) if part)


def row_columns(raw: Any, table: Table) -> dict[str, Any]:
    """Return raw rows of an Arrow table as the inputs of an ONNX file, by column."""
    import pyarrow.compute as pc

    found: dict[str, Any] = {}
    for name in table.numeric:
        column = raw[name]
        if name in table.dates:
            column = pc.divide(column.cast("int64").cast("float64"), DAY)
        found[name] = np.array(column.to_pylist(), dtype=np.float64)
    for name in table.categorical:
        found[name] = raw[name].fill_null("").to_numpy()
    return found


def columns_taken(table: Table, *, named: bool) -> str:
    """Return in words what an exported model takes; `named`: whether it has an input for each
    column.
    """
    numbers = ", ".join(table.numeric)
    categories = ", ".join(table.categorical)
    if named:
        numbers = f"float64 for numbers ({numbers})"
        categories = f"text for categories ({categories}), empty if missing"
    else:
        numbers = f"float64 numbers (n, {len(table.numeric)}): {numbers}"
        categories = (
            f"int64 codes (n, {len(table.categorical)}): {categories}, each the place of the "
            "category in inputs.vocabularies, counted from 1, and 0 for others"
        )
    if table.dates:
        numbers += f", days since 1970 for dates ({', '.join(table.dates)})"
    parts = []
    if table.numeric:
        parts.append(f"{numbers}, NaN if missing")
    if table.categorical:
        parts.append(categories)
    if named:
        return f"an input (n,) for each column, by its name: {'; '.join(parts)}"
    return "; then ".join(parts)


def take_columns(model: Any, table: Table) -> None:
    """Change an ONNX model (`onnx_ir.Model`) that takes parts of `Rows`: it gets a named input for
    each column.
    """
    # comes with the extra
    import onnx_ir as ir

    graph = model.graph
    _free_names(graph, {*table.numeric, *table.categorical})
    given = dict(zip(parts_of(table), graph.inputs, strict=True))
    batch = graph.inputs[0].shape[0]
    one = ir.Value(name="ekiden.one", const_value=ir.tensor([1], name="ekiden.one"))
    made: list[Any] = []
    inputs: list[Any] = []

    def added(name: str, kind: Any) -> Any:
        inputs.append(ir.Input(name, shape=ir.Shape([batch]), type=ir.TensorType(kind)))
        return inputs[-1]

    def node(
        kind: str, taken: list[Any], name: str, attributes: dict[str, Any], domain: str = ""
    ) -> Any:
        out = ir.Value(name=f"ekiden.{name}")
        made.append(ir.node(kind, taken, attributes, domain=domain, outputs=[out]))
        return out

    stacked: dict[str, list[Any]] = {"numbers": [], "codes": []}
    for k, name in enumerate(table.numeric):
        column = added(name, ir.DataType.DOUBLE)
        stacked["numbers"].append(node("Unsqueeze", [column, one], f"number.{k}", {}))
    for k, (name, known) in enumerate(zip(table.categorical, table.vocabularies, strict=True)):
        places = {
            "keys_strings": list(known),
            "values_int64s": list(range(1, len(known) + 1)),
            "default_int64": 0,
        }
        # the operator needs a key
        if not known:
            places |= {"keys_strings": [""], "values_int64s": [0]}
        code = node(
            "LabelEncoder", [added(name, ir.DataType.STRING)], f"category.{k}", places, _DOMAIN
        )
        stacked["codes"].append(node("Unsqueeze", [code, one], f"code.{k}", {}))
    for name, part in given.items():
        ir.convenience.replace_all_uses_with(part, node("Concat", stacked[name], name, {"axis": 1}))
    graph.initializers.add(one)
    graph.inputs.clear()
    graph.inputs.extend(inputs)
    graph.insert_before(graph[0], made)
    model.opset_imports[_DOMAIN] = _VERSION


def _free_names(graph: Any, taken: set[str]) -> None:
    """Rename values inside the graph that are called like a column."""
    values = [*graph.inputs, *graph.initializers.values()]
    for node in graph:
        values += node.outputs
    for k, value in enumerate(values):
        if value.name in taken:
            value.name = f"ekiden.{k}.{value.name}"


def made_up(model: LoadedModel) -> Any:
    """Return raw samples from a fixed seed, on which both models are compared: a tensor (n, ...), or
    rows of an Arrow table, among them rows with missing numbers and unknown categories.
    """
    draw = torch.Generator().manual_seed(0)
    inputs = model.inputs
    shape = (_COMPARED, *model.shape)
    match inputs:
        case Images():
            return torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8)
        case Tokens():
            return torch.randint(0, inputs.vocabulary, shape, generator=draw)
        case Table():
            return _made_up_rows(inputs, draw)
        case _:
            return torch.randn(shape, generator=draw)


def _made_up_rows(table: Table, draw: torch.Generator) -> Any:
    import pyarrow as pa

    columns = {}
    for name, mean, scale in zip(table.numeric, table.centre, table.scale, strict=True):
        numbers = torch.randn(_COMPARED, generator=draw, dtype=torch.float64).numpy()
        numbers = numbers * scale + mean
        if name in table.dates:
            numbers = np.rint(numbers * DAY).astype("datetime64[us]")
        columns[name] = pa.array(numbers, mask=torch.rand(_COMPARED, generator=draw).numpy() < 0.2)
    for name, known in zip(table.categorical, table.vocabularies, strict=True):
        # no known category is longer than all of them together
        names = np.array(["", "".join(known) + "?", *known], dtype=np.str_)
        chosen = torch.randint(0, len(names), (_COMPARED,), generator=draw).numpy()
        columns[name] = pa.array(names[chosen], pa.string())
    return pa.table(columns)


@dataclass(frozen=True)
class Exported:
    """What was written."""

    samples: int  # number of made-up samples that both models were compared on
    difference: float  # the largest difference between two outputs
    takes: str  # what the exported model takes, in words


def export(
    folder: str | os.PathLike[str],
    to: str,
    path: str | os.PathLike[str],
    *,
    client: str = "",
    network: ModelSource | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write the model of a run for other software; see `ekiden.export`."""
    run = Path(folder)
    path = Path(path)
    _check_target(path, to, overwrite)
    model = load_model(run, client=client, network=network)
    raw = made_up(model)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    makers: dict[str, Callable[[], Program]] = {
        "onnx": lambda: _onnx(model, unfinished),
        "pt2": lambda: _pt2(model, unfinished),
        "hf": lambda: _hf(model, unfinished, run, network),
    }
    try:
        difference = _compared(model, makers[to](), raw)
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(unfinished, path)
    except OSError as error:
        raise disk_error(error, path) from None
    finally:
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        unfinished.unlink(missing_ok=True)
    return Exported(len(raw), difference, takes(model, named=to == "onnx"))


def _check_target(path: Path, to: str, overwrite: bool) -> None:
    if path.is_dir() and to == "hf":
        ours = (
            overwrite and (path / "config.json").exists() and (path / "model.safetensors").exists()
        )
        if any(path.iterdir()) and not ours:
            raise UserError(f"{path} is a folder that is not empty: choose another name")
        return
    check_free(path, overwrite)


def _compared(model: LoadedModel, exported: Program, raw: Any) -> float:
    """Return the largest difference between both models' outputs, for raw samples together and for
    a single one.
    """
    largest = 0.0
    for part in (raw, raw[:1]):
        with torch.inference_mode(), warnings.catch_warnings():
            # made-up rows hold unknown categories on purpose
            warnings.simplefilter("ignore", DataWarning)
            ours = model(part).float()
            theirs = exported(part).float()
        ulp = torch.zeros(())
        # in standard deviations; a float32 holds 7 digits of the number itself
        if isinstance(model.task, Regression):
            there = model.task.answers(ours, full=True)
            ulp = (
                model.task.standardised(there + torch.finfo(torch.float32).eps * there.abs()) - ours
            )
            theirs = model.task.standardised(theirs)
        if ours.shape != theirs.shape:
            raise UserError(
                f"the exported model gives {tuple(theirs.shape)}, not {tuple(ours.shape)}: nothing "
                "written"
            )
        apart = (ours - theirs).abs()
        largest = max(largest, float(apart.max()))
        if not (apart <= ABSOLUTE + RELATIVE * ours.abs() + 2 * ulp.abs()).all():
            raise UserError(
                f"the exported model's outputs differ from the run's (by up to {largest:.3g}, "
                "allowed "
                f"are {ABSOLUTE:g} + {RELATIVE:g} of the output): nothing written; try another "
                "format"
            )
    return largest


def _examples(model: LoadedModel) -> tuple[Tensor, ...]:
    """Return the inputs to trace with: no samples, because a traced program may keep them."""
    if isinstance(model.inputs, Table):
        return tuple(parts_of(model.inputs).values())
    # of texts ones, because the token 0 may stand for padding
    return (torch.full((2, *model.shape), int(model.inputs.ragged), dtype=model.inputs.dtype),)


def _traced(model: LoadedModel) -> Any:
    """Return the model as a program for any number of samples."""
    dims: dict[int, Any] = {0: torch.export.Dim("batch")}
    if model.inputs.ragged:
        dims[1] = torch.export.Dim("length", max=model.shape[0])
    whole: nn.Module = _Raw(model)
    examples = _examples(model)
    shapes: Any = (dims,)
    if isinstance(model.inputs, Table):
        whole = Rows(whole, model.inputs)
        shapes = ((dims,) * len(examples),)
    with _quiet():
        # errors of any kind, from PyTorch's tracer or the user's own code
        try:
            return torch.export.export(whole, examples, dynamic_shapes=shapes, strict=False)
        except Exception as error:
            raise UserError(
                f"the network cannot be traced by torch.export ({first_line(error)})"
            ) from error


class _Raw(nn.Module):
    """A model that includes its scaling."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self.network = model.network
        self.task = model.task
        self.scaled = not model.inputs.ragged
        if not self.scaled:
            return
        unit = 1.0
        if model.inputs.dtype == torch.uint8:
            unit = 255.0
        shape = (2, 1, -1, *[1] * (len(model.shape) - 1))
        mean, std = torch.tensor([model.mean, model.std], dtype=torch.float64).view(shape)
        self.scale: Tensor
        self.offset: Tensor
        self.register_buffer("scale", (1 / (unit * std)).float())
        self.register_buffer("offset", (-mean / std).float())

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (b, K) for raw samples (b, ...): numbers in their unit, otherwise
        logits.
        """
        if self.scaled:
            x = x.float() * self.scale + self.offset
        out: Tensor = self.network(x)
        if isinstance(self.task, Regression):
            return self.task.answers(out, full=True)
        return out


def _pt2(model: LoadedModel, file: Path) -> Program:
    program = _traced(model)
    extra = {"ekiden.json": json.dumps(about(model, named=False))}
    with _quiet(), file.open("wb") as target:
        torch.export.save(program, target, extra_files=extra)
    with _quiet():
        loaded: Callable[..., Tensor] = torch.export.load(io.BytesIO(file.read_bytes())).module()
    table = model.inputs
    if isinstance(table, Table):
        return lambda rows: loaded(*row_parts(rows, table))
    return loaded


def _onnx(model: LoadedModel, file: Path) -> Program:
    try:
        # an extra
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        raise UserError(f"ONNX needs an extra: {_EXTRA}") from None
    size = sum(value.nbytes for value in model.state_dict().values())
    if size > _LARGEST:
        raise UserError(
            f"the model has {size:,} bytes, but an ONNX file holds at most 2 GB: use --to=pt2"
        )
    program = _traced(model)
    names = ["input"]
    table = model.inputs
    if isinstance(table, Table):
        names = list(parts_of(table))
    with _quiet():
        try:
            made = torch.onnx.export(
                program, dynamo=True, input_names=names, output_names=["output"], verbose=False
            )
        except Exception as error:  # of an operator that ONNX lacks; all kinds
            raise UserError(
                f"the network cannot be written as ONNX ({first_line(error)}): use --to=pt2"
            ) from error
        assert made is not None, "the dynamo exporter returns a program"
        if isinstance(table, Table):
            take_columns(made.model, table)
        for key, value in about(model, named=True).items():
            made.model.metadata_props[key] = json.dumps(value)
        made.save(str(file), external_data=False)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def answer(raw: Any) -> Tensor:
        given = row_columns(raw, table) if isinstance(table, Table) else {"input": raw.numpy()}
        return torch.from_numpy(session.run(None, given)[0])

    return answer


def _hf(model: LoadedModel, folder: Path, run: Path, network: ModelSource | None) -> Program:
    folder.mkdir()
    result = open_run(run, network=network)
    state = model.network.state_dict() | dict(fixed(model.network))
    config = about(model, named=False) | {
        "architectures": [result.config["network"] or result.config["recipe"]["model"]],
        "id2label": dict(enumerate(model.classes)),
        "label2id": {name: k for k, name in enumerate(model.classes)},
        "problem_type": _problem(model),
        "ekiden_version": __version__,
    }
    write(folder / "model.safetensors", safetensors_chunks(state, {"format": "pt"}))
    answers = _pt2(model, folder / "model.pt2")
    write(folder / "config.json", [json.dumps(config, indent=2).encode() + b"\n"])
    write(
        folder / "README.md",
        [(front_matter(model) + card(result) + usage(model, config["takes"])).encode()],
    )
    return answers


def about(model: LoadedModel, *, named: bool) -> dict[str, Any]:
    """Return what a user of an exported model must know, as plain values; `named`: whether its
    inputs have names.
    """
    outputs = "logits"
    if isinstance(model.task, Regression):
        outputs = "values"
    if isinstance(model.task, Survival):
        outputs = "log hazards"
    values = {
        "classes": list(model.classes),
        "task": recorded(model.task),
        "inputs": model.inputs.to_json() | {"shape": list(model.shape)},
        "takes": takes(model, named=named),
        "normalisation": {"mean": list(model.mean), "std": list(model.std), "inside": True},
        "outputs": outputs,
    }
    if model.baseline:
        values["baseline"] = plain(model.baseline)
    if model.recalibration:
        values["recalibration"] = {"inside": True, **plain(model.recalibration)}
    return values


def takes(model: LoadedModel, *, named: bool) -> str:
    """Return in words what an exported model takes; `named`: whether it has an input for each
    column of a table.
    """
    shape = ", ".join(map(str, model.shape))
    match model.inputs:
        case Images(fit=fit, window=window):
            how = "scaled and cut to"
            if fit == "stretch":
                how = "scaled to"
            text = f"uint8 pixels (n, {shape}), {how} {model.shape[2]} x {model.shape[1]} before"
            if window:
                text += f", values from {window[0]:g} to {window[1]:g} brought to 0 to 255"
            return text
        case Table() as table:
            return columns_taken(table, named=named)
        case Tokens(tokenizer=tokenizer):
            name = Path(tokenizer).name or tokenizer
            return f"int64 tokens (n, length) of the tokenizer {name!r}, which is not in the file"
        case _:
            return f"float32 arrays (n, {shape})"


def front_matter(model: LoadedModel) -> str:
    """Return what the Hugging Face hub reads at the top of a model card."""
    tags = ["federated-learning", model.task.kind]
    if model.inputs.sized and isinstance(model.task, Classification):
        tags.append("image-classification")
    return "\n- ".join(("---\nlibrary_name: ekiden\ntags:", *tags)) + "\n---\n\n"


def _problem(model: LoadedModel) -> str:
    kinds = {
        "classification": "single_label_classification",
        "multi-label": "multi_label_classification",
    }
    return kinds.get(model.task.kind, model.task.kind)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what PyTorch prints about the inside of its exporters; it is for its developers."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
