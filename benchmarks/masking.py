"""What masks of secure sums cost: CPU milliseconds of a silo for one part, with N silos.

    python -m benchmarks.masking

Each row is the least of three measurements of `PartMasks.added`: the members' signatures are checked, keys derived,
numbers masked, and the masks noted on the disk. Without masks a silo only adds its part.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from ekiden.base.sums import Sums
from ekiden.transports.flower.trust import keys, sealing
from ekiden.transports.flower.trust.masking import PartMasks
from ekiden.transports.flower.trust.sealing import Party, Reader

SILOS = (4, 20, 100)
WIDTHS = {"0.8 MB": 620, "8 MB": 1990}
CLASSES = 10


def part(width: int) -> Sums:
    """Sums of `width` features, 4 bytes a number."""
    draw = torch.Generator().manual_seed(0)
    gram = torch.randint(2**20, (width * (width + 1) // 2,), generator=draw, dtype=torch.int32)
    classes = torch.randint(2**20, (CLASSES, width), generator=draw, dtype=torch.int32)
    return Sums(gram, classes, torch.full((CLASSES,), 100))


def masks(folder: Path, silos: int) -> PartMasks:
    """The masks of the first of some silos."""
    names = [f"silo-{i}" for i in range(silos)]
    public = {name: keys.read_public(keys.generate(folder / name)) for name in names}
    private = {name: sealing.new_private() for name in names}
    members = []
    for name in names:
        key = sealing.public_of(private[name])
        proof = keys.sign(folder / name, sealing.key_text("run", name, key))
        members.append(Reader(name, 0, key, proof))
    return PartMasks(
        Party(names[0], "run", "terms", private[names[0]], public, None), tuple(members), 2, "0-add", folder / "run"
    )


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    print("| silos | " + " | ".join(WIDTHS) + " |\n|---|" + "---|" * len(WIDTHS))
    for silos in SILOS:
        with TemporaryDirectory() as scratch:
            folder = Path(scratch)
            (folder / "run").mkdir()
            mine, row = masks(folder, silos), []
            for number, width in enumerate(WIDTHS.values()):
                own, spent = part(width), []
                for _ in range(3):
                    began = time.process_time()
                    PartMasks(mine.party, mine.members, 2, f"{number}-add", mine.folder).added(None, own)
                    spent.append(1000 * (time.process_time() - began))
                row.append(f"{min(spent):.0f}")
        print(f"| {silos} | " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
