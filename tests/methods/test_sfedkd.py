"""SFedKD: its loss, its teachers and whole runs against rewrites from the equations."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.engine.method import Size
from ekiden.core.engine.wire import Ref
from ekiden.core.tasks import Classification
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedSeq, SFedKD
from ekiden.methods.blocks.distillation import kl, other_classes
from ekiden.methods.chain.sfedkd import (
    Lesson,
    Taught,
    complementary,
    discrepancies,
    distributions,
    normalised,
    target_class,
)
from tests.methods.test_fedavg import SETTINGS, same


def parts(student: np.ndarray, teacher: np.ndarray, label: int) -> tuple[float, float]:
    """TCKD and NCKD of one sample's logits, from the definitions."""
    p, q = (np.exp(z) / np.exp(z).sum() for z in (student, teacher))
    target = q[label] * np.log(q[label] / p[label]) + (1 - q[label]) * np.log(
        (1 - q[label]) / (1 - p[label])
    )
    rest = [c for c in range(len(p)) if c != label]
    others = sum(
        q[c] / (1 - q[label]) * np.log(q[c] / (1 - q[label]) * (1 - p[label]) / p[c]) for c in rest
    )
    return float(target), float(others)


def logits(*seeds: int) -> list[torch.Tensor]:
    return [2 * torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


Y = torch.tensor([0, 1, 2, 3, 4, 0])


def test_both_parts() -> None:
    student, teacher = logits(0, 1)
    rows = [
        parts(s, t, y) for s, t, y in zip(student.numpy(), teacher.numpy(), Y.tolist(), strict=True)
    ]
    assert float(target_class(student, teacher, Y)) == pytest.approx(
        np.mean([r[0] for r in rows]), rel=1e-5
    )
    assert float(other_classes(student, teacher, Y)) == pytest.approx(
        np.mean([r[1] for r in rows]), rel=1e-5
    )


def test_parts_make_up_the_whole_divergence() -> None:
    student, teacher = logits(2, 3)
    for i in range(6):
        s, t, y = student[i : i + 1], teacher[i : i + 1], Y[i : i + 1]
        away = 1 - float(t.softmax(1)[0, y])
        whole = float(target_class(s, t, y)) + away * float(other_classes(s, t, y))
        assert float(kl(s, t)) == pytest.approx(whole, rel=1e-5)


def test_certain_teachers_give_finite_gradients() -> None:
    student = torch.zeros(2, 3, requires_grad=True)
    teacher, y = torch.tensor([[200.0, 0.0, 0.0], [-200.0, 0.0, 0.0]]), torch.tensor([0, 0])
    loss = target_class(student, teacher, y) + other_classes(student, teacher, y)
    loss.backward()  # type: ignore[no-untyped-call]
    assert student.grad is not None
    assert bool(student.grad.isfinite().all())
    assert loss.item() == pytest.approx((np.log(3) + np.log(3 / 2)) / 2, rel=1e-5)


def test_loss_of_two_teachers() -> None:
    student, first, second = logits(4, 5, 6)
    lesson = Lesson(
        Classification(), (nn.Identity(), nn.Identity()), (0.3, 0.7), (1.5, 0.5), temperature=2.0
    )
    wanted = 0.0
    for s, one, two, y in zip(
        student.numpy(), first.numpy(), second.numpy(), Y.tolist(), strict=True
    ):
        (t1, n1), (t2, n2) = parts(s / 2, one / 2, y), parts(s / 2, two / 2, y)
        wanted -= np.log(np.exp(s[y]) / np.exp(s).sum())
        wanted += 4 * (0.3 * t1 + 1.5 * n1 + 0.7 * t2 + 0.5 * n2)
    assert float(lesson(lambda x: student, student, Y, first, second)) == pytest.approx(
        wanted / 6, rel=1e-5
    )


def test_teachers_complement_each_other() -> None:
    p = torch.tensor([[1, 0, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5], [0, 1, 0, 0]])
    # Gaps to uniform: 1.5, 1, 1, 1.5; with row 1: 1, -, 0, 1; with rows 1 and 2: 1/2, -, -, 1/2.
    assert complementary(p, 1) == [1]
    assert complementary(p, 2) == [1, 2]
    assert complementary(p, 3) == [1, 2, 0]
    assert complementary(p, 9) == [1, 2, 0, 3]


def test_greedy_choice_by_loops() -> None:
    p = torch.rand(7, 5, generator=torch.Generator().manual_seed(0)).double()
    p /= p.sum(1, keepdim=True)
    found: list[int] = []
    for _ in range(4):
        gaps = {}
        for i in set(range(7)) - set(found):
            means = p[[*found, i]].mean(0).tolist()
            gaps[i] = sum(abs(share - 0.2) for share in means)
        found.append(min(gaps, key=lambda i: gaps[i]))
    assert complementary(p, 4) == found


def test_shares_of_teachers() -> None:
    counts = torch.tensor([[2, 2, 0], [4, 4, 0], [0, 0, 5], [0, 3, 3]])
    d = discrepancies(counts, [1, 2, 3], 0)
    assert d.tolist() == [0, 1, 0.5]
    assert normalised(1 - d) == pytest.approx((2 / 3, 0, 1 / 3))
    assert normalised(d) == pytest.approx((0, 2 / 3, 1 / 3))
    assert normalised(torch.zeros(2)) == (0.5, 0.5)


def plain(blobs: FederatedData, start: torch.Tensor, lr: float) -> torch.Tensor:
    """Two rounds in the order given, two teachers, one full-batch step a visit, α = 0.5, β = 2, τ =
    2, from scratch."""
    data = [
        (c.train.samples.x[c.train.rows], c.train.samples.y[c.train.rows]) for c in blobs.clients
    ]
    p = [np.bincount(y.numpy(), minlength=3) / len(y) for _, y in data]
    last: list[torch.Tensor] = []
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    w = start
    for round in range(2):
        models = []
        if round:
            first = min(range(4), key=lambda i: np.abs(p[i] - 1 / 3).sum())
            second = min(
                (j for i, j in pairs if i == first),
                key=lambda j: np.abs((p[first] + p[j]) / 2 - 1 / 3).sum(),
            )
        for k, (x, y) in enumerate(data):
            w = w.clone().requires_grad_()
            z = x @ w[:, :4].T + w[:, 4]
            loss = F.cross_entropy(z, y)
            if round:
                gap = [np.abs(p[t] - p[k]).sum() / 2 for t in (first, second)]
                for i, t in enumerate((first, second)):
                    a, b = (1 - gap[i]) / (2 - sum(gap)), gap[i] / sum(gap)
                    ps, qs = (
                        (z / 2).softmax(1),
                        ((x @ last[t][:, :4].T + last[t][:, 4]) / 2).softmax(1).detach(),
                    )
                    for row in range(len(x)):
                        label = int(y[row])
                        pt, qt = ps[row, label], qs[row, label]
                        tckd = qt * (qt / pt).log() + (1 - qt) * ((1 - qt) / (1 - pt)).log()
                        rest = [c for c in range(3) if c != label]
                        pn, qn = ps[row, rest] / (1 - pt), qs[row, rest] / (1 - qt)
                        nckd = (qn * (qn / pn).log()).sum()
                        loss = loss + 4 * (0.5 * a * tckd + 2 * b * nckd) / len(x)
            (gradient,) = torch.autograd.grad(loss, w)
            w = (w - lr * gradient).detach()
            models.append(w)
        last = models
    return w


def test_a_run_from_scratch(blobs: FederatedData) -> None:
    start: list[torch.Tensor] = []

    def build() -> nn.Module:
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        start.append(torch.cat([layer.weight, layer.bias[:, None]], 1).detach().clone())
        return layer

    training = Training(optimizer="sgd", lr=0.5, weight_decay=0.0, batch_size=1000, select="last")
    method = SFedKD(
        rounds=2,
        epochs=1,
        teachers=2,
        target_weight=0.5,
        others_weight=2.0,
        temperature=2.0,
        order="given",
    )
    found = run(method, blobs, build, training=training, hardware=Hardware(threads=1)).weights
    wanted = plain(blobs, start[0], 0.5)
    assert found is not None
    assert torch.allclose(found.params[:12].view(3, 4), wanted[:, :4], atol=1e-5)
    assert torch.allclose(found.params[12:], wanted[:, 4], atol=1e-5)


@pytest.mark.parametrize("order", ["random", "reversed"])
def test_without_distillation_it_is_fedseq(blobs: FederatedData, order: str) -> None:
    a = run(
        SFedKD(rounds=3, epochs=1, target_weight=0.0, others_weight=0.0, order=order),
        blobs,
        Tiny,
        **SETTINGS,
    )
    b = run(FedSeq(rounds=3, epochs=1, order=order), blobs, Tiny, **SETTINGS)
    assert same(a.weights, b.weights)
    assert a.bytes == b.bytes


def test_one_round_is_fedseq(blobs: FederatedData) -> None:
    a = run(SFedKD(rounds=1, epochs=1, order="given"), blobs, Tiny, **SETTINGS)
    b = run(FedSeq(rounds=1, epochs=1), blobs, Tiny, **SETTINGS)
    assert same(a.weights, b.weights)
    assert a.bytes == b.bytes


def test_bytes_by_hand(blobs: FederatedData) -> None:
    method = SFedKD(rounds=2, epochs=1, teachers=2, order="given")
    result = run(method, blobs, Tiny, **SETTINGS)
    size = Size.of(Network(Tiny()), (4,))
    # 7 hops; 4 clients get 2 teachers each, except 2 that are at home; 4 clients send 3 counts.
    assert result.bytes == 13 * size + 4 * 3 * 8
    assert method.cost(4, size) == 15 * size + 4 * 3 * 8


def test_sequences_are_drawn_anew(blobs: FederatedData) -> None:
    result = run(SFedKD(rounds=4, epochs=1, teachers=1, participation=0.5), blobs, Tiny, **SETTINGS)
    trained = [row.target for row in result.ledger if row.task == "train"]
    assert len(set(trained)) > 2, "other clients in other rounds"
    assert isinstance(result.state.model, Ref)
    assert result.state.step == 8


def test_counts_are_of_training_samples(blobs: FederatedData) -> None:
    result = run(SFedKD(rounds=2, epochs=1), blobs, Tiny, **SETTINGS)
    assert isinstance(result.state, Taught)
    assert result.state.counts is not None
    for row, client in zip(result.state.counts, blobs.clients, strict=True):
        labels = client.train.samples.y[client.train.rows]
        assert row.tolist() == [int((labels == c).sum()) for c in range(3)]
    assert distributions(result.state.counts).sum(1).tolist() == pytest.approx([1, 1, 1, 1])


def test_refuses_to_leave_out_the_same_clients_always() -> None:
    with pytest.raises(UserError, match=r"participation 0.5 is out of range: it must be 1, unless"):
        SFedKD(participation=0.5, order="given")
