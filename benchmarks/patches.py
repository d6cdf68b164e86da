"""Patch features against a bare convolution of the same size.

    python -m benchmarks.patches

One core. Contestants take turns; printed are ratios of medians of CPU time, so that other load on
the machine counts little. The bare convolution reads the images and their mirror images with the
same filters and does nothing else; its batches are of the size that suits it best among some. Then
the CPU seconds of FedGram for as many images of 3x32x32 bytes as CIFAR-10 has: features and sums,
measured on fewer, and the solution.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ekiden.core.training.gram import measure
from ekiden.methods.exact.blocks import gaussian_heads as heads
from ekiden.methods.exact.blocks.patches import Patches, from_images

SHAPE = (3, 32, 32)
BATCHES = (1, 4, 8, 32)


def seconds(work: Callable[[], object]) -> float:
    """CPU seconds."""
    began = time.process_time()
    work()
    return time.process_time() - began


def compare(width: int, images: int, turns: int) -> tuple[float, float]:
    """Seconds an image of the features and of the bare convolution."""
    x = torch.randint(256, (images, *SHAPE), dtype=torch.uint8)
    dictionary = from_images(x, width // 8, torch.Generator().manual_seed(0))
    module, weight = Patches(SHAPE, [(width // 8, 6)]), dictionary.filters.float()
    module.take([dictionary])
    faces = [x.float(), x.flip(3).float()]

    def features() -> object:
        return module(x)

    def bare(batch: int) -> Callable[[], object]:
        return lambda: [
            F.conv2d(part, weight) for face in faces for part in torch.split(face, batch)
        ]

    contestants = [features, *map(bare, BATCHES)]
    times: list[list[float]] = [[] for _ in contestants]
    for turn in range(turns + 1):
        for taken, work in zip(times, contestants, strict=True):
            taken.append(seconds(work)) if turn else work()  # the first turn warms up
    own, *others = (statistics.median(taken) / images for taken in times)
    return own, min(others)


def closing(width: int, images: int) -> tuple[float, float]:
    """Seconds an image of the sums over so many features, and of the solution."""
    features = torch.randint(128, (images, width)).float()
    labels = torch.arange(images) % 10
    began = time.process_time()
    sums = measure([(features, labels)], 10, width)
    added = time.process_time()
    heads.ridge(heads.moments(sums))
    return (added - began) / images, time.process_time() - added


def main() -> None:
    """Print ratios and seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for width in (336, 2401):
        own, bare = compare(width, args.images, args.turns)
        added, solved = closing(width, 2048)
        print(
            f"D = {width}: {1 / own:6.0f} images/s, {bare / own:.2f} of a bare convolution of "
            "image and mirror image, "
            f"{bare / 2 / own:.2f} of one of the image alone; 50,000 images in "
            f"{5e4 * (own + added) + solved:.0f} s: "
            f"features {5e4 * own:.0f}, sums {5e4 * added:.0f}, solution {solved:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
