"""What a coordinator, a silo or a relay tries by what a run says about its network, its frozen
values and its samples.

Each test is written as the attacker would write it, against the silo's own `answer`.
"""

import json
import pickle
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ekiden.core.base import outside
from ekiden.core.base.errors import UserError
from ekiden.core.engine import wire
from ekiden.core.engine.folder import values_digest
from ekiden.core.engine.method import INITIAL
from ekiden.core.models.catalogue import build
from ekiden.core.training.network import Network
from ekiden.methods import FedAvg, FedSeq
from ekiden.methods.blocks.rounds import Reply
from ekiden.readers.kinds import Table, Tokens
from ekiden.readers.scaling import Scaling
from ekiden.silos.coordinator import session
from ekiden.silos.silo.silo_file import read
from ekiden.silos.trust.parcel import Answer, Ask, Hello, pack, unpack
from tests.silos.across.test_attacks import Attacker, files_of, finished, terms_in
from tests.silos.fakes import NAMES, FakeNodes, silo_file, with_keys
from tests.silos.sessions import assert_equal, far, here, plan_of
from tests.silos.test_session import Crooked

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")

LIMITS = '[limits]\nmethods = ["fedseq", "fedavg"]\n'
METHOD = FedSeq(epochs=1)


def federation(folder: Path, more: str = "") -> tuple[FakeNodes, dict[str, str]]:
    """Three silos, whose folders of pretrained networks are `pretrained`."""
    files, public = with_keys(folder, NAMES, LIMITS + more)
    return FakeNodes(files), public


def weights(path: Path, seed: int) -> Path:
    """A file with values of the runs' network."""
    torch.manual_seed(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(dict(build("mlp", (1, 8, 8), 10).state_dict()), path)
    return path


def begun(folder: Path, more: str = "", **plan: Any) -> tuple[FakeNodes, dict[str, str], Attacker]:
    """A finished run; whoever knows its terms tries others under new ids, `fresh`, and under its
    own."""
    nodes, public = federation(folder, more)
    far(METHOD, nodes, folder / "run", public, **plan)
    return nodes, public, Attacker(nodes, terms_in(nodes))


def as_usual(folder: Path) -> Attacker:
    """Whoever knows the terms of a run over silos without settings of their own."""
    nodes, _ = finished(folder)
    return Attacker(nodes, terms_in(nodes))


def refused(attacker: Attacker, **changes: Any) -> str:
    """What client-0 says to a task under other terms and a new run id, of which it stores
    nothing."""
    folder = attacker.nodes.files[100].folder
    before = files_of(folder)
    thief = attacker.under(run=secrets.token_hex(8), **changes)
    said = [
        thief.ask(100, kind, task="train", key="0-0-train")[0].error
        for kind in ("hello", "task", "value")
    ]
    assert said[0]
    assert said.count(said[0]) == 3
    assert files_of(folder) == before
    return said[0]


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Notes the largest tensor that is made and takes memory."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                self.found = max(self.found, tensor.numel())
        return made


@contextmanager
def largest() -> Iterator[Largest]:
    with Largest() as found:
        yield found


# Which files a silo reads, and what it executes.


def test_a_run_cannot_have_code_executed_that_the_operator_trusts(tmp_path: Path) -> None:
    """The operator has run a file of his own here; a run names another function of it."""
    code, marker = tmp_path / "own_tools.py", tmp_path / "executed"
    code.write_text(
        f"import pathlib\ndef clean(shape, classes):\n    pathlib.Path({str(marker)!r}).touch()\n"
    )
    outside.trust(f"{code}:clean")
    attacker = as_usual(tmp_path)
    assert "own_tools.py:clean" in refused(attacker, model=f"{code}:clean")
    with pytest.raises(UserError, match="which client-0 does not trust"):
        far(METHOD, attacker.nodes, tmp_path / "other", model=f"{code}:clean")
    assert not marker.exists()


@pytest.mark.parametrize(
    "form",
    ["{outside}", "../secret.safetensors", "./../secret.safetensors", "a/../../secret.safetensors"],
)
def test_a_run_cannot_name_values_outside_the_silos_folder(form: str, tmp_path: Path) -> None:
    """Also where it knows their digest, as it does of a network that is public."""
    secret = weights(tmp_path / "secret.safetensors", 1)
    (tmp_path / "pretrained").mkdir()
    attacker = as_usual(tmp_path)
    known = replace(attacker.terms, recipe=replace(attacker.terms.recipe, pretrained=str(secret)))
    digest = values_digest(known.builder()())
    said = refused(attacker, pretrained=form.format(outside=secret), values=digest)
    assert "the run needs 'secret.safetensors', which is not in" in said
    assert "pretrained.folder in the silo.toml" in said


class Evil:
    """Executed by whoever unpickles it."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_a_pickle_in_the_silos_folder_is_never_unpickled(tmp_path: Path) -> None:
    folder, marker = tmp_path / "pretrained", tmp_path / "executed"
    folder.mkdir()
    evil = pickle.dumps(Evil(marker))
    for name in ("net.pt", "net.bin", "net.safetensors"):
        (folder / name).write_bytes(evil)
    attacker = as_usual(tmp_path)
    for name in ("net.pt", "net.bin", "net.safetensors"):
        assert "is not a safetensors file, or is damaged" in refused(
            attacker, pretrained=name, values="0" * 32
        )
    assert not marker.exists()
    pickle.loads(evil)
    assert marker.exists()  # it is a pickle that works


@pytest.mark.slow
def test_a_folder_of_a_network_gives_no_code_and_no_pickle(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    marker = tmp_path / "executed"
    for name, files in {
        "pickled": {
            "pytorch_model.bin": pickle.dumps(Evil(marker)),
            "config.json": b'{"model_type": "bert"}',
        },
        "coded": {
            "config.json": b'{"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModel": "own.M"}}',
            "own.py": f"import pathlib\npathlib.Path({str(marker)!r}).touch()\n".encode(),
        },
    }.items():
        (tmp_path / "pretrained" / name).mkdir(parents=True)
        for file, content in files.items():
            (tmp_path / "pretrained" / name / file).write_bytes(content)
    attacker = as_usual(tmp_path)
    for name in ("pickled", "coded"):
        assert f"pretrained/{name} cannot be read" in refused(
            attacker, model=f"hf:{name}", values="0" * 32
        )
    assert not marker.exists()


def test_a_silo_does_not_fetch_networks(tmp_path: Path) -> None:
    attacker = as_usual(tmp_path)
    assert "comes from a hub, which a silo does not ask" in refused(
        attacker, model="timm:resnet18", values="0" * 32
    )
    assert "the run needs 'resnet-18', which is not in" in refused(
        attacker, model="hf:microsoft/resnet-18"
    )


# Whose values a run has.


def test_a_run_has_the_silos_own_frozen_values_or_none(tmp_path: Path) -> None:
    """Others, or none named: the network would not be the one that all parties agreed on."""
    file = weights(tmp_path / "pretrained" / "net.safetensors", 1)
    _, public, attacker = begun(tmp_path, pretrained=str(file), train="head")
    assert attacker.terms.values
    assert_equal(
        far(METHOD, attacker.nodes, tmp_path / "again", public, pretrained=str(file), train="head"),
        here(METHOD, pretrained=str(file), train="head"),
    )
    other = weights(tmp_path / "other" / "net.safetensors", 2)
    recipe = replace(attacker.terms.recipe, pretrained=str(other))
    theirs = values_digest(replace(attacker.terms, recipe=recipe).builder()())
    for values in ("", "0" * 32, theirs, attacker.terms.values[:8], attacker.terms.values.upper()):
        assert "client-0 has other values of mlp" in refused(attacker, values=values)
    weights(file, 2)  # the silo's copy changes while the run goes on
    answer, _ = attacker.ask(100, "value", key="0-0-train")
    assert "client-0 has other values of mlp" in answer.error


def assert_tells_its_name_only(body: Any) -> None:
    """A silo that refuses proves who it is, and says nothing of its data or keys."""
    hello: Hello = wire.decode(body, Hello)
    assert hello == Hello(hello.version, signature=hello.signature)


def test_a_network_of_the_silos_own_does_not_come_out(tmp_path: Path) -> None:
    """It is in the folder for another run. Somebody who does not know its values cannot obtain it
    as a model."""
    weights(tmp_path / "pretrained" / "private.safetensors", 7)
    attacker = as_usual(tmp_path)
    for train in ("all", "head"):
        thief = attacker.under(
            run=secrets.token_hex(8), pretrained="private.safetensors", train=train, values="0" * 32
        )
        with pytest.raises(
            wire.WireError
        ):  # no key to seal for: it greets nobody under these terms
            thief.task(100, 0, (INITIAL,), readers=(thief.reader(),))
        answer, body = thief.ask(100, "hello")
        assert "has other values" in answer.error
        assert_tells_its_name_only(body)


TERMS: dict[str, dict[str, Any]] = {
    "train": {"train": "head"},
    "all": {"train": "all", "values": ""},
    "pretrained": {"pretrained": ""},
    "values": {"values": "0" * 32},
    "inputs": {"inputs": json.dumps(Tokens().to_json())},
}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(name, marks=[] if name in ("train", "values") else pytest.mark.slow)
        for name in TERMS
    ],
)
def test_what_is_trained_cannot_change_within_a_run(other: str, tmp_path: Path) -> None:
    """Between two requests: first adapters, then all, so that the next hop would show what was
    frozen."""
    file = weights(tmp_path / "pretrained" / "net.safetensors", 1)
    _, _, attacker = begun(tmp_path, pretrained=str(file), train="last:1")
    thief = attacker.under(**TERMS[other])
    for kind in ("value", "task", "evaluate", "status", "hello"):
        assert (
            "has other terms at client-0"
            in thief.ask(100, kind, key="0-0-train", task="train")[0].error
        )


# What it costs.

BOMBS: list[tuple[dict[str, Any], str]] = [
    ({"train": "lora:r=1000000000"}, "does not describe adapters"),
    ({"train": "lora:r=4096,alpha=1e400"}, "does not describe adapters"),
    ({"train": "last:1000000000"}, "is not a part of a network"),
    ({"train": "last:9999"}, "blocks before its head"),
    (
        {"train": "lora:r=4096"},
        r"the model has 1\d{7} bytes, client-0 allows 1000000 \(limits.model_bytes",
    ),
    (
        {"train": "lora:targets=" + "+".join(["0"] * 20_000)},
        "no layer of the features is called '0'",
    ),
    ({"model": "resnet18", "train": "head"}, "the network with its frozen part has 44"),
    ({"model": "resnet18"}, "the model has 44"),
    ({"inputs": "[" * 100_000}, "the terms of the run cannot be read"),
    ({"task": "[" * 100_000}, "the terms of the run cannot be read (the task"),
    ({"inputs": " " * 300_000}, "the terms of the run cannot be read: they have 301"),
    ({"seed": 10**4000}, "1"),
]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Attacker:
    """Of silos with narrow limits; what they refuse leaves nothing there."""
    folder = tmp_path_factory.mktemp("attacked")
    nodes, public = federation(folder, "model_bytes = 1000000\nmemory = 10000000\n")
    far(METHOD, nodes, folder / "run", public)
    return Attacker(nodes, terms_in(nodes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param(
            *case, marks=[pytest.mark.slow] if "lora" in str(case[0]) else [], id=case[1][:30]
        )
        for case in BOMBS
    ],
)
def test_large_networks_are_refused_before_they_are_made(
    changes: dict[str, Any], said: str, attacked: Attacker
) -> None:
    if "lora" in str(changes):
        pytest.importorskip("peft")
    with largest() as made:
        if "seed" in changes:
            thief = attacked.under(run=secrets.token_hex(8), **changes)
            assert thief.ask(100, "hello")[0].error.count("\n") == 0
        else:
            answer = refused(attacked, **changes)
            assert re.search(said if "\\" in said else re.escape(said), answer), answer
    assert made.found < 300_000  # all digits have 115,008 pixels


# What the samples are said to be.

COLUMNS = Table(("age",), ("ward",), (40.0,), (10.0,), (), (("a", "b"),))


def tables(folder: Path) -> FakeNodes:
    """A silo that holds a table, scaled as agreed, of which it leaves out the column of
    diagnoses."""
    lines = [
        f"{20 + k % 50},{'ab'[k % 2]},secret,{'yes' if k % 50 > 25 else 'no'}" for k in range(100)
    ]
    (folder / "t.csv").write_text("age,ward,diagnosis,died\n" + "\n".join(lines) + "\n")
    (folder / "agreed.json").write_text(json.dumps(Scaling(COLUMNS, {}).to_json()))
    files = []
    for name in ("a", "b"):
        path = folder / f"{name}.toml"
        path.write_text(
            f'name = "{name}"\n[data]\npath = "t.csv"\nlabel_column = "died"\ndrop_columns = '
            '["diagnosis"]\n'
            'agreed = "agreed.json"\n[hardware]\nthreads = 1\n[limits]\nlevel = "models"\n'
        )
        files.append(read(path))
    return FakeNodes(files)


CLAIMS: dict[str, Any] = {
    "a column that was not shared": replace(COLUMNS, categorical=("diagnosis",)),
    "a further column": replace(
        COLUMNS, categorical=("ward", "diagnosis"), vocabularies=(("a", "b"), ("secret",))
    ),
    "another vocabulary": replace(COLUMNS, vocabularies=(("a",),)),
    "another scale": replace(COLUMNS, scale=(1e-30,)),
    "texts": Tokens(vocabulary=10**9, length=10**9),
}


def test_samples_are_read_as_the_silo_reads_them(tmp_path: Path) -> None:
    nodes = tables(tmp_path)
    far(METHOD, nodes, tmp_path / "run", clients="a,b", model="table_mlp")
    attacker = Attacker(nodes, terms_in(nodes))
    for what, claim in CLAIMS.items():
        inputs = json.dumps(claim.to_json(), sort_keys=True)
        assert "and the run are of different inputs" in refused(attacker, inputs=inputs), what
    odd = [json.dumps({**COLUMNS.to_json(), "centre": [float("inf")]})]
    odd += [
        json.dumps({**COLUMNS.to_json(), "scale": [value]})
        for value in (float("nan"), 0, "x", True)
    ]
    odd += ["{}", '{"kind": "pickle"}', "null", '{"kind": ["table"]}', "{"]
    for inputs in odd:
        assert refused(attacker, inputs=inputs), inputs
    vocabulary = replace(COLUMNS, vocabularies=(("x" * 10**7,),))
    assert "unreadable message" in refused(attacker, inputs=json.dumps(vocabulary.to_json()))


def test_an_agreed_scaling_that_is_none_is_refused_by_the_silo(tmp_path: Path) -> None:
    """The coordinator makes that file."""
    nodes = tables(tmp_path)
    file = tmp_path / "agreed.json"
    for name, value in (
        ("centre", [float("nan")]),
        ("scale", [float("inf")]),
        ("scale", [0.0]),
        ("vocabularies", []),
    ):
        file.write_text(json.dumps({**COLUMNS.to_json(), name: value}))
        answer, _ = unpack(
            FakeNodes([nodes.files[100]]).silo(100).answer(pack(Ask("hello"))), Answer
        )
        assert answer.error, (name, value)
        assert "\n" not in answer.error


@pytest.mark.parametrize(
    "name",
    [
        "mean",
        "training",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("std", "hyperparameters", "augment")),
    ],
)
def test_terms_hold_no_numbers_that_are_none(name: str, tmp_path: Path) -> None:
    attacker = as_usual(tmp_path)
    for text in ("NaN", "Infinity", "-Infinity", "1e999"):
        values = json.loads(attacker.terms.text()) | {"run": secrets.token_hex(8), name: "HERE"}
        inside = {
            "mean": "[{}]",
            "std": "[{}]",
            "hyperparameters": '{{"epochs": {}}}',
            "training": '{{"lr": {}}}',
        }
        part = inside.get(name, '{{"crop": 0, "flip": false, "rotation": {}}}').format(text)
        ask = Ask("hello", json.dumps(values).replace('"HERE"', part))
        answer, body = unpack(attacker.nodes.silo(100).answer(pack(ask)), Answer)
        assert answer.error, part
        assert "\n" not in answer.error
        assert_tells_its_name_only(body)


# A silo that lies, a relay that listens.


def test_a_silo_that_sends_more_than_what_is_trained_is_named(tmp_path: Path) -> None:
    """The whole network, although only the head is trained."""
    nodes = FakeNodes([silo_file(tmp_path, name) for name in NAMES])
    whole = Network(build("mlp", (1, 8, 8), 10)).weights()
    honest = FakeNodes.silo

    def change(answer: Answer, reply: Reply) -> tuple[Answer, Reply]:
        return answer, reply._replace(model=whole)

    nodes.silo = lambda node: (  # type: ignore[method-assign]
        Crooked(honest(nodes, node), "value", change) if node == 101 else honest(nodes, node)
    )
    with pytest.raises(
        UserError, match=r"silo client-1 sent a value .* model of another shape or type"
    ):
        far(FedAvg(rounds=1, epochs=1), nodes, tmp_path / "run", train="head")


SAID: dict[str, dict[str, Any]] = {
    "inputs": {"inputs": json.dumps(COLUMNS.to_json())},
    "no inputs": {"inputs": "[" * 100_000},
    "NaN": {"inputs": '{"kind": "table", "centre": [NaN]}'},
    "shape": {"shape": (10**12, 10**12)},
    "classes": {"classes": ("\x1b[2J\nekiden ended: well", *("x" * 1000 for _ in range(1000)))},
    "mean": {"mean": (float("nan"),)},
}


@pytest.mark.parametrize("who", [100, 101])
@pytest.mark.parametrize("what", SAID)
def test_what_a_silo_says_of_its_samples_is_one_line(what: str, who: int, tmp_path: Path) -> None:
    """The run does not begin; the line is short, and moves no cursor."""
    nodes, public = federation(tmp_path)
    honest = FakeNodes.silo

    def say(answer: Answer, hello: Hello) -> tuple[Answer, Hello]:
        return answer, replace(hello, holds=replace(hello.holds, **SAID[what]))

    nodes.silo = lambda node: (  # type: ignore[method-assign]
        Crooked(honest(nodes, node), "hello", say) if node == who else honest(nodes, node)
    )
    with pytest.raises(UserError, match=r"client-0 and client-\d") as refusal:
        far(METHOD, nodes, tmp_path / "run", public)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 1000
    assert not (tmp_path / "run").exists()


def test_a_refusal_of_a_silo_is_one_line_at_the_coordinator(tmp_path: Path) -> None:
    nodes, public = federation(tmp_path)
    bad = pack(Answer("client-1", error="no\n\x1b[2Jekiden ended: all is well\r" + "x" * 10**6))
    nodes.corrupt = {101: bad}
    said: list[str] = []
    with pytest.raises(UserError) as refusal:
        session.run(
            plan_of(METHOD, patience=0.01), nodes, tmp_path / "run", public, said.append, poll=0
        )
    for line in (str(refusal.value), *said):
        assert line.isprintable()
        assert len(line) < 1500
    assert any("no [2Jekiden ended: all is well xxx" in line for line in said)


@pytest.mark.parametrize("train", ["head", pytest.param("lora:r=4", marks=pytest.mark.slow)])
def test_neither_frozen_nor_trained_values_are_on_the_wire(train: str, tmp_path: Path) -> None:
    """A relay of messages; in the model itself the same search finds what is trained."""
    pytest.importorskip("peft")
    file = weights(tmp_path / "pretrained" / "net.safetensors", 1)
    frozen = [
        t
        for n, t in safetensors.torch.load_file(file).items()
        if t.ndim == 2 and not n.startswith("head")
    ]
    folder = tmp_path / "silos"
    weights(folder / "pretrained" / "net.safetensors", 1)
    nodes, public = federation(folder, "")
    result = far(METHOD, nodes, folder / "run", public, pretrained=str(file), train=train)
    wires = b"".join([data for _, data in nodes.log] + nodes.said)
    assert result.weights is not None
    trained = [
        p[:8].numpy().tobytes() for p in torch.split(result.weights.params, 100) if len(p) >= 8
    ]
    told = [p for p in trained if p != bytes(32)]
    assert sum(p in wire.encode(result.weights) for p in told) > 5
    assert not any(p in wires for p in told)
    assert not any(t.flatten()[:8].numpy().tobytes() in wires for t in frozen)
