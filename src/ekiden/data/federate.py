"""Make one data set of what several silos hold: tensors, datasets, frames or files."""

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

import numpy as np
from torch import Tensor

from ekiden.base.checks import checked
from ekiden.base.errors import UserError
from ekiden.data import frames, whose
from ekiden.data.assemble import assemble, augmented
from ekiden.data.augment import Augment
from ekiden.data.given import pairs_of_images
from ekiden.data.holdings import hold
from ekiden.data.partition import Natural, split
from ekiden.data.reading import reading
from ekiden.data.samples import FederatedData, Samples
from ekiden.data.shares import Rows, divide, share_out
from ekiden.data.tasks import Task
from ekiden.data.tensors import Source, concatenated, held_out, labelled, made_of


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
    if columns or any(map(_is_own, silos)):
        if test is not None or classes is not None:
            raise UserError("for frames and files, give tests=[...] for each silo instead of test, and no classes")
        kind = task.kind if isinstance(task, Task) else task or ""
        made = _from_own(silos, tests, names, columns, kind, val_fraction, seed)
        dataset = replace(made.dataset, mean=tuple(mean), std=tuple(std), augment=augment or made.dataset.augment)
        return replace(made, dataset=dataset)
    sources: dict[str, Source] = {f"silo {i}": silo for i, silo in enumerate(silos)}
    sources |= {f"test set {i}": own for i, own in enumerate(tests or ())}
    sources |= {} if test is None else {"test": test}
    parts, order, meant = labelled(sources, classes, task)
    train, held = parts[: len(silos)], parts[len(silos) :]
    if not held:
        train, held = held_out({f"silo {i}": s for i, s in enumerate(train)}, meant)
    sides = concatenated(train), concatenated(held)
    dataset = made_of(*sides, name="own data", classes=order, mean=mean, std=std, augment=augment, task=meant)
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(r) for r in _ranges(train)]
    test_rows = (
        _ranges(held) if test is None else divide(dataset.strata(dataset.train), rows, dataset.strata(dataset.test))
    )
    return share_out(dataset, names or [f"client-{i}" for i in range(len(rows))], rows, test_rows, val_fraction)


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


def _is_own(source: Any) -> bool:
    """Return whether it is read like a file: a frame, a path, or a dict of columns."""
    if isinstance(source, str | PathLike) or type(source) is dict:
        return True
    return frames.is_frame(source) and not pairs_of_images(source)


def _from_own(
    silos: Sequence[Any],
    tests: Sequence[Any] | None,
    names: Sequence[str] | None,
    columns: dict[str, Any],
    task: str,
    val_fraction: float,
    seed: int,
) -> FederatedData:

    how = reading(columns)
    for silo in silos:
        if not _is_own(silo) and not frames.is_frame(silo):
            raise UserError(f"a silo is {type(silo).__name__}, which has no columns: give a frame, a path or a dict")
    if names is None and all(isinstance(silo, str | PathLike) for silo in silos):
        given = whose.silos([fspath(silo) for silo in silos])
        names, silos = list(given), list(given.values())
    names = names or [f"client-{k}" for k in range(len(silos))]
    holdings = [hold(silo, how, name) for silo, name in zip(silos, names, strict=True)]
    if tests is not None:
        held = [hold(test, how, f"{name} (test)") for test, name in zip(tests, names, strict=True)]
        holdings = [replace(h, test=t.train) for h, t in zip(holdings, held, strict=True)]
    if len(holdings) < 2:
        raise UserError(
            "a federation needs two silos or more: give several, or divide the data with ekiden.split(ekiden.load(...))"
        )
    dataset = augmented(assemble(holdings, how, name="own data", task=task), how)
    return split(dataset, Natural(), seed=seed, val_fraction=val_fraction)


def _ranges(parts: list[Samples]) -> list[Rows]:
    """Return the rows of each part within their concatenation."""
    ends = np.cumsum([len(p) for p in parts])
    return [np.arange(end - len(p), end) for p, end in zip(parts, ends, strict=True)]
