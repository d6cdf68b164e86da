"""Measure a finished run's model at silos, also at others than those that trained it."""

import contextlib
import json
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ekiden.clinic.counting import Counting
from ekiden.clinic.noisy import Noisy
from ekiden.core.base.errors import UserError
from ekiden.core.data.samples import Subset
from ekiden.core.engine import wire
from ekiden.core.engine.method import Method
from ekiden.methods import FedAvg, FedGram, FedSeq
from ekiden.runs.loading import load_model
from ekiden.silos.coordinator.session import EVALUATIONS
from ekiden.silos.coordinator.verify import signers, verify
from ekiden.silos.silo import policy, told
from ekiden.silos.silo.silo import Silo
from ekiden.silos.silo.silo_file import Limits, read
from ekiden.silos.trust import agreement as agreements
from ekiden.silos.trust import custody, keys
from ekiden.silos.trust import report as reports
from ekiden.silos.trust.parcel import Answer, Ask, pack, unpack
from ekiden.silos.trust.report import Reported
from tests.silos.across.test_attacks import Attacker, layers
from tests.silos.asked import model as initial
from tests.silos.asked import terms, with_recipe
from tests.silos.fakes import (
    NAMES,
    FakeNodes,
    evaluate,
    member_of,
    mine,
    seal_for,
    silo_file,
    with_keys,
)
from tests.silos.sessions import far
from tests.silos.silo_files import TABLE, tables

pytest.importorskip("cryptography", reason="needs the extra flower: pip install 'ekiden[flower]'")

SILENT: dict[str, Any] = {"seconds": 1.0, "poll": 0.0}


FOUR = (*NAMES, "client-3")


class Nodes(FakeNodes):
    """The fourth silo holds the same data as the first one."""

    def silo(self, node: int) -> Silo:
        file = self.files[node]
        dataset, client = mine(file.name if file.name in NAMES else NAMES[0])
        return Silo(file, {"": (dataset, replace(client, name=file.name))})


def trained(folder: Path, method: Method, more: str = "") -> tuple[FakeNodes, dict[str, str]]:
    """A run of the first two silos; the others did not train."""
    files, public = with_keys(folder, FOUR, more)
    known = {name: public[name] for name in FOUR[:2]}
    far(method, Nodes(files[:2]), folder / "run", known, clients=",".join(FOUR[:2]))
    return Nodes(files), public


def again(
    nodes: FakeNodes,
    public: dict[str, str],
    run: Path,
    names: tuple[str, ...],
    to: str,
    evaluate_dp: str = "exact",
) -> dict[str, object]:
    out = run / EVALUATIONS / to
    keys = {name: public[name] for name in names}
    how: dict[str, Any] = {"evaluate_dp": evaluate_dp, **SILENT}
    return evaluate(run, names, nodes, out, keys, lambda line: None, **how)


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(FedSeq(epochs=1), id="fedseq"),
        pytest.param(FedAvg(rounds=1, epochs=1), id="fedavg", marks=pytest.mark.slow),
    ],
)
def test_a_model_is_measured_at_silos_that_did_not_train_it(method: Method, tmp_path: Path) -> None:
    nodes, public = trained(tmp_path, method)
    run = tmp_path / "run"
    row = again(nodes, public, run, FOUR, "all")
    assert {"accuracy", "metrics", "figures", "silo_means", "majority", "confusion"} <= row.keys()
    assert row["figures"]["silos"] == 4  # type: ignore[index]
    assert "clients" not in row
    assert verify(run, public).wrong == ()
    forged = {
        **public,
        FOUR[3]: public[FOUR[0]],
    }  # the coordinator's own key for a silo that measured
    assert any("knew another key of client-3" in line for line in verify(run, forged).wrong)
    kinds = {unpack(data, Ask)[0].kind for _, data in nodes.log}
    assert kinds == {"hello", "evaluate"}
    # What the folder says must follow from what the silos signed.
    file = run / EVALUATIONS / "all" / "metrics.jsonl"
    file.write_text(json.dumps(row | {"accuracy": 0.99}) + "\n")
    changed = "evaluations/all: metrics.jsonl, line 1, says "
    assert verify(run).wrong[0].startswith(changed)
    file.write_text(json.dumps(row) + "\n")
    custody = file.with_name("custody.jsonl")
    custody.write_text("".join(custody.read_text().splitlines(keepends=True)[:3]))
    assert "evaluations/all: nobody signed what client-3 measured" in verify(run).wrong


def test_silos_measure_the_values_of_another_file(tmp_path: Path) -> None:
    """A model that was trained elsewhere, in the run's network; `verify` compares with what was
    measured."""
    nodes, public = trained(tmp_path, FedSeq(epochs=1))
    run, other = tmp_path / "run", tmp_path / "other.safetensors"
    values = load_file(run / "model.safetensors")
    save_file({name: -value for name, value in values.items()}, other)
    keys = {name: public[name] for name in FOUR[2:]}
    rows = [
        evaluate(
            run,
            FOUR[2:],
            nodes,
            run / EVALUATIONS / to,
            keys,
            lambda line: None,
            weights=weights,
            **SILENT,
        )
        for to, weights in (("own", None), ("other", other))
    ]
    assert rows[0]["accuracy"] != rows[1]["accuracy"]
    assert verify(run).wrong == ()
    kept = run / EVALUATIONS / "other" / "model.safetensors"
    save_file(values, kept)
    assert (
        "evaluations/other: silos measured another model than the one in the folder"
        in verify(run).wrong
    )
    save_file({"head": torch.zeros(3)}, other)
    with pytest.raises(UserError, match=r"other\.safetensors holds another network than the run's"):
        evaluate(
            run,
            FOUR[2:],
            nodes,
            run / EVALUATIONS / "no",
            keys,
            lambda line: None,
            weights=other,
            **SILENT,
        )


def test_a_model_of_one_machine_is_measured_at_silos(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two files of its run are enough, and the scaling with which it was trained."""
    monkeypatch.chdir(tmp_path)
    (one, two), model = tables(tmp_path), tmp_path / "model"
    rows = [(tmp_path / f"{name}.csv").read_text().splitlines(keepends=True) for name in "ab"]
    Path("all.csv").write_text("".join([*rows[0], *rows[1][1:]]))
    flags = ("--label-column", "died", "--drop-columns", "ward", "--clients", "2", "--epochs", "1")
    assert command("run", "centralized", "--data", "all.csv", *flags)[0] == 0
    (run,) = Path("runs").iterdir()
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(run / name, model / name)
    code, said = command("federation", "agree", "model")
    assert (code, "wrote agreed.json" in said) == (0, True)
    more = 'agreed = "agreed.json"\n[hardware]\nthreads = 1\n[link]\nkey = "{0}.key"\npeers = "peers"\n'
    for file in (one, two):
        file.write_text(TABLE.format(name=file.stem, more=more.format(file.stem)))
    files = [read(file) for file in (one, two)]
    public = {file.name: keys.read_public(keys.generate(file.key)) for file in files}
    Path("peers").mkdir()
    for name, key in public.items():
        Path("peers", f"{name}.pub").write_text(key)
    row = again(FakeNodes(files), public, model, ("a", "b"), "one")
    tests = [file.load()[1].test for file in files]
    known = load_model(model)
    found = (
        torch.cat(
            [known.task.answers(known.network(part.x), full=False) == part.y for part in tests]
        )
        .float()
        .mean()
    )
    assert row["accuracy"] == pytest.approx(float(found))
    assert verify(model, public).wrong == ()
    assert signers(model) == ("a", "b")
    other = keys.read_public(keys.generate(tmp_path / "c.key"))
    assert any(
        "knew another key of b" in line for line in verify(model, {**public, "b": other}).wrong
    )
    code, said = command("evaluate", "model", "--on", "flower")
    assert (code, "say which silos measure its model" in said) == (2, True)


def test_with_and_without_one_silo_is_refused(tmp_path: Path) -> None:
    """The difference of both would be the counts of that silo."""
    nodes, public = trained(tmp_path, FedAvg(rounds=1, epochs=1))
    nodes.files = {
        n: replace(f, limits=replace(f.limits, level="sums")) for n, f in nodes.files.items()
    }
    again(nodes, public, tmp_path / "run", FOUR, "all")
    with pytest.raises(UserError, match="were told with other members before"):
        again(nodes, public, tmp_path / "run", FOUR[:3], "three")
    assert not (tmp_path / "run" / EVALUATIONS / "three").exists()


def test_counts_that_share_their_noise_are_of_one_list_of_silos(tmp_path: Path) -> None:
    """The same noise twice: the difference has one share of it, whatever the level is."""
    more = "[limits]\nhonest = 2\nmin_clients = 2\nevaluation_epsilon = 99\n"
    nodes, public = trained(tmp_path, FedSeq(epochs=1), more)
    shared = "epsilon=2,delta=1e-5,honest=2"
    again(nodes, public, tmp_path / "run", FOUR, "all", shared)
    with pytest.raises(UserError, match="were told with other members before"):
        again(nodes, public, tmp_path / "run", FOUR[:3], "three", shared)


class Grown(Nodes):
    """One silo lacks some of its test samples."""

    grows, lacks = NAMES[0], 0

    def silo(self, node: int) -> Silo:
        made = super().silo(node)
        dataset, client = made._held()
        if made._file.name == self.grows:
            test = Subset(client.test.samples, client.test.rows[self.lacks :])
            client = replace(client, test=test)
        return Silo(made._file, {"": (dataset, client)})


def test_a_sample_in_the_difference_of_two_exact_tables_is_refused(tmp_path: Path) -> None:
    """Whoever has the tables before and after a patient came reads her label and answer. Here she leaves."""
    held, public = trained(tmp_path, FedSeq(epochs=1))
    nodes, run = Grown(list(held.files.values())), tmp_path / "run"

    def table(to: str) -> torch.Tensor:
        return torch.tensor(again(nodes, public, run, FOUR, to)["confusion"])

    before = table("before")
    assert table("same").equal(before)
    nodes.lacks = 1
    with pytest.raises(UserError, match="sums of test samples were told with other rows before"):
        table("after")
    assert not (run / EVALUATIONS / "after").exists()
    (tmp_path / f"{NAMES[0]}-silo" / told.FILE).write_text("")  # what it would have shown
    her = before - table("shown")
    assert her.sum() == her.max() == 1
    assert int(her.sum(1).argmax()) == int(mine(NAMES[0])[1].test.y[0])


def test_what_is_measured_is_bounded_over_all_runs(tmp_path: Path) -> None:
    """Each evaluation is a run, so a coordinator could ask again and again; a silo counts what no
    run holds."""
    nodes, public = trained(tmp_path, FedSeq(epochs=1), "[limits]\nevaluation_epsilon = 3\n")
    run = tmp_path / "run"

    def noisily(to: str) -> dict[str, object]:
        keys = {name: public[name] for name in FOUR[2:]}
        out, more = run / EVALUATIONS / to, {"evaluate_dp": "epsilon=2,delta=1e-5", **SILENT}
        return evaluate(run, FOUR[2:], nodes, out, keys, lambda line: None, **more)

    row = noisily("one")
    assert row["figures"]["noise"]["accuracy"] > 0  # type: ignore[index]
    exact = again(nodes, public, run, FOUR[2:], "exact")
    assert (row["accuracy"], row["loss"]) != (exact["accuracy"], exact["loss"])
    assert verify(run).wrong == ()
    shutil.rmtree(tmp_path / "client-2-silo" / "runs")  # as after a month
    assert noisily("two")["accuracy"] is not None
    with pytest.raises(
        UserError,
        match=r"client-[23] has told epsilon .* in 2 earlier runs and allows 3, .*evaluation_epsilon",
    ):
        noisily("three")
    file = tmp_path / "client-2-silo" / "evaluations.jsonl"
    assert len(file.read_text().splitlines()) == 2
    file.write_text("{\n")
    with pytest.raises(UserError, match=r"evaluations.jsonl, line 1 is damaged"):
        noisily("four")


def test_exact_counts_are_for_silos_whose_files_say_so(tmp_path: Path) -> None:
    assert not Limits().exact_evaluation
    nodes, public = trained(tmp_path, FedSeq(epochs=1))
    nodes.files = {
        n: replace(f, limits=replace(f.limits, exact_evaluation=False))
        for n, f in nodes.files.items()
    }
    with pytest.raises(UserError, match=r"adds noise: leave out evaluate_dp='exact'"):
        again(nodes, public, tmp_path / "run", FOUR[2:], "one")


def test_an_evaluation_needs_approval_like_a_run(tmp_path: Path) -> None:
    nodes, public = trained(tmp_path, FedSeq(epochs=1))
    nodes.files = {
        n: replace(f, limits=replace(f.limits, approve=True)) for n, f in nodes.files.items()
    }
    with pytest.raises(UserError, match="approved this plan"):
        again(nodes, public, tmp_path / "run", FOUR[2:], "one")


def test_a_silo_may_forbid_it(tmp_path: Path) -> None:
    nodes, public = trained(tmp_path, FedSeq(epochs=1), '[limits]\nmethods = ["fedseq"]\n')
    with pytest.raises(
        UserError,
        match=r"does not allow 'evaluate', only fedseq \(limits.methods in its silo.toml\)",
    ):
        again(nodes, public, tmp_path / "run", FOUR, "all")


def test_silos_measure_only_the_model_that_the_terms_name_and_train_nothing(tmp_path: Path) -> None:
    nodes, public = trained(tmp_path, FedSeq(epochs=1))
    again(nodes, public, tmp_path / "run", FOUR, "all")
    ask = next(a for _, d in nodes.log if (a := unpack(d, Ask)[0]).kind == "evaluate")
    attacker = Attacker(nodes, agreements.parse(ask.agreement))
    with pytest.raises(UserError, match="silos measure only the model that the terms name"):
        attacker.measure(100, [layers({})])
    for kind in ("task", "value"):
        assert (
            "the run only measures a model"
            in attacker.ask(100, kind, task="train", key="0-0-train")[0].error
        )


def test_what_cannot_be_measured_is_one_line(tmp_path: Path) -> None:
    files, public = with_keys(tmp_path, FOUR)
    (tmp_path / "here").mkdir()
    with pytest.raises(UserError, match="is not a run folder"):
        again(Nodes(files), public, tmp_path / "here", FOUR, "all")
    nodes, public = trained(tmp_path / "two", FedSeq(epochs=1))
    for node, file in nodes.files.items():
        nodes.files[node] = replace(file, limits=replace(file.limits, min_samples=10_000))
    with pytest.raises(UserError, match="no silo has enough samples to report anything"):
        again(nodes, public, tmp_path / "two" / "run", FOUR, "all")


def test_external_data_are_measured_whole_at_one_silo_that_agrees(
    tmp_path: Path, command: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `own_figures` it measures nothing alone, and it never trains."""
    monkeypatch.chdir(tmp_path)
    one, _ = tables(tmp_path)
    rows, model = Path("a.csv").read_text().splitlines(keepends=True), Path("model")
    shutil.copy("a.csv", "all.csv")
    flags = ("--label-column", "died", "--drop-columns", "ward", "--clients", "2", "--epochs", "1")
    assert command("run", "centralized", "--data", "all.csv", *flags)[0] == 0
    (run,) = Path("runs").iterdir()
    shutil.copytree(run, model)
    assert command("federation", "agree", "model")[0] == 0
    link = '[link]\nkey = "a.key"\npeers = "peers"\n'
    data = 'agreed = "agreed.json"\npart = "external"\n[hardware]\nthreads = 1\n'
    one.write_text(TABLE.format(name="a", more=data + link))
    key = keys.read_public(keys.generate(tmp_path / "a.key"))
    Path("peers").mkdir()
    for name in "ab":  # two silos in the roster
        Path("peers", f"{name}.pub").write_text(key)
    with pytest.raises(UserError, match="the run has 1 silos, a allows 2 to 100"):
        again(FakeNodes([read(one)]), {"a": key}, model, ("a",), "one")
    limits = "[limits]\nown_figures = true\napprove = false\n"
    one.write_text(TABLE.format(name="a", more=data + limits + link))
    row = again(FakeNodes([read(one)]), {"a": key}, model, ("a",), "one")
    found = load_model(model)
    dataset, client = read(one).load()
    assert row["figures"]["samples"] == len(client.test) == len(rows) - 1  # type: ignore[index]
    answers = found.task.answers(found.network(dataset.test.x), full=False)
    assert row["accuracy"] == pytest.approx(float((answers == dataset.test.y).float().mean()))
    assert "majority" not in row
    terms = replace(agreements.parse(text_of(model)), measures="")
    with pytest.raises(UserError, match=r"a holds external data, on which models are only eval"):
        policy.check_terms(read(one), terms)


def text_of(run: Path) -> str:
    """The terms of its evaluation."""
    return (run / EVALUATIONS / "one" / agreements.AGREEMENT).read_text()


def test_four_silos_tell_how_they_differ_under_masks_and_fewer_do_not(tmp_path: Path) -> None:
    nodes, public = trained(tmp_path, FedSeq(epochs=1), "[limits]\nmin_clients = 2\n")
    run = tmp_path / "run"
    row = again(nodes, public, run, FOUR, "all")
    found = row["heterogeneity"]["accuracy"]  # type: ignore[index]
    assert found["silos"] == 4
    low, high = found["interval"]
    assert low < found["mean"] < high
    assert found["prediction"][0] <= low
    assert "clients" not in row
    assert verify(run, public).wrong == ()
    other = trained(tmp_path / "other", FedSeq(epochs=1), "[limits]\nmin_clients = 2\n")
    assert "heterogeneity" not in again(*other, tmp_path / "other" / "run", FOUR[2:], "two")


class Oracle:
    """Asks a silo to measure one made-up model after the other: linear, of pixels from 0 to 1."""

    def __init__(self, folder: Path, noise: str) -> None:
        limits = '[limits]\nlevel = "sums"\nmin_clients = 1\n'
        self.file = silo_file(folder, NAMES[0], limits, trusting=False)
        agreed = with_recipe(terms(FedSeq(epochs=1), clients=NAMES[:1]), model="linear")
        self.terms = replace(agreed, evaluate_dp=noise)
        self.like = initial(agreed)
        self.asked = 0

    def answers(self, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Return how many samples a model with these weights (10, 64) puts into each class."""
        made = self.like.with_params(torch.cat([weight.flatten(), bias]).float())
        digest = custody.digest(wire.chunks(made))
        agreed = replace(self.terms, run=secrets.token_hex(8), measures=digest)
        body = wire.encode([made])
        members = (member_of(self.file, agreed.run),)
        ask = Ask("evaluate", agreed.text(), results=1, members=members)
        asked = seal_for(self.file, pack(ask, (body,)))
        answer, rest = unpack(Silo(self.file, {"": mine(NAMES[0])}).answer(asked), Answer)
        if answer.error:
            raise UserError(answer.error)
        self.asked += 1
        shown = wire.decode(bytes(rest), Reported).shown
        assert shown is not None
        telling = reports.telling(agreed, 1, last=True)
        told = shown.counts[0]
        if isinstance(telling, Noisy):
            table = torch.from_numpy(telling.split(told)[2]["table"])
        else:
            table = telling.counting.split(told)["table"]
        return table[:, :10].sum(0)

    def bins(self, taste: torch.Tensor, low: float, high: float) -> torch.Tensor:
        """Return how many samples lie in each of ten parts of a range along a direction."""
        place = torch.arange(10.0, dtype=torch.float64)[:, None]
        scale = 10 / (high - low)
        weight, bias = place * taste * scale, -place[:, 0] * (low * scale + place[:, 0] / 2)
        return self.answers(weight, bias)

    def image(self, taste: torch.Tensor) -> torch.Tensor:
        """Return the image that lies furthest along a direction, to one part in 16 of a pixel."""
        low, high = 0.0, float(taste.clamp(min=0).sum())
        for _ in range(8):
            found = self.bins(taste, low, high)
            there = (found > 0.5).nonzero().flatten()
            top = int(there[-1]) if len(there) else 9
            if found[top] < 1.5 and (len(there) < 2 or top - int(there[-2]) > 1):
                break
            low, high = low + (high - low) * (top - 1) / 10, low + (high - low) * (top + 1) / 10
        middle, far = low + (high - low) * (top - 0.5) / 10, 400 * 10 / (high - low)
        read = torch.full((64,), 0.5, dtype=torch.float64)
        place = torch.arange(10.0, dtype=torch.float64)
        with contextlib.suppress(UserError):  # its budget is spent
            for pixel in range(64):
                # the one image answers with its pixel, from 1 to 9; all others with 0
                weight = far * (place[:, None] > 0) * taste
                weight[:, pixel] += 8 * place
                bias = place * (1 - place / 2) - far * middle * (place > 0)
                read[pixel] = (int(self.answers(weight, bias)[1:].argmax())) / 8
        return read


@pytest.mark.parametrize(
    "noise",
    [
        "exact",
        agreements.NOISE,
        pytest.param("epsilon=0.2,delta=1e-5", marks=pytest.mark.slow),
    ],
)
def test_made_up_models_read_no_test_image_through_noise(noise: str, tmp_path: Path) -> None:
    """Exact counts show a test image in 70 evaluations, and nothing was trained."""
    oracle = Oracle(tmp_path, noise)
    taste = torch.rand(64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    test = mine(NAMES[0])[1].test.x.flatten(1).double() / 255
    read = oracle.image(taste)
    apart = (test - read).abs()
    print(f"{noise}: {oracle.asked} evaluations, {float(apart.amax(1).min()):.3f} off")
    if noise == "exact":
        assert float(apart.amax(1).min()) < 0.07
        return
    assert oracle.asked < 20 or noise != agreements.NOISE, "its budget ends"
    right = (apart < 0.07).double().mean(1)
    assert float(right[(test @ taste).argmax()]) < 0.5


def table_of_a_chain(folder: Path, lacks: int, noise: str) -> torch.Tensor:
    """The table of a run of FedGram with the strictest file, as its coordinator opens it; the last
    silo lacks some of its test samples."""
    files, public = with_keys(folder, NAMES, '[limits]\nmethods = ["fedgram"]\n', trusting=False)
    nodes, tables = Grown(files), list[torch.Tensor]()
    nodes.grows, nodes.lacks = NAMES[2], lacks
    noisy, exact = Noisy.split, Counting.split

    def split(self: Noisy, told: torch.Tensor) -> Any:
        found = noisy(self, told)
        if found[0] == len(NAMES):
            tables.append(torch.from_numpy(found[2]["table"]))
        return found

    def split_exactly(self: Counting, told: torch.Tensor) -> Any:
        found = exact(self, told)
        if noise == "exact" and found["reports"] == len(NAMES):
            tables.append(found["table"].double())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Noisy, "split", split)
        patch.setattr(Counting, "split", split_exactly)
        method = FedGram(width=20, dictionary="seed", min_active=10)
        far(method, nodes, folder / "run", public, evaluate_dp=noise)
    return tables[0][:, :10]


@pytest.mark.slow
def test_a_chain_shows_hardly_whether_a_known_record_is_tested(tmp_path: Path) -> None:
    """The coordinator knows all other test samples, so exact counts tell it in each run."""
    without = table_of_a_chain(tmp_path / "without", 1, "exact")
    hers = table_of_a_chain(tmp_path / "with", 0, "exact") - without
    assert hers.sum() == hers.max() == 1
    right, trials = 0, 24
    for number in range(trials):
        there = number % 2 == 0
        found = table_of_a_chain(tmp_path / str(number), 0 if there else 1, agreements.NOISE)
        guess = float(((found - without) * hers).sum()) > 0.5
        right += guess == there
    print(f"membership seen in {right} of {trials} runs")
    assert right < 0.85 * trials
