"""`Client.remember`: once for each client and name, and no more than fits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ekiden import FederatedData, Hardware
from ekiden.core.engine import client as client_module
from ekiden.core.engine.client import Client
from ekiden.core.engine.worker import Setup, Worker
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedSeq


def client_of(made: Worker, name: str, data: FederatedData) -> Client:
    held = {c.name: c for c in data.clients}[name]
    return Client(made.bench("here"), held, None, 0, "key", remembered=made._remembered)


def counting(calls: list[int]) -> Callable[[], Tensor]:
    def make() -> Tensor:
        calls.append(1)
        return torch.arange(4)

    return make


def test_made_once_for_each_client_and_name(blobs: FederatedData) -> None:
    made = Worker(
        Setup(FedSeq(), Tiny, blobs.dataset, hardware=Hardware(threads=1)),
        {c.name: c for c in blobs.clients},
    )
    calls: list[int] = []
    names = [c.name for c in blobs.clients[:2]]
    for _ in range(3):
        for name in names:
            for what in ("a", "b"):
                assert torch.equal(
                    client_of(made, name, blobs).remember(what, counting(calls)), torch.arange(4)
                )
    assert len(calls) == 4


def test_what_does_not_fit_is_made_each_time(
    blobs: FederatedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "REMEMBERED", 40)  # one of 32 bytes
    made = Worker(
        Setup(FedSeq(), Tiny, blobs.dataset, hardware=Hardware(threads=1)),
        {c.name: c for c in blobs.clients},
    )
    calls: list[int] = []
    client = client_of(made, blobs.clients[0].name, blobs)
    for _ in range(2):
        for what in ("a", "b"):
            client.remember(what, counting(calls))
    assert len(calls) == 3
    assert len(made._remembered) == 1
