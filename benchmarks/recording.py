"""Whether what a GPU replays has the bits of what it replays: networks, settings and all methods.

    python -m benchmarks.recording [--device cuda] [--only TEXT]

Each case trains twice, with recording and without, and prints both digests if they differ, and how
much was recorded, taken and replayed. On a CPU a recording is a call, which tries the script; there
dropout and augmentation draw from one generator, and cases with both differ.
"""

import argparse
import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ekiden import Augment, Hardware, Training, run
from ekiden.core.models import catalogue
from ekiden.core.training import fit as fitting
from ekiden.core.training import gradients
from ekiden.core.training.feed import feed_for
from ekiden.core.training.fit import Bench, Penalty, fit
from ekiden.core.training.gradients import Pass, Shortcut
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.data import Subset, from_tensors
from ekiden.lab.conformance import small_runs
from ekiden.methods import METHODS, FedELMY

IMAGES = ("linear", "mlp", "lenet", "cnn", "cnn_tiny", "cnn_ma_echo", "cnn_ua_pdfl", "resnet18")
NETWORKS = (*IMAGES, "resnet18_gn", "vgg11", "scattering", "mlp_ma_echo")
SETTINGS: list[dict[str, Any]] = [
    {"optimizer": "sgd", "momentum": 0.9, "clip_norm": 0.5},
    {"optimizer": "adamw", "select": "tail", "max_steps": 13},
    {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.3, 0.4)},
    {"augment": False},
    {"optimizer": "sam"},
]


class Called:
    """Stands in for a recording on a CPU."""

    def __init__(self, function: Pass, given: tuple[Tensor, ...]) -> None:
        self.function = function

    def __call__(self, *given: Tensor) -> Tensor:
        return self.function(*given).clone()


class Tally:
    """Counts recordings, those that had other bits, failures, and replays."""

    def __init__(self) -> None:
        self.made = self.other = self.failed = self.replays = 0

    def __str__(self) -> str:
        return (
            f"recorded {self.made}, other bits {self.other}, failed {self.failed}, replays "
            f"{self.replays}"
        )


@contextmanager
def recording(wanted: bool, device: str) -> Iterator[Tally]:
    """Record what may be recorded, or nothing."""
    tally = Tally()
    kind: Any = gradients.Recording if device != "cpu" else Called
    compare = Shortcut._compare

    def kept(*args: Any) -> Any:
        try:
            return kind(*args)
        except RuntimeError as error:
            tally.failed += 1
            print(f"    not recorded: {str(error).splitlines()[0][:150]}")
            raise

    true = gradients.record if device != "cpu" else kept

    def record(function: Pass, given: tuple[Tensor, ...]) -> Pass | None:
        made = true(function, given)
        if made is None:
            tally.failed += 1
            return None
        tally.made += 1

        def replay(*now: Tensor) -> Tensor:
            tally.replays += 1
            found: Tensor = made(*now)
            return found

        return replay

    def noted(self: Shortcut, kind: Any, function: Pass, given: tuple[Tensor, ...]) -> Tensor:
        before = tally.made
        found = compare(self, kind, function, given)
        if tally.made > before and not self._ways[kind]:
            tally.other += 1
        return found

    plain = gradients.is_recordable

    def may(network: Network) -> bool:
        module = network.module
        of_torch = all(
            type(m).__module__.startswith(("torch.nn.", "ekiden.core.models."))
            for m in module.modules()
        )
        on_cpu = device == "cpu" and of_torch and not gradients.is_changed(module)
        return wanted and (on_cpu or plain(network))

    with (
        patch.object(fitting, "record", record),
        patch.object(fitting, "is_recordable", may),
        patch.object(Shortcut, "_compare", noted),
        patch.object(gradients, "Recording", kept),
    ):
        yield tally


def digest(tensors: Sequence[Tensor]) -> str:
    """Return a digest of tensors."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def bench_of(
    module: nn.Module, hardware: Hardware, batch: int, n: int, **settings: Any
) -> tuple[Bench, Subset]:
    """Return what to train on, and its samples: random images."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8, generator=draw)
    y = torch.randint(10, (n,), generator=draw)
    data = from_tensors(
        (x, y),
        (x[:1], y[:1]),
        classes=tuple("abcdefghij"),
        augment=Augment(crop=4, flip=True, rotation=15),
    )
    training = Training(**({"batch_size": batch} | settings))
    network = Network(module, hardware.device)
    feed = feed_for(data.fed(training), hardware, network.module)
    return Bench(network, feed, training, hardware), Subset(data.train, torch.arange(n))


def fitted(
    build: Callable[[], nn.Module],
    hardware: Hardware,
    penalty: Callable[[Weights], Penalty | None] = lambda start: None,
    batch: int = 16,
    epochs: int = 4,
    **settings: Any,
) -> str:
    """Return the digest of two fits of one network, with a remainder batch."""
    torch.manual_seed(0)
    bench, train = bench_of(build(), hardware, batch, 3 * batch + 5, **settings)
    val = Subset(train.samples, torch.arange(20))
    model, found = bench.network.weights(), []
    for _ in range(2):
        model = fit(bench, model, train, val, epochs=epochs, seed=1, penalty=penalty(model))
        found += [*vars(model).values(), fitting.evaluate(bench, val).loss]
    return digest(found)


def pool(start: Weights, members: int, **settings: Any) -> Penalty | None:
    """Return FedELMY's penalty for a pool around a model."""
    draw = torch.Generator().manual_seed(3)
    noise = [torch.randn(len(start.params), generator=draw) for _ in range(members)]
    near = [start.with_params(start.params + 0.01 * n.to(start.params.device)) for n in noise]
    return FedELMY(alpha=0.5, **settings).diversity(near, near[0])


def dropping() -> nn.Module:
    """Return layers of PyTorch with dropout and BatchNorm, and tensors that begin anywhere."""
    return nn.Sequential(
        nn.Conv2d(3, 7, 3),
        nn.PReLU(),
        nn.BatchNorm2d(7),
        nn.Dropout(0.2),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(112, 10),
    )


def scalar_first() -> nn.Module:
    """Return a network whose tensors begin 4 bytes after multiples of 16."""
    return nn.Sequential(nn.PReLU(), catalogue.build("resnet18", (3, 32, 32), 10))


def norm_after_ten() -> nn.Module:
    """Return a network with running statistics that begin at no multiple of 16 bytes."""
    return nn.Sequential(
        nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.ReLU(), nn.Conv2d(10, 16, 3),
        nn.BatchNorm2d(16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
        nn.BatchNorm1d(10), nn.Linear(10, 10),
    )  # fmt: skip


class Waiting:
    """A penalty that says it could be replayed and asks the GPU for a number."""

    fixed = True

    def __call__(self, params: Tensor, grad: Tensor, loss: Tensor) -> None:
        grad.add_(params, alpha=1e-3 * float(loss))


class Stopping:
    """A penalty that says it could be replayed, and waits in a way that only a recording notices."""

    fixed = True

    def __call__(self, params: Tensor, grad: Tensor, loss: Tensor) -> None:
        if params.is_cuda:
            torch.cuda.current_stream().synchronize()
        grad.add_(params, alpha=1e-3)


def method(kind: Any, hardware: Hardware) -> str:
    """Return the digest of a small run of a method."""
    settings = small_runs.settings() | {"hardware": hardware}
    small = small_runs.Subject(kind).small
    result = run(small, small_runs.blobs(), small_runs.Tiny, quiet=True, **settings)
    weights = [*([result.weights] if result.weights else []), *filter(None, result.personal)]
    return digest([tensor for model in weights for tensor in vars(model).values()])


def after(penalty: Penalty, hardware: Hardware) -> str:
    """Return the digest of a fit with a penalty, and of fits with and without dropout after it."""
    build = images_of("lenet")
    first = fitted(build, hardware, lambda start: penalty)
    return first + fitted(dropping, hardware) + fitted(build, hardware)


def images_of(name: str) -> Callable[[], nn.Module]:
    """Return what makes a built-in network for images."""
    return partial(catalogue.build, name, (3, 32, 32), 10)


def cases(device: str) -> dict[str, Callable[[], str]]:
    """Return all cases by name."""
    found: dict[str, Callable[[], str]] = {}
    both = Hardware(device, 1), Hardware(device, 1, "bf16")
    for hardware in both:
        for name in NETWORKS:
            found[f"network {name} {hardware.precision}"] = partial(
                fitted, images_of(name), hardware
            )
        found[f"dropout {hardware.precision}"] = partial(fitted, dropping, hardware)
    lenet = partial(fitted, images_of("lenet"), both[0])
    for settings in SETTINGS:
        found[f"settings {settings}"] = partial(lenet, **settings)
    for form, size, measure in [
        ("paper", 1, "l2"), ("paper", 3, "l2"), ("paper", 3, "squared_l2"), ("paper", 2, "l1"),
        ("paper", 2, "cosine"), ("released", 3, "l2"),
    ]:  # fmt: skip
        near = partial(pool, members=size, form=form, measure=measure)
        found[f"fedelmy {form} {size} {measure}"] = partial(lenet, near)
    for penalty in (Waiting(), Stopping()):
        found[f"a penalty that waits, and fits after it: {type(penalty).__name__}"] = partial(
            after, penalty, both[0]
        )
    for kind in METHODS:
        found[f"method {kind.title()}"] = partial(method, kind, both[0])
    for hardware in both:
        found[f"aligned norm {hardware.precision}"] = partial(fitted, norm_after_ten, hardware)
        found[f"aligned scalar {hardware.precision}"] = partial(fitted, scalar_first, hardware)
    return found


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="")
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="cases that begin later are left out"
    )
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), help="I N: every N-th case")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if args.device != "cpu":
        torch.backends.cudnn.deterministic = True
    small_runs.Tiny.__module__ = "ekiden.core.models.tiny"  # counts as ours
    began, wrong, left_out = time.monotonic(), [], 0
    some = list(cases(args.device).items())[args.part[0] :: args.part[1]]
    for name, case in some:
        if args.only not in name:
            continue
        if time.monotonic() - began > args.seconds:
            left_out += 1
            continue
        at = time.monotonic()
        try:
            with recording(True, args.device) as tally:
                found = case()
            words = f"{tally}"
            if tally.made or tally.failed:
                with recording(False, args.device):
                    plain = case()
                if found != plain:
                    words += f"   DIFFERS: {found} {plain}"
                    wrong.append(name)
            else:
                words = "nothing is recorded"
        except Exception as error:
            words = f"{type(error).__name__}: {str(error)[:300]}"
            wrong.append(name)
        print(f"{time.monotonic() - at:5.1f} s  {name}: {words}", flush=True)
    print(f"{len(wrong)} differ or failed: {', '.join(wrong)}; {left_out} left out")


if __name__ == "__main__":
    main()
