"""Frozen parts: constants that do not travel or change, and compute each sample once."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ekiden
from ekiden import Training, run
from ekiden.core.base.errors import UserError
from ekiden.core.models.split import SplitNetwork, freeze
from ekiden.core.training import frozen
from ekiden.core.training.network import Network, fresh
from ekiden.data import FederatedData
from ekiden.methods import FedGram

FIT = Training(optimizer="sgd", lr=0.1, batch_size=16, select="last")


class Counting(nn.Linear):
    """A layer that counts the rows that it computes."""

    asked: list[int]

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.asked = ASKED

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        ASKED.append(len(input))
        return super().forward(input)

    def __deepcopy__(self, memo: dict[int, object]) -> "Counting":
        new = Counting(self.in_features, self.out_features)
        memo[id(self)] = new
        for name, value in vars(self).items():
            new.__dict__[name] = copy.deepcopy(value, memo) if name != "asked" else value
        return new


ASKED: list[int] = []


def network(seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        features = nn.Sequential(Counting(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5))
        module = SplitNetwork(features, nn.Linear(6, 3))
        module(torch.randn(30, 4))
        ASKED.clear()
        return module


def frozen_head(seed: int = 0) -> Any:
    return frozen.fix(freeze(network(seed), "head"))


def test_a_network_without_frozen_parts_is_left_alone() -> None:
    module: Any = network()
    before = dict(vars(module.features[1]))
    same = frozen.fix(module)
    assert id(same) == id(module)
    assert vars(module.features[1]).keys() == before.keys()
    assert frozen.digest(module) == ""
    assert len(Network(module).params) == 4 * 6 + 6 + 12 + 6 * 3 + 3


def test_frozen_values_are_in_no_vector_and_no_state_dict() -> None:
    weights = Network(module := frozen_head()).weights()
    assert [len(v) for v in (weights.params, weights.buffers, weights.counters)] == [21, 0, 0]
    assert set(module.state_dict()) == {"head.weight", "head.bias"}
    assert (
        frozen.size(module) == 4 * 6 + 6 + 12 + 12 + 1
    )  # with running statistics and their counter


def test_frozen_norms_and_dropout_stay_in_evaluation_mode_also_in_copies() -> None:
    module = frozen_head()
    wanted = network().eval()(x := torch.randn(8, 4))
    each: Any
    for each in (module, frozen.copied(module), copy.deepcopy(module)):
        each.train()
        assert each.training
        assert each.head.training
        assert not any(part.training for part in each.features.modules())
        assert torch.equal(each(x), wanted)
    assert torch.equal(
        frozen.copied(module).get_buffer("features.1.running_mean"),
        module.get_buffer("features.1.running_mean"),
    )
    assert frozen.copied(module).get_buffer("features.0.weight") is module.get_buffer(
        "features.0.weight"
    )


def test_a_partly_frozen_sequence_keeps_training_what_is_not() -> None:
    features = nn.Sequential(
        nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 6)
    )
    module = SplitNetwork(features, nn.Linear(6, 3))
    frozen.fix(freeze(module, 1)).train()
    assert [part.training for part in features] == [False, False, True, True, True]
    assert {part.name for part in Network(module).layout.params} == {
        "features.4.weight", "features.4.bias", "head.weight", "head.bias"
    }  # fmt: skip
    assert len(Network(module).buffers) == 0


def test_new_values_are_drawn_for_what_is_trained_only() -> None:
    module = frozen_head()
    other: Any = fresh(module, 5)
    assert frozen.digest(other) == frozen.digest(module) != frozen.digest(frozen_head(1))
    assert not torch.equal(other.head.weight, module.head.weight)


def test_training_leaves_the_constants_and_the_run_folder_names_them(
    few: FederatedData, tmp_path: Path
) -> None:
    result = run(
        "fedavg", few, network(), training=FIT, train="head", folder=tmp_path / "r", stop_after=2
    )
    wanted = frozen.digest(frozen_head())
    assert result.config["frozen"] == {"digest": wanted, "values": 55}
    assert result.config["digests"]["model"]["frozen"] == wanted
    assert frozen.digest(result.model) == wanted
    assert result.config["model_bytes"] == 4 * 21


def test_a_run_goes_on_only_with_the_same_frozen_part(few: FederatedData, tmp_path: Path) -> None:
    folder = tmp_path / "r"
    run("fedavg", few, network(), training=FIT, train="head", folder=folder, stop_after=1)
    with pytest.raises(UserError, match="frozen part"):
        run("fedavg", few, network(1), training=FIT, train="head", folder=folder, stop_after=2)
    again = run("fedavg", few, network(), training=FIT, train="head", folder=folder, stop_after=2)
    whole = run("fedavg", few, network(), training=FIT, train="head", stop_after=3)
    assert torch.equal(again.weights.params, whole.weights.params)  # type: ignore[union-attr]


def test_a_model_is_loaded_with_its_own_frozen_part_or_not_at_all(
    few: FederatedData, tmp_path: Path
) -> None:
    folder = tmp_path / "r"
    result = run("fedseq", few, network(), training=FIT, train="head", folder=folder)
    x = few.dataset.test.x[:5]
    assert torch.equal(ekiden.load_model(folder, network=network())(x), result.model(x))
    with pytest.raises(UserError, match="frozen part of the network is not that of the run"):
        ekiden.load_model(folder, network=network(1))


def test_the_frozen_part_is_asked_about_each_sample_once(few: FederatedData) -> None:
    """However many epochs, clients and rounds there are: one row for each sample of training,
    validation and test."""
    run("fedavg", few, network(), training=FIT, train="head", stop_after=6)
    alone = sum(n for n in ASKED if n == 1)
    held = sum(len(c.train) + len(c.val) for c in few.clients) + len(few.dataset.test)
    assert alone <= held + 2  # one more for each set, to see how long an answer is
    assert sum(ASKED) - alone <= 10  # what checks the network before the run


@pytest.mark.parametrize("train", ["all", "head"])
def test_blocks_that_were_frozen_before_are_asked_once_too(few: FederatedData, train: str) -> None:
    """FedGram takes what a network's blocks give; `train` may have frozen the network already."""
    module = network()
    module.features.append(nn.Linear(6, 6))
    run(FedGram(features="blocks", width=6), few, module, training=FIT, train=train)
    alone = sum(n for n in ASKED if n == 1)
    assert alone > len(few.dataset.test)
    assert sum(ASKED) - alone <= 20, ASKED  # what checks the network before the run


def test_remembered_answers_change_no_result_but_rounding(
    few: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = run("fedavg", few, network(), training=FIT, train="head", stop_after=3)
    monkeypatch.setattr(frozen, "_source", lambda x: None)
    monkeypatch.setattr(Network, "light", False)
    each_time = run("fedavg", few, network(), training=FIT, train="head", stop_after=3)
    torch.testing.assert_close(known.weights.params, each_time.weights.params, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]
    assert [row["forward"] for row in known.metrics] == [
        row["forward"] for row in each_time.metrics
    ]


def test_a_batch_that_was_changed_is_asked_about_as_it_is(few: FederatedData) -> None:
    """An objective may add noise to its batch in place: then stored features of the samples are not
    used."""
    from ekiden.core.base.settings import Hardware
    from ekiden.core.data.samples import Subset
    from ekiden.core.training.feed import Feed

    module, feed = frozen_head().eval(), Feed(few.dataset, Hardware())
    x, _ = feed.batch(Subset(few.dataset.train, torch.arange(4)), slice(None), train=True)
    before = module(x)
    x.add_(1.0)
    assert torch.equal(module(x), module(x.clone()))
    assert not torch.equal(module(x), before)


class Both(nn.Module):
    """A part that gives its samples and what a layer makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.layer(x)


class Reads(nn.Module):
    """Begins with a frozen part that gives two tensors, as the rows of a table with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Both().requires_grad_(False)
        self.last = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat(self.both(x), dim=1))  # type: ignore[no-any-return]


def test_a_frozen_part_may_give_several_tensors(few: FederatedData) -> None:
    torch.manual_seed(0)
    assert run("fedseq", few, Reads(), training=FIT).accuracy > 0.5
