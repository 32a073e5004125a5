"""Files that a stranger may have made: only bounded, regular ones are read, no link is followed, writes replace a file.

The user names a file, or the folder that holds it. Links on the way to it are the user's own; the file itself, and
everything within the folder, must not be a link.
"""

import errno
import fcntl
import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import BufferedReader, FileIO, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import msgspec

T = TypeVar("T")

SMALL_BYTES_MAX: Final = 1 << 18
"""Size limit of files that people write: settings, models, rules."""

BYTES_MAX: Final = 1 << 28
"""Size limit of files that are read into memory."""

STREAM_BYTES_MAX: Final = 1 << 36
"""Size limit of files that are read line by line."""

LINE_BYTES_MAX: Final = 1 << 26

JSON_DEPTH_MAX: Final = 50

_TO_READ: Final = os.O_RDONLY | os.O_NONBLOCK  # to open a FIFO would wait for a writer
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_NESTING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)


def is_secret_name(name: str) -> bool:
    """Return whether files with this name usually hold settings, keys or the service's data: dotfiles and `*.env`."""
    return name.startswith(".") or name.endswith(".env")


def open_regular(file: Path, bytes_max: int = STREAM_BYTES_MAX, *, below: Path | None = None) -> BufferedReader:
    """Open a file for reading; `below` is the folder that the user named, if the file is deeper in it.

    :raises OSError: it does not exist, is a link or no regular file, is below a link, or has more than `bytes_max`
    """
    opened: BufferedReader = BufferedReader(FileIO(_open_regular(file, _TO_READ, below or file.parent, bytes_max)))
    return opened


def read_regular(file: Path, bytes_max: int = BYTES_MAX, *, below: Path | None = None) -> bytes:
    """Return the content of a file. Raise like `open_regular`."""
    with open_regular(file, bytes_max, below=below) as opened:
        content = opened.read(bytes_max + 1)
    if len(content) > bytes_max:  # it has grown meanwhile
        raise _too_large(file, bytes_max)
    return content


def read_lines(file: Path, bytes_max: int = STREAM_BYTES_MAX, *, below: Path | None = None) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; an incomplete last line has none. Raise like `open_regular`."""
    with open_regular(file, bytes_max, below=below) as opened:
        while line := opened.readline(LINE_BYTES_MAX + 1):
            if len(line) > LINE_BYTES_MAX:
                raise _too_large(file, LINE_BYTES_MAX, "a line of ")
            yield line


def file_digest(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raises `OSError`."""
    with open_regular(file) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def decode_json(content: bytes, kind: type[T], dec_hook: Callable[[type, Any], Any] | None = None) -> T:
    """Return the value of a JSON text; `dec_hook` is as in msgspec.

    :raises msgspec.DecodeError: it is no such value, or nested more than `JSON_DEPTH_MAX` deep
    """
    if content.count(b"[") + content.count(b"{") > JSON_DEPTH_MAX:
        depth = 0
        for found in _NESTING.finditer(content):
            depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(found[0], 0)
            if depth > JSON_DEPTH_MAX:
                raise msgspec.DecodeError(f"more than {JSON_DEPTH_MAX} lists and objects within each other")
    return msgspec.json.decode(content, type=kind, dec_hook=dec_hook)


def open_appending(file: Path, *, waits: bool = False) -> FileIO:
    """Open a file, which is created if it is missing, for `append`, which one process at a time may do.

    :raises OSError: as in `open_regular`; or another process appends to it, unless this `waits` for that
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK
    opened = FileIO(_open_regular(file, flags, file.parent, STREAM_BYTES_MAX), "a+")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except OSError as error:
        opened.close()
        reason = "Another process appends to it" if isinstance(error, BlockingIOError) else error.strerror
        raise OSError(error.errno, reason, str(file)) from error
    return opened


def append(file: BinaryIO | RawIOBase, content: bytes) -> None:
    """Append to an unbuffered file. After an `OSError`, such as of a full disk, none of the content is in it."""
    size = file.seek(0, os.SEEK_END)
    written = 0
    try:
        while written < len(content):
            written += file.write(content[written:]) or 0
    except OSError:
        file.truncate(size)
        raise


def append_lines(file: Path, lines: bytes) -> None:
    """Append complete lines to a file that others append to as well. Raise like `open_appending`."""
    with open_appending(file, waits=True) as opened:
        size = opened.seek(0, os.SEEK_END)
        is_cut = bool(size) and os.pread(opened.fileno(), 1, size - 1) != b"\n"
        append(opened, (b"\n" if is_cut else b"") + lines)
        os.fsync(opened.fileno())


@contextmanager
def replacing(file: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file that, once it is written, takes the place of any file or link with this name.

    :raises OSError: it cannot be written; what was there stays
    """
    draft = file.with_name(f".{secrets.token_hex(8)}.new")
    try:
        with os.fdopen(os.open(draft, _NEW | os.O_NOFOLLOW | os.O_CLOEXEC, mode), "wb") as opened:
            yield opened
        draft.replace(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error
    finally:
        draft.unlink(missing_ok=True)


def replace_file(file: Path, content: bytes | str, mode: int = 0o666) -> None:
    """Write a file as `replacing` does."""
    with replacing(file, mode) as opened:
        opened.write(content.encode() if isinstance(content, str) else content)


def _open_regular(file: Path, flags: int, below: Path, bytes_max: int) -> int:
    """Return a descriptor of a file that is regular and not too large."""
    opened = _open(file, flags, below)
    facts = os.fstat(opened)
    if stat.S_ISREG(facts.st_mode) and facts.st_size <= bytes_max:
        return opened
    os.close(opened)
    if stat.S_ISREG(facts.st_mode):
        raise _too_large(file, bytes_max)
    code = errno.EISDIR if stat.S_ISDIR(facts.st_mode) else errno.EINVAL
    raise OSError(code, os.strerror(code) if code == errno.EISDIR else "Not a regular file", str(file))


def _open(file: Path, flags: int, below: Path) -> int:
    """Return a descriptor of a file, opened folder by folder from `below` on, so that none of them is a link."""
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        if below == file.parent:
            return os.open(file, flags, 0o644)
        with ExitStack() as stack:
            place = os.open(below, os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, place)
            for folder in file.relative_to(below).parts[:-1]:
                place = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
                stack.callback(os.close, place)
            return os.open(file.name, flags, 0o644, dir_fd=place)
    except ValueError:  # a NUL
        raise OSError(errno.EINVAL, "No name of a file", str(file)) from None
    except OSError as error:
        reason = "Is a link, which is not followed" if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, reason, str(file)) from error


def _too_large(file: Path, bytes_max: int, what: str = "") -> OSError:
    return OSError(errno.EFBIG, f"Has {what}more than {bytes_max:,} bytes", str(file))
