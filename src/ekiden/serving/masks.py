"""Write the masks of a segmentation: a folder with one mask per image, and a table."""

import colorsys
import csv
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from ekiden.base.errors import UserError
from ekiden.base.files import disk_error
from ekiden.results.model import LoadedModel
from ekiden.serving.reading import Batch

TABLE = "masks.csv"
_MOST = 256  # most classes of a PNG with a palette


def check_out(out: str, overwrite: bool) -> None:
    """Refuse an output before anything is computed."""
    folder = Path(out)
    if out == "-" or folder.suffix:
        raise UserError("a segmentation gives a mask for each image: name a folder for them by -o FOLDER")
    ours = _is_ours(folder)
    if folder.exists() and not (overwrite and ours):
        raise UserError(f"{folder} exists: choose another name{', or add --overwrite' if ours else ''}")
    if not folder.absolute().parent.is_dir():
        raise UserError(f"cannot write {folder}: there is no folder {folder.parent}")


def _is_ours(folder: Path) -> bool:
    """Return whether a folder holds only what `write` made."""
    try:
        with (folder / TABLE).open(newline="", encoding="utf-8") as file:
            listed = {row["mask"] for row in csv.DictReader(file)}
    except (OSError, KeyError, UnicodeDecodeError):
        return False
    return {path.name for path in folder.iterdir()} == {*listed, TABLE}


def write(model: LoadedModel, batches: Iterable[Batch], out: Path) -> int:
    """Write a PNG for each image, whose pixel values are the numbers of the classes, and `masks.csv`.

    Masks have the size at which the model sees images. The table has `file`, `row`, `mask` (the name of the PNG), and
    `share_NAME`, the share of the pixels that belong to each class. The folder appears only when everything is done.

    Returns:
        The number of images.
    """
    if len(model.classes) > _MOST:
        raise UserError(f"a mask as PNG has at most {_MOST} classes, but the model has {len(model.classes)}")
    try:
        unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.absolute().parent))
    except OSError as error:
        raise disk_error(error, out) from None
    try:
        count = _write(model, batches, unfinished)
        if not count:
            raise UserError("these files hold no sample: nothing to predict")
        unfinished.chmod(0o755)
        if out.exists():
            shutil.rmtree(out)
        unfinished.rename(out)
    except OSError as error:
        raise disk_error(error, out) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return count


def _write(model: LoadedModel, batches: Iterable[Batch], folder: Path) -> int:
    palette = _palette(len(model.classes))
    taken: dict[str, int] = {}
    count = 0
    with (folder / TABLE).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["file", "row", "mask", *(f"share_{name}" for name in model.classes)])
        for batch in batches:
            with torch.inference_mode():
                answers = model.task.answers(model(batch.x).float(), full=True)
            for name, row, answer in zip(batch.files, batch.rows, answers, strict=True):
                stem = Path(name).stem if row is None else f"{Path(name).stem}-{row}"
                taken[stem] = taken.get(stem, 0) + 1
                mask = f"{stem}.png" if taken[stem] == 1 else f"{stem}~{taken[stem]}.png"
                image = Image.fromarray(answer.to(torch.uint8).numpy(), "L")
                image.putpalette(palette)
                image.save(folder / mask)
                table.writerow([name, "" if row is None else row, mask, *_shares(answer, len(model.classes))])
                count += 1
    return count


def _shares(answer: Tensor, classes: int) -> list[float]:
    """Return the share of the pixels (H, W) of each class."""
    return (torch.bincount(answer.flatten(), minlength=classes) / answer.numel()).tolist()


def _palette(classes: int) -> list[int]:
    """Return red, green and blue of each class: black first, then colours around the colour circle."""
    colours = [colorsys.hsv_to_rgb(k / max(classes - 1, 1), 0.8, 1.0) for k in range(classes - 1)]
    return [0, 0, 0, *(round(255 * part) for colour in colours for part in colour)]
