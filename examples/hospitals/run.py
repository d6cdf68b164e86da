"""A table with a column of hospitals, three methods, two seeds: `python run.py`."""

from sklearn.datasets import load_breast_cancer

import ekiden

patients = load_breast_cancer(as_frame=True).frame
patients["target"] = patients["target"].map({0: "malignant", 1: "benign"})
patients["hospital"] = ["north"] * 200 + ["south"] * 250 + ["west"] * 119
patients.to_csv("patients.csv", index=False)  # leave out these four lines if you have a file

data = ekiden.load("patients.csv", label_column="target", group_column="hospital")
silos = ekiden.split(data, "natural")
study = ekiden.study(["fedseq", "fedgram", "local"], silos, seeds=range(2), folder="runs/hospitals")
print(study.table())
