"""Folders of images, one for each silo: `python run.py`."""

from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

import ekiden

folder = Path("data")
digits = load_digits()
for k, (pixels, label) in enumerate(zip(digits.images[:450], digits.target[:450], strict=True)):
    file = folder / ("north", "south", "west")[k % 3] / str(label) / f"{k}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels * 15.9).astype(np.uint8)).save(file)

silos = ekiden.federate({silo.name: silo for silo in sorted(folder.iterdir())})
result = ekiden.run("fedgram", silos, "mlp", folder="runs/images")
print(result)

answers = ekiden.predict(ekiden.load_model("runs/images"), folder / "north" / "0")
print("prediction for a zero:", answers[0]["prediction"])
