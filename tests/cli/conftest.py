from collections.abc import Iterator

import pytest

from ekiden.core.base.errors import command_line


@pytest.fixture(autouse=True)
def flags_in_messages() -> Iterator[None]:
    """What is called here is called by the command line, whose messages name flags."""
    with command_line():
        yield
