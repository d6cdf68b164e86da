"""The run folder: everything a run leaves behind, and all that it needs to resume after a crash.

config.json         what was run, enough to run it again; the network and what it takes; digests of test data and model
data.jsonl          one line for each client that a step has called: a digest of its data
environment.json    on which machine, with which packages
metrics.jsonl       one line a step, the same bits in every repetition
ledger.jsonl        one line a transfer, also the same bits
passes.jsonl        one line a step: what each task computed; of a step that was done again, the last line counts
attempts.jsonl      one line each time the run was started, with the transfers of the attempt before that were lost; and
                    one with the reason if a run between machines ended early
times.jsonl         seconds of each step
state.safetensors   the state after the last step, or one up to a second before it, synced
latest-...          the state after the last step, if that is not synced; ends with the machine's
                    present start, after which it counts no more
clients/            what each client keeps
model.safetensors   the result

Digests of a run's data and initial model, so that nobody resumes or measures it with something
else, stand at the end. A client's data are hashed when the step that first calls it is done. To
continue or measure the run, they are hashed again before anything else. Data that no step has used
may still change.
"""

import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from math import inf, isfinite, prod
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ekiden._version import __version__
from ekiden.core.base import errors
from ekiden.core.base.checks import all_but, made, reading
from ekiden.core.base.errors import UserError, listed, visible
from ekiden.core.base.files import (
    add_tensor,
    bytes_of,
    disk_error,
    hold_lock,
    read_regular,
    safetensors_chunks,
    sync,
    with_digest,
    write,
)
from ekiden.core.base.settings import Hardware, Training, seeded
from ekiden.core.data.samples import ClientData, Samples, Subset
from ekiden.core.engine import wire
from ekiden.core.engine.method import State
from ekiden.core.engine.store import read_described
from ekiden.core.engine.transport import Transfer
from ekiden.core.training import frozen
from ekiden.core.training.network import Network

# bytes hashed at a time
_CHUNK = 1 << 26
# outputs of the initial model that are kept
_SHOWN = 8
# clients that a message names
_LISTED = 3
# relative: more than machines and devices differ by rounding, less than other networks differ
_LIKE = 1e-2
S = TypeVar("S", bound=State)
FORMAT = 2
# also in the headers of model files
_ABOUT = ("method", "network", "classes", "input", "inputs", "task", "train", "frozen")
_DAMAGED = "the run folder is damaged, start a new run"
BESIDE = {"ekiden", "sweep", "selection", "revisions", "architecture", "origin", "auto_threads"}
"""Entries of the configuration on which the run does not depend: what wrote it, for which table,
what its result is, where the data lay (their digests count), and who chose the threads."""
# of environments that are compared
_DIFFER = ("python", "torch", "platform", "gpu", "threads")
_CONFIG = "config"
_DATA = "data.jsonl"
# of a sample; far more than any, and sizes of networks still fit into 64 bits
_MOST_NUMBERS = 1 << 40
_PASSES = "passes.jsonl"
_WRITTEN = "written"
_NEEDED = {
    str: "selection dataset method model train pretrained metric evaluate_on",
    dict: "recipe hardware clients input inputs task frozen hyperparameters training",
    int: "steps model_bytes seed evaluate_every",
    list: "classes",
    str | None: "network",
}
"""entries that a configuration and its recipe have, by their types"""
_OPTIONAL = {dict: "digests architecture origin plan privacy", list: "revisions"}


class TaskPasses(NamedTuple):
    """What a task computed."""

    party: str  # the client that did it, or the server
    value: str  # the name of its result there; empty for the server, which has one entry a step
    forward: int  # samples that went forward through a network
    backward: int  # samples that went backward

    @property
    def call(self) -> int:
        """The number of earlier tasks of this client in the step."""
        return int(self.value.split("-", 2)[1])


PassesOf = Mapping[int, Sequence[TaskPasses]]  # What was computed in each step, counted from 0


@dataclass
class Trace:
    """What a run reported."""

    metrics: list[Mapping[str, Any]] = field(default_factory=list)  # one row a step
    ledger: list[Transfer] = field(default_factory=list)  # every transfer
    passes: dict[int, Sequence[TaskPasses]] = field(default_factory=dict)  # what each task computed


@dataclass(frozen=True)
class Marks:
    """How much of the growing files belongs to the steps that are done; kept with the state."""

    metrics: int = 0
    ledger: int = 0
    bytes: int = 0
    forward: int = 0
    backward: int = 0


class InUse(UserError):
    """Another process is working on this run."""


class RunFolder:
    """A run folder, held by this process until `close`."""

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        clients: Mapping[str, ClientData] | None = None,
        needed: Mapping[str, str] | None = None,
    ) -> None:
        """Create the folder, or open one that exists.

        Args:
            path: where it is.
            config: what was run.
            clients: the data of the clients.
            needed: files that are there before config.json; a run folder has them all.

        Raises:
            InUse: another process is using it.
        """
        self.path = path
        # `Transport.written` of the state that was loaded; None if the transport does not know it
        self.written: Mapping[str, str] | None = {}
        self._files: dict[str, IO[bytes]] = {}
        self._synced_at = -inf
        config = {"format": FORMAT, "ekiden": __version__, **config}
        listed = _listed(config)
        self._about = json.dumps({key: listed[key] for key in _ABOUT if key in listed})
        _refuse_links(path)
        fresh = not (path / "config.json").exists()
        needed = needed or {}
        if fresh and _foreign(path, needed):
            what = "is a file" if path.is_file() else "is not empty and not a run folder"
            raise UserError(f"{path} {what}: choose another folder")
        if not fresh:
            _check(path, config, clients)
        self._clients = clients
        self._hashed = set(data_digests(path))
        self._config = config_digest(json.loads(_json(config)) if fresh else read_config(path))
        threads = config.get("hardware", {}).get("threads")
        self._environment = _environment() | {"threads": threads}
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = hold_lock(path / "lock", wait=False)
        except OSError as error:
            # commands that only look do not lock
            from filelock import Timeout

            if not isinstance(error, Timeout):
                raise disk_error(error, path) from None
            raise InUse(
                f"{path} is in use by another process: wait for it, or choose another folder"
            ) from None
        try:
            for name, text in needed.items():
                write(path / name, [text.encode()])
            if fresh:
                write(path / "environment.json", [_json(self._environment)])
                write(path / "config.json", [_json(config)])
        except UserError:
            self.close()
            raise

    def load(self, kind: type[State]) -> tuple[State, Marks] | None:
        """Return the last state written and cut the growing files back to it; None before the first
        state.

        Raises:
            Damaged: the state file is not as it was written.
        """
        state = None
        marks = Marks()
        self.written = {}
        file = state_file(self.path)
        if file.exists():
            state, marks, self.written = read_state(self.path, kind, self._config)
        if file.name != "state.safetensors":
            # the killed process did not sync all
            for file in self.path.rglob("*.safetensors"):
                sync(file)
        self._name_other_environment()
        lost = self._beyond("ledger.jsonl", marks.ledger).count(b"\n")
        transfers = read_ledger(self.path)
        self.append(
            "attempts.jsonl",
            {
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "from_step": state.step if state else 0,
                "command": list(errors.typed),
                "lost_transfers": transfers[len(transfers) - lost :],
                "environment": self._environment,
            },
        )
        # Note first, then cut: after a kill in between, the rows are noted twice, not lost.
        self._cut("metrics.jsonl", marks.metrics)
        self._cut("ledger.jsonl", marks.ledger)
        if state:
            return (state, marks)
        return None

    def _name_other_environment(self) -> None:
        """Say in what this attempt's environment differs from that of the one before."""
        *_, last = {}, *read_lines(self.path / "attempts.jsonl")
        before = last.get("environment", {})
        changed = []
        for key in _DIFFER:
            now = self._environment[key]
            if before.get(key, now) != now:
                changed.append(f"{key} {before[key]} before and {now} now")
        if changed:
            errors.tell(f"{self.path}: {', '.join(changed)}; the last bits may differ")

    def transfer(self, row: Transfer) -> None:
        """Note a transfer as it happens."""
        self.append("ledger.jsonl", vars(row))

    def computed(self, step: int, tasks: Sequence[TaskPasses]) -> None:
        """Note what the tasks of a step computed."""
        self.append(_PASSES, {"step": step, "tasks": tasks})

    def called(self, clients: Iterable[str]) -> None:
        """Note digests of the data of clients that a step has called for the first time."""
        if self._clients is None:
            return
        for name in clients:
            if name not in self._hashed:
                self.append(_DATA, {"client": name, "digest": client_digest(self._clients[name])})
                self._hashed.add(name)

    def append(self, name: str, row: Mapping[str, Any]) -> int:
        """Add a line to a growing file; returns the file's length."""
        try:
            if name not in self._files:
                self._files[name] = open(self.path / name, "ab")  # noqa: SIM115
                _drop_broken_line(self.path / name)
            file = self._files[name]
            file.write(_json(row))
            file.flush()
            return file.tell()
        except OSError as error:
            raise disk_error(error, self.path / name) from error

    @property
    def due(self) -> bool:
        """Whether to wait for the disk: if it is a second ago, or nobody could tell a power cut."""
        return not _boot() or time.monotonic() > self._synced_at + 1

    def save(
        self,
        state: State,
        marks: Marks,
        written: Mapping[str, str] | None = None,
        *,
        lasting: bool = True,
    ) -> None:
        """Write the state after a step, from which the run resumes from now on. Delete results of
        earlier steps.

        Args:
            state: the state.
            marks: where the run stands.
            written: see `Transport.written`.
            lasting: whether it is to outlive a power cut. If not, the run resumes from the last
                state that does, should the machine have started again by then.
        """
        for stale in (self.path / "model.safetensors", *self.path.glob("personal/*.safetensors")):
            stale.unlink(missing_ok=True)
        said = {_CONFIG: self._config}
        if written is not None:
            said[_WRITTEN] = json.dumps(written, sort_keys=True)
        chunks = with_digest(wire.chunks((state, marks)), **said)
        if not lasting:
            # A new name: ext4 starts to write out a file that replaces another one.
            latest = self.path / f"latest-{state.step}-{_boot()}.safetensors"
            write(latest, chunks, sync=False)
            self._drop_latest(but=latest)
            return
        for name in ("metrics.jsonl", "ledger.jsonl", _PASSES, _DATA):
            if name in self._files:
                os.fsync(self._files[name].fileno())
        write(self.path / "state.safetensors", chunks)
        self._drop_latest()
        self._synced_at = time.monotonic()

    def _drop_latest(self, but: Path | None = None) -> None:
        for file in self.path.glob("latest-*"):
            if file != but:
                file.unlink()

    def forget(self) -> None:
        """Go back to before the first step; the run then gives the same bits again."""
        self._drop_latest()
        (self.path / "state.safetensors").unlink(missing_ok=True)
        shutil.rmtree(self.path / "clients", ignore_errors=True)

    def trace(self) -> Trace:
        """Return all that was reported, by this process and earlier ones."""
        ledger = [Transfer(**row) for row in read_ledger(self.path)]
        return Trace(list(read_lines(self.path / "metrics.jsonl")), ledger, read_passes(self.path))

    def length(self, name: str) -> int:
        """Return the bytes in a growing file."""
        file = self.path / name
        if file.exists():
            return file.stat().st_size
        return 0

    def write_model(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a model as a named state dict, for any tool that reads safetensors; its header
        describes the inputs.
        """
        file = self.path / name
        file.parent.mkdir(exist_ok=True)
        write(
            file, with_digest(safetensors_chunks(tensors, {"format": "pt", "ekiden": self._about}))
        )

    def close(self) -> None:
        """Release the folder for other processes."""
        for file in self._files.values():
            # a disk that was full before is full again
            with contextlib.suppress(OSError):
                file.close()
        self._lock.release()

    def _beyond(self, name: str, length: int) -> bytes:
        """Return what a growing file holds after the rows of finished steps."""
        path = self.path / name
        data = path.read_bytes() if path.exists() else b""
        if len(data) < length:
            raise UserError(f"{path} is shorter than the state says: {_DAMAGED}")
        return data[length:]

    def _cut(self, name: str, length: int) -> None:
        """Shorten a growing file to the rows of finished steps."""
        if self._beyond(name, length):
            os.truncate(self.path / name, length)


def read_config(path: Path) -> dict[str, Any]:
    """Return the configuration in a run folder."""
    try:
        config = json.loads(read_regular(path / "config.json", 1 << 28))
    except (FileNotFoundError, NotADirectoryError):
        hint = "give the path that the run printed"
        # a folder of runs, or the name of a run without the folder that holds it
        near = [*sorted(path.glob("*/config.json")), *Path("runs", path).glob("config.json")]
        if near:
            hint = f"did you mean {near[0].parent}?"
        raise UserError(f"{path} is not a run folder (it has no config.json): {hint}") from None
    except (OSError, ValueError):
        raise UserError(f"{path / 'config.json'} cannot be read: {_DAMAGED}") from None
    return check_config(config, path)


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Replace the configuration in a run folder by one with the same `config_digest`."""
    write(path / "config.json", [_json(config)])


def check_config(config: Any, path: Path) -> dict[str, Any]:
    """Check what was read as the configuration of a run, and return it."""
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        found = config.get("format") if isinstance(config, dict) else None
        raise UserError(
            f"{path} has run-folder format {found}, this version reads {FORMAT}: "
            "use the version of Ekiden that wrote it"
        )
    listed = _listed(config)
    needed = _kinds(_NEEDED)
    optional = _kinds(_OPTIONAL)
    if missing := needed.keys() - listed.keys():
        raise UserError(f"{path / 'config.json'} has no {', '.join(sorted(missing))}: {_DAMAGED}")
    known = [name for name in needed | optional if name in listed]
    if wrong := sorted(n for n in known if not isinstance(listed[n], (needed | optional)[n])):
        raise UserError(f"{path / 'config.json'} has wrong {', '.join(wrong)}: {_DAMAGED}")
    shape = config["input"].get("shape")
    sizes = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    if not sizes or prod(shape) > _MOST_NUMBERS:
        raise UserError(f"{path / 'config.json'} has wrong input.shape: {_DAMAGED}")
    if not all(isinstance(made, dict) for made in config.get("revisions", [])):
        raise UserError(f"{path / 'config.json'} has wrong revisions: {_DAMAGED}")
    return config


def _kinds(table: Mapping[Any, str]) -> dict[str, Any]:
    """Return the types by the names of entries."""
    kinds = {}
    for kind, names in table.items():
        kinds.update(dict.fromkeys(names.split(), kind))
    return kinds


def _listed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a configuration and of its recipe."""
    recipe = config.get("recipe")
    return {**config, **(recipe if isinstance(recipe, Mapping) else {})}


def settings_in(config: Mapping[str, Any]) -> tuple[Training, Hardware]:
    """Return how the clients of a run trained, and on what hardware."""
    with reading(
        f"the settings of {config['recipe']['method']}", "the version of Ekiden that ran it"
    ):
        return made(Training, config["recipe"]["training"], "training"), made(
            Hardware, config["hardware"], "hardware"
        )


@cache
def _boot() -> str:
    """Return what names the time since the machine was started; empty if that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def state_file(path: Path) -> Path:
    """Return the file of the last state of a run that can be trusted; it may not exist.

    A state that was not synced is as good as another one until the machine starts again.
    """
    latest = path.glob(f"latest-*-{_boot()}.safetensors")
    steps = {int(file.name.split("-")[1]): file for file in latest}
    if steps:
        return steps[max(steps)]
    return path / "state.safetensors"


def read_state(path: Path, kind: type[S], config: str) -> tuple[S, Marks, Mapping[str, str] | None]:
    """Return the state in a run folder, where the run stands, and `Transport.written`.

    The state must have been written under the configuration with this `config_digest`; otherwise,
    or if the file is not as it was written, it is `Damaged`.
    """
    file = state_file(path)
    try:
        (state, marks), said = read_described(file, tuple[kind, Marks])  # type: ignore[valid-type]
    except wire.WireError:
        raise UserError(
            f"{file} is damaged or of another version of Ekiden: use the one that wrote it, or "
            f"delete {path} to run it again"
        ) from None
    if said.get(_CONFIG) != config:
        raise UserError(
            f"{path / 'config.json'} was changed after the run began: restore it from a backup"
        )
    return state, marks, json.loads(said[_WRITTEN]) if _WRITTEN in said else None


def read_ledger(folder: Path) -> list[dict[str, Any]]:
    """Return the transfers in a run folder, as `read_lines` gives them."""
    return read_lines(folder / "ledger.jsonl", *(f.name for f in fields(Transfer)))


def read_passes(folder: Path) -> dict[int, Sequence[TaskPasses]]:
    """Return what each task of each step computed, as a run folder has it."""
    found: dict[int, Sequence[TaskPasses]] = {}
    for row in read_lines(folder / _PASSES, "step", "tasks"):
        try:
            found[int(row["step"])] = tuple(
                TaskPasses(str(party), str(value), int(forward), int(backward))
                for party, value, forward, backward in row["tasks"]
            )
        except (TypeError, ValueError):
            raise UserError(f"{folder / _PASSES} cannot be read: {_DAMAGED}") from None
    return found


def note_end(folder: Path, reason: str) -> None:
    """Write down why an attempt at a run ended early."""
    row = {"ended": datetime.now(UTC).isoformat(timespec="seconds"), "reason": reason}
    with open(folder / "attempts.jsonl", "ab") as file:
        file.write(_json(row))


def why_ended(folder: Path) -> str:
    """Return why the last attempt at a run ended early; empty if nobody wrote it down."""
    *_, last = {}, *read_lines(folder / "attempts.jsonl")
    # the folder may be of anybody
    return visible(str(last.get("reason", "")))


def read_lines(path: Path, *keys: str) -> list[dict[str, Any]]:
    """Return the complete lines of a growing file, each with these keys; empty if there is no
    file.
    """
    rows = list[dict[str, Any]]()
    if not path.exists():
        return rows
    for number, line in enumerate(read_regular(path).split(b"\n")[:-1]):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not row.keys() >= set(keys):
            raise UserError(f"{path}, line {number + 1} cannot be read: {_DAMAGED}")
        rows.append(row)
    return rows


def _foreign(path: Path, needed: Iterable[str]) -> bool:
    """Return whether the folder holds anything that a run killed before it wrote its configuration
    does not leave.
    """
    if not path.is_dir():
        return path.exists()
    ours = ("lock", "environment.json", *needed)
    return any(p.name not in ours and p.suffix != ".tmp" for p in path.iterdir())


def _refuse_links(folder: Path) -> None:
    """Refuse links of both kinds, through which the folder of somebody else would change files
    elsewhere.
    """
    for path in folder.rglob("*"):
        if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1):
            raise UserError(
                f"{path} is a link to another file: put a copy of the file there, or start a new "
                "run"
            )


def _drop_broken_line(path: Path) -> None:
    """Cut off the line that a full disk left unfinished, so that the next one does not continue
    it.
    """
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def _check(path: Path, config: Mapping[str, Any], clients: Mapping[str, ClientData] | None) -> None:
    """Refuse to resume if the folder holds another run."""
    found = read_config(path)
    wanted = json.loads(_json(config))
    found = _listed(found)
    wanted = _listed(wanted)
    # the number that this machine has
    if wanted.get("auto_threads"):
        wanted["hardware"]["threads"] = found["hardware"]["threads"]
    keys = (wanted.keys() | found.keys()) - BESIDE - {"digests", "recipe"}
    different = sorted(k for k in keys if found.get(k) != wanted.get(k))
    before = found.get("digests", {})
    now = wanted.get("digests", {})
    if clients is not None:
        different += data_differences(path, clients, now.get("test"), before.get("test"))
    different += model_differences(before, now)
    if different:
        more = ""
        if found.get("ekiden") != __version__:
            more = f"; Ekiden {found.get('ekiden')} began this run and can continue it"
        raise UserError(
            f"{path} holds another run ({', '.join(different)} differ): choose another folder, or "
            f"put back what differs{more}"
        )


def config_digest(config: Mapping[str, Any]) -> str:
    """Return a digest of a configuration, without the entries on which the result does not
    depend, where the data are, and the limit of steps.
    """
    decisive = all_but(config, "steps", "dataset", *BESIDE)
    if "plan" in config:
        decisive["plan"] = all_but(config["plan"], "data", "silos", "code")
    if limit := config.get("limit"):
        free = all_but(config["recipe"]["hyperparameters"], limit)
        decisive["recipe"] = config["recipe"] | {"hyperparameters": free}
    return hashlib.blake2b(
        json.dumps(decisive, sort_keys=True).encode(), digest_size=16
    ).hexdigest()


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _environment() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def data_digests(path: Path) -> dict[str, str]:
    """Return the digests in a run folder of the data of clients that the run has called."""
    return {row["client"]: row["digest"] for row in read_lines(path / _DATA, "client", "digest")}


def data_differences(
    path: Path,
    clients: Mapping[str, ClientData],
    test: str | None = None,
    before: str | None = None,
) -> list[str]:
    """Say whose data differ from those that a run has used; of clients that it has not used none
    are read.
    """
    used = data_digests(path)
    names = []
    for name, digest in used.items():
        if name not in clients or client_digest(clients[name]) != digest:
            names.append(name)
    if names:
        return [f"the data of {listed(names, _LISTED)}"]
    if test != before:
        return ["the test data"]
    return []


@cache
def code_version() -> str:
    """Return the version of this package with a digest of its source: two checkouts of one version
    differ.
    """
    return f"{__version__}+{source_digest(Path(__file__).parents[2])}"


def source_digest(root: Path) -> str:
    """Return a digest of the names and contents of all Python files below a folder."""
    found = hashlib.blake2b(digest_size=8)
    for file in sorted(root.rglob("*.py")):
        content = file.read_bytes()
        found.update(f"{file.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        found.update(content)
    return found.hexdigest()


def model_digest(network: Network, shape: tuple[int, ...], constants: str) -> dict[str, Any]:
    """Return what identifies the initial model: a digest of its values and its structure, and some
    outputs.

    The outputs tell apart networks that have the same layers but use them differently. `constants`
    is the digest of the frozen part.
    """
    # addresses differ between processes
    structure = re.sub(r"0x[0-9a-f]+", "", repr(network.module))
    digest = _digest_of(network.module.state_dict().items(), structure)
    found = {"digest": digest, "answers": _answers(network, shape)}
    return found | ({"frozen": constants} if constants else {})


def values_digest(module: nn.Module) -> str:
    """Return a digest of all values of an initial network, including frozen ones."""
    return _digest_of(module.state_dict().items(), frozen.digest(module))


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """Return a digest of named tensors, whatever their order."""
    return _digest_of(sorted(tensors.items()))


def _digest_of(tensors: Iterable[tuple[str, Tensor]], about: str = "") -> str:
    """Return a digest of a text and tensors."""
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for name, tensor in tensors:
        add_tensor(digest, name, tensor)
    return digest.hexdigest()


def model_differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Say which digests of the model in a run folder differ from those wanted, where both sides
    have them.
    """
    different = []
    if "model" in found and "model" in wanted:
        if found["model"].get("frozen") != wanted["model"].get("frozen"):
            different.append("the frozen part of the network")
        elif not _alike(found["model"], wanted["model"]):
            different.append("the initial model")
    return different


def client_digest(client: ClientData) -> str:
    """Return a digest of what a client holds: inputs and labels, in order, of its training,
    validation, test data.

    It depends on the contents alone, not on the files that they came from or the machine.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, part in (("train", client.train), ("val", client.val), ("test", client.test)):
        _add_samples(digest, part, name)
    return digest.hexdigest()


def samples_digest(samples: Samples) -> str:
    """Return such a digest of all samples of a data set."""
    digest = hashlib.blake2b(digest_size=16)
    _add_samples(digest, Subset(samples, torch.arange(len(samples))), "all")
    return digest.hexdigest()


def _add_samples(digest: "hashlib.blake2b", part: Subset, name: str) -> None:
    x = part.samples.x
    digest.update(f"{name} {len(part)} {tuple(x.shape[1:])} {x.dtype};".encode())
    for rows in torch.split(part.rows, max(1, _CHUNK // max(1, x[:1].nbytes))):
        digest.update(bytes_of(x[rows]))
    add_tensor(digest, "labels", part.y)


def _answers(network: Network, shape: tuple[int, ...]) -> list[float]:
    """Return outputs for two fixed inputs; none if they are not finite or the network does not take
    such inputs.
    """
    x = (
        torch.arange(2 * prod(shape), dtype=torch.float32)
        .sin()
        .reshape(2, *shape)
        .to(network.params.device)
    )
    with seeded(0), torch.inference_mode():
        try:
            out = network.module.eval()(x)
        except Exception:  # the user's own network may take certain values only
            return []
    values = [float(v) for v in out.float().flatten()[:_SHOWN].cpu()]
    if all(map(isfinite, values)):
        return values
    return []


def _alike(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    before = found["answers"]
    now = wanted["answers"]
    near = _LIKE * max((abs(v) for v in before), default=0.0)
    same = len(before) == len(now) and all(
        abs(a - b) <= near for a, b in zip(before, now, strict=True)
    )
    return found["digest"] == wanted["digest"] and (same or not before or not now)
