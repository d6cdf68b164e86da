"""The list of items of TRIPOD+AI."""

from collections.abc import Callable
from pathlib import Path

from ekiden import Training, load, run, split
from ekiden.lab.reporting.tripod import answered
from ekiden.methods import FedSeq
from ekiden.runs.summary import summarise


def test_tripod_lists_what_a_run_answers_and_what_it_does_not(
    tmp_path: Path, command: Callable[..., tuple[int, str]]
) -> None:
    """Heterogeneity needs four silos, and figures a metric that measures all."""
    for clients, metric in ((4, "auroc"), (2, "")):
        silos = split(load("digits"), "iid", clients)
        options = {"training": Training(max_steps=2), "quiet": True, "metric": metric}
        folder = tmp_path / str(clients)
        run(FedSeq(epochs=1), silos, "linear", folder=folder, **options)  # type: ignore[arg-type]
        where = {
            number: place
            for number, asks, place in answered(summarise(folder))
            if "subgroups" not in asks
        }
        assert [where[number] for number in ("1-4", "10", "14", "20a, 20c")] == [""] * 4
        assert where["22"].startswith("model.safetensors")
        assert bool(where["23a"]) == bool(metric)
        assert bool(where["12d"]) == bool(where["23b"]) == (clients == 4)
        code, said = command("report", str(folder), "--tripod")
        assert code == 0, said
        assert "not here" in said
