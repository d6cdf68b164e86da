"""Distillation from a frozen teacher: the divergences, and the inputs that are only distilled."""

from math import log

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ekiden.core.training.fit import Work
from ekiden.methods.blocks.distillation import Distillation, Form, divergence, kl, scrambled
from tests.methods.tasuki_runs import Fixed

TEACHER, LABEL = torch.tensor([[log(2), 0.0, 0.0]]), torch.tensor([0])


@pytest.mark.parametrize(("form", "d"), [("kl", 0.058891518), ("both", 0.029445759)])
def test_divergence(form: Form, d: float) -> None:
    assert float(divergence(torch.zeros(1, 3), TEACHER, LABEL, form)) == pytest.approx(d, abs=1e-7)


def test_divergence_without_the_true_class() -> None:
    student, teacher = torch.tensor([[5.0, 0.0, 0.0]]), torch.tensor([[0.0, log(3), 0.0]])
    q, p = torch.tensor([0.75, 0.25]), torch.tensor([0.5, 0.5])
    rest = float((q * (q / p).log()).sum())
    whole = float(divergence(student, teacher, LABEL, "kl"))
    assert float(divergence(student, teacher, LABEL, "both")) == pytest.approx(
        (whole + rest) / 2, abs=1e-6
    )


def test_loss_of_300_samples_before_100() -> None:
    logits = torch.zeros(1, 3, requires_grad=True)
    loss = Distillation(Fixed(TEACHER), 300 / 100, "both", 1.0)(
        lambda x: logits, torch.zeros(1), LABEL, TEACHER
    )
    assert loss.item() == pytest.approx(1.186949566, abs=1e-6)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    # p - onehot + 3·½·[(p - q) + (p^ - q^)]
    torch.testing.assert_close(
        logits.grad, torch.tensor([[-2 / 3 - 0.25, 1 / 3 + 0.125, 1 / 3 + 0.125]])
    )


class Given(nn.Module):
    """Answers with its inputs, so that both sides see what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.asked.append(x)
        return x.flatten(1)[:, :3]


def test_the_widened_part_has_no_label_and_counts_whole() -> None:
    torch.manual_seed(0)
    x, y = torch.rand(8, 3), torch.arange(8) % 3
    teacher, student, said = Given(), torch.randn(8, 3), torch.randn(8, 3)
    objective = Distillation(teacher, 3.0, "both", 1.0, ((0.25, lambda x, y: scrambled(x)),))
    loss = objective(lambda x: student, x, y, said)
    (asked,) = teacher.asked
    assert len(asked) == 2
    assert (objective.asks(8), objective.further(8)) == (6, Work(2))
    d = (6 * divergence(student[:6], said[:6], y[:6], "both") + 2 * kl(student[6:], asked)) / 8
    torch.manual_seed(0)
    torch.rand(8, 3), torch.randn(8, 3), torch.randn(8, 3)
    assert torch.equal(objective(lambda x: student, x, y, said[:6]), loss), (
        "the other two answers are of no use"
    )
    assert loss.item() == pytest.approx(
        float(F.cross_entropy(student[:6], y[:6]) + 3 * d), abs=1e-6
    )


def test_both_models_see_the_same_scrambled_inputs() -> None:
    torch.manual_seed(0)
    teacher, student = Given(), Given()
    x = torch.rand(16, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    objective = Distillation(teacher, 1.0, "kl", invented=((0.5, lambda x, y: scrambled(x)),))
    objective(student, x, torch.zeros(16, dtype=torch.long), torch.randn(16, 3))
    assert torch.equal(teacher.asked[0], student.asked[0][8:])
    assert torch.equal(student.asked[0][:8], x[:8])
    assert student.asked[0].is_contiguous(memory_format=torch.channels_last), (
        "the layout that the feed gave"
    )
    assert teacher.asked[0].is_contiguous(memory_format=torch.channels_last)
    assert not torch.isclose(teacher.asked[0], x[8:]).all((1, 2, 3)).any()


@pytest.mark.parametrize(
    "shape", [(6, 3, 8, 8), (6, 1, 1, 1), (6, 5), (1, 3, 4, 4), (0, 3, 8, 8), (0, 4)]
)
def test_scrambling_takes_every_number_from_the_batch(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x = torch.rand(shape)
    out = scrambled(x)
    assert out.shape == x.shape
    assert torch.isin(out, torch.cat([x.flatten(), torch.zeros(1)])).all()


def test_scrambled_images_are_of_two() -> None:
    torch.manual_seed(0)
    x = torch.arange(1.0, 65).view(-1, 1, 1, 1).expand(-1, 1, 12, 12)
    kinds = [set(image.unique().tolist()) - {0.0} for image in scrambled(x)]
    assert max(map(len, kinds)) == 2
    assert sum(len(kind) == 2 for kind in kinds) > 32


def test_temperature_softens_both_sides() -> None:
    logits = torch.zeros(1, 3)
    loss = Distillation(Fixed(2 * TEACHER), 1.0, "kl", 2.0)(
        lambda x: logits, torch.zeros(1), LABEL, 2 * TEACHER
    )
    assert loss.item() == pytest.approx(log(3) + 4 * 0.058891518, abs=1e-6)


@pytest.mark.parametrize("form", ["kl", "both"])
def test_no_divergence_and_no_gradient_at_the_received_model(form: Form) -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    d = divergence(logits, logits.detach(), torch.arange(6) % 4, form)
    d.backward()  # type: ignore[no-untyped-call]
    assert d.item() == 0
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.zeros(6, 4), atol=1e-7, rtol=0)
