"""Principal components of the features of seed images: few, nearly white, and chosen by nobody.

A silo projects its patch features on them, or units of a vector's numbers, and adds up products of
the results. These have about the
same variance and hardly depend on each other, so sums of products need few bits, and a given number
of them says more than as many patch features do.

1. The seed draws images (`seed_images`): shapes that cover each other, and every second time a few on
   a plain ground.
2. Filters q are 5x5 and 8x8 patches of 1,000 such images, whitened by W = (Σxxᵀ/n + 0.1 I)^(-1/2), in
   int8, s times the whitened filter.
3. A patch x with deviation σ answers v = ⌊u·(q·x)/√(σ² + 10)⌉. Over 3x3 overlapping regions of the
   image and its mirror image f = min(⌊127·√(Σ max(±v - ⌊us/2⌉, 0))/t⌉, 127), with t twice what normal
   answers give: 3,996 features.
4. V are the first r eigenvectors of the correlations that f has on 4,000 images of the seed, in int8.
   Then h = ⌊(Vᵀf - c)·k⌉, at most 127, with mean 0 and deviation 32 on these images. For vectors and
   signals f is u = ⌊127/4·x⌉ and 3,000 units ⌊max(r·u + 127·b, 0)/(2·|r|)⌉, samples of the seed are
   normal numbers, and h is at most 64: then nothing can wrap.
5. A silo sends Σ h_i², class sums, counts, and ⌊Σ h_i h_j/q⌉ mod 2^b with q = ⌈n·4·32²/2^(b-1)⌉. Sums
   that might wrap are refused.
6. With M = (Σ zzᵀ + λI)⁻¹, z standardised, W = M Σ zyᵀ and errors of rounding of variance s², λ has
   the least n·(RSS + 2s²(tr M ‖W‖² + tr WᵀMW))/(n - df)².

Related: Yingxue Zhou, Zhiwei Steven Wu, Arindam Banerjee: Bypassing the Ambient Dimension: Private
SGD with Gradient Subspace Identification. ICLR 2021. https://arxiv.org/abs/2007.03813 (a projection
from public data). Ali Rahimi, Benjamin Recht: Random Features for Large-Scale Kernel Machines.
NeurIPS 2007. Hirokatsu Kataoka et al.: Pre-training without Natural Images. ACCV 2020.
https://arxiv.org/abs/2101.08515 (images by formula). Images: see `seed_images`.

The basis must have the same bits on every machine, which eigenvectors in floating point do not. So
all matrices here hold whole numbers, and float64 holds the sums of their products exactly, whatever
the order of adding. What remains (roots, quotients, and Cholesky's method by rows) are single
operations that IEEE 754 rounds right.
"""

import contextlib
import hashlib
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ekiden.core.base import files
from ekiden.core.base.errors import UserError
from ekiden.core.training.gram import LARGEST
from ekiden.methods.exact.blocks.patches import Patches, Pooling
from ekiden.methods.exact.blocks.seed_images import DEVIATION, Draws, seed_images
from ekiden.methods.exact.blocks.whole_features import NORMALISED, SPREAD, Scaling, WholeFeatures

Matrix = NDArray[np.float64]

# Deviation of a component on samples of the seed; in images it is cut off beyond four of them
UNIT = 32
IMAGES = 4000  # seed images whose features are analysed
FILTERS = 222  # 3,996 features with 3 x 3 parts of the image
SIZES = (5, 8)  # sides of the patches in pixels
UNITS = 3000  # random units of a vector, next to its numbers
# With these, sums of 4,096 products stay exact
MOST_INPUTS = 1000
# Largest sum that a feature tells from larger ones, in usual sums
REACH = 2.0
# components; of more the last ones would hold little but noise
MOST = 1000
# Of whole numbers in matrices: products of two, 4,096 times, stay below 2^53
_BITS = 20
_PASSES = 4  # of subspace iteration
_SPARE = 1e-9  # added to squared lengths of 1: less is left only by rounding
# A component is counted in 1/_FINE of its unit before it is rounded
_FINE = 2**20
# 127² times as many is below 2^24, so float32 is exact
_ROWS = 1024
_VERSION = "1"  # of the basis: after a new number, files in the cache are not used


class Basis(NamedTuple):
    """How components follow from patch features f: ⌊(f·V - c)·k / 2^20⌉."""

    projection: Tensor  # (D, r) int8 V
    centre: Tensor  # (r,) int64 c
    factor: Tensor  # (r,) int64 k


class RandomUnits(nn.Module):
    """Numbers u of a vector, and random rectified linear units of them, in whole numbers.

    u = ⌊127/4·x⌉ if x has mean 0 and deviation 1, and a unit is ⌊max(r·u + 127·b, 0)/(2·|r|)⌉; both
    are cut off at 127. Rows r are about normal, and so is b, as large as r·u/127.
    """

    matrix: Tensor
    bias: Tensor

    def __init__(self, inputs: int) -> None:
        """Prepare for vectors of `inputs` numbers."""
        super().__init__()
        self.inputs = inputs
        self.width = inputs + UNITS
        self.register_buffer("matrix", torch.zeros(UNITS, inputs))
        self.register_buffer("bias", torch.zeros(UNITS))

    def fix(self, seed: int) -> None:
        """Draw the units."""
        numbers = self._drawn(seed)[:UNITS]
        rows = (numbers[:, 1:] / 4).floor()
        self.matrix.copy_(rows)
        length = rows.square().sum(1).sqrt()
        self.bias.copy_((numbers[:, 0] * length / (4 * DEVIATION)).floor())

    def samples(self, seed: int) -> Tensor:
        """(n, inputs) normal numbers that do not depend on each other."""
        return (self._drawn(seed)[UNITS:, 1:] / DEVIATION).float()

    def _drawn(self, seed: int) -> Tensor:
        draws = Draws(UNITS + IMAGES, 4 * (self.inputs + 1), seed)
        return torch.from_numpy(draws.normal(self.inputs + 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        """(b, D) float32 of vectors (b, inputs)."""
        u = (x.flatten(1).double() * (LARGEST / SPREAD)).round_().clamp_(-LARGEST, LARGEST)
        matrix = self.matrix.double()
        answers = (u @ matrix.T + LARGEST * self.bias.double()).clamp_(min=0)
        length = matrix.square().sum(1).sqrt().clamp(min=1)
        units = (answers / (2 * length)).round_().clamp_(max=LARGEST)
        return torch.cat([u, units], 1).float()


class Components(WholeFeatures):
    """Principal components of other features, from the seed alone.

    The first r components that D features have on samples of the seed: 3,996 patch features on
    images, or a vector's numbers and 3,000 units of them on normal numbers. They are rotated among
    themselves: a rotation changes no ridge regression, and what subspace iteration finds is one.
    Each has deviation `UNIT` on samples of the seed.
    """

    fixed = True
    # On six sets of images, components had 0.18 to 2.06 times the variance that they have on seed
    # images. Sums in which one is more than four times as large are refused.
    variance = 4 * UNIT**2

    def __init__(self, shape: tuple[int, ...], width: int, *, mirror: bool) -> None:
        """Prepare for samples of `shape`.

        Args:
            shape: (C, H, W), or (d,) for vectors whose numbers have mean 0 and deviation 1.
            width: r, number of components.
            mirror: whether features are averaged with those of the mirror image.
        """
        super().__init__()
        self.body: Patches | RandomUnits
        if len(shape) == 3:
            how = Pooling(pool=3, mirror=mirror, bilinear=True)
            self.body = Patches(shape, [(FILTERS // len(SIZES), side) for side in SIZES], how)
            self.settled = NORMALISED
            self.largest = LARGEST
        else:
            self.body = RandomUnits(shape[0])
            self.settled = {}
            # Columns of tables may depend on each other as much as they like. So what is beyond two
            # deviations is cut off, and no variance is too large.
            self.largest = 2 * UNIT
        if width > MOST:
            raise UserError(
                f"there are {MOST} components at most, not {width}: give a smaller --width"
            )
        self.width = width
        self.shape = shape
        self.seed = torch.initial_seed()
        # Whole numbers
        self.register_buffer("projection", torch.zeros(self.body.width, width))
        self.register_buffer("centre", torch.zeros(width, dtype=torch.int64))
        self.register_buffer("factor", torch.zeros(width, dtype=torch.int64))

    def get_buffer(self, target: str) -> Tensor:
        """The own one, or that of the features below."""
        own = target in Basis._fields
        return super().get_buffer(target) if own else self.body.get_buffer(target)

    def fix(self) -> None:
        """Set the features below and components from the seed."""
        # A silo asks for the shapes with each message.
        if self.get_buffer("projection").is_meta:
            return
        with torch.no_grad(), torch.device("cpu"):
            if isinstance(self.body, RandomUnits):
                self.body.fix(self.seed)
            else:
                self.body.fix(self.seed, REACH)
            for name, values in self._basis()._asdict().items():
                self.get_buffer(name).copy_(values)

    def settle(self, x: Tensor, scaling: Scaling, draw: torch.Generator) -> None:
        """Take how images were normalised."""
        if isinstance(self.body, Patches):
            self.body.scale_by(*scaling)

    def forward(self, x: Tensor) -> Tensor:
        """(b, r) whole numbers from -127 to 127 of samples (b, ...)."""
        with torch.autocast(x.device.type, enabled=False):
            sums = self.body(x).double() @ self.get_buffer("projection").double()
            fine = (sums - self.get_buffer("centre")) * self.get_buffer("factor")
            whole: Tensor = (fine / _FINE).round_().clamp_(-self.largest, self.largest)
            return whole.float()

    def _basis(self) -> Basis:
        """Return the basis, from the cache if it was made before."""
        how = self.body.how if isinstance(self.body, Patches) else UNITS
        about = (_VERSION, self.shape, how, self.seed, self.width, IMAGES, FILTERS, REACH)
        name = hashlib.blake2b(repr(about).encode(), digest_size=16).hexdigest()
        return _kept(f"components-{name}", self)

    def samples(self) -> Tensor:
        """Return the samples of the seed on which the features below are analysed."""
        if isinstance(self.body, RandomUnits):
            return self.body.samples(self.seed)
        channels, side, _ = self.shape
        return torch.from_numpy(seed_images(IMAGES, channels, side, self.seed))


@lru_cache(maxsize=4)
def _kept(name: str, features: Components) -> Basis:
    file = files.cache_folder() / f"{name}.safetensors"
    with contextlib.suppress(UserError, OSError):
        return Basis(**files.read_tensors(file)[0])
    made = basis_of(features.body, features.samples(), features.width, features.seed)
    # The cache is a help, not a need.
    with contextlib.suppress(UserError, OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        chunks = files.with_digest(files.safetensors_chunks(made._asdict(), {}))
        files.write(file, chunks, sync=False)
    return made


def basis_of(features: Patches | RandomUnits, samples: Tensor, width: int, seed: int) -> Basis:
    """Return a basis of the first principal components that features have on samples of the seed.

    Args:
        features: with filters and scales, D features.
        samples: (n, ...).
        width: r.
        seed: decides with which space the iteration begins.
    """
    n = len(samples)
    total = np.zeros(features.width)
    products = np.zeros((features.width,) * 2)
    for block in torch.split(samples, _ROWS):
        found = features(block)
        products += (found.T @ found).numpy()
        total += found.double().sum(0).numpy()
    covariance = products / n - np.outer(total, total) / n**2
    deviation = np.sqrt(np.maximum(np.diagonal(covariance), 1.0))
    whole = np.rint(covariance / np.outer(deviation, deviation) * 2**_BITS)
    start = np.random.Philox(key=seed % 2**64).random_raw(features.width * width) >> np.uint64(55)
    subspace = start.astype(np.float64).reshape(features.width, width) - 256
    for _ in range(_PASSES):
        image = _shortened(whole @ subspace)[0]
        subspace = _shortened(image @ _inverse_root(image.T @ image))[0]
    image, shift = _shortened(whole @ subspace)
    white = (
        _shortened(subspace @ _inverse_root((subspace.T @ image) * shift))[0] / deviation[:, None]
    )
    projection = np.rint(white / np.abs(white).max(0) * LARGEST)
    centre = np.floor(projection.T @ total / n)
    # In units of 2^-10 a covariance has 22 bits, and the columns' sums of products have 41.
    spread = np.floor(np.rint(covariance * 2**10) @ projection / 2**12)
    variance = (spread * projection).sum(0) * 2**2
    factor = np.rint(UNIT * _FINE / np.sqrt(np.maximum(variance, 1.0)))
    return Basis(
        torch.from_numpy(projection.astype(np.int8)),
        torch.from_numpy(centre.astype(np.int64)),
        torch.from_numpy(factor.astype(np.int64)),
    )


def _shortened(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Return `matrix` with columns of whole numbers of `_BITS` bits, and the powers of two that
    each counts in.
    """
    _, exponent = np.frexp(np.abs(matrix).max(0))
    shift = np.ldexp(1.0, exponent - _BITS)
    return np.floor(matrix / shift), shift


def _inverse_root(gram: Matrix) -> Matrix:
    """Return whole numbers W with WᵀGW diagonal, by Cholesky's method, one row after the other."""
    size = np.sqrt(gram.diagonal())
    work = gram / np.outer(size, size)
    # W may differ a little from the exact root: what counts is the space that its columns span, and
    # the next pass starts from better columns.
    np.fill_diagonal(work, 1 + _SPARE)
    inverse = np.eye(len(work))
    for k in range(len(work)):
        # What rounding left of a column that nearly follows from earlier ones has no sign.
        if work[k, k] < _SPARE:
            continue
        pivot = np.sqrt(work[k, k])
        column = work[k + 1 :, k] / pivot
        inverse[k] /= pivot
        inverse[k + 1 :] -= column[:, None] * inverse[k]
        work[k + 1 :, k + 1 :] -= column[:, None] * column
    return _shortened((inverse / size).T)[0]
