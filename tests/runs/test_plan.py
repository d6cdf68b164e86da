"""What the settings of a run make of its data."""

from dataclasses import replace

import torch

from ekiden.core.data.augment import Augment
from ekiden.methods import FedSeq
from ekiden.runs.plan import Plan, from_json
from ekiden.runs.recipe import Recipe


def test_a_subset_keeps_all_but_the_number_of_training_samples() -> None:
    plan = Plan(Recipe(FedSeq(epochs=1)), data="digits", clients=3, partition="iid", subset=100)
    few, whole = plan.dataset(), Plan(Recipe(FedSeq())).dataset()
    assert (len(few.train), len(few.test)) == (100, len(whole.test))
    for name in ("name", "classes", "mean", "std", "augment", "task", "inputs"):
        assert getattr(few, name) == getattr(whole, name), name
    augmented = replace(whole, augment=Augment(flip=True), classes=tuple("abcdefghij"), mean=(0.5,))
    kept = augmented.subset(100)
    assert replace(kept, train=augmented.train) == augmented, "in Python it loses nothing, either"
    assert torch.equal(kept.train.x, few.train.x)
    assert torch.equal(few.train.x, plan.dataset().train.x), "the seed chooses the samples"
    other = Plan(Recipe(FedSeq(), seed=1), subset=100).dataset()
    assert not torch.equal(few.train.x, other.train.x)
    assert sum(len(client.train) + len(client.val) for client in plan.federation().clients) == 100
    assert from_json(plan.to_json()) == plan
    assert "subset" not in Plan(Recipe(FedSeq())).to_json(), "older runs are the same"
