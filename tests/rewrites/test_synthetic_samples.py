"""Methods that make samples of their own, written from their papers, against the library's runs.

The rewrites replay the random numbers that the library drew, in the order in which it drew them,
and compute everything else themselves: networks and derivatives in float64 by torch's autograd,
losses, optimisers and rules by hand."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ekiden
from ekiden import Hardware, Training
from ekiden.core.engine.method import Method
from ekiden.core.models.split import SplitNetwork
from ekiden.methods import DENSE, CoBoosting, FedOV
from tests.rewrites.plain import CLASSES, HIDDEN, INPUTS, LR, SILOS, data, library

Draws = list[Tensor]


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Draws:
    """Collect copies of what torch draws."""
    drawn: Draws = []
    for place, name in (
        (torch, "rand"),
        (torch, "randn"),
        (torch, "randint"),
        (torch, "randperm"),
        (nn.init, "normal_"),
    ):
        real = getattr(place, name)

        def noted(*args: Any, real: Callable[..., Tensor] = real, **options: Any) -> Tensor:
            drawn.append(values := real(*args, **options))
            drawn[-1] = values.detach().clone()
            return values

        monkeypatch.setattr(place, name, noted)
    return drawn


def states_of(method: Method, network: nn.Module, draws: Draws, **training: Any) -> list[Any]:
    """Return the library\'s states after each step; `draws` then has what was drawn after the first
    one."""
    chosen: dict[str, Any] = {
        "optimizer": "sgd",
        "lr": LR,
        "weight_decay": 0.0,
        "batch_size": 6,
        "select": "last",
    }
    how = Training(**chosen | training)
    found: list[Any] = []
    for result in ekiden.steps(
        method, data(), network, training=how, hardware=Hardware(threads=1), evaluate_every=0
    ):
        if not found:
            draws.clear()
        found.append(result.state)
    return found


def cross_entropy(z: Tensor, y: Tensor) -> Tensor:
    """Return -log softmax(z)_y of each sample (n,)."""
    return torch.logsumexp(z, 1) - z[torch.arange(len(y)), y]


def divergence(t: Tensor, s: Tensor) -> Tensor:
    """Return KL(softmax(t) ‖ softmax(s)) of each sample (n,)."""
    p, q = t.softmax(1), s.softmax(1)
    return (p * (p / q).log()).sum(1)


# FedOV


def wide(w: Tensor, x: Tensor, mix: tuple[Tensor, float] | None = None) -> Tensor:
    """Return the answers (n, K + 1) of the flat weights, or those for mixed hidden
    representations."""
    sizes = [HIDDEN * INPUTS, HIDDEN, (CLASSES + 1) * HIDDEN, CLASSES + 1]
    w1, b1, w2, b2 = torch.split(w, sizes)
    h = torch.tanh(x @ w1.view(HIDDEN, INPUTS).T + b1)
    if mix is not None:
        h = mix[1] * h + (1 - mix[1]) * h[mix[0]]
    z: Tensor = h @ w2.view(CLASSES + 1, HIDDEN).T + b2
    return z


def test_fedov(draws: Draws) -> None:
    """Diao, Li and He 2023 and their code: five terms, PGD away from "unknown", the k least unknown
    vote.

    Samples that are not images are corrupted by permuting their numbers, which is the library's
    own."""
    steps, step, radius, weight, voters, u = 3, 0.1, 0.25, 0.3, 2, CLASSES
    method = FedOV(
        epochs=2,
        attack_steps=steps,
        attack_step=step,
        attack_radius=radius,
        mix=weight,
        voters=voters,
        init="same",
    )
    started = library(FedOV(epochs=1, init="same"), lr=1e-30).weights
    assert started is not None
    start = started.params[: len(started.params) // len(SILOS)].double()
    draws.clear()
    result = library(method)
    left = iter(draws)
    models = []
    for silo in data().clients:
        x_all, y_all, w = silo.train.x.double(), silo.train.y, start
        for _ in range(2):
            for rows in torch.split(next(left), 6):
                x, y = x_all[rows], y_all[rows]
                spoiled = x.gather(1, next(left).argsort(1))
                unknown = torch.full_like(y, u)
                harder = spoiled
                for _ in range(steps):
                    harder = harder.detach().requires_grad_()
                    (slope,) = torch.autograd.grad(
                        cross_entropy(wide(w, harder), unknown).mean(), harder
                    )
                    moved = (harder + step * slope.sign()).detach()
                    harder = spoiled + (moved - spoiled).clamp(-radius, radius)
                pairs, share = next(left), float(next(left))
                w = w.detach().requires_grad_()
                z = wide(w, x)
                others = z - 1e4 * torch.eye(CLASSES + 1, dtype=torch.float64)[y]
                terms = [
                    (z, y),
                    (others, unknown),
                    (wide(w, spoiled), unknown),
                    (wide(w, harder), unknown),
                ]
                loss = torch.stack([cross_entropy(*term).mean() for term in terms]).sum()
                differ = y != y[pairs]
                if bool(differ.any()):
                    loss = (
                        loss
                        + weight * cross_entropy(wide(w, x, (pairs, share)), unknown)[differ].mean()
                    )
                (g,) = torch.autograd.grad(loss, w)
                w = (w - LR * g).detach()
        models.append(w)
    assert result.weights is not None
    np.testing.assert_allclose(result.weights.params.numpy(), torch.cat(models).numpy(), atol=1e-5)
    x = torch.tensor(np.concatenate([x for x, _ in SILOS]))
    p = torch.stack([wide(w, x).softmax(1) for w in models])
    first = p[:, :, u].argsort(0)[:voters]
    score = torch.stack([p[first[:, at], at, :CLASSES].sum(0) for at in range(len(x))])
    np.testing.assert_allclose(
        result.model(x.float()).exp().detach().numpy(), score.numpy(), atol=1e-5
    )


# DENSE and Co-Boosting


class Normed:
    """A network of the library in float64: x W1ᵀ + b1, BatchNorm, tanh, h W2ᵀ + b2."""

    def __init__(self, weights: Any) -> None:
        self.params = weights.params.double().clone()
        self.mean, self.variance = weights.buffers.double().clone().split(HIDDEN)

    def answers(
        self, x: Tensor, params: Tensor | None = None, *, train: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return logits (n, K), and what the BatchNorm reads (n, hidden); in training with the
        batch's statistics."""
        sizes = [HIDDEN * INPUTS, HIDDEN, HIDDEN, HIDDEN, CLASSES * HIDDEN, CLASSES]
        w1, b1, scale, shift, w2, b2 = (self.params if params is None else params).split(sizes)
        z = x @ w1.view(HIDDEN, INPUTS).T + b1
        mean, variance = self.mean, self.variance
        if train:
            n, mean = len(z), z.mean(0)
            variance = ((z - mean) ** 2).mean(0)
            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
            self.variance = 0.9 * self.variance + 0.1 * variance.detach() * n / (n - 1)
        h = torch.tanh((z - mean) / (variance + 1e-5).sqrt() * scale + shift)
        return h @ w2.view(CLASSES, HIDDEN).T + b2, z


def normed() -> nn.Module:
    """Return the library's form of it."""
    torch.manual_seed(7)
    first = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.Tanh())
    return SplitNetwork(first, nn.Sequential(nn.Linear(HIDDEN, CLASSES)))


def synthesised(
    left: Iterator[Tensor],
    noise: int,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    ascending: bool,
    lr: float,
    clip: float,
) -> tuple[Tensor, Tensor]:
    """Return the best samples of a new generator, and their classes: three steps of Adam with β =
    0.5 and 0.999.

    The generator is z A ᵀ, BatchNorm, leaky ReLU, linear; weights N(0, 0.02²), scales N(1, 0.02²),
    biases 0."""
    a, scale, b, z, y = (next(left) for _ in range(5))
    y = y.sort().values if ascending else y
    values = [a.double(), scale.double(), b.double(), z.double()]
    values[3:3] = [
        torch.zeros(len(a)).double(),
        torch.zeros(len(a)).double(),
        torch.zeros(len(b)).double(),
    ]
    first = [torch.zeros_like(v) for v in values]
    second = [torch.zeros_like(v) for v in values]
    best, least = torch.empty(0), np.inf
    for step in range(1, 4):
        values = [v.detach().requires_grad_() for v in values]
        a, scale, b, bias, shift, end, z = values
        h = z @ a.T + bias
        h = (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt() * scale + shift
        x = torch.where(h > 0, h, 0.2 * h) @ b.T + end
        loss = loss_of(x, y)
        if float(loss.detach()) < least:
            best, least = x.detach(), float(loss.detach())
        slopes = torch.autograd.grad(loss, values)
        length = torch.stack([g.square().sum() for g in slopes[:-1]]).sum().sqrt()
        slopes = (*(g * min(1.0, clip / float(length)) for g in slopes[:-1]), slopes[-1])
        first = [0.5 * m + 0.5 * g for m, g in zip(first, slopes, strict=True)]
        second = [0.999 * v + 0.001 * g**2 for v, g in zip(second, slopes, strict=True)]
        values = [
            value - lr * m / (1 - 0.5**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
            for value, m, v in zip(values, first, second, strict=True)
        ]
    return best, y


def test_dense(draws: Draws) -> None:
    """Zhang et al. 2022, equations 2 to 6, and their code: L_CE + λ_1 L_BN + λ_2 L_adv, then
    distillation on the pool.

    L_BN is the mean over clients, which is the library's own.
    """
    ce, bn, adv, lr, student_lr, temperature, batch = 0.7, 0.6, 0.8, 0.05, 0.1, 3.0, 6
    method = DENSE(
        epochs=1,
        distill_epochs=2,
        steps_per_batch=3,
        distill_batch_size=batch,
        ce=ce,
        bn=bn,
        adv=adv,
        generator_lr=lr,
        distill_lr=student_lr,
        temperature=temperature,
        noise=5,
        generator_width=2,
    )
    states = states_of(method, normed(), draws)
    teachers, left, pool = [Normed(t) for t in states[0].teachers], iter(draws), torch.empty(0)
    student = Normed(states[0].model)
    momentum = torch.zeros_like(student.params)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        answers, read = zip(*(t.answers(x) for t in teachers), strict=True)
        t, s = torch.stack(answers).mean(0), student.answers(x)[0]
        apart = divergence(t, s) * (t.argmax(1) != s.argmax(1))
        norms = [
            (z.var(0, correction=0) - own.variance).norm() + (z.mean(0) - own.mean).norm()
            for z, own in zip(read, teachers, strict=True)
        ]
        return ce * cross_entropy(t, y).mean() + bn * torch.stack(norms).mean() - adv * apart.mean()

    for state in states[1:]:
        made, _ = synthesised(left, 5, loss_of, True, lr, np.inf)
        pool = torch.cat([pool, made])
        np.testing.assert_allclose(state.pool.numpy(), pool.numpy(), atol=1e-4)
        next(left)
        for rows in torch.split(next(left), batch):
            x = pool[rows]
            t = torch.stack([teacher.answers(x)[0] for teacher in teachers]).mean(0)
            w = student.params.requires_grad_()
            s, _ = student.answers(x, w, train=True)
            (g,) = torch.autograd.grad(
                temperature**2 * divergence(t / temperature, s / temperature).mean(), w
            )
            momentum = 0.9 * momentum + g
            student.params = (w - student_lr * momentum).detach()
        np.testing.assert_allclose(state.model.params.numpy(), student.params.numpy(), atol=1e-4)
        np.testing.assert_allclose(
            state.model.buffers.numpy(),
            torch.cat([student.mean, student.variance]).numpy(),
            atol=1e-4,
        )
    assert (states[-1].model.params - states[0].model.params).abs().max() > 0.02


def test_co_boosting(draws: Draws) -> None:
    """Dai et al. 2024, objective and code: hard samples, weights by the sign of the gradient, moved
    samples.

    L = mean of (1 - p)^γ (-log p) - β T² KL(A/T ‖ s/T); w ← clip(w - μ sign ∂ℓ, 0, 1) on the
    samples of earlier epochs; x ← x + ε sign(∇ uᵀ softmax(A/T)). The student's rate falls by a
    cosine; gradients are cut to length 10."""
    hardness, beta, far, lr, batch, epochs = 1.5, 0.4, 3.0, 0.05, 6, 3
    mu, decay, eps, student_lr, l2, temperature = 0.2, 0.9, 0.3, 0.2, 0.01, 2.0
    method = CoBoosting(
        epochs=1,
        distill_epochs=epochs,
        steps_per_batch=3,
        distill_batch_size=batch,
        hardness=hardness,
        adv=beta,
        adv_temperature=far,
        generator_lr=lr,
        weight_lr=mu,
        weight_lr_decay=decay,
        perturbation=eps,
        distill_lr=student_lr,
        distill_weight_decay=l2,
        temperature=temperature,
        noise=5,
        generator_width=2,
    )
    states = states_of(method, normed(), draws)
    teachers, left = [Normed(t) for t in states[0].teachers], iter(draws)
    student, weights = (
        Normed(states[0].model),
        torch.full((len(teachers),), 1 / len(teachers)).double(),
    )
    momentum, pool, labels = (
        torch.zeros_like(student.params),
        torch.empty(0),
        torch.empty(0, dtype=torch.int64),
    )

    def ensemble(x: Tensor, w: Tensor) -> Tensor:
        return (w[:, None, None] * torch.stack([t.answers(x)[0] for t in teachers])).sum(
            0
        ) / w.sum()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        a, s = ensemble(x, weights), student.answers(x)[0]
        loss = cross_entropy(a, y)
        difficult = (1 - torch.exp(-loss.detach())) ** hardness
        return (difficult * loss).mean() - beta * far**2 * divergence(a / far, s / far).mean()

    for epoch, state in enumerate(states[1:]):
        made, y = synthesised(left, 5, loss_of, False, lr, 10.0)
        if epoch:
            for rows in torch.split(next(left), batch):
                w = weights.requires_grad_()
                (g,) = torch.autograd.grad(
                    cross_entropy(ensemble(pool[rows], w), labels[rows]).mean(), w
                )
                weights = (w - mu * decay**epoch * g.sign()).detach().clamp(0, 1)
        pool, labels = torch.cat([pool, made]), torch.cat([labels, y])
        np.testing.assert_allclose(state.pool.numpy(), pool.numpy(), atol=1e-4)
        np.testing.assert_allclose(state.weights.numpy(), weights.numpy(), atol=1e-6)
        next(left)
        rate = student_lr * (1 + np.cos(np.pi * epoch / epochs)) / 2
        for rows in torch.split(next(left), batch):
            u, x = 2 * next(left).double() - 1, pool[rows].requires_grad_()
            (slope,) = torch.autograd.grad(
                (u * (ensemble(x, weights) / temperature).softmax(1)).sum(), x
            )
            x = (x + eps * slope.sign()).detach()
            w = student.params.requires_grad_()
            a, (s, _) = ensemble(x, weights), student.answers(x, w, train=True)
            (g,) = torch.autograd.grad(
                temperature**2 * divergence(a / temperature, s / temperature).mean(), w
            )
            g = g * min(1.0, 10 / float(g.norm()))
            momentum = 0.9 * momentum + g + l2 * w.detach()
            student.params = (w - rate * momentum).detach()
        np.testing.assert_allclose(state.model.params.numpy(), student.params.numpy(), atol=1e-4)
    assert (states[-1].weights - 1 / 3).abs().max() > 0.1
