"""What is measured of a run's model and kept in its folder: how it is recalibrated, and its last
table of subgroups.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from ekiden.clinic.figures import Figures
from ekiden.core.base.checks import Checked, Count, Fraction, Positive, made, plain, reading
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import read_regular, write

# file in a run folder
FILE = "recalibration.json"
Form = Literal["platt", "temperature"]


@dataclass(frozen=True)
class Recalibration(Checked):
    """Slope and intercept of the logit of the second class's probability, and the threshold that
    was chosen.
    """

    form: Form  # how they were fitted
    slope: Positive  # factor of the logit z; 1/T for a temperature T
    intercept: float  # added to it; 0 for a temperature
    threshold: (
        Fraction  # samples whose recalibrated probability is this or more are of the second class
    )
    rule: str  # how the threshold was chosen
    samples: Count  # validation samples that it was fitted to
    model: str  # digest of the file of the model, see `model_in`

    @classmethod
    def fitted(cls, form: Form, found: Figures, threshold: float | None, model: str) -> Self:
        """Return the recalibration that follows from figures on validation samples.

        Raises:
            UserError: no recalibration follows from them.
        """
        if form not in found.recalibration:
            raise UserError(
                "no recalibration follows from the validation samples: they are few, or of one "
                "class, or their scores "
                "part the classes almost without error, or are not higher for the second class. "
                "Use the model as it "
                "is, or more validation samples"
            )
        slope, intercept = found.recalibration[form]
        rule = "chosen"
        if threshold is None:
            one = next(one for one in found.thresholds if one.rule.startswith("Youden"))
            rule = one.rule
            raw = min(max(one.threshold, 1e-12), 1 - 1e-12)
            threshold = 1 / (1 + exp(-(slope * log(raw / (1 - raw)) + intercept)))
        return cls(form, slope, intercept, threshold, rule, found.samples, model)

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Return the recalibration in a run folder; None if there is none."""
        file = folder / FILE
        if not file.exists():
            return None
        with reading(str(file), "`ekiden evaluate --calibrate`, which writes it"):
            found = made(cls, json.loads(read_regular(file)))
        if found.model != model_in(folder):
            raise UserError(
                f"{file} is of an earlier model of {folder}: remove it, or recalibrate by `ekiden "
                "evaluate --calibrate`"
            )
        return found

    def write(self, folder: Path) -> None:
        """Put it into a run folder, in place of an earlier one."""
        _write(folder / FILE, plain(self))


def _write(file: Path, values: Mapping[str, Any]) -> None:
    write(file, [json.dumps(values, indent=1).encode() + b"\n"])


def model_in(folder: Path) -> str:
    """Return the digest of the file of a run's global model; "" if there is none."""
    file = folder / "model.safetensors"
    if not file.exists():
        return ""
    return hashlib.sha256(read_regular(file, 1 << 62)).hexdigest()


class Recalibrated(nn.Module):
    """A network of two classes whose logits are recalibrated."""

    def __init__(self, network: nn.Module, how: Recalibration) -> None:
        super().__init__()
        self.network = network
        self.slope = how.slope
        self.intercept = how.intercept

    def forward(self, *x: Tensor) -> Tensor:
        """Return logits (b, 2); the first is 0."""
        z = self.network(*x)
        second = self.slope * (z[:, 1] - z[:, 0]) + self.intercept
        return torch.stack([torch.zeros_like(second), second], 1)


def recalibration_in(about: Mapping[str, Any]) -> Recalibration | None:
    """Return the recalibration in the configuration of a run that was opened; None if there is
    none.
    """
    found = about.get("recalibration")
    if isinstance(found, Recalibration):
        return found
    return None


# file in a run folder
SUBGROUPS = "subgroups.json"


def keep_subgroups(folder: Path, table: Mapping[str, Any]) -> None:
    """Put the entry `subgroups` of a row of metrics into a run folder, in place of an earlier
    one.
    """
    _write(folder / SUBGROUPS, {"model": model_in(folder), **table})


def kept_subgroups(folder: Path) -> Mapping[str, Any]:
    """Return the table in a run folder; empty if there is none, or if it is of an earlier model."""
    try:
        found: Mapping[str, Any] = json.loads(read_regular(folder / SUBGROUPS))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise UserError(
            f"{folder / SUBGROUPS} is damaged: remove it, or run `ekiden evaluate --by` again"
        ) from None
    if found.get("model") != model_in(folder):
        return {}
    return found
