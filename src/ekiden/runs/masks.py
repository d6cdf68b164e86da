"""Write the masks that a segmentation gives: a PNG for each image, and a table of shares."""

import colorsys
import csv
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch
from PIL import Image

from ekiden.core.base.errors import UserError
from ekiden.core.base.files import csv_cell, disk_error
from ekiden.runs.batches import Batch
from ekiden.runs.loaded_model import LoadedModel

TABLE = "masks.csv"
# classes of a PNG with a palette
_MOST = 256


def check_mask_folder(out: str, overwrite: bool) -> None:
    """Refuse an output before anything is computed."""
    folder = Path(out)
    if out == "-" or folder.suffix:
        raise UserError(
            "a segmentation gives a mask for each image: name a folder for them by -o FOLDER"
        )
    ours = _is_ours(folder)
    if folder.exists() and not (overwrite and ours):
        raise UserError(
            f"{folder} exists: choose another name{', or add --overwrite' if ours else ''}"
        )
    if not folder.absolute().parent.is_dir():
        raise UserError(f"cannot write {folder}: there is no folder {folder.parent}")


def _is_ours(folder: Path) -> bool:
    """Return whether a folder holds only what `write` made."""
    try:
        with (folder / TABLE).open(newline="", encoding="utf-8") as file:
            listed = {row["mask"].removeprefix("'") for row in csv.DictReader(file)}
    except (OSError, KeyError, UnicodeDecodeError):
        return False
    return {path.name for path in folder.iterdir()} == {*listed, TABLE}


def write_masks(model: LoadedModel, batches: Iterable[Batch], out: Path) -> int:
    """Write a PNG for each image, with the numbers of the classes as pixels, and `masks.csv`;
    return how many.

    Masks have the size at which the model sees images. The table has `file`, `row`, `mask` (the
    name of the PNG), and `share_NAME`, the share of the pixels that belong to each class. The
    folder appears only when everything is done.
    """
    if len(model.classes) > _MOST:
        raise UserError(
            f"a mask as PNG has at most {_MOST} classes, but the model has {len(model.classes)}"
        )
    try:
        with tempfile.TemporaryDirectory(prefix=".ekiden-", dir=out.absolute().parent) as place:
            unfinished = Path(place) / "masks"
            unfinished.mkdir()
            count = _write(model, batches, unfinished)
            if out.exists():
                shutil.rmtree(out)
            unfinished.rename(out)
    except OSError as error:
        raise disk_error(error, out) from None
    return count


def _write(model: LoadedModel, batches: Iterable[Batch], folder: Path) -> int:
    classes = len(model.classes)
    count = 0
    # black for the first class, then colours around the colour circle
    palette = [0, 0, 0]
    for k in range(classes - 1):
        palette += [round(255 * part) for part in colorsys.hsv_to_rgb(k / (classes - 1), 0.8, 1.0)]
    with (folder / TABLE).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        shares = [f"share_{name}" for name in model.classes]
        table.writerow(map(csv_cell, ["file", "row", "mask", *shares]))
        for batch in batches:
            with torch.inference_mode():
                answers = model.task.answers(model.encoded(batch.x).float(), full=True)
            for name, row, answer in zip(batch.files, batch.rows, answers, strict=True):
                stem = Path(name).stem if row is None else f"{Path(name).stem}-{row}"
                # images in several folders may have one name
                mask = f"{stem}.png"
                if (folder / mask).exists():
                    mask = f"{stem}~{count}.png"
                image = Image.fromarray(answer.to(torch.uint8).numpy(), "L")
                image.putpalette(palette)
                image.save(folder / mask)
                share = torch.bincount(answer.flatten(), minlength=classes) / answer.numel()
                table.writerow(map(csv_cell, [name, row, mask, *share.tolist()]))
                count += 1
    return count
