"""Two silos with a table each, and their sums."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

TABLE = """name = "{name}"
[data]
path = "{name}.csv"
label_column = "died"
drop_columns = ["ward"]
min_count = 3
{more}
"""


def tables(folder: Path) -> list[Path]:
    """Two silos with a table each, not scaled yet."""
    rng = np.random.default_rng(0)
    for name, mean in (("a", 50.0), ("b", 70.0)):
        age = rng.normal(mean, 10, 50)
        lines = [f"{x:.2f},{'fm'[k % 2]},w,{'yes' if x > 60 else 'no'}" for k, x in enumerate(age)]
        lines[3] = f",{'fm'[1]},w,no"
        (folder / f"{name}.csv").write_text("age,sex,ward,died\n" + "\n".join(lines) + "\n")
        (folder / f"{name}.toml").write_text(TABLE.format(name=name, more=""))
    return [folder / "a.toml", folder / "b.toml"]


def sums_of(folder: Path, command: Callable[..., tuple[int, str]], more: str = "") -> list[str]:
    for file in tables(folder):
        file.write_text(TABLE.format(name=file.stem, more=more))
        code, said = command("silo", "sums", str(file))
        assert code == 0, said
    return [str(folder / f"{name}-sums.json") for name in "ab"]
