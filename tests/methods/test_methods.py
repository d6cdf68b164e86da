"""Methods by their names."""

import pytest

from ekiden.methods import method_named


@pytest.mark.parametrize(
    "name", ["fedelmy-parallel", "fedelmyparallel", "FedELMY_Parallel", "ot-fusion", "otfusion"]
)
def test_names_with_and_without_hyphens(name: str) -> None:
    assert method_named(name).title() == name.lower().replace("-", "").replace("_", "")
