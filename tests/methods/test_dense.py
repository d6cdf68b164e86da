"""DENSE: exact numbers of its losses, of the steps and of the generator; statistics are actually
seen."""

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, run
from ekiden.core.engine.federation import Fed
from ekiden.core.models import catalogue
from ekiden.core.tasks import Classification
from ekiden.core.training.fit import Work
from ekiden.core.training.network import Network
from ekiden.core.training.weights import Weights
from ekiden.data import federate
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import DENSE
from ekiden.methods.one_shot.blocks.ensemble import (
    Distilled,
    EnsembleModel,
    SampleGenerator,
    softened,
)
from ekiden.methods.one_shot.dense import Statistics, disagreement

T, S = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [0.0, 3.0]])


def test_losses() -> None:
    assert float(disagreement(T, S)) == pytest.approx(-0.414362, abs=1e-6)
    assert float(disagreement(T[:1], S[:1])) == pytest.approx(-0.828725, abs=1e-6)
    assert float(nn.functional.cross_entropy(T, torch.tensor([0, 0]))) == pytest.approx(
        0.720095, abs=1e-6
    )


@pytest.mark.parametrize(("temperature", "loss"), [(1.0, 0.550967), (20.0, 0.811505)])
def test_distillation(temperature: float, loss: float) -> None:
    assert float(softened(T, S, temperature)) == pytest.approx(loss, abs=1e-5)


def test_a_student_that_equals_the_teacher_has_no_loss() -> None:
    assert float(softened(T, T, 20.0)) == pytest.approx(0, abs=1e-6)
    assert float(disagreement(T, T)) == 0


def test_statistics_of_a_layer() -> None:
    layer = nn.BatchNorm2d(1).eval()
    x = torch.tensor([[1.0, 3.0], [5.0, 7.0]]).view(2, 1, 1, 2).requires_grad_()
    statistics = Statistics(layer)
    layer(x)
    assert [float(t.detach()) for t in statistics.terms] == [8.0]
    statistics.close()
    layer(x)
    assert len(statistics.terms) == 1


def test_statistics_see_every_layer_of_every_teacher_and_survive_a_perfect_fit() -> None:
    teacher = EnsembleModel([Tiny().eval().requires_grad_(False) for _ in range(3)], 3, "logits")
    statistics = Statistics(teacher)
    x = torch.zeros(4, 4, requires_grad=True)
    teacher(x)
    assert len(statistics.terms) == 3
    layer = nn.BatchNorm1d(1).eval()
    exact = Statistics(layer)
    y = torch.tensor([[-1.0], [1.0]], requires_grad=True)
    layer(y)
    exact.terms[0].backward()  # type: ignore[no-untyped-call]
    assert float(exact.terms[0].detach()) == 0
    assert y.grad is not None
    assert torch.isfinite(y.grad).all()


def test_the_statistics_loss_is_a_mean_over_the_teachers() -> None:
    teacher = EnsembleModel([nn.BatchNorm2d(1).eval() for _ in range(3)], 1, "logits")
    statistics = Statistics(teacher)
    assert float(statistics.loss(3)) == 0
    teacher(torch.tensor([[1.0, 3.0], [5.0, 7.0]]).view(2, 1, 1, 2))
    assert [float(t.detach()) for t in statistics.terms] == [8.0] * 3
    assert float(statistics.loss(3).detach()) == 8


def test_a_teacher_that_comes_three_times_guides_the_generator_as_it_does_once() -> None:
    fed = SimpleNamespace(
        layout=Network(Tiny()).layout,
        shape=(4,),
        feed=lambda raw, draw: raw,
        autocast=nullcontext,
        work=Work(),
        task=Classification(),
    )
    member, student = (Tiny().eval().requires_grad_(False) for _ in range(2))
    once, thrice = (
        small(ce=1.0, bn=10.0, steps_per_batch=5, generator_lr=0.01).synthesise(
            cast(
                Fed,
                SimpleNamespace(
                    **vars(fed), generator=lambda purpose: torch.Generator().manual_seed(1)
                ),
            ),
            EnsembleModel([copy.deepcopy(member) for _ in range(count)], 3, "logits").eval(),
            student,
        )
        for count in (1, 3)
    )
    # Adam magnifies the rounding of sums of three, to 1e-5 on some processors; a sum instead of a
    # mean differs by 1e-2.
    torch.testing.assert_close(once, thrice, atol=1e-3, rtol=0)


@pytest.mark.parametrize(("shape", "count"), [((3, 32, 32), 2_328_899), ((1, 28, 28), 1_834_305)])
def test_size_of_the_generator(shape: tuple[int, ...], count: int) -> None:
    generator = SampleGenerator(shape, 256, 64, torch.Generator())
    assert sum(p.numel() for p in generator.parameters()) == count
    images = generator(torch.randn(2, 256))
    assert images.shape == (2, *shape)
    assert float(images.detach().min()) >= 0
    assert float(images.detach().max()) <= 1


def test_size_of_the_cnn() -> None:
    assert sum(p.numel() for p in catalogue.build("cnn", (3, 32, 32), 10).parameters()) == 319_242


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 13, 10), (5,)])
def test_samples_of_any_shape(shape: tuple[int, ...]) -> None:
    assert SampleGenerator(shape, 6, 4, torch.Generator())(torch.randn(3, 6)).shape == (3, *shape)


def test_the_student_walks_the_whole_pool_in_each_epoch(
    blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def spy(task: Classification, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        seen.append(len(teacher))
        return softened(teacher, outputs, temperature)

    monkeypatch.setattr(Classification, "distance", spy)
    state = run(small(distill_epochs=3), blobs, Tiny, **settings()).state
    assert isinstance(state, Distilled)
    assert state.pool is not None
    assert len(state.pool) == 3 * 8
    assert seen == [8] * (1 + 2 + 3)


def settings() -> dict[str, Any]:
    return {
        "training": Training(lr=0.01, batch_size=16),
        "hardware": Hardware(threads=1),
        "seed": 3,
    }


def small(**changes: Any) -> DENSE:
    fields = {
        "epochs": 3,
        "distill_epochs": 2,
        "steps_per_batch": 3,
        "distill_batch_size": 8,
        "noise": 8,
        "generator_width": 4,
    }
    return DENSE(**(fields | changes))


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"bn": 0.0}, {"ce": 0.0}, {"adv": 0.0}], ids=str)
def test_every_loss_changes_the_result(blobs: FederatedData, fields: dict[str, float]) -> None:
    whole, part = (
        run(small(epochs=30, steps_per_batch=15, generator_lr=0.1, **f), blobs, Tiny, **settings())
        for f in ({}, fields)
    )
    assert whole.weights is not None
    assert part.weights is not None
    assert not torch.equal(whole.weights.params, part.weights.params)


def images() -> FederatedData:
    """Two clients with 20 grey images each."""
    generator = torch.Generator().manual_seed(0)
    silos = [
        (
            torch.randint(256, (20, 1, 16, 16), generator=generator, dtype=torch.uint8),
            torch.arange(20) % 3,
        )
        for _ in range(2)
    ]
    return federate(silos, test=silos[0])


def lenet() -> nn.Module:
    """For `images`."""
    return catalogue.build("lenet", (1, 16, 16), 3)


def test_images_grow_a_pool_of_bytes_and_the_loss_reaches_the_generator() -> None:
    result = run(small(epochs=1, steps_per_batch=5), images(), lenet, **settings())
    pool = result.state.pool  # type: ignore[attr-defined]
    assert (pool.dtype, pool.shape) == (torch.uint8, (16, 1, 16, 16))
    assert len(result.state.teachers) == 2  # type: ignore[attr-defined]
    assert result.bytes == 2 * 4 * sum(p.numel() for p in lenet().parameters())


def test_passes_at_the_server_count(blobs: FederatedData) -> None:
    result = run(small(), blobs, Tiny, **settings())
    n, clients = sum(len(c.train) for c in blobs.clients), len(blobs.clients)
    first, *others = result.metrics
    assert first["backward"] == 3 * n
    synthesis = 3 * 8 * (clients + 2)
    for epoch, (before, row) in enumerate(zip(result.metrics, others, strict=False), start=1):
        assert row["forward"] - before["forward"] == synthesis + (clients + 1) * 8 * epoch
        assert row["backward"] - before["backward"] == synthesis + 8 * epoch


def test_the_precision_is_the_server_s_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []
    softly = softened

    def spy(task: Classification, outputs: Tensor, teacher: Tensor, temperature: float) -> Tensor:
        seen.append(
            torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        )
        return softly(teacher, outputs, temperature)

    precise = SampleGenerator.forward

    def forward(self: SampleGenerator, z: Tensor) -> Tensor:
        made = precise(self, z)
        seen.append(made.dtype)
        return made

    monkeypatch.setattr(Classification, "distance", spy)
    monkeypatch.setattr(SampleGenerator, "forward", forward)
    hardware = Hardware(threads=1, precision="bf16")
    half = run(
        small(epochs=1, distill_epochs=1), images(), lenet, **(settings() | {"hardware": hardware})
    )
    assert seen == [torch.bfloat16] * 3 + [torch.float32], "the losses are not computed in bf16"
    assert half.weights is not None
    assert half.weights.is_finite()


def test_the_student_learns_where_the_teachers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere:
        """Stands for a federation on a GPU, as far as the first distillation."""

        layout = Network(Tiny()).layout

        def network(self, model: Weights) -> nn.Module:
            return Tiny().to("meta")

    class Seen(Exception):
        pass

    def epoch(
        self: DENSE,
        fed: Fed,
        s: Distilled,
        members: Sequence[nn.Module],
        student: Network,
        momentum: Tensor,
    ) -> None:
        values = [p for member in members for p in member.parameters()]
        assert {p.device.type for p in (*values, student.params, momentum)} == {"meta"}
        raise Seen

    monkeypatch.setattr(DENSE, "epoch", epoch)
    model = Network(Tiny()).weights()
    s = Distilled(
        step=1, model=model, teachers=(model, model), momentum=torch.zeros_like(model.params)
    )
    with pytest.raises(Seen):
        next(DENSE().run(cast(Fed, Elsewhere()), s))
