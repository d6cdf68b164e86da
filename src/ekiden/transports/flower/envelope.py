"""A byte string as the content of a Flower message: one array, which Flower carries whatever its size."""

from flwr.app import Array, ArrayRecord, Message, RecordDict

_NAME = "ekiden"


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
