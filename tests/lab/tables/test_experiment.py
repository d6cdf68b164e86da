"""Experiment files: what they mean, and the messages about mistakes in them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ekiden.core.base.errors import UserError
from ekiden.lab.tables import experiment
from ekiden.lab.tables.experiment import Experiment, Published, Scaled
from ekiden.methods import FedELMY, FedSeq, Local
from ekiden.runs.plan import from_json

FILES = sorted((Path(__file__).parents[3] / "experiments").glob("*.toml"))
TABLE = """
title = "a table"
source = "a paper, Table 1"
note = "not all is known"
seeds = [3, 4, 5]

[budget.small]
epochs = 0.1
warmup = 0.5
seeds = 2

[settings]
epochs = 20
lr = 0.5
clients = 4

[[column]]
label = "first"
partition = "iid"
fedelmy = {models = 2, warmup = 3}

[[column]]
label = "second"
partition = "dirichlet:0.5"
lr = 1

[[row]]
label = "FedELMY"
method = "fedelmy"
printed = ["39.50 ± 1.25", 40]

[[row]]
label = "long"
method = "fedseq"
epochs = 50
differs = "longer"
printed = ["-", 12.345]
at = {second = {epochs = 60, metric = "client_mean"}}

[[row]]
label = "missing"
skip = "no such method"
printed = [1, 2]
"""


def read(text: str, budget: str = "paper") -> Experiment:
    return experiment.parsed(text, "table", budget, "table.toml")


def test_a_table() -> None:
    found = read(TABLE)
    assert (found.title, found.source, found.note) == (
        "a table",
        "a paper, Table 1",
        "not all is known",
    )
    assert (found.rows, found.columns) == (("FedELMY", "long", "missing"), ("first", "second"))
    assert found.seeds == (3, 4, 5)
    assert found.methods_in_rows
    a, b, c, d, e, _ = found.cells
    assert a.plan is not None
    assert a.plan.recipe.method == FedELMY(models=2, warmup=3, epochs=20)
    assert (a.plan.recipe.training.lr, a.plan.clients, a.plan.partition) == (0.5, 4, "iid")
    assert a.plan.hardware.threads == 1
    assert a.published == Published(39.5, 1.25)
    assert b.plan is not None
    assert b.plan.recipe.method == FedELMY(epochs=20), (
        "what the first column says to FedELMY is not for the second"
    )
    assert b.plan.recipe.training.lr == 1.0
    assert b.published == Published(40.0)
    assert c.plan is not None
    assert d.plan is not None
    assert (c.plan.recipe.method, d.plan.recipe.method) == (FedSeq(epochs=50), FedSeq(epochs=60))
    assert (c.metric, d.metric, c.differs) == ("accuracy", "client_mean", "longer")
    assert c.published is None
    assert d.published == Published(12.345)
    assert (e.plan, e.skip, e.published) == (None, "no such method", Published(1.0))
    assert all(not cell.scaled for cell in found.cells)


def test_of_how_many_runs_printed_values_are_means() -> None:
    first, second, missing, *_ = read(TABLE.replace("seeds = [3, 4, 5]", "printed_seeds = 7")).cells
    assert (first.published, second.published) == (
        Published(39.5, 1.25, 7),
        Published(40.0, runs=7),
    )
    assert missing.published is None


def test_a_budget_makes_runs_cheaper_and_says_so() -> None:
    found = read(TABLE, "small")
    assert (found.seeds, found.all_seeds) == ((3, 4), 3)
    a, b, c, *_ = found.cells
    assert a.plan is not None
    assert a.plan.recipe.method == FedELMY(models=2, warmup=2, epochs=2)
    assert a.scaled == (Scaled("epochs", 20, 2), Scaled("warmup", 3, 2))
    assert b.scaled[1] == Scaled("warmup", 30, 15)
    assert c.scaled == (Scaled("epochs", 50, 5),)
    assert str(c.scaled[0]) == "epochs 5 of 50"


def test_a_list_of_values_is_a_grid() -> None:
    found = read("""
        seeds = [0]
        [[column]]
        label = "N={clients} {partition}"
        clients = [2, 3]
        partition = ["iid", "dirichlet:0.5"]
        [[row]]
        label = "Local, {epochs} epochs"
        method = "local"
        epochs = [1, 2]
    """)
    assert found.rows == ("Local, 1 epochs", "Local, 2 epochs")
    assert found.columns == ("N=2 iid", "N=2 dirichlet:0.5", "N=3 iid", "N=3 dirichlet:0.5")
    plans = [cell.plan for cell in found.cells]
    assert plans[0] is not None
    assert plans[-1] is not None
    assert (plans[0].recipe.method, plans[0].clients, plans[0].partition) == (
        Local(epochs=1),
        2,
        "iid",
    )
    assert (plans[-1].recipe.method, plans[-1].clients, plans[-1].partition) == (
        Local(epochs=2),
        3,
        "dirichlet:0.5",
    )


MISTAKES = [
    ("seeds = [3, 4, 5]", "seed = [3]", "unknown entry 'seed': did you mean 'seeds'?"),
    ("seeds = [3, 4, 5]", "seeds = [1, 1]", "seeds must differ"),
    ("seeds = [3, 4, 5]", "seeds = 3", "seeds 3 is of the wrong type: it must be a list"),
    (
        "seeds = [3, 4, 5]",
        "printed_seeds = 0",
        "printed_seeds 0 is out of range: it must be 1 or more",
    ),
    ("seeds = [3, 4, 5]", "printed_seeds = true", "printed_seeds True is of the wrong type"),
    ("seeds = [3, 4, 5]", 'paired = "long"', "paired 'long' is of the wrong type"),
    (
        "seeds = [3, 4, 5]",
        'paired = ["lon"]',
        "unknown method in paired 'lon': did you mean 'long'?",
    ),
    ("title =", "title ", "it is not valid TOML"),
    ('method = "fedelmy"', 'method = "fedely"', "unknown method 'fedely': did you mean 'fedelmy'?"),
    (
        "lr = 0.5",
        'lr = "0.5"',
        "row 'FedELMY', column 'first': lr '0.5' is of the wrong type: it must be a number",
    ),
    ("lr = 0.5", "lr = -1", ": lr -1 is out of range"),
    ("lr = 0.5", "learning = 1", "unknown setting of fedelmy 'learning'"),
    (
        "epochs = 50",
        "epoch = 50",
        "row 'long', column 'first': unknown setting of fedseq 'epoch': did you mean 'epochs'?",
    ),
    ("epochs = 50", "models = 5", "row 'long', column 'first': unknown setting of fedseq 'models'"),
    ("models = 2,", "modles = 2,", "unknown setting of fedelmy 'modles': did you mean 'models'?"),
    ("fedelmy = {", "fedelym = {", "unknown method 'fedelym': did you mean 'fedelmy'?"),
    ('partition = "iid"', 'partition = "idd"', "'idd' is not a partition"),
    ('partition = "iid"', 'model = "lenett"', "unknown model 'lenett': did you mean 'lenet'?"),
    (
        'partition = "iid"',
        'optimizer = "adamm"',
        "optimizer 'adamm' is unknown: it must be one of adam,",
    ),
    (
        "printed = [1, 2]",
        "printed = [1]",
        "printed must be a list of one value for each of the 2 columns, not [1]",
    ),
    (
        "printed = [1, 2]",
        'printed = [1, "2 +- 3"]',
        'a printed value must be a number, "mean ± std" or "-"',
    ),
    ("at = {second", "at = {secnd", "unknown column in at 'secnd': did you mean 'second'?"),
    ('metric = "client_mean"', 'metric = "mean"', "unknown metric 'mean'"),
    (
        'metric = "client_mean"',
        'metric = "client_mean_trained"',
        'not measured: add evaluate_on = "own"',
    ),
    ('label = "long"', 'label = "FedELMY"', "would share a run folder"),
    ('label = "long"', "", "every [[row]] needs a label"),
    (
        'label = "long"',
        'label = "long"\nlr = [1, 2]',
        "write a row of its own for each printed value",
    ),
    ('printed = ["39.50 ± 1.25", 40]', "warmup = [1, 2]", "would share a run folder"),
    ('label = "second"', 'label = "{beta}"\nclients = [2, 3]', "settings as {clients}: 'beta'"),
    (
        'label = "second"',
        'label = "{clients.beta}"\nclients = [2, 3]',
        "the label must name settings as {clients}: ",
    ),
    (
        'label = "second"',
        'label = "{clients[0]}"\nclients = [2, 3]',
        "the label must name settings as {clients}: ",
    ),
    (
        'label = "second"',
        'label = "second"\nclients = []',
        "column 'second': clients is a list without values: give at least one",
    ),
    ("lr = 0.5", "lr = 0.5\nfedelmy = 3", "fedelmy must be a table"),
    ('label = "long"', f'label = "{"x" * 180}"', "are too long to name a run folder: shorten them"),
    (
        "printed = [1, 2]",
        "printed = [1, nan]",
        'a printed value must be a number, "mean ± std" or "-"',
    ),
    ("epochs = 0.1", "epochs = 2", "budget.small: epochs must be a factor above 0 and below 1"),
    ("epochs = 0.1", "alpha = 0.1", "unknown hyperparameter to scale 'alpha'"),
    ("seeds = 2", "seeds = 0", "seeds must be the number"),
    ("[budget.small]", "[budget.paper]", "the budget 'paper' scales nothing"),
    (
        'skip = "no such method"',
        "",
        "row 'missing', column 'first': neither row nor column names a method",
    ),
]


@pytest.mark.parametrize(
    ("right", "wrong", "said"), MISTAKES, ids=[wrong or right for right, wrong, _ in MISTAKES]
)
def test_a_mistake_is_named(right: str, wrong: str, said: str) -> None:
    assert right in TABLE
    with pytest.raises(UserError) as error:
        read(TABLE.replace(right, wrong, 1))
    assert str(error.value).startswith("table.toml: ")
    assert said in str(error.value)


@pytest.mark.parametrize("columns", ["", '[[column]]\nlabel = "a"\n'])
def test_a_file_has_rows(columns: str) -> None:
    with pytest.raises(UserError, match=r"give at least one \[\[row\]\]"):
        read(f"row = []\n{columns}")


def test_settings_are_a_table() -> None:
    with pytest.raises(UserError, match="settings 3 is of the wrong type: it must be a table"):
        read("row = []\nsettings = 3")


def test_a_printed_value_is_no_larger_than_numbers_can_be() -> None:
    with pytest.raises(UserError, match="a printed value must be a number"):
        read(TABLE.replace("printed = [1, 2]", f"printed = [1, {10**400}]"))


def test_the_only_column_of_a_file_without_columns_is_the_metric() -> None:
    row = '[[row]]\nlabel = "A"\nmethod = "fedseq"\n'
    for given, label in (
        ("", "accuracy %"),
        ('[settings]\nmetric = "auroc"\n', "auroc %"),
        ('[settings]\ntask = "survival"\n', "c_index %"),
        ('[settings]\ndata = "patients.csv"\n', "headline metric"),
        (
            '[settings]\ndata = "patients.csv"\n' + row.replace("A", "B") + 'metric = "auroc"\n',
            "headline metric",
        ),
    ):
        assert experiment.parsed(given + row, "table", "paper", "table.toml").columns == (label,)


def test_labels_are_lines() -> None:
    found = read(TABLE.replace('label = "long"', r'label = " lo\nng "'))
    assert found.rows == ("FedELMY", "lo ng", "missing")


def test_a_file_or_budget_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "table1.toml").write_text(TABLE)
    with pytest.raises(UserError, match=r"did you mean .*table1\.toml"):
        experiment.read(tmp_path / "tabel1.toml")
    with pytest.raises(UserError, match="unknown budget 'smal': did you mean 'small'"):
        experiment.read(tmp_path / "table1.toml", "smal")


@pytest.mark.parametrize(
    "most", [3, pytest.param(10**9, marks=pytest.mark.slow)], ids=["some cells", "all cells"]
)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_published_table_expands(file: Path, most: int) -> None:
    """Every plan can be made and fits its clients, at every budget, and is the same after a run
    folder stored it."""
    for budget in ("paper", "small", "tiny"):
        try:
            found = experiment.read(file, budget)
        except UserError as error:
            assert f"unknown budget '{budget}'" in str(error)  # noqa: PT017
            continue
        assert found.title
        assert len(found.cells) == len(found.rows) * len(found.columns)
        rows = found.cells[
            :: 1 if budget == "paper" else len(found.columns)
        ]  # budgets differ by row
        for cell in rows[:: max(1, len(rows) // most)]:
            if cell.plan is None:
                assert cell.skip
                continue
            assert from_json(json.loads(json.dumps(cell.plan.to_json()))) == cell.plan
            domains = (
                cell.plan.partition.startswith("domains") and cell.plan.partition.count(",") + 1
            )
            cell.plan.recipe.method.check(
                [f"client-{i}" for i in range(cell.plan.clients or domains or 10)]
            )


def test_the_tables_of_the_papers_are_there() -> None:
    names = {file.stem for file in FILES}
    wanted = [f"fedelmy-table{k}" for k in range(1, 10)] + [
        "fedelmy-fig5",
        "fedelmy-fig6",
        "fedelmy-fig7",
    ]
    wanted += [f"ma-echo-table{k}" for k in (1, 2, 3, "4-mlp", "4-cnn", 5, 6)]
    wanted += [
        "spfl-main",
        "spfl-table6",
        "spfl-table7",
        *(f"ua-pdfl-table{k}" for k in range(1, 6)),
    ]
    assert set(wanted) <= names


@pytest.mark.parametrize("name", ["fedelmy-table9", "fedelmy-table9-cnn"])
def test_ma_echo_in_the_table_of_another_paper_is_trained_as_in_its_own(name: str) -> None:
    found = experiment.read(FILES[0].parent / f"{name}.toml")
    used = {
        (
            c.plan.recipe.training.optimizer,
            c.plan.recipe.training.lr,
            c.plan.recipe.training.momentum,
        )
        for c in cells(found, "MA-Echo")
    }
    assert used == {("sgd", 0.01, 0.5)}
    assert {c.plan.recipe.training.optimizer for c in cells(found, "FedELMY in parallel")} == {
        "adam"
    }


def cells(found: Experiment, row: str) -> list[Any]:
    return [cell for cell in found.cells if cell.row == row]


EXPERIMENTS = Path(__file__).parents[3] / "experiments"
TABLES = (
    (Path(__file__).parent / "ua_pdfl_printed.md")
    .read_text(encoding="utf-8")
    .split("\n## Table ")[1:]
)
NETWORKS = {"CNN": "CNN", "ResNet18": "RN18", "VGG11": "VGG11"}
DATA = {"CIFAR10": "CIFAR-10", "CIFAR100": "CIFAR-100", "SVHN": "SVHN"}


def label(name: str) -> str:
    """The label of a row in our files: "CNN / CIFAR10" and "IID / CNN" are "CNN CIFAR-10" and "IID
    CNN" there."""
    first, second = name.split(" / ")
    if first in NETWORKS:
        return f"{NETWORKS[first]} {DATA[second]}"
    return f"{first[0].lower() + first[1:] if first.startswith('Extreme') else first} {NETWORKS[second]}"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"table {table[0]}")
def test_every_value_of_the_paper_is_in_our_file(table: str) -> None:
    cells = experiment.read(EXPERIMENTS / f"ua-pdfl-table{table[0]}.toml").cells
    columns = len({cell.column for cell in cells})
    found = {}
    for row, line in enumerate(re.findall(r"^- (.*)$", table, re.MULTILINE)):
        name, values = line.split(": ")
        for column, value in enumerate(values.split(", ")):
            mean, std = value.split(" ± ")
            cell = cells[row * columns + column]
            assert cell.row == label(name)
            found[cell.row, cell.column] = cell.published
            assert cell.published == Published(float(mean), float(std), 3)
    assert len(found) == len(cells) >= 24
