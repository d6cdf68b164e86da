"""Exact unlearning and late joining: a finished run of FedGram without one of its clients, or with one more."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ekiden.api import Result, describe
from ekiden.base.errors import UserError, unknown
from ekiden.base.files import write
from ekiden.base.refs import Ref
from ekiden.base.seeds import derive
from ekiden.data.samples import FederatedData
from ekiden.engine import identity, wire
from ekiden.engine.drive import drive, models
from ekiden.engine.evaluation import TestSet
from ekiden.engine.federation import Fed, in_order
from ekiden.engine.folder import (
    Marks,
    RunFolder,
    Trace,
    config_digest,
    read_config,
    read_ledger,
    read_state,
    settings_in,
)
from ekiden.engine.machine import resolve
from ekiden.engine.method import State
from ekiden.engine.modules import write_models
from ekiden.engine.networks import builder
from ekiden.engine.parties import check_clients
from ekiden.engine.setup import check_model
from ekiden.engine.transport import live_refs
from ekiden.engine.worker import Setup, Worker
from ekiden.experiments.plan import Plan, plan_in
from ekiden.experiments.summary import summarise
from ekiden.methods.fedgram import revision
from ekiden.methods.fedgram.fedgram import FedGram
from ekiden.methods.fedgram.handed import Summing
from ekiden.results.model import ModelSource
from ekiden.serving.loading import method_in
from ekiden.training.weights import Weights
from ekiden.transports.base import Start
from ekiden.transports.local.in_process import InProcess
from ekiden.transports.local.simulation import Simulation

Loop = Callable[[FedGram, Fed, Summing], Iterator[State]]
_FED = {"classes": "the classes", "input": "the shape or scale of inputs"}
_OWN_WORDS = ("ekiden", "sweep")
"""Entries of a configuration that are valid for one run only."""


@dataclass(frozen=True)
class _Finished:
    """A finished run of FedGram on this machine.

    Attributes:
        folder: its folder.
        config: its configuration.
        method: the method with its hyperparameters.
        plan: the plan that repeats the run; None if the run was made from Python with its own data.
        state: its last state.
    """

    folder: Path
    config: Mapping[str, Any]
    method: FedGram
    plan: Plan[FedGram] | None
    state: Summing

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients whose sums are in the totals."""
        return tuple(self.config["clients"])

    @property
    def order(self) -> tuple[str, ...]:
        """The clients in the order of the run. The first one set the features."""
        return in_order(self.method.order, self.clients, derive(self.config["seed"], "order", 0))


def forget(
    folder: str | os.PathLike[str],
    client: str,
    data: FederatedData | None = None,
    *,
    network: ModelSource | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Result:
    """Remove a client from a finished run of FedGram. The new model has the bits of a run without the client.

    The client computes its sums again, and they are subtracted from the totals. Its test data are left out, too. The
    old run folder does not change and still has the client's sums in its totals and its model: delete that folder to
    forget the client there, too.

    Args:
        folder: the run folder.
        client: the client to forget; it cannot be the client that set the features.
        data: the run's data, if it was given data in Python.
        network: the module that the run was started with, or a function that makes one, if the network is not in the
            library.
        out: the new run folder; by default FOLDER-without-CLIENT.

    Raises:
        UserError: the caller has to fix something; nothing has been written.
    """
    run = _finished(folder)
    if client not in run.clients:
        raise unknown("client", client, run.clients)
    if len(run.clients) == 1:
        raise UserError(f"{client} is the only client of {run.folder}: delete the folder")
    if client == run.order[0]:
        raise UserError(
            f"{client} set the features of {run.folder}, and all sums depend on them, so it cannot "
            "leave: run again without it"
        )
    order = tuple(name for name in run.order if name != client)
    held = _given(run, data)
    _check_data(run, held)
    about = {"forgot": client, "from": run.folder.name}
    target = Path(out) if out else _beside(run, f"without-{client}")
    return _revised(
        run, held, order, network, target, about, lambda m, fed, s: revision.forget(m, fed, s, client, order[-1])
    )


def join(
    folder: str | os.PathLike[str],
    client: str,
    data: FederatedData | str | None = None,
    *,
    network: ModelSource | None = None,
    out: str | os.PathLike[str] | None = None,
) -> Result:
    """Add a client to a finished run of FedGram. The new model has the bits of a run in which the client was last.

    Args:
        folder: the run folder.
        client: the client that joins.
        data: data with this client and the clients of the run, unchanged; by default the run's own data, for a client
            that `--without` left out. If the run names its data, this is a name, too.
        network: as in `forget`.
        out: the new run folder; by default FOLDER-with-CLIENT.

    Raises:
        UserError: the caller has to fix something; nothing has been written.
    """
    run = _finished(folder)
    if client in run.clients:
        raise UserError(f"{client} is in {run.folder} already: name a client of its data that is not")
    if run.plan and isinstance(data, str):
        run = replace(run, plan=replace(run.plan, data=data))
        data = None
    held = _given(run, data)
    if client not in (names := [c.name for c in held.clients]):
        raise unknown("client", client, [name for name in names if name not in run.clients])
    _check_data(run, held)
    about = {"joined": client, "from": run.folder.name}
    target = Path(out) if out else _beside(run, f"with-{client}")
    return _revised(
        run, held, (*run.order, client), network, target, about, lambda m, fed, s: revision.join(m, fed, s, client)
    )


def _finished(folder: str | os.PathLike[str]) -> _Finished:
    """Read a run.

    Raises:
        UserError: the run is not one that a client can leave or join.
    """
    path = Path(folder)
    config = read_config(path)
    plan: Plan[Any] | None = plan_in(config, path) if "plan" in config and config.get("on") != "flower" else None
    method = plan.method if plan else method_in(config)
    if not isinstance(method, FedGram):
        raise UserError(
            f"{path} is a run of {config['method']}: only runs of fedgram can change their clients, "
            "because their totals are exact sums; run again"
        )
    if method.dictionary == "all":
        raise UserError(f"{path} has filters from the patches of all clients, so nobody can leave or join: run again")
    if config.get("on") == "flower":
        raise UserError(
            f"{path} is a run between machines: use the commands `ekiden forget` and `ekiden join` at its coordinator"
        )
    if not summarise(path).finished:
        raise UserError(f"{path} is not finished: run `ekiden resume {path}` first")
    if away := sorted({row["source"] for row in read_ledger(path) if row["missing"]}):
        raise UserError(f"{', '.join(away)} did not answer in every step of {path}: run again with all clients")
    state, _, _ = read_state(path, Summing, config_digest(config))
    if state.totals is None:
        raise UserError(f"{path} did not keep the totals: run again")
    return _Finished(path, config, method, plan, state)


def _given(run: _Finished, data: FederatedData | str | None) -> FederatedData:
    """Return the data of all clients that can be in the run.

    Raises:
        UserError: the data were not given, or must not be.
    """
    if run.plan:
        if data is not None:
            raise UserError(f"{run.folder} names its data: leave out `data`, or give the name of others")
        return replace(run.plan, without="").federation()
    if not isinstance(data, FederatedData):
        raise UserError(f"{run.folder} was made from Python with its own data: give `data`, as to `ekiden.run`")
    return data


def _check_data(run: _Finished, data: FederatedData) -> None:
    """Refuse data that differ from the run's, because they would give other sums.

    Raises:
        UserError: the data of some clients differ.
    """
    found = identity.data_digests([c for c in data.clients if c.name in run.clients])
    wanted = run.config.get("digests", {}).get("data")
    if different := identity.unlike({"data": wanted}, {"data": found}):
        raise UserError(f"{', '.join(different)} differ from what {run.folder} was made with: put these data back")


def _beside(run: _Finished, suffix: str) -> Path:
    return run.folder.with_name(f"{run.folder.resolve().name}-{suffix}")


def _revised(
    run: _Finished,
    held: FederatedData,
    order: Sequence[str],
    network: ModelSource | None,
    out: Path,
    about: Mapping[str, str],
    loop: Loop,
) -> Result:
    """Make the new run folder, or nothing.

    Args:
        run: the run to start from.
        held: the data of all clients.
        order: the clients of the new run, in the order of the run that it must equal.
        network: the user's own network, if any.
        out: the new run folder.
        about: entry for `config.json` about what is done.
        loop: the outer loop that does it.

    Raises:
        UserError: the folder already exists, or the network is another one.
    """
    if out.exists():
        raise UserError(f"{out} exists already: delete it, or choose another folder by --out")
    left_out = [c.name for c in held.clients if c.name not in order]
    data = held.without(*left_out)
    clients = tuple(c.name for c in data.clients)
    method = _ordered(run, order, clients)
    check_clients(data.clients, method)
    setup = _setup(run, method, data, network)
    # A client that is being forgotten takes part, too.
    worker = Worker(setup, {c.name: c for c in held.clients if c.name in (*run.clients, *order)})
    check_model(worker, data)
    config = {k: v for k, v in run.config.items() if k not in _OWN_WORDS} | describe(setup, data.clients)
    config["revisions"] = [*run.config.get("revisions", []), about]
    if run.plan:
        config["plan"] = replace(run.plan, method=method, without=",".join(left_out)).to_json()
    _check_same_network(run, config)
    test = TestSet(worker, data, len(clients), run.config.get("evaluate_on", "all"))
    with _staged(out) as staged, closing(RunFolder(staged, config)) as folder:
        folder.load(Summing)
        state, weights, personal, totals = _driven(run, worker, test, clients, folder, loop)
        trace = folder.trace()
        _note_totals(staged, totals)
    found = weights, tuple(personal)
    return Result(state, tuple(trace.metrics), tuple(trace.ledger), out, test.build, read_config(out), lambda: found)


def _driven(
    run: _Finished, worker: Worker, test: TestSet, clients: tuple[str, ...], folder: RunFolder, loop: Loop
) -> tuple[State, Weights | None, list[Weights], str]:
    """Return the last state of `loop`, its model and personal models, all written, and the digest of its totals."""
    setup, kept = worker.setup, folder.path / "clients"
    method = cast(FedGram, setup.method)
    for ref in live_refs(replace(run.state, model=None, personal=())):  # the totals, if a client holds them
        name = f"value-{ref.key}.safetensors"
        if not (file := run.folder / "clients" / ref.owner / name).exists():
            raise UserError(f"{file} is gone, the totals of the run: run again")
        (kept / ref.owner).mkdir(parents=True)
        shutil.copyfile(file, kept / ref.owner / name)
    # Continue as if all steps were done except the last two and the step of personal heads.
    state: State = replace(run.state, step=method.steps(len(clients)) - 2 - method.personal, model=None, personal=())
    transport = Simulation(InProcess(worker), Start(setup, worker.clients, state, kept))
    everyone = tuple(worker.clients)
    steps = drive(
        method,
        everyone,
        transport,
        test,
        setup.seed,
        state,
        Marks(),
        Trace(),
        folder,
        1,
        setup,
        skip=False,
        loop=lambda fed, s: loop(method, fed, cast(Summing, s)),
    )
    with closing(transport):
        for state in steps:  # noqa: B007
            pass
        weights, personal = models(state, transport)
        held = cast(Summing, state).totals
        totals = wire.encode(transport.value(held) if isinstance(held, Ref) else held)
    write_models(folder, setup.build, test.build, clients, weights, personal)
    for place in kept.iterdir() if kept.exists() else ():
        if not any(place.iterdir()):  # the folder of the client that held the totals
            place.rmdir()
    return state, weights, personal, hashlib.sha256(totals).hexdigest()


def _note_totals(folder: Path, digest: str) -> None:
    """Note which totals the last revision gave. Older digests are not kept: with them one could test who left."""
    config = read_config(folder)
    config["revisions"][-1]["totals"] = digest
    write(folder / "config.json", [json.dumps(config, separators=(",", ":")).encode() + b"\n"])


def _ordered(run: _Finished, order: Sequence[str], clients: tuple[str, ...]) -> FedGram:
    """Return the method with this order, in the words of the run if they mean the same for these clients."""
    word, seed = run.method.order, derive(run.config["seed"], "order", 0)
    if word in ("given", "reversed", "random") and in_order(word, clients, seed) == tuple(order):
        return run.method
    return replace(run.method, order=",".join(order))


def _setup(run: _Finished, method: FedGram, data: FederatedData, network: ModelSource | None) -> Setup:
    """Return what the parties agree on: the run's setup, with other clients."""
    config, plan = run.config, run.plan
    model: str | ModelSource = plan.model if plan else network or config["model"]
    if not plan and network is None and config["network"] is None:
        raise UserError(f"{run.folder} has its own network ({config['model']}): give it as `network`")
    train, pretrained = config.get("train", "all"), config.get("pretrained", "")
    build = builder(model, data, config["seed"], method, train, pretrained)
    training, hardware = settings_in(config)
    hardware = resolve(plan.hardware if plan else hardware, config["workers"], build)
    return Setup(method, build, data.dataset, training, hardware, config["seed"])


def _check_same_network(run: _Finished, config: Mapping[str, Any]) -> None:
    """Refuse another network, or one with differently prepared inputs, because it would give other features.

    Raises:
        UserError: the network differs.
    """
    parts = {key: {"model": known["digests"]["model"]} for key, known in (("old", run.config), ("new", config))}
    different = identity.unlike(parts["old"], parts["new"])
    different += [name for key, name in _FED.items() if run.config[key] != config[key]]
    if different:
        raise UserError(f"{', '.join(different)} differ from those of {run.folder}: give the same network and data")


@contextmanager
def _staged(out: Path) -> Iterator[Path]:
    """Give a folder that becomes `out` if everything goes well, and is deleted otherwise."""
    staged = out.with_name(f".{out.name}.{os.getpid()}.part")
    out.parent.mkdir(parents=True, exist_ok=True)
    staged.mkdir()
    try:
        yield staged
        staged.rename(out)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
