"""Steps over one flat vector against torch's own optimisers."""

import subprocess
import sys

import pytest
import torch

from ekiden import Training
from ekiden.core.training.fit import Optimizer

CASES = {
    "adam": Training(optimizer="adam", lr=0.01, weight_decay=0.1),
    "adamw": Training(optimizer="adamw", lr=0.01, weight_decay=0.1),
    "sgd": Training(optimizer="sgd", lr=0.1),
    "momentum": Training(optimizer="sgd", lr=0.1, momentum=0.9, weight_decay=0.01),
}


def reference(params: torch.Tensor, training: Training) -> torch.optim.Optimizer:
    """PyTorch's optimiser, as its users make it."""
    if training.optimizer in ("adam", "adamw"):
        kind = torch.optim.Adam if training.optimizer == "adam" else torch.optim.AdamW
        return kind([params], training.lr, weight_decay=training.weight_decay, fused=True)
    return torch.optim.SGD(
        [params],
        training.lr,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        fused=True,
    )


@pytest.mark.parametrize("name", CASES)
def test_steps_are_torchs_bit_for_bit_also_when_taken_up_again(name: str) -> None:
    start = torch.randn(37, generator=torch.Generator().manual_seed(0))
    ours, theirs = start.clone(), start.clone()
    theirs.grad, grad = torch.zeros_like(start), torch.zeros_like(start)
    mine, its = Optimizer(ours, grad, CASES[name]), reference(theirs, CASES[name])
    for step in range(6):
        if step == 3:  # as after a crash
            kept = {name: value.clone() for name, value in mine.state.items()}
            mine = Optimizer(ours, grad, CASES[name])
            mine.state |= kept
        drawn = torch.randn(37, generator=torch.Generator().manual_seed(step + 1))
        grad.copy_(drawn)
        theirs.grad.copy_(drawn)
        mine.step()
        its.step()
        assert torch.equal(ours, theirs)
    assert not torch.equal(ours, start)
    torch_keeps = {
        name: value for name, value in its.state[theirs].items() if isinstance(value, torch.Tensor)
    }
    assert mine.state.keys() == torch_keeps.keys()
    assert all(torch.equal(mine.state[name], value) for name, value in torch_keeps.items())


def test_decoupled_weight_decay_is_no_part_of_the_gradient() -> None:
    """Control variates are means of gradients: what AdamW subtracts from the weights does not
    belong to them."""
    assert [CASES[name].l2 for name in CASES] == [0.1, 0.0, 0.0001, 0.01]
    assert [CASES[name].adaptive for name in CASES] == [True, True, False, False]


def test_training_starts_without_what_takes_seconds_to_load() -> None:
    """Torch's compiler, statistics, and what other sources need: every task on Flower is a new
    process."""
    code = """
import sys
heavy = {"datasets", "flwr_datasets", "sklearn", "scipy", "matplotlib", "pandas", "pyarrow", "polars", "transformers"}
heavy |= {"peft", "timm", "flwr", "cryptography", "jinja2", "onnx", "torch._dynamo", "sympy"}
from ekiden import Training, run
from ekiden.data import load, parse, split
print([name for name in heavy if name in sys.modules])
from ekiden.methods import FedSeq
load("digits")
for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
    del sys.modules[name]
for optimizer in "adam", "adamw", "sgd", "sam":
    data, training = split(load("digits"), parse("iid"), 2, seed=0), Training(optimizer=optimizer, max_steps=2)
    run(FedSeq(epochs=1), data, training=training)
print([name for name in ("torch._dynamo", "sympy", "sklearn") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n[]\n"), done.stderr
