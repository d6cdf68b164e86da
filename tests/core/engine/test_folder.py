"""A run continues, and is measured, only with the data and the network that it began with."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ekiden
from ekiden import FederatedData, UserError, run
from ekiden.core.data.samples import Clients, Shares
from ekiden.core.engine.folder import client_digest, data_digests, read_config
from ekiden.data import Samples, Subset, from_tensors
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Centralized, FedAvg, FedSeq

ONE = FedSeq(epochs=1)


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


def changed(data: FederatedData, part: str, field: str, client: int = 1) -> FederatedData:
    """The same data except for one number of one client."""
    held: Samples = getattr(data.dataset, "test" if part == "test" else "train")
    values: Tensor = getattr(held, field).clone()
    row = int(getattr(data.clients[client], part).rows[0])
    values[row] = values[row] + 1 if field == "x" else (values[row] + 1) % 3
    other = replace(held, x=values) if field == "x" else replace(held, y=values)
    dataset = (
        replace(data.dataset, test=other) if part == "test" else replace(data.dataset, train=other)
    )

    def of(subset: Subset) -> Subset:
        return replace(subset, samples=other) if subset.samples is held else subset

    clients = (replace(c, train=of(c.train), val=of(c.val), test=of(c.test)) for c in data.clients)
    return FederatedData(dataset, tuple(clients))


@pytest.mark.parametrize("part", ["train", "val", "test"])
@pytest.mark.parametrize("field", ["x", "y"])
def test_one_number_of_one_client_is_noticed(blobs: FederatedData, part: str, field: str) -> None:
    pairs = zip(blobs.clients, changed(blobs, part, field).clients, strict=True)
    assert [a.name for a, b in pairs if client_digest(a) != client_digest(b)] == ["client-1"]


def test_a_digest_is_of_the_contents_in_their_order(blobs: FederatedData) -> None:
    held, other = blobs.dataset.train, torch.randperm(len(blobs.dataset.train))
    moved = Samples(
        held.x[other], held.y[other]
    )  # elsewhere in memory, the same samples for each client
    place = other.argsort()
    client = blobs.clients[0]
    train, val = (
        replace(part, samples=moved, rows=place[part.rows]) for part in (client.train, client.val)
    )
    assert client_digest(replace(client, train=train, val=val)) == client_digest(client)
    turned = replace(client, train=replace(client.train, rows=client.train.rows.flip(0)))
    assert client_digest(turned) != client_digest(client)


def test_a_rerun_with_other_data_is_refused_and_named(blobs: FederatedData, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(ONE, blobs, tiny(), folder=folder)
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    with pytest.raises(
        UserError, match=r"another run \(the data of client-1 differ\): choose another folder"
    ):
        run(ONE, changed(blobs, "train", "x"), tiny(), folder=folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before
    assert run(ONE, blobs, tiny(), folder=folder).metrics == first.metrics


def test_data_that_a_run_has_not_used_may_change_and_used_data_may_not(
    blobs: FederatedData, tmp_path: Path
) -> None:
    read = list[int]()

    def lazy(data: FederatedData) -> FederatedData:
        return replace(
            data,
            clients=Clients(data.sizes, lambda at: read.append(at) or data.clients[at]),  # type: ignore[func-returns-value]
        )

    folder, other = tmp_path / "run", changed(blobs, "train", "x", client=3)
    run(ONE, lazy(blobs), tiny(), folder=folder, stop_after=2, evaluate_every=0)
    assert set(read) == {0, 1}  # the others' data were not read
    assert list(data_digests(folder)) == ["client-0", "client-1"]
    resumed = run(
        ONE, lazy(other), tiny(), folder=folder, evaluate_every=0
    )  # as a run that had these data from the start
    assert resumed.weights is not None
    assert torch.equal(resumed.weights.params, run(ONE, other, tiny()).weights.params)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="the data of client-3 differ"):
        run(ONE, lazy(blobs), tiny(), folder=folder, evaluate_every=0)
    with pytest.raises(UserError, match="the data of client-3 differ"):
        ekiden.evaluate(folder, blobs, network=tiny())
    tests = replace(other.dataset.test, y=1 - other.dataset.test.y.clamp(max=1))
    with pytest.raises(UserError, match="the test data differ"):
        run(
            ONE,
            replace(other, dataset=replace(other.dataset, test=tests)),
            tiny(),
            folder=folder,
            evaluate_every=0,
        )


def test_many_clients_are_measured_one_by_one_at_the_end_only() -> None:
    x, y = torch.randn(1002, 2), torch.arange(1002) % 3
    dataset = from_tensors((x, y), (x, y), classes=("a", "b", "c"))
    rows = [np.arange(1002)[i : i + 1] for i in range(1002)]
    data = FederatedData(
        dataset,
        Shares(
            [f"c{i}" for i in range(1002)], dataset, (rows, [r[:0] for r in rows], rows)
        ).clients(),
    )
    first, last = run(FedAvg(rounds=2, epochs=1, participation=0.002), data, "mlp").metrics
    assert "accuracy" in first
    assert "client_mean" not in first
    assert last["client_mean"] == pytest.approx(last["accuracy"])


def test_data_scaled_in_another_way_are_other_data(blobs: FederatedData, tmp_path: Path) -> None:
    run(ONE, blobs, tiny(), folder=tmp_path / "run")
    scaled = replace(blobs, dataset=replace(blobs.dataset, mean=(0.5,)))
    with pytest.raises(UserError, match=r"another run \(input differ\)"):
        run(ONE, scaled, tiny(), folder=tmp_path / "run")


class Bent(Tiny):
    """The same layers and values as `Tiny`, with another function of them."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.features(x)))  # type: ignore[no-any-return]


def test_another_network_is_refused(blobs: FederatedData, tmp_path: Path) -> None:
    run(ONE, blobs, tiny(), folder=tmp_path / "run")
    less_dropout = tiny()
    less_dropout.features[3] = nn.Dropout(0.5)
    bent = Bent()
    bent.load_state_dict(tiny().state_dict())
    bent.__class__.__name__ = "Tiny"
    for other in (tiny(1), less_dropout, bent):
        with pytest.raises(
            UserError,
            match=r"\(the initial model differ\): choose another folder, or put back what differs",
        ):
            run(ONE, blobs, other, folder=tmp_path / "run")


def test_digests_that_are_damaged_are_an_error(blobs: FederatedData, tmp_path: Path) -> None:
    run(ONE, blobs, tiny(), folder=tmp_path / "run")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"digests": 3}))
    with pytest.raises(UserError, match="wrong digests"):
        read_config(tmp_path / "run")


class Picky(Tiny):
    """Accepts certain values only."""

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 0] == 0).any():
            raise ValueError("no zeros")
        return super().forward(x)


def test_networks_and_scalings_of_every_kind_are_described(
    blobs: FederatedData, tmp_path: Path
) -> None:
    data = replace(blobs, dataset=replace(blobs.dataset, std=tuple(np.ones(1, dtype=np.float32))))
    run(ONE, data, Picky(), folder=tmp_path / "run")
    config = read_config(tmp_path / "run")
    assert config["digests"]["model"]["answers"] == []
    assert config["input"]["std"] == [1.0]


def test_pooled_data_are_those_of_one_client(blobs: FederatedData, tmp_path: Path) -> None:
    run(Centralized(epochs=1), blobs, tiny(), folder=tmp_path / "run")
    assert list(data_digests(tmp_path / "run")) == ["all"]
    with pytest.raises(UserError, match="the data of all differ"):
        run(Centralized(epochs=1), changed(blobs, "train", "x"), tiny(), folder=tmp_path / "run")
