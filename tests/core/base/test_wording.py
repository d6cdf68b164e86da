"""Numbers in sentences."""

from ekiden.core.base.errors import counted


def test_one_is_singular_and_large_numbers_have_separators() -> None:
    assert [counted(n, "step") for n in (0, 1, 2, 1000)] == [
        "0 steps",
        "1 step",
        "2 steps",
        "1,000 steps",
    ]
    assert [counted(n, "class", "classes") for n in (1, 2)] == ["1 class", "2 classes"]
