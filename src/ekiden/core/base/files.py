"""Files: a crash leaves the old or the new file, a changed byte is noticed, and tensors are not
copied.

Locks exclude other processes of one machine. A lock is released when its process ends, even by a
kill.
"""

import codecs
import contextlib
import errno
import hashlib
import json
import os
import stat
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ekiden.core.base.errors import UserError, visible

if TYPE_CHECKING:
    from filelock import FileLock

_DIGEST = "blake2b"
# placeholder for the digest while it is computed
_BLANK = "0" * 32
# bytes that are read and hashed while they are in the processor's cache
_AT_ONCE = 1 << 20
_MARK = b"ekiden\0\2"
"""first bytes of a file with a digest that is not a safetensors file (those begin with the length
of their header)"""
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_KINDS = {name: kind for kind, name in DTYPES.items()}


class Damaged(UserError):
    """A file that has changed since it was written."""


def path_of(given: object) -> Path:
    """Return the path that the caller of a public function means."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        hint = ": its path is result.folder" if hasattr(given, "folder") else ""
        raise UserError(
            "give a path, not "
            f"{'an empty text' if isinstance(given, str) else type(given).__name__}{hint}"
        )
    return Path(given)


def safetensors_chunks(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a safetensors file, piece by piece.

    The writer of the library safetensors holds a second copy of everything and refuses tensors that
    share memory. That library reads the files of this one.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    yield _framed(header)
    for tensor in tensors.values():
        yield bytes_of(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the content of a tensor, row by row."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def add_tensor(digest: "hashlib.blake2b", name: str, tensor: Tensor) -> None:
    """Add name, shape, type and content of a tensor to a digest."""
    digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
    if not tensor.is_meta:
        digest.update(bytes_of(tensor))


def with_digest(chunks: Iterable[bytes | memoryview], **more: str) -> Iterator[bytes | memoryview]:
    """Return the pieces of a safetensors file with a digest of all its bytes in the metadata, for
    `read_tensors`.

    It stays a safetensors file that every tool reads. `more` are further entries of the metadata.
    """
    first, *tensors = chunks
    header = json.loads(bytes(first[8:]))
    metadata = {_DIGEST: _BLANK, **more, **header["__metadata__"]}
    found = _hashed([_framed({**header, "__metadata__": metadata}), *tensors])
    yield _framed({**header, "__metadata__": metadata | {_DIGEST: found.hexdigest()}})
    yield from tensors


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file that `with_digest` and `write` made.

    Bytes go from the file into the tensors, so they are in memory once, and those that are used are
    those that were checked. (A mapped file needs as much. Whoever changes it later changes the
    tensors, or kills the process.)

    Raises:
        Damaged: a byte was changed, it is truncated, or it has no digest.
        OSError: it cannot be read.
        UserError: it is not a regular file.
    """
    with _regular(path) as file:
        left = os.fstat(file.fileno()).st_size
        first = file.read(8)
        length = int.from_bytes(first, "little")
        text = file.read(length) if 8 + length <= left else b""
        left -= 8 + length
        tensors: dict[str, Tensor] = {}
        try:
            header = json.loads(text)
            metadata = header.pop("__metadata__")
            said = metadata[_DIGEST]
            blank = f'"{_DIGEST}":"{_BLANK}"'.encode()
            found = _hashed([first, text.replace(f'"{_DIGEST}":"{said}"'.encode(), blank, 1)])
            for name, about in header.items():
                tensor = torch.empty(0, dtype=_KINDS[about["dtype"]])
                size = prod(about["shape"]) * tensor.element_size()
                if not 0 <= size <= left:
                    break
                tensor = tensor.new_empty(about["shape"])
                left = left - size
                view = tensor.reshape(-1).view(torch.uint8).numpy()
                for at in range(0, size, _AT_ONCE):
                    piece = view[at : at + _AT_ONCE].data
                    file.readinto(piece)
                    found.update(piece)
                tensors[name] = tensor
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError):
            raise Damaged("changed since it was written: it has no digest") from None
    if left or len(tensors) < len(header) or found.hexdigest() != said:
        raise Damaged("changed since it was written: its digest differs")
    return tensors, metadata


def _framed(header: Mapping[str, object]) -> bytes:
    """Return the header of a safetensors file."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def marked(pieces: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Return the pieces of a file with their digest in front."""
    return [_MARK, _hashed(pieces).digest(), *pieces]


def _hashed(pieces: Iterable[bytes | memoryview]) -> "hashlib.blake2b":
    found = hashlib.blake2b(digest_size=len(_BLANK) // 2)
    for piece in pieces:
        found.update(piece)
    return found


def verified(data: bytes) -> memoryview:
    """Return what `marked` was given.

    Raises:
        Damaged: a byte was changed.
    """
    start = len(_MARK) + len(_BLANK) // 2
    if not data.startswith(_MARK):
        raise Damaged("changed since it was written: it has no digest")
    content = memoryview(data)[start:]
    if _hashed([content]).digest() != data[len(_MARK) : start]:
        raise Damaged("changed since it was written: its digest differs")
    return content


def read_regular(path: Path, most: int = 1 << 31) -> bytes:
    """Return the content of a file that others may have made.

    Args:
        path: a regular file; a pipe would never end, nor would a device.
        most: largest number of bytes.

    Raises:
        FileNotFoundError: there is none.
        UserError: it is not a regular file, or too large.
    """
    with _regular(path, most) as file:
        # `read` makes room for what it is asked for
        return file.read(os.fstat(file.fileno()).st_size)


def read_text(path: Path, most: int = 1 << 28) -> str:
    """Return the text of a file that others may have made, at most so many bytes; see
    `read_regular`. A byte-order mark says whether it is UTF-16, as PowerShell writes it.
    """
    data = read_regular(path, most)
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        return data.decode("utf-16" if wide else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not text in UTF-8 (byte {error.start}): get it again from who made it"
        ) from None


def read_toml(path: Path, advice: str) -> dict[str, Any]:
    """Return the values in a TOML file; `advice` says what to do if it cannot be read."""
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): {advice}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None


def csv_cell(value: Any) -> Any:
    """Return a cell of a CSV file. Spreadsheets take texts that begin like this for formulas, and
    run them.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        return value
    text = visible(value, keep="\n\t")
    if text.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{text}"
    return text


def for_csv(table: Any) -> Any:
    """Return an Arrow table whose names and texts can stand in a CSV file; see `csv_cell`."""
    table = table.rename_columns(list(map(csv_cell, table.column_names)))
    for place, name in enumerate(table.column_names):
        if "string" in str(table.schema.types[place]):
            # None stays None: an empty cell, and not a text of no letters
            cells = [cell and csv_cell(cell) for cell in table.column(place).to_pylist()]
            table = table.set_column(place, name, [cells])
    return table


@contextmanager
def _regular(path: Path, most: int = 1 << 62) -> Iterator[BufferedReader]:
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise UserError(
                f"{path} is not a file of at most {most} bytes: it does not belong into a run "
                "folder"
            )
        yield file


def write(path: Path, chunks: Iterable[bytes | memoryview], *, sync: bool = True) -> int:
    """Write `chunks` to `path` atomically and return the number of bytes.

    The folder must exist. `sync` waits until the file is on the disk, so that it also survives a
    power cut.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            written = sum(map(file.write, chunks))
            if sync:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise disk_error(error, path) from error
    return written


def sync(path: Path) -> None:
    """Wait until a file is on the disk."""
    try:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise disk_error(error, path) from error


def write_once(path: Path, content: bytes) -> bytes:
    """Write `path`, readable by its owner only, unless it exists; return what it then holds.

    If several processes try at once, all get what the first one wrote.
    """
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with open(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
            ) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):
                # unlike a rename, this keeps what another process wrote meanwhile
                os.link(temporary, path)
        except OSError as error:
            raise disk_error(error, path) from error
        finally:
            temporary.unlink(missing_ok=True)
    return path.read_bytes()


def leave_no_core() -> None:
    """Let no crash of this process and its children write their memory, with keys and samples, to a
    file.
    """
    with contextlib.suppress(ImportError):
        # Windows does not have it
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def disk_error(error: OSError, path: Path) -> UserError:
    """Return the error for a `path` that could not be written."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"disk full while writing {path}: free some space, then run `ekiden resume` or the "
            "same command again"
        )
    return UserError(f"cannot write {path}: {error.strerror or error}: choose another place")


# seconds: longer than `is_held` holds a lock
_A_LOOK = 0.1


def hold_lock(path: Path, *, wait: bool) -> "FileLock":
    """Hold the lock of a file until `release` is called; a missing file is made.

    Args:
        path: the file, whose contents do not matter.
        wait: whether to wait while another process holds it.

    Raises:
        Timeout: another process holds it, and `wait` is false. It is an OSError.
        OSError: the file cannot be opened.
    """
    # commands that only look need no lock
    from filelock import FileLock

    lock = FileLock(path, thread_local=False)
    lock.acquire(timeout=-1 if wait else _A_LOOK, poll_interval=0.02)
    return lock


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock of a file. To find out, this one holds it for a
    moment.
    """
    if not path.exists():
        return False
    from filelock import Timeout

    try:
        hold_lock(path, wait=False).release()
    except Timeout:
        return True
    except OSError:  # a folder of somebody else
        return False
    return False


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the lock of a file for a while; see `hold_lock`."""
    lock = hold_lock(path, wait=wait)
    try:
        yield
    finally:
        lock.release()


def lock_file(path: Path) -> Path:
    """Return the lock file for `path`, a hidden file next to it: the same for all names of the
    path.
    """
    found = path.resolve()
    return found.with_name(f".{found.name}.lock")


# images of at least this number of bytes stay on the disk
LARGE = 1 << 28


@dataclass(frozen=True)
class Place:
    """Where the bytes of a tensor are."""

    path: Path  # path of the file
    offset: int  # position of the first byte
    shape: tuple[int, ...]  # shape of the tensor

    def open(self) -> Tensor:
        """Map the bytes as uint8. Writing into the tensor writes into the file.

        The system would refuse a private mapping that is larger than memory.
        """
        size = self.offset + prod(self.shape)
        whole = torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)
        tensor = whole[self.offset :].view(self.shape)
        tensor.__dict__["_ekiden_place"] = self
        return tensor


def place(tensor: Tensor) -> Place | None:
    """Return where a tensor from `Place.open` is; None for other tensors and for views of it."""
    found = vars(tensor).get("_ekiden_place")
    if isinstance(found, Place):
        return found
    return None


def digest_of(about: str, pieces: Iterable[bytes | memoryview | str | Path]) -> str:
    """Return the hexadecimal BLAKE2b of a text and the pieces; of a path, the file's contents
    count.
    """
    digest = hashlib.blake2b(about.encode(), digest_size=16)
    for piece in pieces:
        if isinstance(piece, Path):
            with piece.open("rb") as file:
                piece = hashlib.file_digest(file, hashlib.blake2b).digest()  # noqa: PLW2901
        data = piece.encode() if isinstance(piece, str) else piece
        # with the length, two lists of pieces never give the same bytes
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return `$EKIDEN_CACHE`, or else `~/.cache/ekiden`."""
    return Path(os.environ.get("EKIDEN_CACHE") or "~/.cache/ekiden").expanduser()


def room(shape: tuple[int, ...]) -> Tensor:
    """Make a uint8 tensor for images: in memory or, if it is large, in a file that vanishes after
    its last use.
    """
    size = prod(shape)
    if size < LARGE:
        return torch.empty(shape, dtype=torch.uint8)
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=cache_folder(), prefix=".decoding-") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            return Place(Path(file.name), 0, shape).open()
    except OSError as error:
        raise UserError(
            f"images of {size / 1e9:.1f} GB cannot be decoded into {cache_folder()} "
            f"({error.strerror}): free space there, or set EKIDEN_CACHE to another folder"
        ) from None
