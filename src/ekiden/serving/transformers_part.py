"""Save the body of a network that came from transformers, as a folder that `AutoModel.from_pretrained` opens."""

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ekiden.base.errors import UserError
from ekiden.data.kinds import Tokens
from ekiden.models.pretrained import Decoder, Encoder
from ekiden.results.model import LoadedModel
from ekiden.training.frozen import fixed

_APART = 1e-3  # relative to the largest feature


def save(model: LoadedModel, x: Tensor, folder: Path) -> bool:
    """Write the body of the network to `folder`/backbone, with its adapters merged, and open it again to compare.

    Args:
        model: the model with the network.
        x: samples on which features are compared.
        folder: the folder of the export.

    Returns:
        Whether the network has a body of transformers; otherwise nothing is written.
    """
    features = getattr(model.network, "features", None)
    if not isinstance(features, Encoder | Decoder):
        return False
    from transformers import AutoModel  # noqa: PLC0415  (an extra that is here, as the network was built by it)

    body: Any = merged(features.backbone)
    place = folder / "backbone"
    body.save_pretrained(place, state_dict=dict(body.state_dict()))
    if isinstance(model.inputs, Tokens) and (Path(model.inputs.tokenizer) / "tokenizer.json").is_file():
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
            if (file := Path(model.inputs.tokenizer) / name).is_file():
                shutil.copy(file, place / name)
    again = copy.deepcopy(features)
    again.backbone = AutoModel.from_pretrained(place, use_safetensors=True).eval()
    x = x if model.inputs.ragged else x.float() / 255
    with torch.inference_mode():
        ours, theirs = features(x), again(x)
    if float((ours - theirs).abs().max()) > _APART * float(ours.abs().max()):
        raise UserError(
            "the body of the network cannot be written for transformers, because its outputs would differ: use --to pt2"
        )
    return True


def merged(backbone: nn.Module) -> nn.Module:
    """Return a copy in which nothing is frozen, and each layer with an adapter is merged with it."""
    body = copy.deepcopy(backbone)
    for path, value in list(fixed(body)):
        above, _, name = path.rpartition(".")
        part = body.get_submodule(above)
        del part._buffers[name]
        part._non_persistent_buffers_set.discard(name)
        if value.is_floating_point():
            part.register_parameter(name, nn.Parameter(value.clone(), requires_grad=False))
        else:
            part.register_buffer(name, value)
    adapted = [(path, part) for path, part in body.named_modules() if hasattr(part, "get_base_layer")]
    for path, part in adapted:
        layer: Any = part
        layer.merge()
        above, _, name = path.rpartition(".")
        setattr(body.get_submodule(above), name, layer.get_base_layer())
    return body
