"""How many payloads the fuzzing tests generate: few in every run, 100 times as many with
EKIDEN_FUZZ=100."""

import os


def examples(count: int) -> int:
    """`count`, or a multiple of it."""
    return count * int(os.environ.get("EKIDEN_FUZZ", "1"))
