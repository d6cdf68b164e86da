"""FedGram's features for tables: random rectified linear units against random Fourier features.

    python -m benchmarks.tables

Three real tables of scikit-learn in four skewed silos. A fifth of the rows, drawn by the seed,
stays out as validation data; it is measured at the end and decides nothing. Printed are means over
seeds, and the paired difference from `random` with its standard error: accuracy in percent, or R²
in percent.
"""

import argparse
import statistics

import torch
from sklearn import datasets
from torch import Tensor

from ekiden import FederatedData, Hardware, federate, run
from ekiden.methods import FedGram

TABLES = ("breast_cancer", "diabetes", "digits")
BANDWIDTHS = (0.5, 1.0, 2.0, 4.0)
SILOS = 4


def silos(name: str, seed: int) -> FederatedData:
    """The table with labels skewed over silos: sorted by them, then cut."""
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    rows, labels = torch.tensor(x).float(), torch.tensor(y)
    labels = labels.float() if name == "diabetes" else labels.long()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    kept, out = order[len(order) // 5 :], order[: len(order) // 5]
    kept = kept[labels[kept].argsort(stable=True)]
    held: list[tuple[Tensor, Tensor]] = [
        (rows[part], labels[part]) for part in torch.tensor_split(kept, SILOS)
    ]
    task = "regression" if name == "diabetes" else "classification"
    return federate(held, test=(rows[out], labels[out]), val_fraction=0.0, task=task)


def score(name: str, method: FedGram, seed: int) -> float:
    """Accuracy or R² in percent."""
    result = run(
        method,
        silos(name, seed),
        "mlp",
        seed=seed,
        hardware=Hardware(threads=1),
        metric=_metric(name),
    )
    return 100 * float(result.metrics[-1][_metric(name)])


def _metric(name: str) -> str:
    return "r2" if name == "diabetes" else "accuracy"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.tables:
        for width in args.width:
            plain = [
                score(name, FedGram(features="random", width=width), seed)
                for seed in range(args.seeds)
            ]
            line = f"{name:14} D = {width:4}: random {statistics.mean(plain):6.2f}"
            for bandwidth in BANDWIDTHS:
                method = FedGram(features="fourier", width=width, bandwidth=bandwidth)
                gaps = [score(name, method, seed) - before for seed, before in enumerate(plain)]
                error = statistics.stdev(gaps) / len(gaps) ** 0.5
                line += f"; fourier {bandwidth:g}: {statistics.mean(gaps):+.2f} ± {error:.2f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
