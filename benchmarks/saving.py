"""What being safe to kill costs: the share of a run's time that goes into writing state, progress
and reports.

EKIDEN_DATA=... python -m benchmarks.saving
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

from ekiden import Hardware, run
from ekiden.core.engine import folder as run_folder
from ekiden.core.engine import local, store
from ekiden.methods import FedELMY, FedSeq
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe

PLACES = [
    (run_folder.RunFolder, "save"),
    (run_folder.RunFolder, "load"),
    (run_folder.RunFolder, "append"),
    (run_folder.RunFolder, "write_model"),
    (store.Store, "commit"),
    (store.Store, "settle"),
    (store.FolderJournal, "save"),
    (store.FolderJournal, "load"),
    (local, "_digest"),
]


def timed(work: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """`work`, with the time that it takes noted in `spent`."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return work(*args, **kwargs)
        finally:
            spent.append(time.perf_counter() - began)

    return wrapper


def main() -> None:
    """Run both methods at 20 epochs a hop and print the share."""
    spent: list[float] = []
    for owner, name in PLACES:
        setattr(owner, name, timed(getattr(owner, name), spent))
    for method in (FedSeq(epochs=20), FedELMY(models=3, epochs=20, warmup=0)):
        spent.clear()
        plan = Plan(Recipe(method), data="pacs", hardware=Hardware(threads=1))
        data = plan.federation()
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            run(plan.recipe.method, data, hardware=plan.hardware, folder=f"{folder}/run")
            total = time.perf_counter() - began
        print(
            f"{method.title():8} on PACS, 20 epochs a hop: {sum(spent) / total:.2%} of {total:.0f} "
            "s (bound: 2 %)"
        )


if __name__ == "__main__":
    main()
