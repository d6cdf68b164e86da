"""The command line for the report: `ekiden report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from ekiden.base.checks import Checked, CountOrZero
from ekiden.base.outside import require_extra
from ekiden.cli.console import console


@dataclass(frozen=True)
class ReportOptions(Checked):
    """Write one page with tables, figures, and the numbers behind them. It needs no network."""

    runs: Positional[tuple[Path, ...]]
    """run folders, sweep folders, or folders that hold them"""
    out: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("report")
    """folder that gets index.html, figures/ and data/"""
    details: CountOrZero = 8
    """how many methods get figures of their own (features, forgetting, loss surface, ...); 0: none, no data are read"""


def report(options: ReportOptions) -> None:
    """`ekiden report RUN... [-o FOLDER]`."""
    require_extra("report", "ekiden report", "matplotlib", "jinja2")
    from ekiden.reporting import report as write  # noqa: PLC0415  (it needs an extra)

    with console.status("reading runs") as status:
        found = write(options.runs, options.out, options.details, status.update)
    for folder, why in found.left_out:
        console.print(f"left out: {folder}: {why}", soft_wrap=True, markup=False, highlight=False)
    console.print(f"report: {options.out / 'index.html'}", soft_wrap=True, markup=False, highlight=False)
