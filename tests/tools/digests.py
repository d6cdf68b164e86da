"""Whether a change of the code changed a bit: digests of what every method, and further settings,
give when run small.

    python -m tests.tools.digests --write FILE     before the change
    python -m tests.tools.digests --check FILE     after it; lists what differs, with exit code 1

Of each run: the global model, personal models, what clients keep on the disk, metrics (which hold
no times), ledger, configuration, and what a run over silos says. Bits depend on the machine and the
versions of the libraries, so FILE is made where it is checked."""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from ekiden import Hardware, Training, run
from ekiden.core.base.files import safetensors_chunks
from ekiden.core.engine.method import Method
from ekiden.core.training.weights import Weights
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.lab.conformance.small_runs import blobs as make_blobs
from ekiden.methods import (
    METHODS,
    MOON,
    Average,
    DisPFL,
    FedAvg,
    FedDC,
    FedDyn,
    FedELMY,
    FedPer,
    FedSeq,
    FedTasuki,
    MetaFed,
)
from ekiden.methods.exact.closing import with_lap
from ekiden.runs.result import Result
from ekiden.silos.coordinator import session
from ekiden.silos.coordinator.courier import Lost
from ekiden.silos.trust.parcel import Ask, unpack
from tests.lab.conformance.across.test_on_another_device import (
    IMAGE_METHODS,
    OPTIONS,
    Picture,
    Wide,
    images,
)
from tests.lab.conformance.test_rules import settings, small
from tests.silos import sessions as remote
from tests.silos.fakes import NAMES, FakeNodes, with_keys

Digests = dict[str, dict[str, str]]
SAID = "said.txt"
Case = Callable[[Path], Result]
"""Runs a setting in a folder that is not there yet."""

TRAININGS: Mapping[str, dict[str, Any]] = {
    "last": {"select": "last"},
    "tail": {"select": "tail"},
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-3},
    "sam": {"optimizer": "sam"},
    "clipped": {"optimizer": "sgd", "clip_norm": 0.5},
    "few steps": {"max_steps": 5},
}
RUNS: Mapping[str, dict[str, Any]] = {
    "two processes": {"workers": 2},
    "every second step": {"evaluate_every": 2},
    "own test data": {"evaluate_on": "own"},
    "bf16": {"hardware": Hardware(threads=1, precision="bf16")},
    "an absent client": {"absent": lambda step, client: step == 1 and client == "client-1"},
}


def cases() -> dict[str, Case]:
    """All runs, by their names."""
    found: dict[str, Case] = {f"method {kind.title()}": simulated(small(kind)) for kind in METHODS}
    for name, changes in TRAININGS.items():
        training = Training(**({"lr": 0.01, "batch_size": 16} | changes))
        found[f"training {name}"] = simulated(FedSeq(epochs=3), training=training)
    for name, options in RUNS.items():
        for method in (FedAvg(rounds=3, epochs=1), FedPer(rounds=3, epochs=1)):
            if method.traits.skips or "absent" not in options:
                found[f"run {name}, {method.title()}"] = simulated(method, **options)
    for i, with_images in enumerate(IMAGE_METHODS):
        found[f"images {i} {with_images.title()}"] = simulated(with_images, images(), Picture)
    for i, with_options in enumerate(OPTIONS):
        found[f"options {i} {with_options.title()}"] = simulated(with_options, network=Wide)
    stopping: tuple[type[Method], ...] = (FedELMY, FedTasuki, MetaFed, FedDC, DisPFL)
    for kind in stopping:
        found[f"resumed {kind.title()}"] = resumed(small(kind))
    between_silos: tuple[type[Method], ...] = (FedSeq, FedAvg, FedTasuki, MetaFed, MOON)
    for kind in between_silos:
        found[f"silos {kind.title()}"] = over_silos(remote.small(kind))
    for lapped in (
        FedSeq(epochs=2),
        FedTasuki(epochs=2),
        Average(epochs=2),
        FedAvg(rounds=2, epochs=1),
    ):
        found[f"lap {lapped.title()}"] = simulated(with_lap(lapped))
    found["silos lap"] = over_silos(with_lap(FedSeq(epochs=2)))
    found["silos that skip"] = over_silos(
        FedDyn(rounds=3, epochs=1), missing=True, absent="skip", patience=0.01
    )
    found["silos that measure"] = over_silos(FedAvg(rounds=3, epochs=1), evaluate_every=1)
    return found


def simulated(
    method: Method, data: Any = None, network: type[nn.Module] = Tiny, **options: Any
) -> Case:
    """A run on one machine."""
    chosen = settings(type(method)) | options
    return lambda folder: run(method, data or make_blobs(), network, folder=folder, **chosen)


def resumed(method: Method) -> Case:
    """A run that stops after each of its steps."""

    def case(folder: Path) -> Result:
        result = None
        for _ in range(method.steps(4)):
            result = run(
                method, make_blobs(), Tiny, folder=folder, stop_after=1, **settings(type(method))
            )
        assert result is not None
        return result

    return case


def over_silos(method: Method, missing: bool = False, **changes: Any) -> Case:
    """A run over silos with keys, without Flower."""

    def case(folder: Path) -> Result:
        files, public = with_keys(
            folder.parent / "silos", NAMES, f'[limits]\nmethods = ["{method.title()}"]\n'
        )
        nodes, said = FakeNodes(files), list[str]()
        if missing:
            nodes.lose = lambda node, data: (
                Lost("unsent") if asked_in(data) == 1 and node == 101 else None
            )
        result = session.run(
            remote.plan_of(method, **changes), nodes, folder, public, said.append, poll=0
        )
        (folder / SAID).write_text("\n".join(said))
        return result

    return case


def asked_in(data: bytes) -> int:
    """The step of a message that asks for a task; -1 of another."""
    ask, _ = unpack(data, Ask)
    return ask.step if ask.kind == "task" else -1


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """Of all parts together."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()


def of_models(models: Iterable[Weights | None]) -> str:
    """Of models, bit by bit."""
    return digest(
        chunk
        for model in models
        for chunk in (safetensors_chunks(vars(model), {}) if model else (b"none",))
    )


def of_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """Of numbers and texts."""
    return digest(json.dumps(row).encode() + b"\n" for row in rows)


def of_run(case: Case) -> dict[str, str]:
    """Run `case` in its own folder and return the results."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        result = case(folder)
        kept = sorted(p for p in folder.glob("clients/**/*") if p.is_file())
        said = folder / SAID
        config = json.loads((folder / "config.json").read_text())
        own = {"run", "ekiden", "format"}  # a random name, and versions
        return {
            "model": of_models([result.weights]),
            "personal": of_models(result.personal),
            "kept by clients": digest(
                part for p in kept for part in (str(p.relative_to(folder)).encode(), p.read_bytes())
            ),
            "metrics": of_rows(result.metrics),
            "ledger": of_rows(map(asdict, result.ledger)),
            "said": said.read_text() if said.exists() else "",
            "configuration": digest(
                [json.dumps({k: config[k] for k in config.keys() - own}, sort_keys=True).encode()]
            ),
        }


def different(before: Digests, now: Digests) -> list[str]:
    """Return what has changed, one line each; runs that only one of the two has are also named."""
    lines = [f"{name}: in one of the two only" for name in sorted(before.keys() ^ now.keys())]
    for name in before.keys() & now.keys():
        parts = [part for part, value in now[name].items() if before[name].get(part) != value]
        lines += [f"{name}: {', '.join(parts)}"] if parts else []
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Write or check; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", type=Path, metavar="FILE")
    what.add_argument("--check", type=Path, metavar="FILE")
    parser.add_argument("--only", default="", help="runs whose names hold this text")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    now: Digests = {}
    for name, case in cases().items():
        if chosen.only in name:
            print(name, file=sys.stderr)
            now[name] = of_run(case)
    if chosen.write:
        chosen.write.write_text(json.dumps(now, indent=1) + "\n")
        print(f"{len(now)} runs written to {chosen.write}")
        return 0
    before = {
        name: found
        for name, found in json.loads(chosen.check.read_text()).items()
        if chosen.only in name
    }
    lines = different(before, now)
    print("\n".join(lines) if lines else f"{len(now)} runs give the same bits")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
