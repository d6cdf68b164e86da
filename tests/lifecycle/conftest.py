"""Which of the combinations of kind, method, place and format are fast."""

import pytest

from tests.lifecycle.kinds import KINDS

ONLY = {
    "test_far_it_is_trained_and_verified": (
        "table",
        "labels",
        "text",
        "signals",
        "png",
        "segmentation",
        "language",
    ),
    "test_here_it_goes_on_after_a_kill": ("table", "segmentation"),
    "test_far_it_goes_on_after_a_kill": ("signals",),
    "test_far_a_changed_folder_is_not_verified": ("png",),
    "test_far_the_silos_measured_it": ("table", "labels", "text", "language"),
    "test_it_is_reported": ("table",),
    "test_it_is_shown": ("table", "png", "language"),
    "test_it_predicts_as_its_export_does": ("table", "labels", "png"),
}
"""Tests of what depends little on the kind of data, and the kinds with which they are fast."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each kind is fast with one method, each method with three kinds or more; the rest is slow."""
    for item in items:
        if item.path.name == "test_lifecycle.py" and isinstance(item, pytest.Function):
            given = item.callspec.params
            place, where, to = str(given["place"]), given.get("where", "here"), given.get("to")
            kind = KINDS[place]
            refusal = (
                given["method"] in kind.refused
                and item.originalname == "test_here_it_is_trained_and_measured"
            )
            wanted = (where, to) == (kind.export if to else ("here", None))
            known = place in ONLY.get(item.originalname, KINDS)
            if not (refusal or (given["method"] == kind.method and wanted and known)):
                item.add_marker(pytest.mark.slow)
