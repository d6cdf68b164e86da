"""FedAvg in other simulators, side by side: CPU seconds a round, memory, accuracy.

    python -m venv --system-site-packages /tmp/peers && /tmp/peers/bin/pip install pfl fedjax
    "flwr[simulation]" PYTHONPATH=.:src /tmp/peers/bin/python -m benchmarks.peers

All have the same data (normal clouds, 20 clients of 200 samples of 64 numbers), the same network
(64-200-10), and the same rounds: all clients train for one epoch of SGD with batches of 20, and the
server averages. Nobody measures models during the run. Each system does a short and a long run in
processes of its own, and the difference is what its rounds cost, without the start and without
compiling. CPU seconds are those of all processes of a run together, memory is the largest sum of
what they hold. A system that is not installed is left out, with its name. Plain JAX and plain
PyTorch are loops without a framework.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

CLIENTS, SAMPLES, FEATURES, HIDDEN, CLASSES = 20, 200, 64, 200, 10
BATCH, RATE = 20, 0.05
SHORT, LONG = 5, 45
_LOOK = 0.05  # seconds
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def samples() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the clients' samples (clients, samples, features) and labels, and those of the
    test.
    """
    draw = np.random.default_rng(0)
    centres = draw.normal(size=(CLASSES, FEATURES)).astype(np.float32)
    labels = draw.integers(0, CLASSES, size=(CLIENTS + 5, SAMPLES))
    x = centres[labels] + 2 * draw.normal(size=(*labels.shape, FEATURES)).astype(np.float32)
    return (
        x[:CLIENTS],
        labels[:CLIENTS],
        x[CLIENTS:].reshape(-1, FEATURES),
        labels[CLIENTS:].ravel(),
    )


def layers() -> Any:
    """Make the network in PyTorch."""
    from torch import manual_seed, nn

    manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


def right(network: Any) -> float:
    """Return the share of right answers of a network in PyTorch."""
    import torch

    _, _, x, y = samples()
    with torch.inference_mode():
        return float((network(torch.from_numpy(x)).argmax(1).numpy() == y).mean())


def with_ekiden(rounds: int) -> float:
    """Run FedAvg in Ekiden, in memory."""
    import torch

    from ekiden import Hardware, Training, federate, run
    from ekiden.methods import FedAvg

    x, y, x_test, y_test = samples()
    silos = {
        f"client-{i}": (torch.from_numpy(x[i]), torch.from_numpy(y[i])) for i in range(CLIENTS)
    }
    training = Training(optimizer="sgd", lr=RATE, weight_decay=0.0, batch_size=BATCH, select="last")
    result = run(
        FedAvg(rounds=rounds, epochs=1),
        federate(silos, test=(torch.from_numpy(x_test), torch.from_numpy(y_test)), val_fraction=0),
        layers,
        training=training,
        hardware=Hardware(threads=1),
        evaluate_every=0,
        quiet=True,
    )
    return result.accuracy


def with_flower(rounds: int) -> float:
    """Run FedAvg in Flower's simulation, with one CPU for each client that works and all CPUs for
    Ray.
    """
    import torch
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    x, y, _, _ = samples()
    client, server = ClientApp(), ServerApp()
    end: list[Any] = []

    @client.train()  # type: ignore[untyped-decorator]
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        network = layers()
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        own = int(context.node_config["partition-id"])
        optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
        own_x, own_y = torch.from_numpy(x[own]), torch.from_numpy(y[own])
        for batch in torch.split(torch.randperm(SAMPLES), BATCH):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(network(own_x[batch]), own_y[batch])
            torch.autograd.backward(loss)
            optimizer.step()
        reply = {
            "arrays": ArrayRecord(network.state_dict()),
            "metrics": MetricRecord({"num-examples": SAMPLES}),
        }
        return Message(RecordDict(reply), reply_to=message)

    @server.main()  # type: ignore[untyped-decorator]
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_train_nodes=CLIENTS)
        end.append(strategy.start(grid, ArrayRecord(layers().state_dict()), num_rounds=rounds))

    run_simulation(
        server,
        client,
        CLIENTS,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 1}},
    )
    network = layers()
    network.load_state_dict(end[0].arrays.to_torch_state_dict())
    return right(network)


def with_pfl(rounds: int) -> float:
    """Run FedAvg in pfl, in one process."""
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
    from torch.nn.functional import cross_entropy

    torch.set_num_threads(1)
    x, y, _, _ = samples()

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, x: Any) -> Any:
            return self.layers(x)

        def loss(self, x: Any, y: Any, eval: bool = False) -> Any:
            return cross_entropy(self(x), y)

        def metrics(self, x: Any, y: Any) -> dict[str, Any]:
            return {}

    held = {i: (torch.from_numpy(x[i]), torch.from_numpy(y[i])) for i in range(CLIENTS)}

    def dataset(user: int) -> Any:
        order = torch.randperm(SAMPLES)
        return Dataset(tuple(part[order] for part in held[user]))

    users = FederatedDataset(dataset, get_user_sampler("minimize_reuse", list(range(CLIENTS))))
    network = Network()
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, rounds + 1, CLIENTS, None),
        SimulatedBackend(users, users),
        PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0)),
        NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=RATE),
        NNEvalHyperParams(local_batch_size=None),
    )
    return right(network)


def with_pytorch(rounds: int) -> float:
    """Run FedAvg as a bare loop that knows no clients but their rows."""
    import torch

    torch.set_num_threads(1)
    x, y, _, _ = (torch.from_numpy(part) for part in samples())
    network = layers()
    shared = {name: value.clone() for name, value in network.state_dict().items()}
    for _ in range(rounds):
        total = {name: torch.zeros_like(value) for name, value in shared.items()}
        for own_x, own_y in zip(x, y, strict=True):
            network.load_state_dict(shared)
            optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
            for batch in torch.split(torch.randperm(SAMPLES), BATCH):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(network(own_x[batch]), own_y[batch])
                torch.autograd.backward(loss)
                optimizer.step()
            for name, value in network.state_dict().items():
                total[name] += value / CLIENTS
        shared = total
    network.load_state_dict(shared)
    return right(network)


def with_jax(rounds: int) -> float:
    """Run FedAvg in plain JAX: a round is one compiled function, with a scan over the clients."""
    import jax
    import jax.numpy as jnp

    x, y, x_test, y_test = samples()
    first, second = jax.random.split(jax.random.PRNGKey(0))
    params = [
        jax.random.normal(first, (FEATURES, HIDDEN)) / FEATURES**0.5,
        jnp.zeros(HIDDEN),
        jax.random.normal(second, (HIDDEN, CLASSES)) / HIDDEN**0.5,
        jnp.zeros(CLASSES),
    ]

    def logits(params: Any, x: Any) -> Any:
        hidden = jax.nn.relu(x @ params[0] + params[1])
        return hidden @ params[2] + params[3]

    def loss(params: Any, x: Any, y: Any) -> Any:
        logs = jax.nn.log_softmax(logits(params, x))
        return -jnp.take_along_axis(logs, y[:, None], 1).mean()

    def trained(params: Any, own: Any) -> Any:
        x, y, key = own

        def step(params: Any, batch: Any) -> Any:
            grads = jax.grad(loss)(params, x[batch], y[batch])
            return [p - RATE * g for p, g in zip(params, grads, strict=True)], None

        order = jax.random.permutation(key, SAMPLES).reshape(-1, BATCH)
        return jax.lax.scan(step, params, order)[0]

    def averaged(params: Any, key: Any) -> Any:
        clients = (x, y.astype(np.int32), jax.random.split(key, CLIENTS))
        every = jax.lax.map(lambda own: trained(params, own), clients)
        return [value.mean(0) for value in every]

    compiled = jax.jit(averaged)
    for key in jax.random.split(jax.random.PRNGKey(1), rounds):
        params = compiled(params, key)
    answers = np.asarray(logits(params, x_test))
    return float((answers.argmax(1) == y_test).mean())


def with_fedjax(rounds: int) -> float:
    """Run FedAvg in FedJAX, on one device of the CPU."""
    import jax

    # FedJAX uses the name that newer versions of JAX do not have
    jax.tree_map = jax.tree_util.tree_map
    import fedjax
    import haiku
    from fedjax.algorithms import fed_avg

    x, y, x_test, y_test = samples()

    def forward(batch: Any) -> Any:
        return haiku.nets.MLP([HIDDEN, CLASSES])(batch["x"])

    model = fedjax.create_model_from_haiku(
        haiku.transform(forward),
        {"x": np.zeros((1, FEATURES), np.float32), "y": np.zeros(1, np.int32)},
        lambda batch, answers: fedjax.metrics.unreduced_cross_entropy_loss(batch["y"], answers),
        {"accuracy": fedjax.metrics.Accuracy()},
    )
    given = {str(i).encode(): {"x": x[i], "y": y[i].astype(np.int32)} for i in range(CLIENTS)}
    data = fedjax.InMemoryFederatedData(given)
    algorithm = fed_avg.federated_averaging(
        fedjax.model_grad(model),
        fedjax.optimizers.sgd(RATE),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=BATCH, num_epochs=1),
    )
    key = jax.random.PRNGKey(0)
    state = algorithm.init(model.init(key))
    for _ in range(rounds):
        key, *keys = jax.random.split(key, CLIENTS + 1)
        clients = [(name, its, one) for (name, its), one in zip(data.clients(), keys, strict=True)]
        state, _ = algorithm.apply(state, clients)
    answers = np.asarray(model.apply_for_eval(state.params, {"x": x_test}))
    return float((answers.argmax(1) == y_test).mean())


SYSTEMS: dict[str, tuple[str, Callable[[int], float]]] = {
    "Ekiden": ("ekiden", with_ekiden),
    "Flower": ("flwr", with_flower),
    "pfl": ("pfl", with_pfl),
    "FedJAX": ("fedjax", with_fedjax),
    "plain JAX": ("jax", with_jax),
    "plain PyTorch": ("torch", with_pytorch),
}


def measured(system: str, rounds: int) -> tuple[float, float, float]:
    """Return CPU seconds, megabytes and accuracy of a run and all processes that it starts."""
    quiet = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "JAX_PLATFORMS": "cpu",
    } | {"RAY_raylet_start_wait_time_s": "300"}
    env = os.environ | dict.fromkeys(_ONE_THREAD, "1") | quiet
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        words = [
            sys.executable,
            "-m",
            "benchmarks.peers",
            "--one",
            system,
            "--rounds",
            str(rounds),
            "--out",
            str(out),
        ]
        with (Path(scratch) / "log").open("w+") as log:
            process = psutil.Popen(words, env=env, stdout=log, stderr=subprocess.STDOUT)
            spent: dict[int, float] = {}
            most = 0
            while process.poll() is None:
                held = 0
                for one in [process, *_descendants(process)]:
                    try:
                        times = one.cpu_times()
                        spent[one.pid] = times.user + times.system
                        held += one.memory_info().rss
                    except psutil.Error:
                        continue
                most = max(most, held)
                time.sleep(_LOOK)
            if process.returncode:
                log.seek(0)
                raise RuntimeError(f"{system} failed: {log.read()[-2000:]}")
        told = json.loads(out.read_text())
    spent[process.pid] = told["seconds"]
    return sum(spent.values()), most / 1e6, told["accuracy"]


def _descendants(process: Any) -> list[Any]:
    try:
        return process.children(recursive=True)  # type: ignore[no-any-return]
    except psutil.Error:
        return []


def main() -> None:
    """Print the table, or do one run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", choices=SYSTEMS)
    parser.add_argument("--rounds", type=int, default=SHORT)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.one:
        accuracy = SYSTEMS[given.one][1](given.rounds)
        given.out.write_text(json.dumps({"accuracy": accuracy, "seconds": time.process_time()}))
        return
    print(
        "| system | version | CPU seconds a round | of Ekiden's | start, CPU seconds | memory, MB "
        "| accuracy % |"
    )
    print("|---|---|---|---|---|---|---|")
    ours = 0.0
    for name, (package, _) in SYSTEMS.items():
        try:
            number = "this checkout" if name == "Ekiden" else version(package)
        except PackageNotFoundError:
            print(f"{name} is not installed: left out", file=sys.stderr)
            continue
        short, _, _ = measured(name, SHORT)
        long, memory, accuracy = measured(name, LONG)
        each = (long - short) / (LONG - SHORT)
        ours = ours or each
        row = (
            f"{each:.3f}",
            f"{each / ours:.1f}",
            f"{short - SHORT * each:.1f}",
            f"{memory:.0f}",
            f"{100 * accuracy:.1f}",
        )
        print(f"| {name} | {number} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
