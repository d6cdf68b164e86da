"""Accuracy of FedGram over the bytes of a hand-off, drawn from a record of finished runs.

    python -m benchmarks.bytes_curve experiments/records/exact-bytes.jsonl --out
    docs/assets/fedgram-bytes.png

Points are means over seeds, bars their standard deviations. The table is printed, too.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, stdev

from matplotlib import pyplot as plt

NAMES = {
    "pacs": "PACS",
    "office_caltech10": "Office-Caltech-10",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
}
UNITS = {"kB": 1e3, "MB": 1e6}

Curves = dict[str, dict[str, list[float]]]


def size(text: str) -> float:
    """Bytes that text such as 250kB stands for."""
    return float(text[:-2]) * UNITS[text[-2:]]


def curves(records: Iterable[Path]) -> Curves:
    """Accuracies in percent of the seeds, by data set and bytes."""
    found: Curves = defaultdict(lambda: defaultdict(list))
    for path in records:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            if "run" not in row:
                continue  # the head says what was run
            config = row["config"]
            found[config["plan"]["data"]][config["recipe"]["hyperparameters"]["bytes"]].append(
                100 * row["result"]["accuracy"]
            )
    return found


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    for data, points in curves(args.records).items():
        texts = sorted(points, key=size)
        means = [mean(points[t]) for t in texts]
        bars = [stdev(points[t]) if len(points[t]) > 1 else 0.0 for t in texts]
        axes.errorbar(
            [size(t) / 1e6 for t in texts],
            means,
            bars,
            marker="o",
            capsize=3,
            label=NAMES.get(data, data),
        )
        print(
            NAMES.get(data, data),
            *(f"{t}: {m:.2f} ± {b:.2f}" for t, m, b in zip(texts, means, bars, strict=True)),
        )
    axes.set(xscale="log", xlabel="hand-off (MB)", ylabel="accuracy (%)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(args.out, dpi=150)


if __name__ == "__main__":
    main()
