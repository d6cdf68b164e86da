"""How much CPU time known features of a frozen network save: three runs of the same method in one
process.

    python -m benchmarks.frozen_features

FedSeq trains a head on EfficientNet-Lite0 with the images of Office-Caltech-10 at 128 pixels,
without augmentation. Printed is CPU time (of one thread), so other programs on the machine change
little: features computed again in each batch; computed once a sample, from nothing; and known from
the second run. Ratios are of CPU time a pass, over all forward passes of a run (training,
validation and test).
"""

import argparse
import os
import tempfile
import time
from unittest.mock import patch

from ekiden import Hardware, Training, load, run, split
from ekiden.core.training.frozen import RememberedAnswers
from ekiden.data import parse
from ekiden.methods import FedSeq

DOMAINS = "domains:amazon,caltech10,dslr,webcam"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=20, help="of the runs that keep features")
    given = parser.parse_args()
    silos = split(load("office_caltech10", size=128), parse(DOMAINS), None, seed=0)
    settings = Training(
        optimizer="adam", batch_size=128, augment=False, mean=(0.498,), std=(0.502,)
    )

    def measure(epochs: int) -> tuple[float, float]:
        """CPU seconds and forward passes."""
        began = time.process_time()
        result = run(
            FedSeq(epochs=epochs),
            silos,
            "efficientnet_lite0",
            train="head",
            training=settings,
            hardware=Hardware(threads=1),
            seed=0,
            evaluate_every=100,
        )
        return time.process_time() - began, result.metrics[-1]["forward"] + len(silos.dataset.test)

    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"EKIDEN_CACHE": folder}):
        with patch.object(RememberedAnswers, "of", return_value=None):
            rows = [("in every pass", 1, *measure(1))]
        rows.append(("once a sample", given.epochs, *measure(given.epochs)))
        rows.append(("known", given.epochs, *measure(given.epochs)))
    dear = rows[0][2] / rows[0][3]
    print(
        f"{'features':<16}{'epochs':>8}{'CPU s':>10}{'passes':>10}{'ms a pass':>12}{'times less':>12}"
    )
    for name, epochs, seconds, passes in rows:
        each = seconds / passes
        print(
            f"{name:<16}{epochs:>8}{seconds:>10.1f}{passes:>10.0f}{1000 * each:>12.3f}{dear / each:>12.1f}"
        )


if __name__ == "__main__":
    main()
