"""Extractor and classifier: which entries of the flat vectors belong to which."""

import pytest
import torch
from torch import nn

from ekiden.core import models
from ekiden.core.base.errors import UserError
from ekiden.core.engine.method import Size
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Part, Weights


class Sandwich(nn.Module):
    """A classifier in the middle of the parameter list, with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 3)
        self.head = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.last = nn.BatchNorm1d(3)


def test_entries_of_the_head_wherever_they_lie() -> None:
    head = Network(Sandwich()).head
    assert head.params.tolist() == [False] * 9 + [True] * 12 + [False] * 6
    assert head.buffers.tolist() == [True] * 4 + [False] * 6
    assert head.counters.tolist() == [True, False]


def test_parts_are_taken_and_put_back() -> None:
    network = Network(Sandwich())
    model, head = network.weights(), network.head
    other = Weights(model.params + 1, model.buffers + 1, model.counters + 1)
    merged = head.put(head.of(other), model)
    assert torch.equal(merged.params[head.params], other.params[head.params])
    assert torch.equal(merged.params[~head.params], model.params[~head.params])
    whole = (~head).put((~head).of(other), merged)
    for name in ("params", "buffers", "counters"):
        assert torch.equal(getattr(whole, name), getattr(other, name))


def test_refuses_values_of_another_part() -> None:
    network = Network(Sandwich())
    with pytest.raises(UserError, match="another part"):
        network.head.put((~network.head).of(network.weights()), network.weights())


@pytest.mark.parametrize("name", models.fitting((3, 32, 32)))
def test_every_network_of_the_library_declares_its_head(name: str) -> None:
    network = Network(models.build(name, (3, 32, 32), 10))
    assert int(network.head.params.sum()) == sum(
        p.numel() for p in network.module.get_submodule("head").parameters()
    )
    assert 0 < int(network.head.params.sum()) <= len(network.params)
    assert (int(network.head.params.sum()) < len(network.params)) == (name != "linear"), (
        "which is a head alone"
    )
    assert sum(torch.Size(shape).numel() for shape in network.shapes) == len(network.params)


def test_the_head_of_resnet18_is_as_large_as_the_papers() -> None:
    network = Network(models.build("resnet18", (3, 32, 32), 10))
    assert (int(network.head.params.sum()), len(network.params)) == (5130, 11_173_962)
    assert Size.of(network) == 44_734_408


def test_refuses_a_model_without_a_declared_head() -> None:
    with pytest.raises(UserError, match="name that part `head`"):
        _ = Network(nn.Sequential(nn.Linear(4, 3))).head


def test_a_head_may_be_empty() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = nn.Linear(4, 3), nn.Identity()

    head: Part = Network(Bare()).head
    assert not head.params.any()
