"""Numbers in sentences."""


def counted(number: int, noun: str, plural: str = "") -> str:
    """`1 step`, `2 steps`, `1,000 steps`; `plural` is `noun` and an s unless it is given."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
