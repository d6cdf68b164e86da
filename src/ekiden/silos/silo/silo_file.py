"""`silo.toml`: a silo's name, its data, and what it agrees to run; how it is made, and where
others' keys go.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from datetime import date
from hashlib import scrypt
from pathlib import Path
from typing import Any, Literal

import torch.nn.functional as F

from ekiden.care.seen import fingerprints
from ekiden.clinic.subgroups import divisions
from ekiden.core.base import outside
from ekiden.core.base.checks import (
    BelowOne,
    Checked,
    Count,
    CountOrZero,
    Fraction,
    Positive,
    admitted,
    hints_of,
    made,
)
from ekiden.core.base.errors import PrivateError, UserError, at, command_line, unknown
from ekiden.core.base.files import read_text, read_toml, write
from ekiden.core.base.settings import Hardware
from ekiden.core.data.samples import ClientData, Dataset, FederatedData, Samples
from ekiden.core.tasks import Classification, LanguageModelling, terms
from ekiden.core.tasks.base import IGNORED
from ekiden.readers import query
from ekiden.readers import schema as schemas
from ekiden.readers.assemble import AskedData, assemble
from ekiden.readers.columns import Reading, listed
from ekiden.readers.holdings import hold
from ekiden.readers.kinds import Table
from ekiden.readers.moments import ColumnSums, told_by
from ekiden.readers.partition import Iid, split
from ekiden.readers.scaling import Scaling, read_agreed
from ekiden.readers.sources import NAMED, load
from ekiden.readers.targets import in_order
from ekiden.silos.metrics import Metrics
from ekiden.silos.security import check_address
from ekiden.silos.silo import told
from ekiden.silos.silo.levels import TELLS, Level
from ekiden.silos.silo.told import ToldSums
from ekiden.silos.trust import keys
from ekiden.silos.trust.agreement import Roster, check_name

Held = tuple[Dataset, ClientData]
TaskKind = Literal[
    "",
    "classification",
    "multi-label",
    "regression",
    "survival",
    "segmentation",
    "language-modelling",
]
Allow = Mapping[str, Mapping[str, tuple[Any, ...]]]
EVALUATE = "evaluate"
_LEAST_SALT = 16
_MOST_SALT = 64
_NEW_PEERS = "new-peers"


@dataclass(frozen=True)
class Limits(Checked):
    """What a silo agrees to run. The coordinator cannot change it. Numbers are checked before
    anything is built.
    """

    level: Level = "sums"
    """how much may leave. sums: sums of many samples under masks, of features and at coefficients
    that nobody chose, and what has noise within `epsilon`. models: also models, from which a
    malicious coordinator or silo can read samples. all: also statistics of few samples. See
    docs/security.md"""
    model_bytes: Count = 100_000_000
    """largest model, in bytes on the wire"""
    methods: tuple[str, ...] | None = None
    """names of the methods that may run here, by default all but centralized; with a closing lap
    (fedavg+lap), sums leave the silo; `evaluate` lets the models of other runs be measured"""
    epochs: Count = 1000
    """largest number of training epochs in one task"""
    min_clients: CountOrZero = 0
    """smallest number of silos in a run; 0: all of the roster, this silo and those with a
    key in `peers`, two at least. Those that a later roster adds count from their first run on. Runs that continue
    without silos that do not answer (`--absent skip`) need one of at least one fewer than theirs"""
    clients: Count = 100
    """largest number of silos in a run"""
    steps: Count = 2000
    """largest number of steps (rounds or hops) of a run"""
    tasks: Count = 20_000
    """largest number of tasks of a run at all silos together, if the method knows it beforehand;
    their arguments may be five times as many values of other silos"""
    requests: Count = 20_000
    """largest number of requests of a run to this silo"""
    evaluation_epsilon: Positive = 8.0
    """largest epsilon (at `delta`) of all that leaves about the test samples of each data set, over
    all runs: counts of models' answers with noise. What was spent is in evaluations.jsonl in the
    silo's folder"""
    exact_evaluation: bool = False
    """also measure models without noise (`--evaluate-dp exact`): whoever makes up models then reads
    test samples from the counts"""
    epsilon: Positive | None = None
    """largest sum of epsilon over all runs with differential privacy (`--dp`), and then no others
    may train here; by default there is no limit. What was spent is in privacy.jsonl in the silo's
    folder"""
    delta: Fraction = 1e-4
    """with `epsilon`: largest sum of delta over all runs; with `evaluation_epsilon`: its delta"""
    honest: Count = 1
    """largest number of silos among which a run may share the noise of its sums (`honest` in
    `--dp` and `--evaluate-dp`); with 1 this silo adds all of it itself, and trusts nobody"""
    min_active: CountOrZero = 10
    """smallest k of a run (its `min_active`): sums leave out features that vary in fewer than k
    samples here, and samples of classes with fewer than k samples; histograms of `trees` are of
    groups of k samples or more. Methods that do not keep to k (level = "all") tell one number for k
    of this silo's own at most, in all runs together. 0: no rule"""
    min_samples: Count = 10
    """nothing is told about fewer test samples than this"""
    min_positives: Count = 5
    """samples of classes, and labels, with fewer test samples than this are left out of what is
    told by class"""
    subgroups: tuple[str, ...] = ()
    """columns by whose subgroups `ekiden evaluate --by` may ask, with the bounds of numbers:
    ["sex", "age:40:65"]. Samples that agree in all of them, and in their class, are told together
    or not at all, so list few"""
    approve: bool = True
    """a run begins only after `ekiden silo approve` has agreed to its plan, and ends with the last
    day of the approval; a table [allow.METHOD] with a last day, until = 2027-01-31, agrees to all
    plans that it allows"""
    own_figures: bool = False
    """also tell the coordinator how models do on this silo's test samples alone; so
    `ekiden evaluate` may then ask fewer silos than `min_clients`, also this one alone"""
    memory: Count = 16_000_000_000
    """largest number of bytes of memory to answer a request, in addition to the data; on Linux"""
    disk_bytes: Count = 20_000_000_000
    """largest number of bytes on the disk for all runs; a run is deleted when nobody asked for it
    in a month"""

    def __post_init__(self) -> None:
        divisions(self.subgroups)

    @property
    def allowed_methods(self) -> tuple[str, ...]:
        """Names of all methods that may run here."""
        if self.methods is None:
            return _known_methods()
        return self.methods


@dataclass(frozen=True)
class Data(Reading):
    """The source of the samples, `path` or `python`, and how files are read: the columns and
    options of `Reading`.
    """

    path: str = ""
    """a data set: a folder of class folders, a table, a file of arrays, or a name (see `ekiden
    list`)"""
    sql: str = ""
    """a file with an SQL query that gives the rows of a table; see `ekiden.readers.query`"""
    python: str = ""
    """FILE.py:FUNCTION; the function takes nothing and returns an `ekiden.data` Dataset or
    FederatedData"""
    size: CountOrZero = 0
    """side of the images in pixels; 0 keeps their size"""
    classes: tuple[str, ...] = ()
    """class names in the order that all silos share; by default those found here, sorted"""
    task: TaskKind = ""
    """what the labels mean (see docs/tasks.md); by default inferred from their values"""
    val_fraction: BelowOne = 0.1
    """share of the training data that is used to select epochs"""
    part: Literal["", "external"] = ""
    """external: nothing is trained here, and models are evaluated on all rows; by default a fifth
    is held out for the test if no test part is given"""
    fingerprints: str = ""
    """a secret text that all silos share: `ekiden silo sums` then tells 8 bytes for each row, by
    which rows that several silos hold are found. By default nothing is told about single rows"""
    agreed: str = ""
    """a file with what all silos agreed on, made by `ekiden federation agree`: the scaling of a
    table and of numbers to predict, and how many training samples each class has, for
    --class-weights"""

    @property
    def reading(self) -> Reading:
        """Return how files are read."""
        return Reading(**{f.name: getattr(self, f.name) for f in fields(Reading)})


@dataclass(frozen=True)
class Link(Checked):
    """How to reach the coordinator's SuperLink."""

    address: str = ""
    """HOST:PORT"""
    certificate: str = ""
    """PEM file of the authority that signed the SuperLink's certificate; by default the system's
    authorities"""
    key: str = ""
    """the silo's private key, made by `ekiden silo keys`; by default NAME.key"""
    peers: str = "peers"
    """folder with the public key NAME.pub of every other silo"""

    def __post_init__(self) -> None:
        if self.address:
            check_address(self.address)


@dataclass(frozen=True)
class Pretrained(Checked):
    """Networks and values that others trained, for runs that need them. A run cannot make a silo
    read other files.
    """

    folder: str = "pretrained"
    """folder that holds them by name: a folder with config.json and model.safetensors, or a
    safetensors file"""


@dataclass(frozen=True)
class SiloFile:
    """The content of a `silo.toml`."""

    path: Path
    name: str
    folder: Path
    """where the silo keeps what a run needs; `NAME-silo` next to the file by default"""
    data: Data = field(default_factory=Data)
    """the only data set, or the chosen one of several"""
    named: Mapping[str, Data] = field(default_factory=dict)
    """several data sets, each a table [data.NAME]; a run says which one it wants"""
    limits: Limits = field(default_factory=Limits)
    hardware: Hardware = field(default_factory=Hardware)
    link: Link = field(default_factory=Link)
    pretrained: Pretrained = field(default_factory=Pretrained)
    metrics: Metrics = field(default_factory=Metrics)
    allow: Allow = field(default_factory=dict)
    """values that hyperparameters of a method may have here"""
    ruled: Mapping[str, date] = field(default_factory=dict)
    """the last day of methods whose table [allow.METHOD] agrees to plans"""

    def least_clients(self, *, measured: bool = False) -> int:
        """Return the smallest number of silos in a run that trains, or is `measured`."""
        if measured and self.limits.own_figures:
            return 1
        # one that joined later counts from its first run on: the others may not know it yet
        known = {self.name, *(path.stem for path in self.peers.glob("*.pub"))} - self.new_peers
        # alone with the coordinator, masks would hide nothing
        return self.limits.min_clients or max(2, len(known))

    @property
    def new_peers(self) -> set[str]:
        """Return the silos whose keys a later roster added, and with which no run began so far."""
        file = self.folder / _NEW_PEERS
        return {*read_text(file).split()} if file.exists() else set()

    def meet(self, names: Collection[str]) -> None:
        """Note that a run among these silos begins."""
        if new := self.new_peers & {*names}:
            self.note_new(self.new_peers - new)

    def note_new(self, names: Collection[str]) -> None:
        """Note which silos are new."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(self.folder / _NEW_PEERS, ["\n".join(sorted(names)).encode()])

    @property
    def pretrained_folder(self) -> Path:
        """Folder in which the silo keeps networks that others trained."""
        return self.beside(self.pretrained.folder)

    @property
    def key(self) -> Path:
        """The silo's private key."""
        return self.beside(self.link.key or f"{self.name}.key")

    @property
    def peers(self) -> Path:
        """Folder with the public keys of the other silos."""
        return self.beside(self.link.peers)

    def beside(self, path: str) -> Path:
        """Return a path of the file, relative to the file's folder."""
        return self.path.parent / Path(path).expanduser()

    def holding(self, name: str) -> "SiloFile":
        """Return the file with the data set of this name; "" is the only one.

        Raises:
            UserError: there is not a data set of this name.
        """
        if not name and not self.named:
            return self
        if name not in self.named:
            raise UserError(
                f"{self.name} holds no data set {name[:80]!r}, but "
                f"{', '.join(self.named) or 'one without a name'}: choose by --data, or leave it out"
            )
        return replace(self, data=self.named[name])

    def load(self) -> Held:
        """Load the silo's data."""
        return self._own(self.read())

    def _own(self, found: Dataset | FederatedData) -> Held:
        if isinstance(found, Dataset):
            found = in_order(found, self.data.classes)
            if found.least:
                raise UserError(
                    f"{self.path}: silos agree on the scaling of a table, and of numbers to "
                    f"predict, before they start: run `ekiden silo sums {self.path.name}` at each, "
                    "`ekiden federation agree SUMS...` at the coordinator, then name its file by "
                    "data.agreed"
                )
            kept = 0.0 if self.data.part else self.data.val_fraction
            found = split(found, Iid(), 1, seed=0, val_fraction=kept)
        mine = [c for c in found.clients if c.name == self.name] or list(found.clients)
        if len(mine) != 1:
            raise UserError(
                f"{self.path}: the data are divided among {len(mine)} clients, none called "
                f"{self.name!r}"
            )
        client = replace(mine[0], name=self.name)
        if not len(client.train):
            raise UserError(f"{self.path}: the silo has no training sample")
        if self.data.task not in ("", found.dataset.task.kind):
            raise UserError(
                f"{self.path}: the labels are of {found.dataset.task.kind}, not of "
                f"{self.data.task} (data.task)"
            )
        try:
            terms(found.dataset.task)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None
        return found.dataset, client

    def sums(self, times: Sequence[float] = ()) -> ColumnSums:
        """Return what the silo reports about its training rows, so that all silos can scale a table
        alike.

        Args:
            times: between which events of survival are counted.

        Raises:
            UserError: the difference from what it reported before would show single rows.
        """
        found, client = self.unscaled()
        table = Table.of(found.inputs)
        columns = ", ".join((*table.numeric, *table.categorical))
        same = {"rows": client.train.digest.hex()}
        if times:
            same["times"] = " ".join(f"{time:g}" for time in times)
        kind = f"columns {columns}" if columns else "labels"
        told.note(self.folder, ToldSums(kind, same))
        rows = list[bytes]()
        secret = ""
        if salt := self.data.fingerprints.encode():
            if not _LEAST_SALT <= len(salt) <= _MOST_SALT:
                raise UserError(
                    f"{self.path}: data.fingerprints is a secret of {_LEAST_SALT} to {_MOST_SALT} "
                    "bytes"
                )
            for part in (found.train, found.test):
                rows += fingerprints(part.x, found.inputs, salt)
            secret = scrypt(
                salt, salt=b"fingerprints", n=1 << 14, r=8, p=1, dklen=8
            ).hex()  # slow to guess
        sums = told_by(client, found, times)
        return replace(
            sums, silo=self.name, rows=tuple(sorted(row.hex() for row in rows)), secret=secret
        )

    def unscaled(self) -> Held:
        """Load rows on whose scale the silos have not agreed yet, or other samples, whose classes
        alone are counted.
        """
        found = self.read()
        if isinstance(found, Dataset) and found.least and not self.data.python:
            held = split(
                replace(found, least=0), Iid(), 1, seed=0, val_fraction=self.data.val_fraction
            )
            return found, held.clients[0]
        dataset, client = self._own(found)
        if dataset.inputs.agreed or not isinstance(dataset.task, Classification):
            raise UserError(
                f"{self.path}: only a table that is not scaled yet, numbers to predict, and "
                "numbers of samples by class are agreed on (leave out data.agreed)"
            )
        return replace(dataset, least=self.data.min_count), client

    @property
    def agreed(self) -> Scaling:
        """Return what all silos agreed on; nothing without data.agreed."""
        if not self.data.agreed:
            return Scaling(None, {})
        return read_agreed(self.beside(self.data.agreed))

    @property
    def schemas(self) -> list[Path]:
        """Return the files that hold the study's schema: that of data.schema, and what the silos
        agreed on.
        """
        given = []
        if self.data.schema:
            given.append(self.beside(self.data.schema))
        if self.agreed.schema:
            given.append(self.beside(self.data.agreed))
        return given

    @property
    def schema(self) -> str:
        """Return the study's schema as text; "" without one."""
        texts = {schemas.read(file).text() for file in self.schemas}
        if len(texts) > 1:
            raise UserError(
                f"{self.path}: the schema of data.schema is not that of data.agreed: leave out "
                "data.schema"
            )
        if texts and self.data.python:
            raise UserError(
                f"{self.path}: a schema is for files (data.path), not for data.python: leave it out"
            )
        return "".join(texts)

    def read(self) -> Dataset | FederatedData:
        """Load the data set that [data] names; errors about its contents are for this silo only."""
        # the reader looks at [data], not at a command
        with command_line(within=False):
            try:
                return self._call() if self.data.python else self._read()
            except PrivateError:
                raise
            except UserError as error:
                raise PrivateError(
                    str(error), "it cannot read its data; its own log says why"
                ) from error

    def _read(self) -> Dataset:
        data = self.data
        reading = self.data.reading
        # relative to this file, as all paths in it
        if outside.is_file(reading.sample_kind):
            file, _, name = reading.sample_kind.rpartition(":")
            reading = replace(reading, sample_kind=f"{self.beside(file).absolute()}:{name}")
        if self.schema:
            reading = replace(reading, schema=str(self.schemas[-1])).with_schema()
        own = self._queried() if data.sql else self.beside(data.path)
        known = self.agreed
        if known.scales:
            reading = reading.like(known.table)
            asked = AskedData(
                own.stem,
                reading,
                task=data.task,
                inputs=known.table,
                classes=data.classes or None,
                whole=bool(data.part),
            )
            found = known.scaled(assemble([hold(own, reading)], asked))
        else:
            how = reading.chosen()
            if not own.exists() and data.path not in NAMED and Path(data.path).exists():
                raise UserError(
                    f"{self.path}: data.path is relative to this file, and there is no {own}"
                )
            with nullcontext() if own.exists() else at(f"{self.path}: data.path"):
                path = str(own) if own.exists() else data.path
                found = load(
                    path,
                    size=data.size or None,
                    task=data.task,
                    classes=data.classes or None,
                    whole=bool(data.part),
                    **how,
                )
        if found.inputs.ragged:
            # padded to the largest length, so that the samples of all silos have one shape
            train = _padded(found.train, found)
            test = _padded(found.test, found)
            found = replace(found, train=train, test=test)
        return found

    def _queried(self) -> Path:
        """Return a file with the rows of the query, in the silo's folder, which is private."""
        file = self.folder / f"{Path(self.data.sql).stem}.parquet"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(file, [query.rows(self.beside(self.data.sql))])
        return file

    @property
    def query(self) -> str:
        """Return the digest of the query that gives the data; empty without one."""
        return query.digest(self.beside(self.data.sql)) if self.data.sql else ""

    def _call(self) -> Dataset | FederatedData:
        file, _, name = self.data.python.rpartition(":")
        code = f"{self.beside(file)}:{name}"
        if not outside.is_file(code):
            raise UserError(
                f"{self.path}: data.python must be FILE.py:FUNCTION, not {self.data.python!r}"
            )
        # only the silo's operator writes silo.toml, and so chooses this code
        outside.allow(code)
        found = outside.call(code, "ekiden.datasets")
        if not isinstance(found, (Dataset, FederatedData)):
            raise UserError(
                f"{self.path}: {self.data.python} returned a {type(found).__name__}: return what "
                "ekiden.data.from_tensors, load or split give"
            )
        return found


def read(path: Path) -> SiloFile:
    """Read the file at `path`, and check every field."""
    values = read_toml(path, "give the silo.toml of this silo")
    sections: dict[str, type[Any]] = {
        "data": Data,
        "limits": Limits,
        "hardware": Hardware,
        "link": Link,
        "pretrained": Pretrained,
        "metrics": Metrics,
    }
    entries = ("name", "folder", "allow", *sections)
    for key in values:
        if key not in entries:
            raise unknown(f"entry in {path}", key, entries)
    name = check_name(values.get("name"), str(path))
    folder = values.get("folder", f"{name}-silo")
    if not isinstance(folder, str):
        raise UserError(f"{path}: folder must be text, not {folder!r}")
    named: dict[str, Data] = {}
    with at(str(path)):
        tables = values.get("data")
        if isinstance(tables, dict) and all(isinstance(one, dict) for one in tables.values()):
            named = {key: made(Data, listed(one), f"data.{key}") for key, one in tables.items()}
            values["data"] = {}
        parts = {
            key: made(kind, listed(values.get(key, {})), key) for key, kind in sections.items()
        }
        allow, ruled = _allowed(values.get("allow", {}))
    own = path.absolute().parent / Path(folder).expanduser()
    silo = SiloFile(path.absolute(), name, own, **parts, named=named, allow=allow, ruled=ruled)
    for key, data in (named or {"": silo.data}).items():
        if len([*filter(None, (data.path, data.sql, data.python))]) != 1:
            where = f"[data.{key}]" if key else "[data]"
            raise UserError(f"{path}: say where the data are, by path, sql or python in {where}")
    for method in silo.limits.methods or ():
        known = _known_methods()
        if method not in known:
            raise unknown(f"method in {path}", method, known)
    return silo


def _known_methods() -> tuple[str, ...]:
    """Return the names of all methods that run between machines, with a lap too."""
    # the other commands of a silo do not wait for all methods
    from ekiden.methods import LAP, METHODS

    titles = [kind.title() for kind in METHODS if not kind.traits.pools_data]
    return (*titles, *(title + LAP for title in titles), EVALUATE)


def _allowed(values: Any) -> tuple[Allow, dict[str, date]]:
    """Return the tables [allow.METHOD], and last days in them."""
    if not isinstance(values, dict):
        raise UserError("allow must be tables, as in [allow.fedgram]")
    found: dict[str, dict[str, tuple[Any, ...]]] = {}
    ruled = dict[str, date]()
    if not values:
        return found, ruled
    from ekiden.methods import METHODS

    kinds = {kind.title(): kind for kind in METHODS}
    for method, lists in values.items():
        if method not in kinds:
            raise unknown("method in allow", method, kinds)
        if not isinstance(lists, dict):
            raise UserError(f"allow.{method} must be a table, as in [allow.{method}]")
        names = [f.name for f in fields(kinds[method])]
        for name, listed_values in lists.items():
            if name == "until" and type(listed_values) is date:
                ruled[method] = listed_values
                continue
            if name not in names:
                raise unknown(f"hyperparameter in allow.{method}", name, names)
            if not isinstance(listed_values, list) or not listed_values:
                raise UserError(
                    f'allow.{method}.{name} must be a list of allowed values, as in ["chain"]'
                )
            values_of = (
                admitted(f"allow.{method}.{name}", value, hints_of(kinds[method])[name])
                for value in listed_values
            )
            found.setdefault(method, {})[name] = tuple(values_of)
    return found, ruled


def _padded(samples: Samples, dataset: Dataset) -> Samples:
    x = dataset.inputs.padded(samples.x)
    y = samples.y
    if isinstance(dataset.task, LanguageModelling):
        y = F.pad(y, (0, x.shape[1] - samples.x.shape[1]), value=IGNORED)
    return replace(samples, x=x, y=y)


CERTIFICATE = "ca.crt"


def make(
    folder: Path,
    name: str,
    address: str,
    data: str,
    salt: str = "SECRET",
    level: Level = "sums",
    *,
    approve: bool = True,
) -> Path:
    """Make a silo's folder, with `silo.toml` and a key pair, and return the public key's file.

    Data are a path (relative to `silo.toml`), a name of a data set, or FILE.py:FUNCTION. The salt
    is proposed as a secret that silos share; the default is too short to be one. Without `approve`
    nobody is asked before a run begins, as in a federation of one user.
    """
    check_name(name, "the silo")
    with keys.new_folder(folder):
        public = keys.generate(folder / f"{name}.key")
        where = "python" if re.search(r"\.py:\w+$", data) else "path"
        text = f"""name = {json.dumps(name)}

[data]
{where} = {json.dumps(data)}
# label_column = "..."  # of a table; other columns and options as in docs/own-data.md
# a secret that all silos share finds equal rows between silos, see docs/own-data.md:
# fingerprints = {json.dumps(salt)}

[link]
address = {json.dumps(address)}
certificate = "{CERTIFICATE}"

[limits]
level = {json.dumps(level)}  # {TELLS[level]}; see docs/security.md
# what this silo agrees to: methods = ["fedelmy"] and others, see docs/security.md
approve = {json.dumps(approve)}  # whether you read each plan, by `ekiden silo approve`, before a run begins
"""
        write(folder / "silo.toml", [text.encode()])
        read(folder / "silo.toml")
    return public


def join(file: SiloFile, roster: Roster, replace: Collection[str] = ()) -> list[str]:
    """Write the others' keys and the SuperLink's certificate to where `silo.toml` says; return what
    changed.

    The roster comes from the coordinator, who could give keys of its own. So known keys, and the
    certificate, are not replaced unless the operator, who asked that silo, names them: `replace`
    has silos, or `ca.crt`.
    """
    if not file.link.certificate:
        raise UserError(
            f'{file.path}: say where the certificate is to be: [link] certificate = "{CERTIFICATE}"'
        )
    own = roster.key_of.get(file.name)
    if own is None or not keys.same(own, keys.public_of(file.key)):
        raise UserError(
            f"the roster has {'another key of' if own else 'no'} {file.name}: give the coordinator "
            f"{file.key.name}.pub"
        )
    peers = file.peers
    certificate = file.beside(file.link.certificate)
    wanted = {
        peers / f"{name}.pub": key + "\n"
        for name, key in roster.key_of.items()
        if name != file.name
    }
    wanted[certificate] = roster.certificate
    new = {}
    for path, text in wanted.items():
        name = CERTIFICATE if path == certificate else path.stem
        if path.exists() and read_text(path).split() == text.split():
            continue
        if path.exists() and name not in replace:
            raise UserError(
                f"{path} has another key than the roster: ask its owner, by another way than the "
                f"coordinator, and then give --replace {name}"
            )
        new[path] = text
    peers.mkdir(parents=True, exist_ok=True)
    known = {path.stem for path in peers.glob("*.pub")}
    # it is written last: without it the silo has not joined so far
    if known and certificate.exists():
        file.note_new({*roster.silos} - known - {file.name} | file.new_peers)
    told = []
    for path in sorted(peers.glob("*.pub")):
        if path not in wanted:
            path.unlink()
            told.append(f"{path.stem} left: its key is removed")
    for path, text in new.items():
        write(path, [text.encode()])
        told.append(
            f"{path.stem} has the key {keys.fingerprint(text)}"
            if path != certificate
            else f"wrote {path}"
        )
    return told
