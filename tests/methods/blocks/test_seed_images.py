"""Images of the seed: the same bytes everywhere, whatever instructions a processor has."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from ekiden.methods.exact.blocks.seed_images import seed_images

DIGESTS = {
    (3, 32, 0): "0c3c3ce6c21c7e23",
    (1, 28, 7): "a639d1ae41adf1fa",
    (2, 17, 2**63 + 5): "21e2159f103c37d4",
}


@pytest.mark.parametrize("of", list(DIGESTS), ids=str)
def test_the_bytes_are_stored_ones(of: tuple[int, int, int]) -> None:
    images = seed_images(20, *of)
    assert hashlib.blake2b(images.tobytes(), digest_size=8).hexdigest() == DIGESTS[of]


def test_the_first_images_do_not_depend_on_how_many_follow() -> None:
    many = seed_images(150, 3, 16, 4)
    assert many.shape == (150, 3, 16, 16)
    assert np.array_equal(seed_images(3, 3, 16, 4), many[:3])


def test_seeds_and_images_differ() -> None:
    a, b = seed_images(12, 3, 16, 0), seed_images(12, 3, 16, 1)
    assert len({image.tobytes() for image in (*a, *b)}) == 24


def test_every_second_image_has_a_plain_ground_and_the_others_use_all_levels() -> None:
    images = seed_images(300, 3, 32, 0)
    flat = [np.bincount(image[0].ravel(), minlength=256).max() / 32**2 for image in images]
    assert np.mean(flat[1::2]) > 2 * np.mean(flat[::2])
    leaves = images[::2].astype(float)
    assert 90 < leaves.mean() < 165
    assert 45 < leaves.std() < 85


SCRIPT = """
import torch
from ekiden.methods.exact.blocks import components
from ekiden.methods.exact.blocks.whole_features import PatchFeatures
components.IMAGES, components.FILTERS, components.UNITS = 300, 6, 200
torch.manual_seed(3)
c = components.Components((3, 16, 16), 30, mirror=True)
c.fix()
p = PatchFeatures((3, 16, 16), 64, (5, 8))
p.fix()
t = components.Components((5,), 30, mirror=False)
t.fix()
x = torch.randint(256, (9, 3, 16, 16), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
import hashlib
parts = [*c._basis(), p.get_buffer("filters"), p.get_buffer("scale"), c(x), p(x)]
parts += [*t._basis(), t(t.samples())]
print(hashlib.blake2b(b"".join(t.numpy().tobytes() for t in parts), digest_size=8).hexdigest())
"""


@pytest.mark.slow
def test_features_are_the_same_bits_with_other_instructions(tmp_path: object) -> None:
    """PyTorch, oneDNN and OpenBLAS each choose kernels by the processor; here they are told to."""
    found = set()
    for torch_, blas in (("default", "Nehalem"), ("avx2", "Haswell"), ("avx512", "SkylakeX")):
        limits = {
            "ATEN_CPU_CAPABILITY": torch_,
            "ONEDNN_MAX_CPU_ISA": "SSE41" if torch_ == "default" else torch_.upper(),
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2" if torch_ == "default" else torch_.upper(),
            "OPENBLAS_CORETYPE": blas,
            "EKIDEN_CACHE": f"{tmp_path}/{torch_}",
        }
        if torch_ == "avx512" and "avx512" not in _flags():
            continue
        found.add(
            subprocess.run(
                [sys.executable, "-c", SCRIPT],
                env=os.environ | limits,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
    assert len(found) == 1


def _flags() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""
