"""Find out which file or folder belongs to which silo, and the silos' names."""

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from ekiden.base.errors import UserError
from ekiden.data.holdings import suits
from ekiden.data.raw import natural


def silos(given: Sequence[str]) -> dict[str, Path]:
    """Return the files or folders of silos, by the silos' names.

    Args:
        given: their paths; or one folder that holds a file or a folder for each; or one TOML file that names them.
    """
    paths = [Path(p).expanduser() for p in given]
    for path in paths:
        if not path.exists():
            raise UserError(f"there is no file or folder {str(path)!r}: give the files or folders of the silos")
    if len(paths) == 1 and paths[0].suffix == ".toml":
        return _from_toml(paths[0])
    if len(paths) == 1 and paths[0].is_dir():
        inside = sorted(paths[0].iterdir(), key=lambda p: natural(p.stem))
        found = [p for p in inside if not p.name.startswith((".", "__")) and (p.is_dir() or suits(p))]
        if not found:
            raise UserError(f"{paths[0]} holds no folder and no file of a silo: put one for each silo there")
        paths = found
    if len(paths) == 1:
        raise UserError(f"a federation needs two silos or more: give several after --silos, or use --data {paths[0]}")
    stems = [silo_name(p.name if p.is_dir() else p.stem) for p in paths]
    if len(set(stems)) < len(stems):
        stems = [silo_name(f"{p.parent.name}-{s}") for p, s in zip(paths, stems, strict=True)]
    return _unlike(list(zip(stems, paths, strict=True)))


def silo_name(text: str) -> str:
    """Return `text` as a name of a silo that can also be a file name."""
    return re.sub(r"[^\w.-]+", "_", text).strip("._") or "silo"


def _from_toml(path: Path) -> dict[str, Path]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    found = values.get("silos")
    if set(values) != {"silos"} or not isinstance(found, dict) or not all(isinstance(p, str) for p in found.values()):
        raise UserError(f'{path} must name the silos in one table, as in [silos] north = "north.csv"')
    made = _unlike([(silo_name(name), path.parent / Path(p).expanduser()) for name, p in found.items()])
    for name, file in made.items():
        if not file.exists():
            raise UserError(f"{path}: there is no file or folder {str(file)!r} for the silo {name}")
    if len(made) < 2:
        raise UserError(f"{path} names {len(made)} silo: name two or more")
    return made


def _unlike(named_: list[tuple[str, Path]]) -> dict[str, Path]:
    names = [name for name, _ in named_]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"two silos are called {twice!r}: rename one, or name them in a TOML file")
    return dict(named_)
