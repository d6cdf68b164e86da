"""Tasks: what the labels mean, the loss that training minimises, and what is measured."""

from ekiden.data.tasks.base import Metric, Need, Scores, Task, own_metric
from ekiden.data.tasks.choice import KINDS, inferred, named, names_of, recorded, scaled, task_of, task_of_terms, terms
from ekiden.data.tasks.classification import Classification
from ekiden.data.tasks.language import LanguageModelling
from ekiden.data.tasks.multilabel import MultiLabel
from ekiden.data.tasks.regression import Regression
from ekiden.data.tasks.segmentation import Segmentation

__all__ = [
    "KINDS",
    "Classification",
    "LanguageModelling",
    "Metric",
    "MultiLabel",
    "Need",
    "Regression",
    "Scores",
    "Segmentation",
    "Task",
    "inferred",
    "named",
    "names_of",
    "own_metric",
    "recorded",
    "scaled",
    "task_of",
    "task_of_terms",
    "terms",
]
