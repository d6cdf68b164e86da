"""Put a byte string into a Flower message, as one array, which Flower carries at any size."""

from flwr.app import Array, ArrayRecord, Message, RecordDict

_NAME = "ekiden"


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
