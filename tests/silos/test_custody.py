"""The log of who signed what of a run."""

import itertools
import json
from base64 import b64decode, b64encode
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from ekiden.cli.app import call
from ekiden.core.base.errors import UserError
from ekiden.core.base.files import safetensors_chunks, with_digest, write
from ekiden.core.engine.folder import read_lines
from ekiden.methods import FedSeq
from ekiden.silos.coordinator.courier import Lost
from ekiden.silos.coordinator.verify import verify
from ekiden.silos.trust import custody, keys
from ekiden.silos.trust.parcel import Ask, unpack
from tests.silos.sessions import far
from tests.silos.signed import federation


@pytest.mark.slow
def test_what_is_not_as_signed_is_named(tmp_path: Path) -> None:
    nodes, public = federation(tmp_path)
    run = tmp_path / "run"
    far(FedSeq(epochs=1), nodes, run, public)
    rows, tallies = read_lines(run / "custody.jsonl")[:3], read_lines(run / "custody.jsonl")[3:]

    def wrong(*changed: dict[str, Any]) -> str:
        (run / "custody.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in (*changed, *tallies))
        )
        return "; ".join(verify(run).wrong)

    def forged(row: dict[str, Any], **changes: Any) -> dict[str, Any]:
        said = json.loads(b64decode(row["payload"])) | changes
        return row | {"payload": b64encode(json.dumps(said).encode()).decode()}

    def signed(row: dict[str, Any], **changes: Any) -> dict[str, Any]:
        entry = replace(custody.parse(json.dumps(row)), **changes)
        sign = partial(keys.sign, tmp_path / f"{entry.client}.key")
        found: dict[str, Any] = json.loads(custody.signed(entry, sign))
        return found

    assert wrong(*rows) == ""
    assert wrong(*reversed(rows)) == ""
    assert "step 2, client-1, train: nobody signed it" in wrong(rows[0], rows[2])
    assert "nobody signed 1-0-train of client-1" in wrong(rows[0], rows[2])
    assert "is not the model that client-2 signed" in wrong(*rows[:2])
    assert "the signature is not client-1's" in wrong(
        rows[0], forged(rows[1], samples=[10**6, 0, 0]), rows[2]
    )
    # A task's signature under the name of a measurement, and of another silo.
    other = {"payloadType": rows[-1]["payloadType"].replace("hop", "tally")}
    assert "cannot be read" in wrong(rows[0] | other, *rows[1:])
    assert "cannot be read" in wrong(rows[0] | {"signatures": rows[1]["signatures"]}, *rows[1:])
    assert "cannot be read" in wrong(rows[0] | {"signatures": []}, *rows[1:])
    assert "did not take 1-0-train of client-1" in wrong(
        rows[0], signed(rows[1], given="0" * 64), rows[2]
    )
    assert "the method does not ask for it" in wrong(*rows, signed(rows[2], step=0))
    assert "is there twice" in wrong(*rows, rows[0])
    assert "of another run" in wrong(signed(rows[0], terms="0"), *rows[1:])
    assert "asked for something else" in wrong(signed(rows[0], arguments="0"), *rows[1:])
    assert "cannot be read" in wrong({"hop": 3}, *rows)
    assert wrong(*rows) == ""
    tensors = safetensors.torch.load_file(run / "model.safetensors")
    name = next(iter(tensors))
    tensors[name].view(-1)[0] += 1e-3
    write(run / "model.safetensors", with_digest(safetensors_chunks(tensors, {})))
    assert "model.safetensors is not the model that client-2 signed as 2-0-train" in wrong(*rows)
    with pytest.raises(
        UserError, match=r"is not what the silos signed: model\.safetensors is not the model"
    ):
        call(["verify", str(run), "--keys", str(public_folder(tmp_path, public))])
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(
        json.dumps(config | {"recipe": config["recipe"] | {"seed": 4}})
    )
    assert "config.json says recipe.seed 4, what silos signed gives 3" in wrong(*rows)


def public_folder(folder: Path, public: dict[str, str]) -> Path:
    (folder / "keys").mkdir()
    for name, key in public.items():
        (folder / "keys" / f"{name}.pub").write_text(key)
    return folder / "keys"


def test_custody_of_a_run_with_lost_messages_and_a_resume(tmp_path: Path) -> None:
    nodes, public = federation(tmp_path)
    method, count = FedSeq(epochs=1, rounds=2), itertools.count()

    def lose(node: int, data: bytes) -> Lost | None:
        if unpack(data, Ask)[0].kind == "task" and next(count) == 3:
            raise KeyboardInterrupt
        return None

    nodes.lose = lose
    with pytest.raises(KeyboardInterrupt):
        far(method, nodes, tmp_path / "run", public)
    killed = verify(tmp_path / "run", public)
    assert killed.wrong == ()
    assert "the run has not ended: 3 steps are done" in str(killed.unproven[0])
    far(method, nodes, tmp_path / "run", public)
    verdict = verify(tmp_path / "run", public)
    assert (len(verdict.hops), verdict.wrong, verdict.result) == (6, (), True)


def test_a_silo_that_signs_something_else_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, public = federation(tmp_path)
    monkeypatch.setattr("ekiden.silos.trust.custody.model_digest", lambda value, given: 3)
    with pytest.raises(UserError, match="gives no account of"):
        far(FedSeq(epochs=1), nodes, tmp_path / "run", public)
