"""FedELMY on PACS with its small CNN: samples a second, alone and in two runs side by side.

    EKIDEN_DATA=... python -m benchmarks.pacs

The authors' released code does about 750 samples a second on such a machine with both cores,
evaluation included (420 when the machine is busy): it decodes JPEGs in every epoch. That figure was
measured once, elsewhere; the ratio to it is not a ratio of one run.
"""

import time
from multiprocessing import get_context

from ekiden import Hardware, run
from ekiden.methods import FedELMY
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe

RELEASED_CODE = 750.0
PLAN = Plan(
    Recipe(FedELMY(models=3, epochs=4, warmup=2)),
    data="pacs",
    partition="domains:photo,art_painting,cartoon,sketch",
)


def measure(seed: int, threads: int = 1) -> float:
    """Training samples a second of a whole run; data are decoded before, as they are once in a
    project.
    """
    data = PLAN.federation()
    began = time.perf_counter()
    result = run(PLAN.recipe.method, data, hardware=Hardware(threads=threads), seed=seed)
    return float(result.metrics[-1]["backward"]) / (time.perf_counter() - began)


def main() -> None:
    """Print samples a second next to the released code's."""
    alone, both = measure(0), measure(0, threads=2)
    with get_context("spawn").Pool(2) as pool:
        together = sum(pool.map(measure, (0, 1)))
    for name, speed in (
        ("one run, one thread", alone),
        ("one run, two threads", both),
        ("two runs side by side", together),
    ):
        print(
            f"{name:22} {speed:8.0f} samples/s   {speed / RELEASED_CODE:5.1f} times the released "
            "code's 750"
        )


if __name__ == "__main__":
    main()
