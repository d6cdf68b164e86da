"""Centralized: training on the union."""

from ekiden import FederatedData, Hardware, Training, run
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import Centralized


def test_sees_every_training_sample_of_every_client_each_epoch(blobs: FederatedData) -> None:
    result = run(Centralized(epochs=3), blobs, Tiny, hardware=Hardware(threads=1))
    assert result.metrics[-1]["backward"] == 3 * sum(len(c.train) for c in blobs.clients)
    assert result.bytes == 0


def test_learns_what_the_clients_cannot_alone(blobs: FederatedData) -> None:
    result = run(
        Centralized(epochs=30),
        blobs,
        Tiny,
        training=Training(lr=0.01),
        hardware=Hardware(threads=1),
    )
    assert result.accuracy > 0.75
