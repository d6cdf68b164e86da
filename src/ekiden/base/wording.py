"""Numbers in sentences."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 step`, `2 steps`, `1,000 steps`; `plural` is `noun` and an s unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def row_text(row: int) -> str:
    """Return how messages name a row of a file, a frame or an array."""
    return f"row {row} (counted from 0, without the header)"
