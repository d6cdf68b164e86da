"""The fixtures of the readers."""

from tests.readers.conftest import digits, no_data, real  # noqa: F401
