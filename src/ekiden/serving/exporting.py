"""Write a trained network as a file for other software, and check it before it is put in place."""

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

import torch
from torch import Tensor, nn

from ekiden._version import __version__
from ekiden.base.errors import UserError, unknown
from ekiden.base.files import disk_error, safetensors_chunks, write
from ekiden.data.kinds import Images, Table, Tokens, to_json
from ekiden.data.tasks import Classification, Regression, recorded
from ekiden.results.model import LoadedModel, ModelSource
from ekiden.serving import table_graph, transformers_part
from ekiden.serving.card import card, usage
from ekiden.serving.loading import load_model, open_run
from ekiden.serving.predictions import check_free
from ekiden.serving.samples import samples_of
from ekiden.training.frozen import fixed

FORMATS = ("onnx", "pt2", "hf")
RELATIVE, ABSOLUTE = 1e-3, 1e-4
"""How far an output of the exported model may be from ours: ABSOLUTE + RELATIVE · |ours|."""
_LARGEST = 2**31 - 2**24  # bytes in an ONNX file, which is one protobuf message
_EXTRA = 'pip install "ekiden[onnx]"'
Program = Callable[[Any], Tensor]
"""Returns the outputs of an exported model for raw samples: a tensor, or the rows of an Arrow table."""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: the file, or the folder.
        samples: number of samples that both models were compared on.
        real: how many of these are from the run's own test data; the others are made up.
        difference: the largest difference between two outputs.
        takes: what the exported model takes, in words.
    """

    path: Path
    samples: int
    real: int
    difference: float
    takes: str


def export(
    folder: str | os.PathLike[str],
    to: str,
    path: str | os.PathLike[str],
    *,
    client: str = "",
    network: ModelSource | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write the model of a run for other software.

    The exported model takes any number of raw samples at a time and scales them itself: pixels, tokens, arrays, or the
    columns of a table with its missing numbers and categories; see `takes`. It gives logits, or the numbers of a
    regression in their unit. Its outputs must equal those of `ekiden.load_model` on raw samples of the run's test data
    (made-up ones if these are not available) to 1e-4 plus 0.1 %; otherwise nothing is written. Numbers of a regression
    are compared in standard deviations. The files contain no samples.

    Args:
        folder: the run folder.
        to: onnx: an ONNX file, class names in its metadata. pt2: a program of `torch.export`, which replaces
            TorchScript. hf: a folder with config.json, model.safetensors, model.pt2 and a model card; and where the
            network's body is one of transformers, that body in backbone/, for `AutoModel.from_pretrained`.
        path: the file or folder to write.
        client: name of a client whose personal model is wanted instead of the global one.
        network: as in `ekiden.load_model`.
        overwrite: replace an existing file, or a folder that an export wrote.

    Raises:
        UserError: the model cannot be exported, the exported model gives other outputs, or the file cannot be written.
    """
    run, path = Path(folder), Path(path)
    _check_format(to)
    _check_target(path, to, overwrite)
    model = load_model(run, client=client, network=network)
    raw, real = samples_of(run, model)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    makers: dict[str, Callable[[], Program]] = {
        "onnx": lambda: _onnx(model, unfinished),
        "pt2": lambda: _pt2(model, unfinished),
        "hf": lambda: _hf(model, unfinished, run, network, raw),
    }
    try:
        difference = _compared(model, makers[to](), raw)
        if path.is_dir():
            shutil.rmtree(path)
        os.replace(unfinished, path)
    except OSError as error:
        raise disk_error(error, path) from None
    finally:
        shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink(missing_ok=True)
    return Exported(path, len(raw), real, difference, takes(model, named=to == "onnx"))


def _check_format(to: str) -> None:
    if to == "torchscript":
        raise UserError("PyTorch has deprecated TorchScript: use --to pt2 (torch.export), which replaces it")
    if to not in FORMATS:
        raise unknown("format", to, FORMATS)


def _check_target(path: Path, to: str, overwrite: bool) -> None:
    if path.is_dir() and to == "hf":
        ours = overwrite and (path / "config.json").exists() and (path / "model.safetensors").exists()
        if any(path.iterdir()) and not ours:
            raise UserError(f"{path} is a folder that is not empty: choose another name")
        return
    check_free(path, overwrite)


def _compared(model: LoadedModel, exported: Program, raw: Any) -> float:
    """Return the largest difference between both models' outputs, for raw samples together and for a single one."""
    largest = 0.0
    for part in (raw, raw[:1]):
        with torch.inference_mode():
            ours, theirs = model(part).float(), exported(part).float()
        ulp = torch.zeros(())
        if isinstance(model.task, Regression):  # in standard deviations; a float32 holds 7 digits of the number itself
            there = model.task.answers(ours, full=True)
            ulp = model.task.standardised(there + torch.finfo(torch.float32).eps * there.abs()) - ours
            theirs = model.task.standardised(theirs)
        if ours.shape != theirs.shape:
            raise UserError(f"the exported model gives {tuple(theirs.shape)}, not {tuple(ours.shape)}: nothing written")
        apart = (ours - theirs).abs()
        largest = max(largest, float(apart.max()))
        if not (apart <= ABSOLUTE + RELATIVE * ours.abs() + 2 * ulp.abs()).all():
            raise UserError(
                f"the exported model's outputs differ from the run's (by up to {largest:.3g}, allowed "
                f"are {ABSOLUTE:g} + {RELATIVE:g} of the output): nothing written; try another format"
            )
    return largest


def _examples(model: LoadedModel) -> tuple[Tensor, ...]:
    """Return the inputs to trace with: zeros, because a traced program may keep them."""
    match model.inputs:
        case Table() as table:
            return table_graph.examples(table)
        case Tokens():
            return (torch.ones(2, *model.shape, dtype=torch.int64),)
        case Images():
            return (torch.zeros(2, *model.shape, dtype=torch.uint8),)
        case _:
            return (torch.zeros(2, *model.shape),)


def _traced(model: LoadedModel) -> Any:
    """Return the model as a program for any number of samples."""
    dims: dict[int, Any] = {0: torch.export.Dim("batch")}
    if model.inputs.ragged:
        dims[1] = torch.export.Dim("length", max=model.shape[0])
    whole: nn.Module = _Raw(model)
    if isinstance(model.inputs, Table):
        whole = table_graph.Rows(whole, model.inputs)
    examples = _examples(model)
    shapes: Any = (dims,) if not isinstance(model.inputs, Table) else (tuple(dims for _ in examples),)
    with _quiet():
        try:
            return torch.export.export(whole, examples, dynamic_shapes=shapes, strict=False)
        except Exception as error:  # errors of any kind, from PyTorch's tracer or the user's own code
            reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
            raise UserError(f"the network cannot be traced by torch.export ({reason})") from error


class _Raw(nn.Module):
    """A model that includes its scaling."""

    def __init__(self, model: LoadedModel) -> None:
        super().__init__()
        self.network = model.network
        self.task = model.task if isinstance(model.task, Regression) else None
        self.scaled = not model.inputs.ragged
        if not self.scaled:
            return
        unit = 255.0 if model.inputs.dtype == torch.uint8 else 1.0
        shape = (1, -1, *[1] * (len(model.shape) - 1))
        mean, std = (torch.tensor(values, dtype=torch.float64).view(shape) for values in (model.mean, model.std))
        self.scale: Tensor
        self.offset: Tensor
        self.register_buffer("scale", (1 / (unit * std)).float())
        self.register_buffer("offset", (-mean / std).float())

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (b, K) for raw samples (b, ...): numbers in their unit, otherwise logits."""
        if self.scaled:
            x = x.float() * self.scale + self.offset
        out: Tensor = self.network(x)
        return out if self.task is None else self.task.answers(out, full=True)


def _pt2(model: LoadedModel, file: Path) -> Program:
    program = _traced(model)
    extra = {"ekiden.json": json.dumps(about(model, named=False))}
    with _quiet(), file.open("wb") as target:
        torch.export.save(program, target, extra_files=extra)
    with _quiet():
        loaded: Callable[..., Tensor] = torch.export.load(io.BytesIO(file.read_bytes())).module()
    table = model.inputs
    return (lambda rows: loaded(*table_graph.parts(rows, table))) if isinstance(table, Table) else loaded


def _onnx(model: LoadedModel, file: Path) -> Program:
    try:
        import onnxruntime  # noqa: PLC0415  (an extra)
        import onnxscript  # noqa: F401, PLC0415
    except ImportError:
        raise UserError(f"ONNX needs an extra: {_EXTRA}") from None
    size = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    if size > _LARGEST:
        raise UserError(f"the model has {size:,} bytes, but an ONNX file holds at most 2 GB: use --to pt2")
    program = _traced(model)
    names = table_graph.part_names(model.inputs) if isinstance(model.inputs, Table) else ["input"]
    with _quiet():
        try:
            made = torch.onnx.export(program, dynamo=True, input_names=names, output_names=["output"], verbose=False)
        except Exception as error:  # of an operator that ONNX lacks; all kinds
            raise UserError(f"the network cannot be written as ONNX ({_first(error)}): use --to pt2") from error
        assert made is not None, "the dynamo exporter returns a program"
        if isinstance(model.inputs, Table):
            table_graph.take_columns(made.model, model.inputs)
        made.model.metadata_props.update({key: json.dumps(value) for key, value in about(model, named=True).items()})
        made.save(str(file), external_data=False)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def answer(raw: Any) -> Tensor:
        table = model.inputs
        given = table_graph.columns(raw, table) if isinstance(table, Table) else {"input": raw.numpy()}
        return torch.from_numpy(session.run(None, given)[0])

    return answer


def _hf(model: LoadedModel, folder: Path, run: Path, network: ModelSource | None, raw: Any) -> Program:
    folder.mkdir()
    result = open_run(run, network=network)
    state = {name: value.detach() for name, value in model.network.state_dict().items()} | dict(fixed(model.network))
    config = about(model, named=False) | {
        "architectures": [result.config["network"] or result.config["model"]],
        "id2label": {str(k): name for k, name in enumerate(model.classes)},
        "label2id": {name: k for k, name in enumerate(model.classes)},
        "problem_type": _problem(model),
        "ekiden_version": __version__,
    }
    write(folder / "model.safetensors", safetensors_chunks(state, {"format": "pt"}))
    answers = _pt2(model, folder / "model.pt2")
    pretrained = transformers_part.save(model, raw, folder)
    write(folder / "config.json", [json.dumps(config, indent=2).encode() + b"\n"])
    write(
        folder / "README.md",
        [(front_matter(model) + card(result) + usage(model, config["takes"], pretrained)).encode()],
    )
    return answers


def about(model: LoadedModel, *, named: bool) -> dict[str, Any]:
    """Return what a user of an exported model must know, as plain values; `named`: whether its inputs have names."""
    return {
        "classes": list(model.classes),
        "task": recorded(model.task),
        "inputs": to_json(model.inputs) | {"shape": list(model.shape)},
        "takes": takes(model, named=named),
        "normalisation": {"mean": list(model.mean), "std": list(model.std), "inside": True},
        "outputs": "values" if isinstance(model.task, Regression) else "logits",
    }


def takes(model: LoadedModel, *, named: bool) -> str:
    """Return in words what an exported model takes; `named`: whether it has an input for each column of a table."""
    shape = ", ".join(map(str, model.shape))
    match model.inputs:
        case Images(fit=fit, window=window):
            scaled = f", values from {window[0]:g} to {window[1]:g} brought to 0 to 255" if window else ""
            how = "scaled to" if fit == "stretch" else "scaled and cut to"
            return f"uint8 pixels (n, {shape}), {how} {model.shape[2]} x {model.shape[1]} before{scaled}"
        case Table() as table:
            return table_graph.takes(table, named=named)
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
    return "---\nlibrary_name: ekiden\ntags:\n" + "".join(f"- {tag}\n" for tag in tags) + "---\n\n"


def _problem(model: LoadedModel) -> str:
    kinds = {"classification": "single_label_classification", "multi-label": "multi_label_classification"}
    return kinds.get(model.task.kind, model.task.kind)


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


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
