"""`ekiden audit`: the attack finds what there is to find, no more, and says who got what."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ekiden
from ekiden import DP, Training, UserError
from ekiden.cli.app import call
from ekiden.core.data.samples import FederatedData
from ekiden.methods import FedSeq, Local
from ekiden.runs.audit import attack, epsilon_from

DRAW = np.random.default_rng(0)


def test_losses_of_one_distribution_tell_nothing() -> None:
    found = attack("m", DRAW.normal(size=4000), DRAW.normal(size=4000))
    assert abs(found.auc - 0.5) < 0.03
    assert abs(found.advantage) < 0.06
    assert found.tpr_1 < 0.03
    assert found.tpr_01 is not None
    assert found.tpr_01 < 0.01
    assert found.epsilon < 0.3


def test_the_attack_finds_as_much_as_is_known_in_closed_form() -> None:
    members, others = DRAW.normal(-1, 1, size=20_000), DRAW.normal(size=20_000)
    found = attack("m", members, others)
    normal = torch.special.ndtr
    assert found.auc == pytest.approx(float(normal(torch.tensor(1 / math.sqrt(2)))), abs=0.01)
    assert found.advantage == pytest.approx(float(2 * normal(torch.tensor(0.5)) - 1), abs=0.02)
    assert found.tpr_1 == pytest.approx(float(normal(torch.tensor(1 - 2.3263))), abs=0.02)


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_bound_on_epsilon_holds_and_is_near(epsilon: float) -> None:
    """Randomised response gives away exactly ε."""
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    wrong = 0
    for trial in range(40):
        draw = np.random.default_rng(trial)
        found = attack(
            "m",
            np.where(draw.random(8000) < truth, 0.0, 1.0),
            np.where(draw.random(8000) < truth, 1.0, 0.0),
        )
        wrong += found.epsilon > epsilon
        assert found.epsilon > epsilon * 0.6
    assert wrong <= 5  # 5 % of 40, and some luck


def test_rates_without_false_alarms_bound_epsilon_too() -> None:
    assert 3 < epsilon_from(1000, 1000, 0, 1000) < 8
    assert epsilon_from(0, 1000, 0, 1000) == 0
    assert epsilon_from(500, 1000, 500, 1000) == 0
    assert epsilon_from(600, 1000, 100, 1000, delta=0.9) == 0


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(UserError, match="too few to attack m"):
        attack("m", np.zeros(19), np.zeros(100))


@pytest.fixture(scope="module")
def noise() -> FederatedData:
    """Labels without any relation to the inputs, so that all that is learned is learned by
    heart."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(240, 30, generator=draw), torch.randint(0, 2, (240,), generator=draw)
    return ekiden.federate([(x[i::2], y[i::2]) for i in range(2)])


def run(data: FederatedData, method: Any, folder: Path | None = None, **more: Any) -> ekiden.Result:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(30, 64), nn.ReLU(), nn.Linear(64, 2))
    training = Training(lr=0.02, select="last", batch_size=32, weight_decay=0)
    return ekiden.run(
        method, data, module, training=training, folder=folder, quiet=True, evaluate_every=0, **more
    )


def test_a_model_that_learned_by_heart_is_found_and_one_with_noise_is_not(
    noise: FederatedData,
) -> None:
    by_heart = ekiden.audit(run(noise, FedSeq(epochs=15)), noise)
    assert by_heart.promised is None
    assert by_heart.attacks[0].auc > 0.75
    assert by_heart.attacks[0].epsilon > 0.2
    private = ekiden.audit(run(noise, FedSeq(epochs=3), dp=DP(1.0, 1e-3)), noise)
    assert private.promised is not None
    assert private.attacks[0].auc < 0.65
    assert private.attacks[0].epsilon <= private.promised


def test_shadow_models_find_more_than_a_threshold(noise: FederatedData) -> None:
    threshold, ratio = ekiden.audit(run(noise, FedSeq(epochs=8)), noise, shadows=4).attacks
    assert ratio.model == "global (LiRA, 4)"
    assert (ratio.members, ratio.others) == (threshold.members, threshold.others)
    assert ratio.tpr_1 > threshold.tpr_1 + 0.05  # at few false alarms
    with pytest.raises(UserError, match="3 shadow models say too little"):
        ekiden.audit(run(noise, FedSeq(epochs=1)), noise, shadows=3)
    with pytest.raises(UserError, match="the run has none"):
        ekiden.audit(run(noise, Local(rounds=1, epochs=1)), noise, shadows=4)


@pytest.mark.slow
def test_shadow_models_find_nothing_behind_noise(noise: FederatedData) -> None:
    private = ekiden.audit(
        run(noise, FedSeq(epochs=3), dp=DP(1.0, 1e-3)), noise, shadows=8
    ).attacks[1]
    assert abs(private.auc - 0.5) < 0.15
    assert private.epsilon <= 1


def test_each_personal_model_is_attacked_with_its_own_samples(noise: FederatedData) -> None:
    found = ekiden.audit(run(noise, Local(rounds=1, epochs=15)), noise)
    assert [one.model for one in found.attacks] == [client.name for client in noise.clients]
    assert [one.members for one in found.attacks] == [len(client.train) for client in noise.clients]


def test_an_audit_says_who_got_what(noise: FederatedData) -> None:
    lines = ekiden.audit(run(noise, FedSeq(epochs=1)), noise).shown
    first, second = (client.name for client in noise.clients)
    assert lines[0].startswith(f"{second} got 1 value (")
    assert lines[0].endswith(f"of {first}")
    assert "no noise was added" in lines[-1]


def test_the_command_prints_a_table_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = tmp_path / "run", ekiden.split(ekiden.load("digits"), "iid", 2)
    ekiden.run(
        FedSeq(epochs=1),
        data,
        training=Training(max_steps=1),
        folder=folder,
        quiet=True,
        evaluate_every=0,
    )
    call(["audit", str(folder)])
    text = capsys.readouterr().out
    assert "AUC" in text
    assert "no epsilon was promised" in text
    call(["audit", str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["attacks"][0]["model"] == "global"
    assert 0.4 < found["attacks"][0]["auc"] < 0.6
