"""The table of subgroups that was measured last of a run's model, kept in the run folder for its report."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ekiden.base.errors import UserError
from ekiden.base.files import write
from ekiden.results.recalibration import model_in

FILE = "subgroups.json"
"""file in a run folder"""


def keep(folder: Path, table: Mapping[str, Any]) -> None:
    """Put the entry `subgroups` of a row of metrics into a run folder, in place of an earlier one."""
    kept = {"model": model_in(folder), **table}
    write(folder / FILE, [json.dumps(kept, indent=1).encode() + b"\n"])


def kept(folder: Path) -> Mapping[str, Any]:
    """Return the table in a run folder; empty if there is none, or if it is of an earlier model."""
    try:
        found: Mapping[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise UserError(f"{folder / FILE} is damaged: remove it, or run `ekiden evaluate --by` again") from None
    return found if found.get("model") == model_in(folder) else {}
