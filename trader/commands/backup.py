"""The commands backup and restore: the whole database to one file, while the service runs, and back."""

import argparse
import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import asyncpg

from trader.commands.audit import LINES_MAX
from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result, command, print_result, run_to_end, show
from trader.commands.database import TargetDatabase, add_database_options, database_command
from trader.embedded import dumps
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres, database_name
from trader.errors import StartError
from trader.services.agents.chain import verify
from trader.services.exchange.audit import audit
from trader.settings import read_database_url
from trader.store.database.loading import (
    COPY_TIMEOUT_S,
    empty_tables,
    enable_tables,
    select_object_names,
    select_schema_name,
    select_tables,
)
from trader.store.database.partitions import create_partition, partitioned_table
from trader.store.database.pool import Connection, Database, place
from trader.store.database.schema import (
    SCHEMA_VERSION,
    apply_schema,
    open_database,
    require_schema,
    schema_text,
    select_schema_version,
    upgrade,
)
from trader.store.operations.status import analyze, select_table_count

_NULL: Final = r"\N"

_IGNORED: Final = ("ENCODING", "STDSTRINGS", "SEARCHPATH", "SCHEMA", "COMMENT", "ACL", "DEFAULT ACL")
"""Kinds of entries of a dump that belong to every database; like all others, they are never executed."""


class Checked(NamedTuple):
    """Findings of the audit and the chain verification of a restored copy."""

    runs: int
    entries: int
    decisions: int
    problems: list[str]

    @property
    def lines(self) -> list[str]:
        """The facts as lines for people."""
        counts = f"{self.runs} runs, {self.entries} ledger entries, {self.decisions} decisions"
        listed = [f"  {problem}" for problem in self.problems[:LINES_MAX]]
        return [f"checked: {counts}", *listed, f"NOT clean: {len(self.problems)} problems" if listed else "clean"]


def _backup_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a file that does not exist yet; it gets pg_dump's custom format")
    parser.add_argument("--encrypt", metavar="RECIPIENT", help="encrypt it with age for this public key (age1…)")


@database_command(
    "backup", example="trader backup trader-2026-11-22.dump", arguments=_backup_arguments, of_any_version=True
)
async def backup(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Back up the database as of one moment to a file, while the service runs, and test that it can be restored.

    The file is restored into a server of its own in the folder for temporary files (TMPDIR), and audited and verified
    there; only then it gets its name. Fails when it cannot, or when the books or the record are not clean. A database
    of an earlier version is backed up as it is.
    """
    checked = await _write_backup(options.file, target, options.encrypt)
    size = options.file.stat().st_size
    lines = [*checked.lines, f"{options.file}: {size / 1e6:,.1f} MB"]
    value = {"file": str(options.file), "bytes": size, "isClean": not checked.problems, "checked": checked}
    return Result(value, lines, EXIT_FAILED if checked.problems else EXIT_DONE)


async def _write_backup(file: Path, target: TargetDatabase, recipient: str | None) -> Checked:
    """Write a backup that was restored, upgraded and checked, encrypted for a recipient if there is one.

    :raises StartError: the file exists, or there can be no such backup
    """
    if await asyncio.to_thread(file.exists):
        raise StartError(f"{file} exists already; name a new file.")
    unfinished = file.with_name(f"{file.name}.unfinished")
    async with target.database.connection() as conn:
        schema = await select_schema_name(conn)
    try:
        await dumps.back_up(target.dsn, unfinished, schema)
        show(
            f"dumped {unfinished.stat().st_size / 1e6:,.1f} MB; restoring it into a server of its own to check it",
            on_stderr=True,
        )
        checked = await _check_copy(unfinished)
        if recipient is None:
            unfinished.rename(file)
        else:
            await dumps.encrypt(unfinished, recipient, file)
    except OSError as error:
        raise StartError(f"{file} cannot be written: {error.strerror}.") from None
    finally:
        unfinished.unlink(missing_ok=True)
    return checked


def _upgrade_arguments(parser: argparse.ArgumentParser) -> None:
    meaning = "the backup, a file that does not exist yet; default: before-version-… in the working folder"
    parser.add_argument(
        "file", type=Path, nargs="?", default=Path(dumps.upgrade_backup_name(SCHEMA_VERSION)), help=meaning
    )


@database_command(
    "upgrade", example="trader upgrade before.dump", arguments=_upgrade_arguments, changes=True, of_any_version=True
)
async def upgrade_database(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Upgrade the database to the schema of this version, after a backup on which the upgrade is tried first.

    The backup is restored into a server of its own, upgraded and audited there. Only when that is clean the database is
    upgraded, in one transaction. A database that a service works on is refused.
    """
    async with target.database.connection() as conn:
        version = await select_schema_version(conn)
    value: dict[str, Any] = {"from": version, "to": SCHEMA_VERSION, "backup": None}
    if version == SCHEMA_VERSION:
        return Result(value, [f"The database has schema version {SCHEMA_VERSION} already."])
    if version is None or version > SCHEMA_VERSION:
        await require_schema(target.database, target.dsn)
    if target.is_served:
        raise StartError("A service of an earlier version works on this database: stop it first. Nothing was changed.")
    checked = await _write_backup(options.file, target, None)
    lines = [*checked.lines, f"backup: {options.file}"]
    value["backup"] = str(options.file)
    if checked.problems:
        return Result(value, [*lines, "Nothing was upgraded."], EXIT_FAILED)
    await apply_schema(target.database, backup=str(options.file.absolute()))
    return Result(value, [*lines, f"upgraded from schema version {version} to {SCHEMA_VERSION}"])


async def _check_copy(file: Path) -> Checked:
    """Restore the file into a scratch server, and audit and verify the copy.

    :raises StartError: it cannot be restored
    """
    try:
        with _scratch_folder() as folder:
            async with EmbeddedPostgres(folder / "server", durable=False) as server:
                dsn = await server.ensure_database("copy")
                await restore_file(file, dsn, (await _read_facts(file)).schema_version)
                return await _check(dsn)
    except StartError as error:
        raise StartError(
            f"The backup could not be restored in {tempfile.gettempdir()} to check it (TMPDIR names another folder), "
            f"so it was removed. {error}"
        ) from None


@contextmanager
def _scratch_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="trader-backup-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # as root the server runs as another user, who must have access
        yield folder


async def restore_file(file: Path, dsn: str, version: int) -> None:
    """Create the tables of a version in an empty database, copy the rows of a file into them, and upgrade them.

    All of it or, with an error, nothing.

    :raises StartError: the database is not empty or does not take the rows, or the file cannot be read
    """
    database = await Database.connect(dsn, size=1)
    try:
        async with database.transaction() as conn:
            if tables := await select_table_count(conn):
                raise StartError(
                    f"The database at {place(dsn)} has {tables} tables already; a backup is restored into an empty one "
                    "only. Nothing was changed."
                )
            await conn.execute(schema_text(version))
            await _copy_rows(file, conn)
            await upgrade(conn, version)
        async with database.connection() as conn:
            await analyze(conn)
    except asyncpg.PostgresError as error:
        raise StartError(f"The database does not take {file}: {error}. Nothing was restored.") from error
    finally:
        await database.close()


async def _copy_rows(file: Path, conn: Connection) -> None:
    """Copy the rows of a file into the empty tables.

    :raises StartError: the file has anything that the schema does not have, or lacks the rows of a table
    """
    entries = await dumps.list_entries(file)
    with_rows = {entry.tag: entry for entry in entries if entry.kind == dumps.ROWS}
    tables, partitions = set(await select_tables(conn)), set(filter(partitioned_table, with_rows))
    for partition in sorted(partitions):
        if partitioned_table(partition) in tables:
            await create_partition(conn, partition)
    names = await select_object_names(conn)
    for entry in entries:
        for word in () if entry.kind in _IGNORED else entry.tag.partition("(")[0].split():
            if word not in names and not word.startswith(tuple(partitions) or "\0"):
                raise StartError(f"{file} has the {entry.kind.lower()} {entry.tag}, which no database of trader has.")
    ordered = [table for table in await select_tables(conn) if table in with_rows]
    await empty_tables(conn)
    copied = set()
    async with dumps.reading(file, [with_rows[table] for table in ordered]) as source:
        async for table, columns in source.tables():
            await conn.copy_to_table(table, columns=columns, source=source.rows(), timeout=COPY_TIMEOUT_S)
            copied.add(table)
    if missing := with_rows.keys() - copied:
        raise StartError(f"{file} has no rows to copy of {', '.join(sorted(missing))}. Nothing was restored.")
    await enable_tables(conn)


async def _check(dsn: str) -> Checked:
    async with open_database(dsn) as database:
        books = await audit(database)
        record = await verify(database, [])
    findings = [f"record: {finding.kind}: {finding.text}" for finding in record.findings]
    return Checked(books.runs, books.entries, record.links, [*books.problems, *findings])


def _restore_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a file of `trader backup`, or another of pg_dump's custom format")
    add_database_options(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


@command("restore", example="trader restore trader-2026-11-22.dump", arguments=_restore_arguments)
def restore(options: argparse.Namespace) -> int:
    """Restore a backup into an empty place: the database of DATABASE_URL, or the embedded one of the working folder.

    Moving from the embedded PostgreSQL to a server, or back, is a backup and a restore. It is restored as a whole or
    not at all, and then audited and verified. A database that has tables is refused.
    """
    if not options.file.is_file():
        raise StartError(f"There is no file {options.file}.")
    return print_result(run_to_end(_run_restore(options)), as_json=options.json)


async def _run_restore(options: argparse.Namespace) -> Result:
    file: Path = options.file
    has_checksum = await asyncio.to_thread(dumps.has_checksum, file)
    facts = await _read_facts(file)
    async with _place(options, facts) as (dsn, where):
        show(f"database: {where}", on_stderr=True)
        await restore_file(file, dsn, facts.schema_version)
        checked = await _check(dsn)
    lines = [*checked.lines, f"restored {file}, of {facts.market_identity} ({facts.trading_mode}), into {where}"]
    if not has_checksum:
        lines.append("It has no checksum, unlike those of `trader backup`, so damage of it may go unnoticed.")
    if facts.schema_version < SCHEMA_VERSION:
        lines.append(f"Its schema version was {facts.schema_version}; it was upgraded to {SCHEMA_VERSION}.")
    value = {"file": str(file), "place": where, "backup": facts, "problems": checked.problems}
    return Result(value, lines, EXIT_FAILED if checked.problems else EXIT_DONE)


class BackupFacts(NamedTuple):
    """Metadata of the database in a backup. `venue_account` is set in live trading."""

    schema_version: int
    market_identity: str
    trading_mode: str
    venue_account: int | None


async def _read_facts(file: Path) -> BackupFacts:
    """Return the metadata of a backup.

    :raises StartError: it is no backup of this program, or one of a newer version
    """
    rows = await dumps.read_rows(file, "schema_version", "service_state")
    versions, states = rows.get("schema_version"), rows.get("service_state")
    if not versions:
        raise StartError(f"{file} is no backup of trader: it has no table schema_version.")
    if not states:
        raise StartError(f"{file} is of a database on which no service has ever run: there is nothing to restore.")
    text, state = versions[0].get("version", ""), states[0]
    if not text.isdecimal() or not int(text) >= 1:
        raise StartError(f"{file} is no backup of trader: its schema version is {text[:20]!r}.")
    version = int(text)
    if version > SCHEMA_VERSION:
        raise StartError(
            f"{file} has schema version {version}, made by a newer version of trader; this one has {SCHEMA_VERSION}. "
            "Restore it with the newer version."
        )
    account = state.get("venue_account_index", _NULL)
    return BackupFacts(
        version, state["market_identity"], state["trading_mode"], None if account == _NULL else int(account)
    )


@asynccontextmanager
async def _place(options: argparse.Namespace, facts: BackupFacts) -> AsyncIterator[tuple[str, str]]:
    """Find the database to restore into, and yield its connection string and its display name."""
    url = options.database_url or read_database_url(os.environ, options.env_file)
    if url:
        yield url, place(url)
        return
    name = options.database or database_name(facts.market_identity, facts.venue_account)
    async with EmbeddedPostgres(EMBEDDED_FOLDER).attach(creates=True) as server:
        yield await server.ensure_database(name), f"embedded in ./{EMBEDDED_FOLDER} ({name})"
