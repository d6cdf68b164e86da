"""The flags of `ekiden run`: those of a run anywhere, and those of its place."""

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ekiden.cli.flags import Boxes

P = TypeVar("P")
L = TypeVar("L")


@dataclass(frozen=True)
class Here:
    """What only runs on this machine have."""

    seeds: tuple[int, ...] = ()
    """several seeds: one run each, side by side on the cores; overrides --seed"""
    config: Path | None = None
    """TOML file with settings by their names, METHOD too; flags override it"""
    print_config: bool = False
    """print all settings as such a file, and run nothing"""


@dataclass(frozen=True)
class LinkOptions:
    """Which SuperLink."""

    federation: Path | None = None
    """folder that `ekiden federation init` made: it has --link, --certificate, --keys, and
    the names for --clients"""
    link: str = ""
    """HOST:PORT of the SuperLink for the coordinator, such as 127.0.0.1:8001"""
    certificate: Path | None = None
    """PEM file of the authority that signed the SuperLink's certificate; by default the system's
    authorities"""


@dataclass(frozen=True)
class BetweenMachines(LinkOptions):
    """What only runs over real silos have."""

    keys: Path | None = None
    """folder with the public key NAME.pub of every silo: a silo must prove its name"""


@dataclass(frozen=True)
class RunOptions(Generic[P, L]):
    """Train one model over many data silos; ends with accuracy, bytes moved, time, and the run
    folders.
    """

    plan: P
    place: L
    out: Path = Path("runs")
    """folder in which the run folders METHOD-DATA-seedSEED are made, METHOD-flower-seedSEED between
    machines, on the SuperLink's"""
    track: tuple[str, ...] = ()
    """programs that draw the metrics as the run goes on: tensorboard (files in the run folder),
    mlflow (where MLFLOW_TRACKING_URI says), wandb, trackio; they need the run folder on this
    machine"""
    on: str = "here"
    """where the clients are: here, simulated; ray, or ray:ADDRESS: simulated on a Ray cluster, see
    docs/clusters.md; or flower: real silos, see --on flower --help"""
    json: bool = False
    """print JSON, and all else to standard error: a list with an object for each run, as
    `ekiden show RUN --json` prints it"""


BOXES: Boxes = (
    (
        "data",
        "Samples, and who holds them.",
        (
            "data",
            "silos",
            "partition",
            "clients",
            "data_seed",
            "without",
            "val_fraction",
            "size",
            "subset",
            "task",
            "metric",
        ),
    ),
    ("columns", "", ("reading",)),
    (
        "superlink",
        "How the silos are reached.",
        ("federation", "link", "certificate", "keys"),
    ),
    ("network", "What is trained.", ("model", "pretrained", "train")),
    ("training", "", ("training",)),
    ("privacy", "", ("dp", "evaluate_dp")),
    ("hardware", "", ("hardware",)),
    ("run", "The run as a whole: seeds, folder, what is measured.", ()),
)
"""The flags in the order of the help, after the method's own flags; a box has those that the place
of the run has, and the last one all that no other names."""
