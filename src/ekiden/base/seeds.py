"""Seeds: each is derived from names and numbers, so nothing depends on a global random state."""

import hashlib


def derive(*parts: str | int) -> int:
    """Return a 63-bit seed that depends on all `parts` and on nothing else."""
    text = "\x1f".join(f"{type(p).__name__}:{p}" for p in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
