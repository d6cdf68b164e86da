"""A byte string as the content of a Flower message: one array, which Flower carries whatever its size."""

import os
from functools import cache

from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

_NAME = "ekiden"
_PIECE = int(FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE)


def wrap(data: bytes) -> RecordDict:
    """The content of a message that carries `data`."""
    array = Array("uint8", (len(data),), "ekiden", data)
    return RecordDict({_NAME: ArrayRecord({_NAME: array})})


def content(message: Message) -> bytes:
    """What a message carries; nothing where it is not from Ekiden."""
    record = message.content.get(_NAME)
    if not isinstance(record, ArrayRecord) or _NAME not in record:
        return b""
    data: bytes = record[_NAME].data
    return data


def overhead(length: int) -> int:
    """Bytes that Flower's objects and their list have beyond the byte string of that length that they carry.

    Flower cuts a byte string into pieces; the first makes the overhead of a message, each other adds the same to it.
    What gRPC, HTTP and TLS add is not in it.
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
    return int(sum(len(o.deflate()) for o in objects)) + int(get_object_tree(record).ByteSize()) - len(data)
