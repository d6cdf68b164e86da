"""The body of a finished run's model as fixed features."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ekiden.authoring import UserError
from ekiden.data.samples import Dataset
from ekiden.engine.folder import read_config, tensors_digest
from ekiden.models.split import as_split

PREFIX = "run:"
_NAMED = re.compile(r"run:[0-9a-f]{32}")
_BODY = "features."


def is_named(features: str) -> bool:
    """Return whether `features` names a model's body by its digest, as `named` writes it."""
    return bool(_NAMED.fullmatch(features))


def named(features: str, model: str) -> tuple[str, str, str]:
    """Return `features` with the digest of the body instead of the run folder, its network, and its file.

    Args:
        features: run:FOLDER.
        model: network that the user chose, or auto.
    """
    folder = Path(features.removeprefix(PREFIX)).expanduser().absolute()
    config, file = read_config(folder), folder / "model.safetensors"
    network = config["network"]
    if network is None or config["train"] != "all":
        what = "a network of its own" if network is None else f"only a part of its network (--train {config['train']})"
        raise UserError(f"{folder} trained {what}: give a run that trained a complete network with a name")
    if model not in ("auto", network):
        raise UserError(f"{folder} is a run of {network}, not of {model}: leave out --model")
    if not file.exists():
        raise UserError(
            f"{folder} has no model: finish it by `ekiden resume {folder}`, or give a run that ends with a global model"
        )
    body = {name.removeprefix(_BODY): t for name, t in _tensors(file).items() if name.startswith(_BODY)}
    if not body:
        raise UserError(f"the model of {folder} has no part that is called features: give the run of another method")
    return f"{PREFIX}{tensors_digest(body)}", network, str(file)


def check_same_data(features: str, pretrained: str, dataset: Dataset) -> None:
    """Refuse a model of other samples than those of `dataset`.

    Args:
        features: run: and a digest.
        pretrained: the file of a run's model, whose header says what it takes.
        dataset: what the features are for.
    """
    if not pretrained:
        raise UserError(
            f"--features {features} has no model of a run: give --features {PREFIX}FOLDER, and no network of your own"
        )
    about = _about(Path(pretrained))
    taken = about.get("input", {})
    here = (list(dataset.shape), [str(name) for name in dataset.classes])
    for what, there, own in zip(
        ("samples of shape", "the classes"), (taken.get("shape"), about.get("classes")), here, strict=True
    ):
        if there != own:
            raise UserError(
                f"{pretrained} is for {what} {_short(there)}, these data have {_short(own)}: give data of the same kind"
            )
    if (taken.get("mean"), taken.get("std")) != (list(map(float, dataset.mean)), list(map(float, dataset.std))):
        raise UserError(f"{pretrained} is for samples of another scale than these data: give the data of that run")


def check_body(features: str, network: nn.Module) -> None:
    """Refuse a network whose body is not the one that `features` names; one without values passes."""
    body = as_split(network).features.state_dict()
    if any(tensor.is_meta for tensor in body.values()):
        return
    wanted, found = features.removeprefix(PREFIX), tensors_digest(body)
    if found != wanted:
        raise UserError(
            f"the features are those of a model with digest {wanted[:8]}, the model given has {found[:8]}: put back "
            "the model.safetensors of that run"
        )


def _tensors(file: Path) -> dict[str, Tensor]:
    with _opened(file) as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def _about(file: Path) -> Mapping[str, Any]:
    """Return what the header of a model says about its inputs."""
    with _opened(file) as opened:
        said = json.loads((opened.metadata() or {}).get("ekiden", "{}"))
    return said if isinstance(said, dict) else {}


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read ({str(error).splitlines()[0]}): restore it, or run again") from None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
