"""The budget of tokens: what is counted, and that every room keeps to it."""

from tests.tools.tokens import BUDGET, rooms, tokens_of


def test_imports_docstrings_comments_and_line_breaks_are_free() -> None:
    text = '"""About."""\n\nimport os\nfrom a import (\n    b,\n    c,\n)\n\nx = 1  # why\n"""what"""\n'
    assert tokens_of(text) == 3
    assert tokens_of("x = (\n    1\n)\n") == 5
    assert tokens_of('def f(a: int) -> str:\n    """About."""\n    return "a" "b"\n') == 13


def test_every_room_keeps_its_budget() -> None:
    assert {room: count for room, count in rooms().items() if count > BUDGET[room]} == {}


def test_the_kernel_stays_small() -> None:
    """Whoever reads it all can do so in some days; more makes that impossible."""
    assert BUDGET["core"] <= 90_000
