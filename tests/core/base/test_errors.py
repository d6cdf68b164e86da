"""Lines for the user."""

import warnings

import pytest

from ekiden.core.base.errors import DataWarning, nearest, warnings_as_lines


def test_warnings_about_data_are_lines_and_others_are_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    warnings_as_lines()
    for _ in range(2):
        warnings.warn("all images of b.csv are grey:\n see there", DataWarning, stacklevel=1)
    warnings.warn("a library changes", FutureWarning, stacklevel=1)
    assert capsys.readouterr() == ("", "ekiden: all images of b.csv are grey: see there\n")


@pytest.mark.parametrize(
    ("given", "ours"),
    [("--silo-column", "--group-column"), ("site", "group_column"), ("--patient-column", "--subject-column"),
     ("target_column", "label_column"), ("num-rounds", "rounds"), ("epoch", "epochs"),
     ("AUROC", "auroc"), ("ROC AUC", "auroc"), ("f1", "macro_f1"), ("F1-score", "macro_f1")],
)  # fmt: skip
def test_names_of_other_libraries_lead_to_ours(given: str, ours: str) -> None:
    known = [ours, "--time-column", "image_column", "--image-column"]
    assert nearest(given, known, n=1) == [ours]
