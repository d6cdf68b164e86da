"""Put a byte string into a Flower message, as one array, which Flower carries at any size."""

import os
from functools import cache

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

_NAME = "ekiden"
_PIECE = int(FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)


def wrap(data: bytes) -> RecordDict:
    """Return the content of a message that carries `data`."""
    array = Array("uint8", (len(data),), "ekiden", data)
    return RecordDict({_NAME: ArrayRecord({_NAME: array})})


def content(message: Message) -> bytes:
    """Return the bytes that a message carries; none if it is not from Ekiden."""
    record = message.content.get(_NAME)
    if not isinstance(record, ArrayRecord) or _NAME not in record:
        return b""
    data: bytes = record[_NAME].data
    return data


def overhead(length: int) -> int:
    """Return how many bytes Flower's objects and their list need in addition to a byte string of
    this length.

    Flower cuts a byte string into pieces. The first has the overhead of a message, and each other
    piece adds the same amount. The bytes that gRPC, HTTP and TLS add are not counted.
    """
    first, each = _measured()
    return first + each * max(0, -(-length // _PIECE) - 1)


@cache
def _measured() -> tuple[int, int]:
    one, two = (_beyond(os.urandom(length)) for length in (_PIECE, _PIECE + 1))
    return one, two - one


def _beyond(data: bytes) -> int:
    record = wrap(data)
    objects = get_all_nested_objects(record).values()
    return (
        int(sum(len(o.deflate()) for o in objects))
        + int(get_object_tree(record).ByteSize())
        - len(data)
    )
