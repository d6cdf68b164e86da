"""FedOV: exact numbers of vote, loss and attack; other numbers of classes; evaluated and loaded
like any model."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ekiden import FederatedData, Hardware, Training, UserError, run
from ekiden.core.data.samples import Samples
from ekiden.core.engine.method import Method, Size
from ekiden.core.engine.setup import read_model
from ekiden.core.models.split import widen
from ekiden.core.training.fit import Work
from ekiden.core.training.network import Network
from ekiden.data import federate, load
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Ensemble, FedOV
from ekiden.methods.one_shot import fedov
from ekiden.methods.one_shot.fedov import (
    OpenSet,
    Vote,
    attack,
    blur,
    crop,
    cut,
    destroy,
    erase,
    mixing,
    overwrite,
    rotate,
    swap_halves,
    turn,
    without,
)
from ekiden.runs.loading import open_run
from ekiden.runs.plan import Plan
from ekiden.runs.recipe import Recipe
from tests.methods.test_ensemble import Fixed

A, B, C = (3.0, 0.0, -1.0), (0.0, 1.0, 2.0), (0.5, 2.0, 0.0)
X = torch.zeros(1, 1)


def vote(voters: int, *logits: tuple[float, ...]) -> Vote:
    return Vote([Fixed(*z) for z in logits], voters)


@pytest.mark.parametrize(
    ("voters", "expected"),
    [
        (1, (0.936240, 0.046613)),
        (2, (1.100491, 0.782737)),
        (3, (1.190522, 1.027466)),
        (0, (1.190522, 1.027466)),
    ],
)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_vote(voters: int, expected: tuple[float, float], order: tuple[int, ...]) -> None:
    model = vote(voters, *((A, B, C)[i] for i in order))
    torch.testing.assert_close(model.scores(X)[0], torch.tensor(expected), atol=1e-6, rtol=0)
    assert int(model(X)[0].argmax()) == 0
    torch.testing.assert_close(model(X).softmax(1), model.scores(X) / model.scores(X).sum())


def test_the_unknown_output_decides() -> None:
    known = torch.tensor([A, B, C])[:, :2].softmax(1).sum(0)
    torch.testing.assert_close(known, torch.tensor([1.403941, 1.596059]), atol=1e-6, rtol=0)
    assert int(known.argmax()) == 1


def test_one_voter_answers_as_the_one_that_knows_best() -> None:
    members = [Network(widen(Tiny(), 1)).module.eval() for _ in range(4)]
    x = torch.randn(60, 4)
    answers = torch.stack([m(x) for m in members])
    surest = answers.softmax(2)[:, :, -1].argmin(0)
    own = answers[surest, torch.arange(60), :-1].argmax(1)
    assert torch.equal(Vote(members, 1)(x).argmax(1), own)


def test_ties_go_in_the_clients_order_and_more_voters_than_models_are_all() -> None:
    p, q = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)
    assert int(vote(1, p, q)(X).argmax()) == 0
    assert int(vote(1, q, p)(X).argmax()) == 1
    assert torch.equal(vote(9, A, B, C).scores(X), vote(3, A, B, C).scores(X))


def test_all_mass_on_unknown_is_defined() -> None:
    answer = vote(0, (0.0, 0.0, 900.0), (0.0, 0.0, 900.0))(X)
    assert torch.isfinite(answer).all()


def test_answers_keep_their_order_where_all_are_sure_of_unknown() -> None:
    assert int(vote(1, (0.0, 5.0, 40.0))(X).argmax()) == 1
    assert int(vote(1, (9.0, 5.0, 50.0), (0.0, 5.0, 40.0))(X).argmax()) == 1, (
        "the less sure one votes"
    )
    assert int(vote(0, (0.0, 5.0, 90.0), (0.0, 4.0, 90.0))(X).argmax()) == 1


def test_removed_logit() -> None:
    f, y, u = torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([0]), torch.tensor([2])
    assert float(F.cross_entropy(f, y)) == pytest.approx(0.169846, abs=1e-6)
    assert float(F.cross_entropy(without(f, y), u)) == pytest.approx(1.313262, abs=1e-6)


def test_the_attack_makes_unknown_less_likely_and_leaves_no_trace() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Dropout(0.5), nn.Linear(30, 3)).train()
    x, u = torch.randn(50, 4), torch.full((50,), 2)
    moved = attack(module, x, u, FedOV(attack_steps=20, attack_step=0.02))
    assert module.training
    module.eval()
    assert (F.cross_entropy(module(moved), u) > F.cross_entropy(module(x), u)).all()
    assert torch.equal(attack(module, x, u, FedOV(attack_steps=0)), x)


def test_representations_are_mixed_behind_the_first_hidden_layer() -> None:
    module = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    x, pairs = torch.randn(9, 4), torch.tensor([2, 0, 1])
    with mixing(module, pairs, 0.3):
        found = module(x)
    assert found.shape == (12, 3)
    h = module[:2](x[:3])
    torch.testing.assert_close(found[9:], module[2:](0.3 * h + 0.7 * h[pairs]))
    torch.testing.assert_close(module(x), found[:9])
    one = nn.Sequential(nn.Tanh(), nn.Linear(4, 3))
    with mixing(one, pairs, 0.3):
        mixed = one(x)[9:]
    torch.testing.assert_close(mixed, one[1](0.3 * x[:3].tanh() + 0.7 * x[:3].tanh()[pairs]))


def test_batchnorm_sees_samples_and_corrupted_ones_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = widen(Tiny(), 1)
    seen: list[Tensor] = []
    module.features[1].register_forward_pre_hook(lambda m, args: seen.append(args[0]))  # type: ignore[union-attr, index]
    terms = OpenSet(module, 3, FedOV())
    loss = terms(module, torch.randn(8, 4), torch.arange(8) % 3)
    assert [len(s) for s in seen] == [16]
    assert terms.further(8) == Work(8, 8)
    loss.backward()  # type: ignore[no-untyped-call]


def digits(classes: int) -> FederatedData:
    """Handwritten digits, as far as there are classes; from 10 on their negatives. Nobody shares a
    class."""
    source = load("digits")

    def part(samples: Samples, own: range) -> tuple[Tensor, Tensor]:
        x, y = torch.cat([samples.x, 255 - samples.x]), torch.cat([samples.y, samples.y + 10])
        chosen = (y >= own.start) & (y < own.stop)
        return x[chosen], y[chosen]

    each = classes // 4
    clients = [part(source.train, range(i * each, (i + 1) * each)) for i in range(4)]
    return federate(clients, test=part(source.test, range(classes)))


class Plain(nn.Module):
    """Without BatchNorm: all five terms."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU())
        self.head = nn.Linear(48, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:silo .* shares no class")
@pytest.mark.slow
@pytest.mark.parametrize(("classes", "epochs"), [(8, 8), (20, 15)])
def test_beats_the_plain_ensemble_where_nobody_shares_a_class(classes: int, epochs: int) -> None:
    settings: dict[str, Any] = {
        "training": Training(lr=0.003, batch_size=64),
        "hardware": Hardware(threads=1),
    }
    data = digits(classes)
    open_set, plain = (
        run(m, data, Plain(classes), **settings)
        for m in (FedOV(epochs=epochs), Ensemble(epochs=epochs))
    )
    assert isinstance(open_set.model, Vote)
    assert open_set.model(torch.rand(2, 1, 8, 8)).shape == (2, classes)
    assert open_set.accuracy > plain.accuracy + 0.2


def test_clients_train_to_the_end(blobs: FederatedData) -> None:
    best, last = (
        run(
            FedOV(epochs=12), blobs, Tiny, training=Training(select=s), hardware=Hardware(threads=1)
        )
        for s in ("best", "last")
    )
    assert best.weights is not None
    assert last.weights is not None
    assert torch.equal(best.weights.params, last.weights.params)


def test_a_client_of_one_class(blobs: FederatedData) -> None:
    both = torch.arange(40) % 2
    data = federate(
        [(torch.rand(40, 64), torch.zeros(40, dtype=torch.int64)), (torch.rand(40, 64), both)],
        test=(torch.rand(4, 64), torch.arange(4) % 2),
    )
    result = run(FedOV(epochs=2), data, Plain(2), hardware=Hardware(threads=1))
    assert result.weights is not None
    assert result.weights.is_finite()


def test_is_evaluated_saved_and_loaded_like_any_model(blobs: FederatedData, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"training": Training(lr=0.01), "hardware": Hardware(threads=1)}
    result = run(FedOV(epochs=5, voters=2), blobs, Tiny, folder=tmp_path / "run", **settings)
    x, y = blobs.dataset.test.x, blobs.dataset.test.y
    assert float((result.model(x).argmax(1) == y).double().mean()) == pytest.approx(result.accuracy)
    again = result.build()
    again.load_state_dict(safetensors.torch.load_file(tmp_path / "run" / "model.safetensors"))
    assert torch.equal(again.eval()(x), result.model(x))
    grown = Network(widen(Tiny(), 1))
    size = 4 * (len(grown.params) + len(grown.buffers)) + 8
    assert result.bytes == 4 * size == FedOV().cost(4, Size.of(grown))


@pytest.mark.parametrize("model", ["mlp", "lenet"])
def test_the_command_line_measures_it(tmp_path: Path, model: str) -> None:
    size = 16 if model == "lenet" else None
    plan: Plan[Method] = Plan(
        Recipe(FedOV(epochs=1), model=model),
        partition="iid",
        clients=2,
        size=size,
        hardware=Hardware(threads=1),
    )
    data = plan.federation()
    result = plan.run(tmp_path / "run", data)
    test = open_run(tmp_path / "run").judge(data)
    scores = test.scores(read_model(tmp_path / "run", "model.safetensors", test.build))
    assert scores.accuracy() == pytest.approx(result.accuracy)


def test_a_network_that_does_not_fit_is_named_with_its_own_number_of_outputs(
    blobs: FederatedData,
) -> None:
    with pytest.raises(UserError, match=r"gives \(5,\) per sample, but the data have 3 classes"):
        run(FedOV(), blobs, nn.Linear(4, 5))


def test_members_are_copies() -> None:
    module = Fixed(*A)
    members = FedOV().result_network(module, 3)
    assert isinstance(members, Vote)
    assert len({p.data_ptr() for p in members.parameters()}) == 3
    assert copy.deepcopy(members)(X).shape == (1, 2)


@pytest.mark.parametrize(("normed", "rows"), [(False, 8), (True, 2)])
def test_all_passes_count(normed: bool, rows: int, blobs: FederatedData) -> None:
    """Samples, corrupted ones, harder ones and five steps of PGD, each forward and backward."""
    settings: dict[str, Any] = {
        "training": Training(select="last"),
        "hardware": Hardware(threads=1),
    }
    norm = nn.BatchNorm1d(6) if normed else nn.Identity()
    result = run(
        FedOV(epochs=2),
        blobs,
        lambda: nn.Sequential(nn.Linear(4, 6), norm, nn.ReLU(), nn.Linear(6, 3)),
        **settings,
    )
    n = sum(len(c.train) for c in blobs.clients)
    assert result.metrics[-1]["forward"] == result.metrics[-1]["backward"] == 2 * rows * n


def test_rows_with_categories_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    """Outliers are numbers in another order, which would be codes that no category has."""
    rows: Any = {
        "age": [20.0, 60.0, 40.0, 30.0] * 15,
        "sex": ["f", "m"] * 30,
        "label": ["no", "yes", "yes"] * 20,
    }
    with pytest.raises(UserError, match="fedov puts the numbers of a sample into another order"):
        run(FedOV(epochs=1), federate([rows, rows], label_column="label"), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    numbers: Any = {name: column for name, column in rows.items() if name != "sex"}
    run(FedOV(epochs=1), federate([numbers, numbers], label_column="label"))


OPERATIONS = (crop, blur, erase, cut, rotate)


def images(n: int = 6, channels: int = 3, height: int = 8, width: int = 10) -> Tensor:
    """Every pixel with a value of its own, none of them 0."""
    return 1 + torch.arange(n * channels * height * width, dtype=torch.float32).view(
        n, channels, height, width
    )


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("size", [(8, 8), (7, 9), (4, 12), (28, 28), (33, 32)])
def test_shape_stays_and_every_image_changes(
    operation: Callable[[Tensor], Tensor], size: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x = torch.rand(20, 3, *size)
    before = x.clone()
    result = operation(x)
    assert result.shape == x.shape
    assert torch.equal(x, before), "the samples themselves stay"
    assert all(not torch.equal(a, b) for a, b in zip(result, x, strict=True))
    assert float(result.min()) >= -1e-6
    assert float(result.max()) <= 1 + 1e-6


@pytest.mark.parametrize("axis", [2, 3])
@pytest.mark.parametrize("size", [(8, 10), (7, 9)])
def test_swapping_halves_twice_is_nothing(axis: int, size: tuple[int, int]) -> None:
    x = images(height=size[0], width=size[1])
    once = swap_halves(x, axis)
    assert not torch.equal(once, x)
    assert torch.equal(swap_halves(once, axis), x)
    half = size[axis - 2] // 2
    assert torch.equal(once.narrow(axis, 0, half), x.narrow(axis, size[axis - 2] - half, half))


@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("size", [(8, 8), (7, 9), (10, 6)])
def test_turning_on_is_nothing_and_one_turn_is_that_of_torch(
    turns: int, size: tuple[int, int]
) -> None:
    x = images(height=size[0], width=size[1])
    start, side = torch.tensor([0, 1, 2, 0, 1, 2]), min(size) // 2
    once = turn(x, start, torch.full((6,), turns))
    assert torch.equal(turn(once, start, torch.full((6,), 4 - turns)), x)
    for i, p in enumerate(start.tolist()):
        for columns in (slice(0, side), slice(size[1] - side, size[1])):
            block = x[i, :, p : p + side, columns]
            assert torch.equal(once[i, :, p : p + side, columns], block.rot90(turns, (1, 2)))
        rest = torch.ones(size[0], dtype=torch.bool)
        rest[p : p + side] = False
        assert torch.equal(once[i][:, rest], x[i][:, rest])


@pytest.mark.parametrize("axis", [2, 3])
def test_a_band_is_overwritten_by_one_that_starts_elsewhere(axis: int) -> None:
    torch.manual_seed(1)
    x = torch.arange(9.0).expand(200, 1, 9, 9)
    x = x.transpose(2, 3) if axis == 2 else x
    lines = overwrite(x, axis).movedim(axis, -1)[:, 0, 0]
    moved = lines - torch.arange(9.0)
    for row in moved:
        shifts = set(row[row != 0].tolist())
        assert len(shifts) == 1
        assert abs(shifts.pop()) >= 2  # half of a band of 4
        assert int((row != 0).sum()) == 4


def test_erased_area() -> None:
    torch.manual_seed(2)
    share = (erase(torch.ones(500, 1, 28, 28)) == 0).float().mean((1, 2, 3))
    assert 0.30 < float(share.min()) < 0.36
    assert 0.47 < float(share.max()) < 0.53
    assert float(share.mean()) == pytest.approx(0.415, abs=0.01)


def test_cropped_area() -> None:
    torch.manual_seed(3)
    x = torch.stack(torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij"))[
        None
    ].repeat(500, 1, 1, 1)
    result = crop(x)
    high, wide = ((result[:, i].amax((1, 2)) - result[:, i].amin((1, 2))) / 27 for i in (0, 1))
    area = high * wide  # half a pixel is missing at each side
    assert 0.05 < float(area.min()) < 0.12
    assert 0.27 < float(area.max()) < 0.36
    assert float((high / wide).max()) < 1.4


def test_blur_is_nearly_a_box_and_keeps_what_is_even() -> None:
    torch.manual_seed(4)
    torch.testing.assert_close(
        blur(torch.full((50, 2, 12, 12), 0.7)), torch.full((50, 2, 12, 12), 0.7)
    )
    point = torch.zeros(300, 1, 21, 21)
    point[:, :, 10, 10] = 1
    spread = blur(point)
    torch.testing.assert_close(spread.sum((1, 2, 3)), torch.ones(300))
    sides = {(int((s.sum(1) > 0).sum()), int((s.sum(0) > 0).sum())) for s in spread[:, 0]}
    assert sides <= {p for a in (3, 5, 7, 9) for b in (1, 3, 5) for p in ((a, b), (b, a))}
    assert len(sides) > 15
    level = spread.flatten(1).max(1).values * (spread.flatten(1) > 0).sum(1)
    assert float(level.max()) < 1.2  # a box of the same size has 1


def test_operations_have_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    for i, operation in enumerate(OPERATIONS):
        monkeypatch.setattr(fedov, operation.__name__, lambda x, i=i: torch.full_like(x, i))
    torch.manual_seed(5)
    seen = destroy(torch.zeros(7000, 1, 4, 4))[:, 0, 0, 0].long().bincount(minlength=5)
    assert (seen - 1000 * torch.tensor([1, 1, 1, 2, 2])).abs().max() < 150


@pytest.mark.parametrize("shape", [(5,), (1, 3, 8), (2, 6), ()])
def test_other_samples_get_their_numbers_in_another_order(shape: tuple[int, ...]) -> None:
    torch.manual_seed(6)
    x = torch.rand(30, *shape)
    result = destroy(x)
    assert result.shape == x.shape
    torch.testing.assert_close(result.view(30, -1).sort(1).values, x.view(30, -1).sort(1).values)


def test_the_same_seed_gives_the_same_outliers() -> None:
    x = images(40)
    torch.manual_seed(7)
    first = destroy(x)
    torch.manual_seed(7)
    assert torch.equal(destroy(x), first)


def test_autocast_does_not_touch_pixels() -> None:
    x = images(40)
    torch.manual_seed(7)
    expected = destroy(x)
    torch.manual_seed(7)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(destroy(x), expected)


@pytest.mark.parametrize("operation", [*OPERATIONS, destroy])
def test_the_layout_in_memory_does_not_matter(operation: Callable[[Tensor], Tensor]) -> None:
    x = torch.rand(30, 3, 8, 8, generator=torch.Generator().manual_seed(8))
    torch.manual_seed(9)
    expected = operation(x)
    torch.manual_seed(9)
    torch.testing.assert_close(operation(x.contiguous(memory_format=torch.channels_last)), expected)
