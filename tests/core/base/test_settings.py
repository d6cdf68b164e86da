"""Settings of training and hardware; seeds."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

from ekiden import Hardware, Training, UserError
from ekiden.core.base.settings import batches, derive, seeded


def test_equal_settings_are_equal_as_json() -> None:
    given = Training(lr=1, batch_size=np.int64(4), momentum=np.float32(0.5), mean=[1, 2])  # type: ignore[arg-type]
    wanted = Training(lr=1.0, batch_size=4, momentum=0.5, mean=(1.0, 2.0))
    assert given == wanted
    assert json.dumps(asdict(given)) == json.dumps(
        asdict(Training(lr=1.0, batch_size=4, momentum=0.5, mean=(1.0, 2.0)))
    )
    assert type(given.lr) is float


def test_one_sample_alone_joins_the_batch_before() -> None:
    """Statistics of a batch need two samples."""
    assert [batches(n, 16) for n in (1, 15, 16, 17, 18, 32, 33, 34)] == [1, 1, 1, 1, 2, 2, 2, 3]


def test_steps_end_at_the_largest_number() -> None:
    assert Training(batch_size=16).steps(40, 5) == 15
    assert Training(batch_size=16, max_steps=4).steps(40, 5) == 4
    assert Training(batch_size=16, max_steps=40).steps(40, 5) == 15


def test_adamw_has_no_weight_decay_in_the_gradient() -> None:
    decays = {one: Training(optimizer=one, weight_decay=0.1).l2 for one in ("adam", "sgd", "adamw")}
    assert decays == {"adam": 0.1, "sgd": 0.1, "adamw": 0.0}


def test_a_device_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="there is no device 'gpu': choose cpu or cuda"):
        Hardware("gpu")


def test_a_seed_depends_on_each_part_its_type_and_its_place() -> None:
    seeds = [derive(*parts) for parts in ((1, "a"), ("1", "a"), ("a", 1), (1, "b"), ("1a",), (1,))]
    assert len(set(seeds)) == len(seeds)
    assert derive(1, "a") == seeds[0]
    assert all(0 <= seed < 1 << 63 for seed in seeds)


def test_draws_inside_follow_the_seed_and_those_outside_go_on() -> None:
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    first = torch.rand(1)
    with seeded(5):
        inside = torch.rand(2)
    assert torch.equal(torch.cat([first, torch.rand(1)]), wanted)
    with seeded(5):
        assert torch.equal(torch.rand(2), inside)
