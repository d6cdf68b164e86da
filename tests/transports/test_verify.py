"""A run folder that somebody changed or made up does not pass for what the silos signed."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import safetensors.torch

from ekiden import cli_silos
from ekiden.core import wire
from ekiden.core.folder import Marks, read_lines
from ekiden.core.method import INITIAL, Method, Model, Ref
from ekiden.core.store import read
from ekiden.errors import UserError
from ekiden.learning.weights import Weights
from ekiden.methods import FedAvg, FedSeq, Local
from ekiden.transports.flower.courier import Lost
from ekiden.transports.flower.parcel import Ask, unpack
from ekiden.transports.flower.verify import verify
from tests.transports.fakes import NAMES, FakeNodes, with_keys
from tests.transports.test_remote import far

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")

LIMITS = '[limits]\nmethods = ["fedseq", "fedavg", "local"]\n'


@dataclass(frozen=True)
class Made:
    """A run: its folder, the silos' public keys, the result."""

    method: Method
    run: Path
    public: dict[str, str]
    model: Weights | None

    def wrong(self) -> str:
        return "; ".join(verify(self.run, self.public).wrong)

    def forge(self, model: Model | None) -> None:
        """Say that this is the model of the last state."""
        file = self.run / "state.safetensors"
        state, marks = read(file, tuple[type(self.method.start()), Marks])  # type: ignore[misc]
        file.write_bytes(b"".join(wire.chunks((replace(state, model=model), marks))))

    def change_model(self, name: str = "model.safetensors") -> None:
        tensors = safetensors.torch.load_file(self.run / name)
        next(iter(tensors.values())).view(-1)[0] += 1e-3
        safetensors.torch.save_file(tensors, self.run / name)

    def copied(self, folder: Path) -> "Made":
        return replace(self, run=Path(shutil.copytree(self.run, folder / "run")))

    def keys(self, folder: Path) -> Path:
        folder.mkdir()
        for name, key in self.public.items():
            (folder / f"{name}.pub").write_text(key)
        return folder


def make(method: Method, folder: Path, away: str = "") -> Made:
    """A run; with `away`, one without this silo."""
    files, public = with_keys(folder, NAMES, LIMITS)
    nodes = FakeNodes(files)

    def lose(node: int, data: bytes) -> Lost | None:
        gone = away and unpack(data, Ask)[0].kind == "task" and node == 100 + NAMES.index(away)
        return Lost("unsent") if gone else None

    nodes.lose = lose
    absent = {"absent": "skip", "patience": 0.01} if away else {}
    return Made(method, folder / "run", public, far(method, nodes, folder / "run", public, **absent).weights)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(FedSeq(epochs=1), tmp_path_factory.mktemp("relay"))


def test_the_state_must_be_the_one_in_which_the_method_ends(relay: Made, tmp_path: Path) -> None:
    """Its file is signed by nobody: a model in the place of a Ref, or another Ref, let any model pass."""
    assert verify(relay.run, relay.public).result
    others: list[Model | None] = [relay.model, Ref("client-1", "1-0-train"), INITIAL, None]
    for number, model in enumerate(others):
        made = relay.copied(tmp_path / str(number))
        made.forge(model)
        assert "state.safetensors is not the state in which the method ends" in made.wrong()
        made.change_model()
        assert "model.safetensors is not the model that client-2 signed as 2-0-train" in made.wrong()


def test_files_that_are_no_result_are_named(relay: Made, tmp_path: Path) -> None:
    made = relay.copied(tmp_path)
    (made.run / "personal").mkdir()
    shutil.copy(made.run / "model.safetensors", made.run / "personal" / "client-0.safetensors")
    assert made.wrong() == "personal/client-0.safetensors is no result of fedseq"


def test_personal_models_are_those_that_silos_signed(tmp_path: Path) -> None:
    made = make(Local(epochs=1), tmp_path)
    assert made.wrong() == ""
    made.change_model("personal/client-1.safetensors")
    assert made.wrong().startswith("personal/client-1.safetensors is not the model that client-1 signed")


def test_a_result_of_the_server_is_verified_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(FedAvg(rounds=1, epochs=1), tmp_path)
    verdict = verify(made.run, made.public)
    assert (verdict.wrong, verdict.result) == ((), False)
    assert "the server reads values in this method: what it made of them" in verdict.remarks[0]
    cli_silos.verify([str(made.run)])
    assert "each signed by its silo, and the result" not in " ".join(capsys.readouterr().out.split())
    made.change_model()
    assert made.wrong() == "model.safetensors is not the model in state.safetensors"


def test_own_keys_do_not_pass_for_those_that_are_given(relay: Made, tmp_path: Path) -> None:
    """A folder made up with keys of one's own, which says in config.json that no silo took part."""
    forged = relay.copied(tmp_path)
    config = json.loads((forged.run / "config.json").read_text())
    (forged.run / "config.json").write_text(json.dumps(config | {"clients": {}}))
    assert "config.json says clients , the terms client-0, client-1, client-2" in forged.wrong()
    other = replace(relay, public={**relay.public, "client-0": relay.public["client-1"]})
    with pytest.raises(UserError, match=r"is not what the silos signed: .*clients"):
        cli_silos.verify([str(forged.run), "--keys", str(other.keys(tmp_path / "keys"))])
    assert any("another key of client-0" in line for line in verify(forged.run, other.public).wrong)
    assert sum("another key of" in line for line in verify(forged.run, {}).wrong) == 3
    (tmp_path / "keys" / "client-2.pub").unlink()
    with pytest.raises(UserError, match=r"there is no public key .*client-2.pub"):
        cli_silos.verify([str(forged.run), "--keys", str(tmp_path / "keys")])


def test_nobody_is_absent_where_the_terms_skip_nobody(relay: Made, tmp_path: Path) -> None:
    """The last hop cut off: its record gone, an unsigned row that says why, the model of the hop before."""
    made = relay.copied(tmp_path)
    rows = read_lines(made.run / "ledger.jsonl")
    cut = rows[-1] | {"step": 2, "source": "client-2", "target": "server", "bytes": 0, "missing": True}
    (made.run / "ledger.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, cut]))
    records = (made.run / "custody.jsonl").read_text().splitlines(keepends=True)
    (made.run / "custody.jsonl").write_text("".join(records[:2]))
    made.forge(Ref("client-1", "1-0-train"))
    assert "step 3, client-2, train: nobody signed it" in made.wrong()


def test_who_was_absent_nobody_signs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make(FedSeq(epochs=1), tmp_path, away="client-1")
    verdict = verify(made.run, made.public)
    assert (verdict.wrong, verdict.result) == ((), True)
    assert verdict.remarks == ("absent, as the ledger says and nobody signs: client-1 in step 2",)
    cli_silos.verify([str(made.run)])
    said = " ".join(capsys.readouterr().out.split())
    assert "verified: 2 tasks, each signed by its silo, and the result is what they gave" in said


def test_a_key_of_a_name_that_means_another_party_is_not_registered(relay: Made, tmp_path: Path) -> None:
    (tmp_path / "server.pub").write_text(relay.public["client-0"])
    with pytest.raises(UserError, match="no silo can be called 'server'"):
        cli_silos.register([str(tmp_path / "server.pub"), "--link", "127.0.0.1:9", "--insecure"])
