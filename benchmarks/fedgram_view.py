"""What the second client of FedGram can make of what it receives: an attack, with pictures.

    EKIDEN_DATA=... python -m benchmarks.fedgram_view --out docs/assets/fedgram-view.png

The first client of Office-Caltech-10 (amazon, 32 pixels) settles the features and hands its sums to
the second (caltech10), which tries to see its images:

- patches: filters are whitened patches; the second client undoes that with the moments of patches
  of its own images;
- one image: where the first client holds one image of a class, the sums of that class are its
  features, and pixels with the same features are searched for by gradient descent;
- class means: the same search for the mean features of all images of a class.

Printed is how alike (correlation of pixels) pictures found and true ones are; since features are
averaged with those of the mirror image, the more alike of the two counts. In brackets: the same for
the mean of the second client's images of that class, which needs no attack.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ekiden.data import load, parse, split
from ekiden.methods.exact.blocks.patches import (  # the attacker reads the source, too
    CONTRAST,
    Patches,
    _at,
    _regions,
    _whitening,
    from_images,
)

WIDTHS = (336, 2376)
SHOWN = 6
SIZE = 6


class Soft:
    """The features of `Patches` without rounding, differentiable."""

    def __init__(self, module: Patches, gain: Tensor) -> None:
        self._filters = module.filters.view(-1, module.shape[0], SIZE, SIZE)
        self._thresholds = gain * module.how.threshold
        positions = [side - SIZE + 1 for side in module.shape[1:]]
        self._rows, self._columns = (_regions(n, module.how.pool) for n in positions)
        self._scale = module.scale

    def __call__(self, pixels: Tensor) -> Tensor:
        """(b, D) of pixels (b, C, H, W) from 0 to 255."""
        sums = self._pooled(pixels) + self._pooled(pixels.flip(3))
        return sums.flatten(1).clamp(min=1e-3).sqrt() * 127 / self._scale

    def _pooled(self, pixels: Tensor) -> Tensor:
        depth = pixels.shape[1] * SIZE**2
        one = torch.ones(1, pixels.shape[1], SIZE, SIZE)
        mean, square = F.conv2d(pixels, one) / depth, F.conv2d(pixels.square(), one) / depth
        v = (
            F.conv2d(pixels, self._filters)
            / (square - mean.square() + CONTRAST).clamp(min=1).sqrt()
        )
        t = self._thresholds.view(-1, 1, 1)
        both = torch.stack([(v - t).relu(), (-v - t).relu()], 2)  # (b, F, 2, rows, columns)
        pooled: Tensor = self._rows @ both @ self._columns.T
        return pooled


def found(soft: Soft, features: Tensor, steps: int) -> Tensor:
    """(b, C, H, W) pixels whose features are nearly `features` (b, D)."""
    draw = torch.Generator().manual_seed(0)
    raw = (0.1 * torch.randn(len(features), 3, 32, 32, generator=draw)).requires_grad_(True)
    adam = torch.optim.Adam([raw], lr=0.05)
    for step in range(steps):
        pixels = raw.sigmoid() * 255
        rough = (pixels.diff(dim=2).abs().mean() + pixels.diff(dim=3).abs().mean()) / 255
        loss = (soft(pixels) - features).square().mean() / 127**2 + 0.02 * rough
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        if step == 2 * steps // 3:
            adam.param_groups[0]["lr"] /= 5
    return (raw.sigmoid() * 255).detach()


def alike(a: Tensor, b: Tensor) -> float:
    """Mean correlation of pictures (b, ...), or of their mirror images if that is larger."""

    def correlation(x: Tensor, y: Tensor) -> Tensor:
        x, y = (t.flatten(1) - t.flatten(1).mean(1, keepdim=True) for t in (x.float(), y.float()))
        return F.cosine_similarity(x, y)

    return float(torch.maximum(correlation(a, b), correlation(a.flip(3), b)).mean())


def main() -> None:
    """Attack, print and draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the picture, a .png")
    parser.add_argument("--steps", type=int, default=600, help="of gradient descent")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = split(load("office_caltech10"), parse("domains:amazon,caltech10,dslr,webcam"), 4, seed=0)
    first, second = (data.clients[i].train for i in (0, 1))
    x, own = first.x, second.x
    classes = list(range(SHOWN))
    images = torch.stack([x[(first.y == c).nonzero()[0, 0]] for c in classes])
    means = torch.stack([x[first.y == c].float().mean(0) for c in classes])
    prior = torch.stack([own[second.y == c].float().mean(0) for c in classes])
    rows: list[tuple[str, Tensor]] = []

    draw = torch.Generator().manual_seed(0)
    places = torch.randint(len(x) * 27 * 27, (20_000,), generator=draw)
    true = _at(x, places, SIZE)
    true = true[true.square().mean(1) > 0.5][: WIDTHS[0] // 8]
    dictionary = from_images(x, WIDTHS[0] // 8, torch.Generator().manual_seed(0))
    sample = _at(own, torch.randint(len(own) * 27 * 27, (20_000,), generator=draw), SIZE)
    undo = torch.linalg.inv(_whitening(sample.T @ sample / len(sample)))
    patches = dictionary.filters.flatten(1).double() @ undo @ undo
    likeness = F.cosine_similarity(patches, true)
    print(
        f"patches: correlation {float(likeness.mean()):.3f}, the least alike "
        f"{float(likeness.min()):.3f}"
    )
    rows += [
        ("patches of the first client", _shown(true)),
        ("found by the second", _shown(patches)),
    ]

    rows.append(("an image of its class\nat the first client", images))
    searched = []
    for width in WIDTHS:
        dictionary = from_images(x, width // 8, torch.Generator().manual_seed(0))
        module = Patches((3, 32, 32), [(width // 8, 6)])
        module.take([dictionary])
        module.scale.copy_(module.sums(x[:1024]).amax(0).clamp(min=1))
        soft = Soft(module, dictionary.gain)
        gap = float((soft(images.float()).clamp(max=127) - module(images)).abs().mean())
        assert gap < 1, gap  # the attacker's features are those that travel
        single = found(soft, module(images), options.steps)
        mean = torch.stack([module(x[first.y == c]).mean(0) for c in classes])
        middle = found(soft, mean, options.steps)
        print(
            f"D = {width}: one image {alike(single, images):.3f} ({alike(prior, images):.3f})",
            end=", ",
        )
        print(f"class mean {alike(middle, means):.3f} ({alike(prior, means):.3f})")
        rows.append((f"found, D = {width}", single))
        searched.append((f"found, D = {width}", middle))
    rows += [("mean image of the class\nat the first client", means), *searched]
    _draw(rows, options.out)


def _shown(patches: Tensor) -> Tensor:
    """The first patches as bytes, the largest entry at the end of the range."""
    some = patches[:SHOWN].view(-1, 3, SIZE, SIZE)
    return 127.5 * (1 + some / some.abs().amax((1, 2, 3), keepdim=True))


def _draw(rows: list[tuple[str, Tensor]], out: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(rows), SHOWN, figsize=(1.1 * SHOWN + 2.2, 1.1 * len(rows)), dpi=80
    )
    for line, (name, pictures) in zip(axes, rows, strict=True):
        line[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
        for place, picture in zip(line, pictures, strict=True):
            place.imshow(picture.permute(1, 2, 0).numpy().clip(0, 255).astype(np.uint8))
            place.set_xticks([])
            place.set_yticks([])
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)


if __name__ == "__main__":
    main()
