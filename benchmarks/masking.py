"""What masks of secure sums cost a silo: bytes and CPU milliseconds for one part, with N silos.

    python -m benchmarks.masking

Times are the least of three measurements of `PartMasks.added`: the members' signatures are checked,
keys derived, numbers masked, and the masks noted on the disk. Without masks a silo only adds its
part. The last column is a model of a million values with `--secure`, with its conversion to fixed
point. Bytes are those that a request has more with the list of members, and those of the part under
masks.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ekiden.core.engine import wire
from ekiden.core.training.gram import Sums
from ekiden.core.training.weights import Weights
from ekiden.methods.blocks.rounds import ModelSums
from ekiden.silos.trust import keys, sealing
from ekiden.silos.trust.masking import PartMasks
from ekiden.silos.trust.parcel import Ask, pack
from ekiden.silos.trust.sealing import Party, Reader

SILOS = (4, 20, 100)
WIDTHS = {"0.8 MB": 620, "8 MB": 1990}
CLASSES = 10


def part(width: int, silos: int) -> Sums:
    """Sums of `width` features, 4 bytes a number; the same for any number of silos."""
    draw = torch.Generator().manual_seed(0)
    gram = torch.randint(2**20, (width * (width + 1) // 2,), generator=draw, dtype=torch.int32)
    classes = torch.randint(2**20, (CLASSES, width), generator=draw, dtype=torch.int32)
    return Sums(gram, classes, torch.full((CLASSES,), 100))


def model() -> Weights:
    """A model of a million values."""
    draw = torch.Generator().manual_seed(0)
    return Weights(
        torch.randn(10**6, generator=draw), torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    )


def masks(folder: Path, silos: int) -> PartMasks:
    """The masks of the first of some silos."""
    names = [f"silo-{i}" for i in range(silos)]
    public = {name: keys.read_public(keys.generate(folder / name)) for name in names}
    private = {name: sealing.new_private() for name in names}
    members = []
    for name in names:
        key = sealing.public_of(private[name])
        proof = keys.sign(folder / name, sealing.KEY, sealing.key_text("run", name, key))
        members.append(Reader(name, 0, key, proof))
    return PartMasks(
        Party(names[0], "run", "terms", private[names[0]], public, None),
        tuple(members),
        2,
        "0-add",
        folder / "run",
    )


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    makers: dict[str, Callable[[int], Sums | ModelSums]] = {
        **{name: partial(part, width) for name, width in WIDTHS.items()},
        "a million values": lambda silos: ModelSums.of(silos, model(), 600.0),
    }
    print(
        "| silos | list of members, bytes | "
        + " | ".join(f"{name}, ms" for name in makers)
        + " | bytes |"
    )
    print("|---" * (3 + len(makers)) + "|")
    for silos in SILOS:
        with TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "run").mkdir()
            mine, row, sizes = masks(folder, silos), [], []
            for number, make in enumerate(makers.values()):
                spent = []
                for _ in range(3):
                    began = time.process_time()
                    own = make(silos)
                    if number < len(WIDTHS):
                        began = time.process_time()  # how a part is made depends on the method
                    masked = PartMasks(
                        mine.party, mine.members, 2, f"{number}-add", mine.folder
                    ).added(None, own, None)
                    spent.append(1000 * (time.process_time() - began))
                row.append(f"{min(spent):.0f}")
                sizes.append(f"{wire.size(masked):,}")
            listed = len(pack(Ask("task", "", members=mine.members))) - len(pack(Ask("task", "")))
            print(f"| {silos} | {listed:,} | " + " | ".join(row) + f" | {', '.join(sizes)} |")


if __name__ == "__main__":
    main()
