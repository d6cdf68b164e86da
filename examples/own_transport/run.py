"""A transport of your own: each client at the other end of a pipe: `python run.py`."""

import json
from contextlib import suppress
from multiprocessing import Pipe
from threading import Thread

import ekiden
from ekiden.methods import FedELMY
from ekiden.transports import (
    INITIAL,
    ClientMissing,
    Job,
    Ref,
    Transport,
    Work,
    payload_types,
    resolve,
    wire,
)


class Pipes(Transport):
    def __init__(self, start):
        self.start, self.links, self.places, self.work = start, {}, dict(start.written or {}), {}
        self.threads = []
        for client in start.clients:
            self.links[client], there = Pipe()
            self.threads.append(Thread(target=serve, args=(there, start, client), daemon=True))
            self.threads[-1].start()
            self.hear(client)  # waits until it is ready, see below

    def tell(self, client, *message):
        self.links[client].send_bytes(json.dumps(message).encode())

    def hear(self, client):
        try:
            return self.links[client].recv_bytes()
        except EOFError:
            raise ClientMissing(f"{client} is gone") from None

    def submit(self, request):
        values = resolve(request.args, self.value)  # a value in place of each Ref
        self.tell(request.client, "task", request.step, request.call, request.task)
        self.links[request.client].send_bytes(wire.encode(values))
        self.work[Ref(request.client, request.key)] = Work(
            *json.loads(self.hear(request.client))
        )  # waits, see below

    def value(self, ref):
        if ref == INITIAL:
            return self.start.initial()
        self.tell(ref.owner, "value", ref.key)
        kind = payload_types(self.start.setup.method, ref.key.split("-", 2)[2])[1]
        return wire.decode(self.hear(ref.owner), kind)

    def commit(self, step, live):
        self.live, work, self.work = live, self.work, {}
        for client in self.links:
            self.tell(client, "commit", step, *(ref.key for ref in live if ref.owner == client))
        self.places = {client: json.loads(self.hear(client)) for client in self.links}
        return work

    def written(self):
        return self.places

    def settle(self):
        for client in self.links:
            self.tell(client, "settle", *(ref.key for ref in self.live if ref.owner == client))

    def close(self):
        for client in self.links:
            self.tell(client, "close")
        for thread in self.threads:
            thread.join(10)


def serve(link, start, client):
    """What runs at the client."""
    worker, store = start.worker(client), start.store(client)
    link.send_bytes(b"ready")
    with link, suppress(EOFError):  # closed, too, where a task fails; ends when the server is gone
        while (message := json.loads(link.recv_bytes()))[0] != "close":
            match message:
                case "task", step, call, task:
                    kinds, _ = payload_types(start.setup.method, task)
                    values = wire.decode(link.recv_bytes(), tuple[*kinds])
                    done = worker.execute(Job(step, call, client, task, values, store.private))
                    store.put(f"{step}-{call}-{task}", done.value, done.private)
                    link.send_bytes(json.dumps([done.work.forward, done.work.backward]).encode())
                case "value", key:
                    link.send_bytes(wire.encode(store.get(key)))
                case "commit", step, *keys:
                    store.commit(step, set(keys))
                    link.send_bytes(json.dumps(str(store.written)).encode())
                case "settle", *keys:
                    store.settle(set(keys))


if __name__ == "__main__":
    silos = ekiden.split(ekiden.load("digits"), "dirichlet:0.5", 4)
    method = FedELMY(models=2, epochs=1, warmup=0)
    result = ekiden.run(method, silos, folder="runs/pipes", transport=Pipes)
    print(f"over pipes: accuracy {result.accuracy:.3f}")
