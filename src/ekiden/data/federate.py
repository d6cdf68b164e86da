"""Make one data set of what several silos hold: tensors, datasets, frames or files."""

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

import numpy as np
from torch import Tensor

from ekiden.base.checks import checked
from ekiden.base.errors import UserError
from ekiden.data import whose
from ekiden.data.assemble import assemble, augmented
from ekiden.data.augment import Augment
from ekiden.data.given import Source
from ekiden.data.holdings import Holding, hold
from ekiden.data.partition import Natural, split
from ekiden.data.reading import reading
from ekiden.data.samples import FederatedData
from ekiden.data.tasks import Task


@checked("silos", "test", "tests", "task")
def federate(
    silos: Sequence[Source],
    test: Source | None = None,
    *,
    tests: Sequence[Source] | None = None,
    names: Sequence[str] | None = None,
    val_fraction: float = 0.1,
    seed: int = 0,
    classes: Sequence[str] | None = None,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    augment: Augment | None = None,
    task: Task | str | None = None,
    **columns: Any,
) -> FederatedData:
    """Return one data set held by several silos, each with the samples given for it.

    Args:
        silos: what each client holds for training and validation, as in `from_tensors`.
        test: a common test set. Each of its classes is divided among the clients in proportion to their
            training samples of the class.
        tests: or else the test set of each client. Without `test` and `tests`, 20 % of each class of each silo is
            held out.
        names: names of the clients; client-0, client-1, ... by default.
        val_fraction: share of a client's (shuffled) samples for validation.
        seed: seed of the shuffle.
        classes: as in `from_tensors`; one list for all silos, so that a label means the same everywhere.
        mean: as in `from_tensors`.
        std: as in `from_tensors`.
        augment: as in `from_tensors`.
        task: as in `from_tensors`.
        **columns: as in `ekiden.load`, if silos are frames, paths, or data sets of Hugging Face.

    Raises:
        UserError: as in `from_tensors`; or there are no silos, or not as many tests or names as silos.
    """
    _check(silos, test, tests, names)
    how = reading(columns)
    sources: Sequence[Any] = silos
    if names is None and all(isinstance(silo, str | PathLike) for silo in sources):
        found = whose.silos([fspath(silo) for silo in sources])
        names, sources = list(found), list(found.values())
    names = names or [f"client-{k}" for k in range(len(sources))]

    def held(source: Any, name: str, what: str = "") -> Holding:
        return hold(source, how.without_augment(), name, what)

    holdings = [held(source, name) for source, name in zip(sources, names, strict=True)]
    if tests is not None:
        parts = [held(own, name, f"the test set of {name}").train for own, name in zip(tests, names, strict=True)]
        holdings = [replace(holding, test=part) for holding, part in zip(holdings, parts, strict=True)]
    common = None if test is None else held(test, "", "test").train
    dataset = assemble(holdings, how, name="own data", task=task, classes=classes, test=common)
    dataset = replace(dataset, mean=tuple(mean), std=tuple(std), augment=augment or dataset.augment)
    return split(augmented(dataset, how), Natural(), seed=seed, val_fraction=val_fraction)


def _check(silos: Any, test: Any, tests: Sequence[Any] | None, names: Sequence[str] | None) -> None:
    """Refuse arguments that do not have one entry for each silo."""
    one = isinstance(silos, Sequence) and len(silos) == 2 and all(isinstance(s, Tensor | np.ndarray) for s in silos)
    if one or isinstance(silos, str) or not isinstance(silos, Sequence):
        raise UserError(
            "federate needs a list with the samples of each silo, as in [(inputs, labels), (inputs, labels)]; "
            "ekiden.split divides one data set"
        )
    if not len(silos) or (test is not None and tests is not None):
        raise UserError("federate needs at least one silo, and either test or tests, not both.")
    for what, given in ("tests", tests), ("names", names):
        if given is not None and len(given) != len(silos):
            raise UserError(f"{len(given)} {what} for {len(silos)} silos: give one for each.")
    if names is not None and len(set(names)) < len(names):
        raise UserError("two silos have the same name: give each its own.")
