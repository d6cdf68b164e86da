"""Tasks of clients: the same job gives the same bits, wherever and however often it is done."""

import pytest
import torch

from ekiden import FederatedData, Hardware, UserError
from ekiden.core.engine.worker import Job, Setup, Worker
from ekiden.core.training.network import Network
from ekiden.lab.conformance.small_runs import Tiny
from ekiden.methods import FedSeq


def worker(data: FederatedData) -> Worker:
    setup = Setup(FedSeq(epochs=1), Tiny, data.dataset, hardware=Hardware(threads=1))
    return Worker(setup, {client.name: client for client in data.clients})


def test_a_job_gives_the_same_bits_after_other_jobs_and_at_another_worker(
    few: FederatedData,
) -> None:
    first, other = (client.name for client in few.clients[:2])
    model = Network(Tiny()).weights()
    job = Job(0, 0, first, "train", (model,))
    made = worker(few)
    once = made.execute(job)
    made.execute(Job(0, 0, other, "train", (once.value,)))
    torch.rand(3)
    for again in (made.execute(job), worker(few).execute(job)):
        assert torch.equal(again.value.params, once.value.params)
        assert again.work == once.work
    later = made.execute(Job(1, 0, first, "train", (model,)))
    assert not torch.equal(later.value.params, once.value.params), "the step seeds the task"


def test_only_what_clients_run_is_a_task(few: FederatedData) -> None:
    with pytest.raises(UserError, match="run"):
        worker(few).execute(Job(0, 0, few.clients[0].name, "run", ()))
