"""Put the encoding of a table's rows into an exported model: scaling, missing numbers, and codes of categories."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ekiden.data.kinds import Table

_DOMAIN, _VERSION = "ai.onnx.ml", 3


class Rows(nn.Module):
    """A model that takes unscaled rows."""

    def __init__(self, encoded: nn.Module, table: Table) -> None:
        """Wrap a model.

        Args:
            encoded: takes encoded rows (b, d).
            table: the columns and their encoding.
        """
        super().__init__()
        self.encoded = encoded
        self.numeric, self.categorical = bool(table.numeric), bool(table.categorical)
        self.gaps = [table.numeric.index(name) for name in table.gaps]
        self.centre: Tensor
        self.scale: Tensor
        self.register_buffer("centre", torch.tensor(table.centre, dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(table.scale, dtype=torch.float64))

    def forward(self, *parts: Tensor) -> Tensor:
        """Return outputs (b, K).

        Args:
            *parts: (b, numeric) float64 numbers, NaN if one is missing, and (b, categorical) int64 codes; a table
                without columns of a kind lacks that part.
        """
        found = []
        if self.numeric:
            numbers = parts[0]
            missing = numbers.isnan()
            scaled = (numbers - self.centre) / self.scale
            found.append(torch.where(missing, torch.zeros_like(scaled), scaled).float())
            found += [missing[:, [k]].float() for k in self.gaps]
        if self.categorical:
            found.append(parts[-1].float())
        out: Tensor = self.encoded(torch.cat(found, dim=1))
        return out


def part_names(table: Table) -> list[str]:
    """Return the names of the parts of a row that `Rows` takes."""
    return ["numbers"] * bool(table.numeric) + ["codes"] * bool(table.categorical)


def examples(table: Table) -> tuple[Tensor, ...]:
    """Return two rows of zeros, as the parts that `Rows` takes."""
    kinds = {"numbers": (len(table.numeric), torch.float64), "codes": (len(table.categorical), torch.int64)}
    return tuple(torch.zeros(2, kinds[name][0], dtype=kinds[name][1]) for name in part_names(table))


def parts(raw: Any, table: Table) -> tuple[Tensor, ...]:
    """Return raw rows of an Arrow table as the parts that `Rows` takes."""
    given, found = columns(raw, table), []
    if table.numeric:
        found.append(torch.from_numpy(np.stack([given[name] for name in table.numeric], axis=1)))
    if table.categorical:
        places = [{name: i for i, name in enumerate(known, 1)} for known in table.vocabularies]
        named = zip(places, table.categorical, strict=True)
        found.append(torch.tensor([[place.get(text, 0) for text in given[name]] for place, name in named]).T)
    return tuple(found)


def columns(raw: Any, table: Table) -> dict[str, Any]:
    """Return raw rows of an Arrow table as the inputs of an ONNX file, by column."""
    found: dict[str, Any] = {name: np.array(raw[name].to_pylist(), dtype=np.float64) for name in table.numeric}
    texts = {name: [text or "" for text in raw[name].to_pylist()] for name in table.categorical}
    return found | {name: np.array(column, dtype=object) for name, column in texts.items()}


def takes(table: Table, *, named: bool) -> str:
    """Return in words what an exported model takes; `named`: whether it has an input for each column."""
    numbers = "number" + "s" * (len(table.numeric) != 1)
    if named:
        kinds = [f"float64 for {numbers} ({', '.join(table.numeric)}), NaN if missing"] * bool(table.numeric)
        kinds += [f"text for categories ({', '.join(table.categorical)}), empty if missing"] * bool(table.categorical)
        return f"an input (n,) for each column, by its name: {'; '.join(kinds)}"
    kinds = [f"float64 numbers (n, {len(table.numeric)}): {', '.join(table.numeric)}, NaN if missing"] * bool(
        table.numeric
    )
    kinds += [
        f"int64 codes (n, {len(table.categorical)}): {', '.join(table.categorical)}, each the place of the category in "
        "inputs.vocabularies, counted from 1, and 0 for others"
    ] * bool(table.categorical)
    return "; then ".join(kinds)


def take_columns(model: Any, table: Table) -> None:
    """Change an ONNX model that takes the parts of `Rows` so that it takes a named input for each column.

    Args:
        model: an `onnx_ir.Model`; it is changed.
        table: the columns.
    """
    import onnx_ir as ir  # noqa: PLC0415  (comes with the extra)

    graph = model.graph
    _free_names(graph, {*table.numeric, *table.categorical})
    given = dict(zip(part_names(table), graph.inputs, strict=True))
    batch = graph.inputs[0].shape[0]
    one = ir.Value(name="ekiden.one", const_value=ir.tensor([1], name="ekiden.one"))
    made: list[Any] = []
    inputs: list[Any] = []

    def added(name: str, kind: Any) -> Any:
        inputs.append(ir.Input(name, shape=ir.Shape([batch]), type=ir.TensorType(kind)))
        return inputs[-1]

    def node(kind: str, taken: list[Any], name: str, attributes: dict[str, Any], domain: str = "") -> Any:
        out = ir.Value(name=f"ekiden.{name}")
        made.append(ir.node(kind, taken, attributes, domain=domain, outputs=[out]))
        return out

    stacked: dict[str, list[Any]] = {"numbers": [], "codes": []}
    for k, name in enumerate(table.numeric):
        column = added(name, ir.DataType.DOUBLE)
        stacked["numbers"].append(node("Unsqueeze", [column, one], f"number.{k}", {}))
    for k, (name, known) in enumerate(zip(table.categorical, table.vocabularies, strict=True)):
        places = {"keys_strings": list(known), "values_int64s": list(range(1, len(known) + 1)), "default_int64": 0}
        if not known:  # the operator needs a key
            places |= {"keys_strings": [""], "values_int64s": [0]}
        code = node("LabelEncoder", [added(name, ir.DataType.STRING)], f"category.{k}", places, _DOMAIN)
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
    inside = [*graph.inputs, *graph.initializers.values(), *(value for n in graph for value in n.outputs)]
    names = {value.name for value in inside}
    for value in inside:
        if value.name in taken:
            free = next(name for k in range(len(names) + 2) if (name := f"ekiden.{k}.{value.name}") not in names)
            value.name = free
