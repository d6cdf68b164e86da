"""A network in two named parts, features and head; a head with more outputs than classes; and what
of it is trained.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from types import MethodType
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from ekiden.core.base.errors import UserError, first_line
from ekiden.core.base.settings import derive, seeded


class Split(Protocol):
    """A network that says where its classifier begins. Your own network does so by its attributes'
    names.

    Methods that personalise or exchange the head, or that read representations, need it. A static
    type only: `isinstance` does not see the submodules of an `nn.Module`.
    """

    @property
    def features(self) -> nn.Module:
        """Extractor: (B, *shape) inputs to (B, d) representations."""

    @property
    def head(self) -> nn.Module:
        """Classifier, often the last layer alone: (B, d) representations to (B, classes) logits."""


def as_split(network: object) -> Split:
    """`network` as a network in two parts."""
    if not (hasattr(network, "features") and hasattr(network, "head")):
        raise UserError(
            "this method reads representations: give the network two attributes, `features` and "
            "`head`, with forward(x) = head(features(x))"
        )
    return cast(Split, network)


class SplitNetwork(nn.Module):
    """`head(features(x))`."""

    def __init__(self, features: nn.Module, head: nn.Module) -> None:
        super().__init__()
        # (B, *shape) inputs to (B, d) representations
        self.features = features
        # (B, d) representations to (B, classes) logits
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """(B, classes) logits of (B, *shape) inputs."""
        logits: Tensor = self.head(self.features(x))
        return logits


@dataclass(frozen=True)
class Widened:
    """Builds what `build` does, with `extra` more outputs drawn from the seed."""

    build: Callable[[], nn.Module]
    extra: int
    seed: int

    def __call__(self) -> nn.Module:
        module = self.build()
        with seeded(derive(self.seed, "extra outputs")):
            return widen(module, self.extra)


def widen(module: nn.Module, extra: int) -> nn.Module:
    """`module` with `extra` more outputs after those that it has, whose values stay; the new rows
    are newly drawn.

    The classifier is what the module calls `head`, or the last linear layer in it.
    """
    path = "head" if isinstance(getattr(module, "head", None), nn.Module) else ""
    last = None
    for name, part in module.get_submodule(path).named_modules():
        if isinstance(part, nn.Linear):
            last = name
    if last is None:
        raise UserError(
            "this method adds outputs to the classifier: the model's last layer must be an "
            "nn.Linear"
        )
    if name := ".".join(filter(None, (path, last))):
        module.set_submodule(name, _wider(module.get_submodule(name), extra))
        return module
    return _wider(module, extra)


def _wider(layer: nn.Module, extra: int) -> nn.Linear:
    assert isinstance(layer, nn.Linear)
    bias = layer.bias is not None
    old = layer.out_features
    wider = nn.Linear(layer.in_features, old + extra, bias, layer.weight.device, layer.weight.dtype)
    with torch.no_grad():
        wider.weight[:old] = layer.weight
        if bias:
            wider.bias[:old] = layer.bias
    return wider


# How the names of layers that hold A and B end
FIRST = "lora_A.default"
SECOND = "lora_B.default"
_FORMS = "all, head, last:K, or lora:r=8,alpha=16,targets=a+b,factors=b"


@dataclass(frozen=True)
class Adapters:
    """Adapters: products of low rank that are added to layers, W + (alpha / r)·B·A."""

    r: int = 8  # rank, rows of A
    alpha: float = 16.0  # scale, as in the papers
    # last part of the layers' names. If empty: all linear layers of the features or, if there are
    # none, all
    # convolutions.
    targets: tuple[str, ...] = ()
    # train A too. Otherwise A keeps its initial values, which are the same everywhere, so that the
    # average of the B
    # gives the average of the products.
    both: bool = False


Part = str | int | Adapters  # all, head; the number of last blocks; or adapters


def parse_part(text: str) -> Part:
    """Return the part that is trained, read from a text."""
    kind, _, rest = text.partition(":")
    if text in ("all", "head"):
        return text
    if kind == "last" and re.fullmatch(r"[1-9]\d{0,3}", rest):
        return int(rest)
    if kind == "lora":
        return _adapters(text, rest)
    raise UserError(f"--train {text!r} is not a part of a network: write {_FORMS}")


def check_part(text: str, method: str, *, averages: bool) -> None:
    """Refuse to train both factors of adapters if a method averages models: the average would be
    wrong.
    """
    part = parse_part(text)
    if averages and isinstance(part, Adapters) and part.both:
        raise UserError(
            f"{method} averages models, and the mean of products B·A is not the product of the "
            "means: leave out factors=both, so that A is the same everywhere and the average exact"
        )


def _adapters(text: str, rest: str) -> Adapters:
    try:
        values = dict(pair.split("=") for pair in filter(None, rest.split(",")))
        r = int(values.pop("r", 8))
        alpha = float(values.pop("alpha", 2 * r))
        targets = tuple(filter(None, values.pop("targets", "").split("+")))
        factors = values.pop("factors", "b")
        if values or factors not in ("b", "both") or not (0 < r <= 4096 and 0 < alpha < inf):
            raise ValueError(rest)
    except ValueError:
        raise UserError(
            f"--train {text!r} does not describe adapters: write "
            "lora:r=8,alpha=16,targets=a+b,factors=b"
        ) from None
    return Adapters(r, alpha, targets, factors == "both")


def freeze(module: nn.Module, part: Part) -> nn.Module:
    """Let only `part` of `module` need gradients, and insert adapters."""
    if part == "all":
        return module
    head = _head(module)
    chosen: list[nn.Module] = [head]
    module.requires_grad_(False)
    if isinstance(part, int):
        features = getattr(module, "features", None)
        if not isinstance(features, nn.Module):
            features = nn.ModuleList(child for child in module.children() if child is not head)
        found = blocks(features)
        if part > len(found):
            raise UserError(
                f"--train last:{part}: the network has {len(found)} blocks before its head: choose "
                "fewer"
            )
        for block in found[-part:]:
            chosen += block
    if isinstance(part, Adapters):
        _adapt(module, head, part)
    for each in chosen:
        each.requires_grad_(True)
    return module


def blocks(features: nn.Module) -> list[list[nn.Module]]:
    """Return the blocks of the feature part: its children that hold parameters.

    A list of modules, or a module with one child that has parameters, counts as its children. A
    part that has only vectors (a normalisation) belongs to the block before it.
    """
    inner = _with_parameters(features)
    while len(inner) == 1 and list(inner[0].children()):
        features = inner[0]
        inner = _with_parameters(features)
    found: list[list[nn.Module]] = []
    for child in _children(features):
        if found and all(p.dim() < 2 for p in child.parameters()):
            found[-1].append(child)
        else:
            found.append([child])
    return found


def _with_parameters(module: nn.Module) -> list[nn.Module]:
    """Return the children that hold parameters."""
    return [c for c in module.children() if next(c.parameters(), None) is not None]


def _children(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        inner = _with_parameters(child)
        own = next(child.parameters(recurse=False), None) is not None
        if isinstance(child, nn.ModuleList) or (
            len(inner) == 1 and not own and len(list(child.children())) == 1
        ):
            yield from _children(child)
        elif own or inner:
            yield child


def _head(module: nn.Module) -> nn.Module:
    head = getattr(module, "head", None)
    if not isinstance(head, nn.Module) or next(head.parameters(), None) is None:
        raise UserError(
            "--train other than all needs to know the classifier: name that part of the network "
            "`head`, as in `self.head = nn.Linear(84, 10)`"
        )
    return head


def _adapt(module: nn.Module, head: nn.Module, part: Adapters) -> None:
    """Put adapters into the layers of the features."""
    names = _targets(module, head, part.targets)
    try:
        # takes seconds; few runs need it
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise UserError(f'--train lora needs peft ({error}): pip install "ekiden[hf]"') from None
    config = LoraConfig(r=part.r, lora_alpha=part.alpha, target_modules=names, lora_dropout=0.0)
    try:
        with warnings.catch_warnings():
            # peft itself finds out which layers keep their weight transposed
            warnings.simplefilter("ignore")
            inject_adapter_in_model(config, module)
    except ValueError as error:
        raise UserError(f"--train lora: {first_line(error)}") from None
    module.requires_grad_(False)
    for name, inner in module.named_modules():
        if name.endswith((FIRST, SECOND)):
            first = name.endswith(FIRST)
            inner.requires_grad_(part.both or not first)
            # a network with new values also begins without a difference
            if not first:
                inner.__dict__["reset_parameters"] = MethodType(_zero, inner)


def _targets(module: nn.Module, head: nn.Module, wanted: Sequence[str]) -> list[str]:
    inside = set(head.modules())
    layers = {name: m for name, m in module.named_modules() if m not in inside and _adaptable(m)}
    found: list[str] = []
    for target in wanted:
        called = [n for n in layers if f".{n}".endswith(f".{target}")]
        if not called:
            last = sorted({n.rpartition(".")[2] for n in layers})
            raise UserError(
                f"--train lora: no layer of the features is called {target!r}: choose from "
                f"{', '.join(last)}"
            )
        found += called
    if wanted:
        return found
    linear = [n for n, m in layers.items() if not isinstance(m, nn.Conv2d)]
    found = linear or list(layers)
    if not found:
        raise UserError(
            "--train lora: the features have no linear layer and no convolution: choose head or "
            "last:K"
        )
    return found


def _adaptable(module: nn.Module) -> bool:
    kind = type(module)
    if kind is nn.Conv2d:
        return bool(module.groups == 1)
    return kind is nn.Linear or kind.__name__ == "Conv1D"


def _zero(layer: nn.Module) -> None:
    for tensor in layer.parameters():
        nn.init.zeros_(tensor)
