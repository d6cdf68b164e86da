"""A client leaves a finished run, or joins it: the run is made again without it, or with it.

The new run equals one that never had the client, or always had it, because it is one: silos agree
again on scale, categories and classes. What is checked is that nothing else has changed: the
clients' samples, and the network.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ekiden.core.base.checks import checked
from ekiden.core.base.errors import UserError, unknown
from ekiden.core.base.files import path_of
from ekiden.core.data.samples import FederatedData, held_by
from ekiden.core.engine.folder import data_differences, model_differences, read_config
from ekiden.core.engine.method import Method
from ekiden.core.engine.setup import builder, describe_model
from ekiden.core.engine.worker import Setup
from ekiden.methods import among
from ekiden.runs import api
from ekiden.runs.loaded_model import ModelSource
from ekiden.runs.plan import Plan, in_memory, plan_in, rerun
from ekiden.runs.recipe import Recipe, recipe_of

_SCALED = {"classes": "the classes", "input": "the shape or scale of inputs"}


@checked("folder")
def forget(
    folder: str | os.PathLike[str],
    client: str,
    data: FederatedData | None = None,
    *,
    network: ModelSource | None = None,
    out: str | os.PathLike[str] | None = None,
) -> api.Result:
    """Make a run again without one of its clients. The new run has the bits of a run that never had
    the client.

    The client's test data are left out, too. The old run folder does not change and still has a
    model that learned from the client: delete that folder to forget the client there, too.

    Args:
        folder: the run folder.
        client: the client to forget.
        data: the run's data, if it was given data in Python.
        network: the module that the run was started with, or a function that makes one, if the
            network is not in the library.
        out: the new run folder; by default FOLDER-without-CLIENT.

    Raises:
        UserError: the caller has to fix something; nothing has been written.
    """
    run = _read(folder, data)
    if client not in run.clients:
        raise unknown("client", client, run.clients)
    if len(run.clients) == 1:
        raise UserError(f"{client} is the only client of {run.folder}: delete the folder")
    left = [name for name in run.clients if name != client]
    return _again(run, run.data(data), left, network, out, f"without-{client}", {"forgot": client})


@checked("folder")
def join(
    folder: str | os.PathLike[str],
    client: str,
    data: FederatedData | str | None = None,
    *,
    network: ModelSource | None = None,
    out: str | os.PathLike[str] | None = None,
) -> api.Result:
    """Make a run again with one more client. The new run has the bits of a run that always had the
    client.

    Args:
        folder: the run folder.
        client: the client that joins. It comes where the data have it; last, if the run named the
            order of its clients.
        data: data with this client and the clients of the run, unchanged; by default the run's own
            data, for a client that `--without` left out. If the run names its data, this is a name,
            too.
        network: as in `forget`.
        out: the new run folder; by default FOLDER-with-CLIENT.

    Raises:
        UserError: the caller has to fix something; nothing has been written.
    """
    run = _read(folder, data)
    if client in run.clients:
        raise UserError(
            f"{client} is in {run.folder} already: name a client of its data that is not"
        )
    if run.plan and isinstance(data, str):
        run = replace(run, plan=replace(run.plan, data=data))
        data = None
    held = run.data(data)
    if client not in (names := [c.name for c in held.clients]):
        left = [name for name in names if name not in run.clients]
        if not left:
            raise UserError(
                f"the data of {run.folder} have no client {client!r}, and all of theirs are in it: "
                "give other --data"
            )
        raise unknown("client", client, left)
    return _again(
        run, held, [*run.clients, client], network, out, f"with-{client}", {"joined": client}
    )


@dataclass(frozen=True)
class _Before:
    """A run on this machine."""

    folder: Path
    config: Mapping[str, Any]  # its configuration
    recipe: Recipe[Method]  # what was run
    # the plan that repeats the run; None if the run was made from Python with its own data
    plan: Plan[Method] | None

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients that took part."""
        return tuple(self.config["clients"])

    def data(self, given: FederatedData | str | None) -> FederatedData:
        """Return the data of all clients that can be in the run."""
        if isinstance(given, FederatedData):
            return given
        if self.plan is None:
            raise UserError(
                f"{self.folder} was made from Python with its own data: give `data`, as to "
                "`ekiden.run`"
            )
        if given is not None:
            raise UserError(
                f"{self.folder} names its data: leave out `data`, or give the name of others"
            )
        return replace(self.plan, without="", tune=False).federation()

    def among(self, held: FederatedData, clients: Sequence[str]) -> FederatedData:
        """Return the data as a run of these clients has them."""
        left_out = [c.name for c in held.clients if c.name not in clients]
        if self.plan:
            return replace(self.plan, without=",".join(left_out)).federation()
        return held.without(*left_out) if left_out else held


def _read(folder: str | os.PathLike[str], given: FederatedData | str | None) -> _Before:
    path = path_of(folder)
    config = read_config(path)
    if config.get("on") == "flower":
        raise UserError(
            f"{path} is a run between machines: use the commands `ekiden forget` and `ekiden join` "
            "at its coordinator"
        )
    known = not in_memory(config) and not isinstance(given, FederatedData)
    plan = plan_in(config, path) if known else None
    return _Before(path, config, recipe_of(config["recipe"]), plan)


def _again(
    run: _Before,
    held: FederatedData,
    clients: Sequence[str],
    network: ModelSource | None,
    out: str | os.PathLike[str] | None,
    suffix: str,
    about: Mapping[str, str],
) -> api.Result:
    """Make the run again among `clients`, if nothing else has changed."""
    folder = new_folder(run.folder, out, suffix)
    before = run.among(held, run.clients)
    data = run.among(held, clients)
    if different := data_differences(run.folder, held_by(before.clients)):
        raise UserError(
            f"{', '.join(different)} differ from what {run.folder} was made with: put these data "
            "back"
        )
    _check_network(run, before, network)
    left_out = [c.name for c in held.clients if c.name not in clients]
    recipe = replace(run.recipe, method=among(run.recipe.method, clients))
    noted = {"revisions": [*run.config.get("revisions", []), {**about, "from": run.folder.name}]}
    if run.plan:
        return replace(run.plan, recipe=recipe, without=",".join(left_out)).run(
            folder, data, about=noted
        )
    return rerun(run.config, recipe, data, network, api.How(folder=folder, config=noted))


def new_folder(before: Path, out: str | os.PathLike[str] | None, suffix: str) -> Path:
    """Return the folder of a run that is made again; by default it is next to the first one."""
    # `.` and `..` have no name
    if before.name in ("", ".."):
        before = before.resolve()
    folder = Path(out or before.with_name(f"{before.resolve().name}-{suffix}"))
    if folder.exists():
        raise UserError(f"{folder} exists already: delete it, or choose another folder by --out")
    return folder


def _check_network(run: _Before, data: FederatedData, network: ModelSource | None) -> None:
    """Refuse another network, or one with differently prepared inputs, than that of the run."""
    config = run.config
    plan = run.plan
    recipe = run.recipe
    if not plan and network is None and config["network"] is None:
        raise UserError(f"{run.folder} has its own network ({recipe.model}): give it as `network`")
    model: str | ModelSource = recipe.model if plan else network or recipe.model
    build = builder(model, data, recipe.seed, recipe.method, recipe.train, recipe.pretrained)
    setup = Setup(recipe.method, build, data.dataset, recipe.training, seed=recipe.seed)
    found = describe_model(setup)
    different = model_differences({"model": config["digests"]["model"]}, found["digests"])
    different += [words for key, words in _SCALED.items() if config[key] != found[key]]
    if different:
        raise UserError(
            f"{', '.join(different)} differ from those of {run.folder}: give the same network and "
            "data"
        )
