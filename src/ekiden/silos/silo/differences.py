"""Which rows a silo has told sums of, in a file or in a run: two sums, subtracted, show the few
rows that differ.
"""

import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ekiden.core.base.checks import Checked, CountOrZero, made
from ekiden.core.base.errors import UserError, counted
from ekiden.core.base.files import lock_file, locked, write_once
from ekiden.core.data.samples import ClientData, Dataset, Subset
from ekiden.readers.kinds import Table
from ekiden.silos.trust.masking import Members, nearly_cancelled

# file in the silo's folder: a line for each sum of columns that it told, never changed
FILE = "told.jsonl"
_SALT = "told.salt"
_SUMMED = "summed"  # folder in the silo's folder: hashes of the rows in sums of runs


@dataclass(frozen=True)
class ToldSums(Checked):
    """A line of the file."""

    # for each column and label, how many rows have a value with this keyed hash (16 bits). Two
    # columns differ in at
    # least as many values as these counts do.
    columns: Mapping[str, Mapping[str, CountOrZero]]
    times: tuple[float, ...] = ()  # between which events were counted

    def apart(self, other: "ToldSums") -> tuple[int, ...]:
        """Return for each column of both by how many values the two differ at least.

        A column in which most values differ was written in another way: of it only the numbers of
        values are compared.
        """
        found = []
        for name in sorted(self.columns.keys() & other.columns.keys()):
            here, there = Counter(self.columns[name]), Counter(other.columns[name])
            alike = 2 * (here & there).total() >= min(here.total(), there.total())
            differ = ((here - there) + (there - here)).total()
            found.append(differ if alike else abs(here.total() - there.total()))
        return tuple(found)


def note(folder: Path, client: ClientData, dataset: Dataset, times: Sequence[float] = ()) -> None:
    """Note that sums of a client's training rows are told, with events between times, or refuse
    that.

    Refused are sums from which earlier ones differ in fewer than `dataset.least` values of a
    column, or sums of these rows between other times.
    """
    file = folder / FILE
    salt = _salt(folder, file)
    now = ToldSums(_columns(client, dataset, salt), tuple(times))
    with locked(lock_file(file)):
        before = _read(file)
        for one in before:
            apart = now.apart(one)
            few = max((n for n in apart if n < dataset.least), default=0)
            if few:
                what = f"except for {counted(few, 'value')} in a column: the difference would show them"
            elif apart and not any(apart) and now.times and one.times and now.times != one.times:
                grid = " ".join(f"{time:g}" for time in one.times)
                what = f"at the times {grid}: two grids show single events"
            else:
                continue
            raise UserError(
                f"sums of these rows were reported before, {what}; use the file that was made "
                "then, or wait for "
                f"{dataset.least} more rows (data.min_count). If nobody read that file, remove "
                f"{file}"
            )
        if now not in before and (name := _combined(now, before, dataset.least)):
            raise UserError(
                f"earlier sums, added and subtracted, leave fewer than {dataset.least} values of "
                f"{name!r} in these: "
                "that would show them; use a file that was made then. If nobody read one of "
                f"those, remove {file}"
            )
        if now not in before:
            with open(
                os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8"
            ) as out:
                out.write(json.dumps(asdict(now), separators=(",", ":")) + "\n")
                out.flush()
                os.fsync(out.fileno())


def _combined(now: ToldSums, before: Sequence[ToldSums], least: int) -> str:
    """Return a column of which few values are left if two or three earlier sums are combined with
    these; else "".
    """
    for name in now.columns:
        sums = [one.columns[name] for one in (now, *before) if name in one.columns]
        own, *earlier = (
            np.repeat(np.array([int(text, 16) for text in counts], "<u8"), [*counts.values()])
            for counts in sums
        )
        if any(len(places) > 1 for places, _ in nearly_cancelled(own, earlier, least)):
            return name
    return ""


def note_rows(folder: Path, part: Subset, kind: str, least: int) -> None:
    """Note that a run sums over these rows, which are "training" rows or of another kind, or refuse
    that.

    Refused are rows that an earlier run, or a combination of up to three, summed over except for
    fewer than `least`.
    """
    kept = folder / _SUMMED / kind
    now = _hashes(folder, kept, part)
    name = _name(now)
    if (kept / name).exists():
        return
    files = sorted(kept.iterdir())
    earlier = [np.frombuffer(file.read_bytes(), "<u8") for file in files]
    # Rows that were scaled or coded in another way are all different, and a few more of them still
    # show.
    recoded = [
        (place,)
        for place, one in enumerate(earlier)
        if 0 < abs(len(now) - len(one)) < least
        and 2 * len(np.intersect1d(now, one)) < min(len(now), len(one))
    ]
    for places in (*recoded, *(places for places, _ in nearly_cancelled(now, earlier, least))):
        before = [files[place] for place in places]
        what = f"an earlier run summed over the same {kind} samples except for fewer than {least}: the difference"
        if len(before) > 1:
            what = f"{len(before)} earlier runs, added and subtracted, leave fewer than {least} {kind} samples: that"
        raise UserError(
            f"{what} would show these. Wait for more, use the earlier samples, or set differences "
            "= true under "
            "[limits] in silo.toml; if no earlier run has ended, remove "
            f"{' '.join(map(str, before))}"
        )
    write_once(kept / name, now.tobytes())


def note_sums(
    folder: Path, part: Subset, features: str, numbers: int, most: int, least: int
) -> None:
    """Note that a run sums these features over training rows, or refuse that.

    Equations of several runs together determine rows that those of one run do not. So all runs that
    share more than half of their rows, or have nearly the same number, tell `most` numbers
    together. The same sums again tell nothing.

    Args:
        folder: the silo's folder.
        part: the rows.
        features: names the features: the same for the same ones.
        numbers: how many numbers the sums have.
        most: how many the largest sums of one run may have.
        least: numbers of rows that differ by less are nearly the same.
    """
    kept = folder / _SUMMED / "features"
    now = _hashes(folder, kept, part)
    file = kept / f"{_name(now)}-{features}-{numbers}"
    with locked(lock_file(kept)):
        if file.exists():
            return
        told = 0
        for other in kept.iterdir():
            rows = np.frombuffer(other.read_bytes(), "<u8")
            shared = 2 * len(np.intersect1d(now, rows)) > min(len(now), len(rows))
            if shared or abs(len(now) - len(rows)) < least:  # the same rows, scaled in another way
                told += int(other.name.rsplit("-", 1)[1])
        if told and told + numbers > most:
            raise UserError(
                f"earlier runs told {told:,} sums of these samples, this one would tell "
                f"{numbers:,} more, and together "
                f"more than {most:,} show them: give the seed and the features of an earlier run, "
                "or a --width with "
                f"{max(most - told, 0):,} sums at most (D(D + 1)/2 + KD), or set differences = "
                "true under [limits] in "
                f"silo.toml; if no earlier run has ended, empty {kept}"
            )
        write_once(file, now.tobytes())


def _hashes(folder: Path, kept: Path, part: Subset) -> Members:
    """Return keyed hashes (n,) of rows and labels, in order; `kept` is the folder with those of
    earlier runs.
    """
    salt = _salt(folder, kept)
    kept.mkdir(mode=0o700, parents=True, exist_ok=True)
    rows = sorted(
        blake2b(a.numpy().tobytes() + b.numpy().tobytes(), digest_size=8, key=salt).digest()
        for a, b in zip(part.x, part.y, strict=True)
    )
    return np.frombuffer(b"".join(rows), "<u8")


def _name(rows: Members) -> str:
    return blake2b(rows.tobytes(), digest_size=16).hexdigest()


def _salt(folder: Path, needs: Path) -> bytes:
    """Return the silo's secret, which `needs` cannot be read without."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if needs.exists() and not (folder / _SALT).exists():
        raise UserError(
            f"{needs} cannot be read without {folder / _SALT}: restore that from a backup"
        )
    return write_once(folder / _SALT, secrets.token_bytes(32))


def _columns(client: ClientData, dataset: Dataset, salt: bytes) -> dict[str, dict[str, int]]:
    """Return the counts of `ToldSums`."""
    table, x, labels = (
        Table.of(dataset.inputs),
        client.train.x,
        client.train.y.reshape(len(client.train.y), -1),
    )
    values = {
        name: x[:, k].double().numpy() + 0.0
        for k, name in enumerate((*table.numeric, *table.categorical))
    }
    values |= {f"label {k}": labels[:, k].double().numpy() + 0.0 for k in range(labels.shape[1])}
    codes = dict(zip(table.categorical, table.vocabularies, strict=True))

    def texts(name: str, found: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> list[bytes]:
        if name not in codes:
            return [value.tobytes() for value in found]
        return [("", *codes[name])[int(value)].encode() for value in found]

    told: dict[str, dict[str, int]] = {}
    for name, column in values.items():
        different, counts = np.unique(column, return_counts=True)
        total: Counter[str] = Counter()
        for text, n in zip(texts(name, different), counts.tolist(), strict=True):
            total[blake2b(text, digest_size=2, key=salt).hexdigest()] += n
        told[name] = dict(total)
    return told


def _read(file: Path) -> list[ToldSums]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        return [made(ToldSums, json.loads(line)) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, UserError) as error:
        raise UserError(f"{file} is damaged ({error}): restore it from a backup") from None
