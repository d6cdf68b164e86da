"""Short texts at two sites: `python run.py`."""

import numpy as np
import pandas

import ekiden

draw = np.random.default_rng(0)
good, bad = ["great", "kind", "quick", "clean"], ["late", "rude", "slow", "dirty"]
things = ["staff", "room", "food", "visit", "doctor"]
rows = []
for k in range(240):
    mood = ("bad", "good")[k % 2]
    words = draw.choice(good if k % 2 else bad, 2)
    rows.append(
        (f"the {draw.choice(things)} was {words[0]} and {words[1]}", mood, f"site {k // 120}")
    )
reviews = pandas.DataFrame(rows, columns=["text", "mood", "site"])

data = ekiden.load(reviews, text_column="text", label_column="mood", group_column="site")
silos = ekiden.split(data, "natural")
result = ekiden.run(ekiden.FedSeq(epochs=10), silos, folder="runs/text")
print(result)

model = ekiden.load_model("runs/text")
answer = model(["the food was slow and rude"]).argmax(1)
print("the food was slow and rude:", model.classes[int(answer)])
