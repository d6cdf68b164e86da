"""Ensemble: exact numbers of the five rules; evaluated, saved and loaded like any model."""

import copy
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.method import Method, Size
from ekiden.core.engine.setup import read_model
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Ensemble
from ekiden.methods.one_shot.blocks.ensemble import EnsembleModel, Rule, join
from ekiden.runs.loading import open_run
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe

RULES: tuple[Rule, ...] = ("logits", "probabilities", "majority", "class-wise", "counts")


class Fixed(nn.Module):
    """Gives these logits for every sample."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def scores(
    rule: Rule, *logits: tuple[float, ...], counts: list[list[float]] | None = None
) -> Tensor:
    model = EnsembleModel([Fixed(*z) for z in logits], len(logits[0]), rule)
    if counts:
        model.counts.copy_(torch.tensor(counts))
    result = model.scores(torch.zeros(1, 1))[0].detach()
    assert int(model(torch.zeros(1, 1))[0].argmax()) == int(result.argmax())
    return result


FIRST = ((4.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 1.5, 0.0))
SECOND = ((10.0, 0.0, 0.0), (0.0, 3.0, 0.0), (0.0, 3.0, 0.0))


@pytest.mark.parametrize(
    ("rule", "models", "expected"),
    [
        ("logits", FIRST, (1.333333, 0.833333, 0.0)),
        ("probabilities", FIRST, (0.443628, 0.428408, 0.127964)),
        ("majority", FIRST, (1 / 3, 2 / 3, 0.0)),
        ("logits", SECOND, (3.333333, 2.0, 0.0)),
        ("probabilities", SECOND, (0.363489, 0.606310, 0.030201)),
    ],
)
def test_rules(
    rule: Rule, models: tuple[tuple[float, ...], ...], expected: tuple[float, ...]
) -> None:
    torch.testing.assert_close(scores(rule, *models), torch.tensor(expected), atol=1e-6, rtol=0)


def test_softmax_of_the_logit_mean_is_the_geometric_mean_of_probabilities() -> None:
    expected = torch.tensor([0.769662, 0.202881, 0.027457])
    torch.testing.assert_close(scores("logits", *SECOND).softmax(0), expected, atol=1e-6, rtol=0)
    product = torch.tensor(SECOND).softmax(1).log().mean(0).exp()
    torch.testing.assert_close(product / product.sum(), expected, atol=1e-6, rtol=0)


def test_class_wise() -> None:
    z = ((2.0, 9.0, 9.0), (7.0, 1.0, 3.0))
    assert scores("class-wise", *z, counts=[[1, 0, 0], [0, 1, 1]]).tolist() == [2.0, 1.0, 3.0]
    assert scores("logits", *z).tolist() == [4.5, 5.0, 6.0]
    assert scores("class-wise", *z, counts=[[1, 0, 0], [1, 1, 0]]).tolist() == [4.5, 1.0, 0.0]


def test_count_weighted() -> None:
    z = tuple(tuple(torch.tensor(p).log().tolist()) for p in ((0.5, 0.5), (0.8, 0.2)))
    result = scores("counts", *z, counts=[[30, 0], [10, 20]])
    torch.testing.assert_close(result, torch.tensor([0.575, 0.2]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_identical_members_answer_as_one(rule: Rule) -> None:
    module = Tiny().eval()
    x = torch.randn(50, 4)
    ensemble = EnsembleModel([copy.deepcopy(module) for _ in range(4)], 3, rule).eval()
    assert torch.equal(ensemble(x).argmax(1), module(x).argmax(1))


def test_logit_mean_of_linear_models_is_the_averaged_model() -> None:
    models = [nn.Linear(4, 3) for _ in range(3)]
    average = nn.Linear(4, 3)
    average.load_state_dict(
        {k: torch.stack([m.state_dict()[k] for m in models]).mean(0) for k in ("weight", "bias")}
    )
    x = torch.randn(9, 4)
    torch.testing.assert_close(EnsembleModel(models, 3, "logits")(x), average(x), atol=1e-6, rtol=0)


def test_gradients_reach_the_input() -> None:
    x = torch.randn(2, 4, requires_grad=True)
    EnsembleModel([Tiny().eval().requires_grad_(False)], 3, "logits")(x).sum().backward()
    assert x.grad is not None
    assert float(x.grad.abs().sum()) > 0


def test_joined_weights_hold_every_member_with_its_statistics() -> None:
    members = [Network(Tiny()) for _ in range(2)]
    for i, m in enumerate(members):
        m.buffers.fill_(i + 2.0)
    whole = Network(EnsembleModel([Tiny(), Tiny()], 3, "class-wise"))
    whole.load(
        join(
            Tiny(),
            [m.weights() for m in members],
            "class-wise",
            torch.tensor([[1.0, 0, 1], [0, 1, 1]]),
        )
    )
    assert isinstance(whole.module, EnsembleModel)
    assert whole.module.counts.tolist() == [[1, 0, 1], [0, 1, 1]]
    for part, m in zip(whole.module.members, members, strict=True):
        for name, value in part.state_dict().items():
            assert torch.equal(value, m.module.state_dict()[name])


def test_models_of_another_network_are_refused() -> None:
    with pytest.raises(UserError, match="do not fit"):
        join(
            Tiny(),
            [Network(Tiny()).weights(), Network(nn.Linear(4, 3)).weights()],
            "logits",
            torch.ones(2, 3),
        )


@pytest.mark.parametrize("rule", RULES)
def test_is_evaluated_saved_and_loaded_like_any_model(
    blobs: FederatedData, tmp_path: Path, rule: Rule
) -> None:
    method = Ensemble(epochs=5, rule=rule)
    settings = {"training": Training(lr=0.01), "hardware": Hardware(threads=1)}
    result = run(method, blobs, Tiny, folder=tmp_path / "run", **settings)  # type: ignore[arg-type]
    assert isinstance(result.model, EnsembleModel)
    x, y = blobs.dataset.test.x, blobs.dataset.test.y
    assert float((result.model(x).argmax(1) == y).double().mean()) == pytest.approx(result.accuracy)
    again = result.build()
    again.load_state_dict(safetensors.torch.load_file(tmp_path / "run" / "model.safetensors"))
    assert torch.equal(again.eval()(x), result.model(x))
    network = Network(Tiny())
    size = 4 * (len(network.params) + len(network.buffers)) + 8
    assert result.bytes == 4 * (size + {"class-wise": 3, "counts": 12}.get(rule, 0))
    assert result.bytes == method.cost(4, Size.of(network))


def test_the_command_line_measures_it(tmp_path: Path) -> None:
    plan: Plan[Method] = Plan(
        Recipe(Ensemble(epochs=1)), partition="iid", clients=3, hardware=Hardware(threads=1)
    )
    data = plan.federation()
    result = plan.run(tmp_path / "run", data)
    test = open_run(tmp_path / "run").judge(data)
    weights = read_model(tmp_path / "run", "model.safetensors", test.build)
    assert test.scores(weights).accuracy() == result.accuracy
