"""The commands backup and restore: the whole database to one file, while the service runs, and back."""

import argparse
import asyncio
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import asyncpg
import msgspec

from trader.agents.sql.external import delete_webhooks, select_webhooks
from trader.agents.sql.models import select_models, update_reaching_out_inactive
from trader.agents.verification import verify
from trader.commands.audit import add_record_option, record_run
from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result, command, count_argument, first, show
from trader.commands.database import TargetDatabase, add_database_options, database_command
from trader.core.clock import SystemClock
from trader.core.errors import StartError
from trader.core.logs import printable
from trader.core.money import counted
from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded import dumps
from trader.database.embedded.server import EmbeddedPostgres, database_name
from trader.database.loading import (
    COPY_TIMEOUT_S,
    empty_tables,
    enable_tables,
    select_object_names,
    select_schema_name,
    select_superuser,
    select_table_with_wrong_time,
    select_tables,
)
from trader.database.partitions import create_partition, partitioned_table
from trader.database.pool import Connection, Database, place
from trader.database.schema import (
    apply_schema,
    open_database,
    require_schema,
    schema_text,
    schema_version,
    select_schema_version,
    upgrade,
)
from trader.exchange.domain.halts import CommandOutcome, scope
from trader.exchange.sql.accounts import select_accounts
from trader.exchange.sql.halts import update_all_withdrawn
from trader.operations.sql.credentials import select_credentials, update_all_revoked
from trader.operations.sql.status import analyze, select_table_count
from trader.portfolio.audit import audit
from trader.portfolio.sql.snapshots import select_baseline_states
from trader.settings.settings import read_database_url

_NAMED: Final = re.compile(r"trader-\d{4}-\d\d-\d\dT\d{6}Z\.dump")

_SCRATCH: Final = ".trader-backup-"
_LOCK: Final = "lock"
_UNLOCKED_S: Final = 60.0
"""How long a scratch folder may lack its lock, which is created right after it."""

_NULL: Final = r"\N"

_KEPT: Final = "in force, so check these before the service starts:"
_DISARMED: Final = "no longer in force, as anybody may have made the file (--keep-credentials keeps them):"

_IGNORED: Final = ("ENCODING", "STDSTRINGS", "SEARCHPATH", "SCHEMA", "COMMENT", "ACL", "DEFAULT ACL")
"""Kinds of dump entries that every database has; like all others, they are never executed."""


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
        listed = first([f"  {problem}" for problem in self.problems])
        verdict = f"NOT clean: {counted(len(self.problems), 'problem')}" if listed else "clean"
        return [f"checked: {counts}", *listed, verdict]


def _backup_arguments(parser: argparse.ArgumentParser) -> None:
    meaning = "a file that does not exist yet; it gets pg_dump's custom format"
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("file", type=Path, nargs="?", help=meaning)
    where.add_argument("--into", type=Path, metavar="FOLDER", help="a folder for a file named after the present time")
    parser.add_argument(
        "--keep", type=count_argument, metavar="N", help="with --into: keep only the newest N backups there"
    )
    meaning = "also copy it to a folder of another disk, or to HOST:FOLDER by scp"
    parser.add_argument("--to", metavar="PLACE", help=meaning)
    add_record_option(parser)
    parser.add_argument("--encrypt", metavar="RECIPIENT", help="encrypt it with age for this public key (age1…)")


@database_command(
    "backup", example="trader backup trader-2026-11-22.dump", arguments=_backup_arguments, of_any_version=True
)
async def backup(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Back up the database to a file while the service runs, and test a restore.

    The command restores the file into a separate server in the folder for temporary files (TMPDIR), and audits and
    verifies it there; only then does the file get its name. It fails if this fails, or if the books or the record are
    not clean. It backs up a database of an earlier version unchanged. With `--into` and `--keep` it also deletes the
    oldest backups that it has named itself, after a clean one.
    """
    file = options.file or options.into / f"trader-{SystemClock().now():%Y-%m-%dT%H%M%SZ}.dump"
    await asyncio.to_thread(file.parent.mkdir, parents=True, exist_ok=True)
    checked = await _write_backup(file, target, options.encrypt)
    size = file.stat().st_size
    lines = [*checked.lines, f"{file}: {size / 1e6:,.1f} MB"]
    outdated = _outdated(options.into, options.keep) if options.into and options.keep and not checked.problems else []
    for old in outdated:
        old.unlink()
        lines.append(f"deleted {old}")
    problem = None if options.to is None else await _copy(file, options.to)
    if options.to is not None:
        lines.append(problem or f"copied to {options.to}")
    value = {"file": str(file), "bytes": size, "isClean": not checked.problems, "checked": checked}
    problems = len(checked.problems) + (problem is not None)
    if options.record:
        await record_run(target, "backup", problems)
    return Result(value, lines, EXIT_FAILED if problems else EXIT_DONE)


async def _copy(file: Path, place: str) -> str | None:
    """Copy a file to a folder, or by scp with a key to HOST:FOLDER. Return why it failed, or None."""
    command = ("scp", "-qB", str(file), f"{place}/") if ":" in place else ("cp", "--", str(file), f"{place}/")
    try:
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    except OSError as error:
        return f"NOT copied to {place}: {command[0]}: {error.strerror}"
    _, said = await process.communicate()
    return f"NOT copied to {place}: {said.decode(errors='replace').strip()}" if process.returncode else None


def _outdated(folder: Path, keep: int) -> list[Path]:
    """Return the backups in a folder beyond the newest ones, oldest first, by the names that --into gives."""
    return sorted(path for path in folder.iterdir() if _NAMED.fullmatch(path.name))[:-keep]


async def _write_backup(file: Path, target: TargetDatabase, recipient: str | None) -> Checked:
    """Write a backup after restoring, upgrading and checking it, encrypted if there is a recipient.

    :raises StartError: the file exists, or the backup failed
    """
    if await asyncio.to_thread(file.exists):
        raise StartError(f"{file} exists already; name a new file.")
    async with target.database.connection() as conn:
        schema = await select_schema_name(conn)
    try:
        with _scratch_folder(file.parent) as folder:
            unfinished = folder / file.name
            await dumps.back_up(target.dsn, unfinished, schema)
            size_mb = unfinished.stat().st_size / 1e6
            show(f"dumped {size_mb:,.1f} MB; restoring it into a separate server to check it", on_stderr=True)
            checked = await _check_copy(unfinished)
            if recipient is None:
                unfinished.rename(file)
            else:
                await dumps.encrypt(unfinished, recipient, folder / "encrypted")
                (folder / "encrypted").rename(file)
    except OSError as error:
        raise StartError(f"{file} cannot be written: {error.strerror}.") from None
    return checked


def _upgrade_arguments(parser: argparse.ArgumentParser) -> None:
    meaning = "the backup, a file that does not exist yet; default: before-version-… in the working folder"
    parser.add_argument(
        "file", type=Path, nargs="?", default=Path(dumps.upgrade_backup_name(schema_version())), help=meaning
    )


@database_command(
    "upgrade", example="trader upgrade before.dump", arguments=_upgrade_arguments, changes=True, of_any_version=True
)
async def upgrade_database(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Upgrade the database to the schema of this version, after a test on a backup.

    The command restores the backup into a separate server, and upgrades and audits it there. Only if the result is
    clean does it upgrade the database, in one transaction. It refuses a database that a service is using.
    """
    async with target.database.connection() as conn:
        version = await select_schema_version(conn)
    value: dict[str, Any] = {"from": version, "to": schema_version(), "backup": None}
    if version == schema_version():
        return Result(value, [f"The database already has schema version {schema_version()}."])
    if version is None or version > schema_version():
        await require_schema(target.database, target.dsn)
    if target.is_served:
        raise StartError("A service of an earlier version is using this database: stop it first. Nothing was changed.")
    checked = await _write_backup(options.file, target, None)
    lines = [*checked.lines, f"backup: {options.file}"]
    value["backup"] = str(options.file)
    if checked.problems:
        return Result(value, [*lines, "Nothing was upgraded."], EXIT_FAILED)
    await apply_schema(target.database, backup=str(options.file.absolute()))
    return Result(value, [*lines, f"upgraded from schema version {version} to {schema_version()}"])


async def _check_copy(file: Path) -> Checked:
    """Restore the file into a scratch server, and audit and verify the copy.

    :raises StartError: the restore failed
    """
    try:
        with _scratch_folder(Path(tempfile.gettempdir())) as folder:
            folder.chmod(0o755)  # under root the server runs as another user, who needs access
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
def _scratch_folder(place: Path) -> Iterator[Path]:
    """Make a folder for unfinished work, remove it at the end, and first remove those left by killed commands."""
    for leftover in place.glob(f"{_SCRATCH}*"):
        if _is_abandoned(leftover):
            show(f"removing {leftover}, left by an interrupted backup", on_stderr=True)
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH, dir=place) as name, Path(name, _LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the lock ends with the process, however the process ends
        yield Path(name)


def _is_abandoned(folder: Path) -> bool:
    """Return whether a scratch folder of this user belongs to no running process."""
    try:
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        with (folder / _LOCK).open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return time.time() - found.st_mtime > _UNLOCKED_S
    except OSError:
        return False
    return True


async def restore_file(file: Path, dsn: str, version: int, *, keeps_credentials: bool = False) -> list[str]:
    """Create the tables of a version in an empty database, copy the rows of a file into them, and upgrade them.

    Return a line for each of the rows that let somebody act, reach an address or run code; only with
    `keeps_credentials` do they stay in force. An error changes nothing.

    :raises StartError: the user is a superuser, the database is not empty or rejects the rows, or the file cannot be
        read
    """
    database = await Database.connect(dsn, size=1)
    try:
        async with database.transaction() as conn:
            await _refuse_superuser(conn, place(dsn))
            if tables := await select_table_count(conn):
                raise StartError(
                    f"The database at {place(dsn)} already has {tables} tables; a backup can only be restored into an "
                    "empty one. Nothing was changed."
                )
            await conn.execute(schema_text(version))
            await _copy_rows(file, conn)
            await upgrade(conn, version)
            await _refuse_unreadable(file, conn)
            lines = await _powers(conn)
            if not keeps_credentials:
                lines += await _disarm(conn)
        async with database.connection() as conn:
            await analyze(conn)
    except asyncpg.PostgresError as error:
        raise StartError(f"The database rejects {file}: {error}. Nothing was restored.") from error
    finally:
        await database.close()
    return lines


async def _refuse_superuser(conn: Connection, where: str) -> None:
    if user := await select_superuser(conn):
        raise StartError(
            f"The user {user} of {where} is a superuser, who may write outside of trader's tables. Restore as a role "
            "that owns nothing but the database: `createuser --pwprompt trader`, `createdb --owner trader trader`, and "
            f"trader instead of {user} in the address. Nothing was changed."
        )


async def _copy_rows(file: Path, conn: Connection) -> None:
    """Copy the rows of a file into the empty tables, after checking all of the file.

    :raises StartError: the file has objects or rows outside the schema, or lacks the rows of a table
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
                raise _unknown(file, entry)
    ordered = [with_rows.pop(table) for table in await select_tables(conn) if table in with_rows]
    for entry in with_rows.values():
        raise _unknown(file, entry)
    await dumps.check_rows(file, ordered)
    await empty_tables(conn)
    schema = await select_schema_name(conn)
    async with dumps.reading(file, ordered) as source:
        async for table, columns in source.tables():
            await conn.copy_to_table(
                table, schema_name=schema, columns=columns, source=source.rows(), timeout=COPY_TIMEOUT_S
            )
    await enable_tables(conn)


async def _refuse_unreadable(file: Path, conn: Connection) -> None:
    """Refuse rows that the constraints allow and that a start could not read."""
    if (table := await select_table_with_wrong_time(conn)) is not None:
        raise StartError(f"{file} has a row of {table} with a time outside of 1970 to 2200. Nothing was restored.")
    try:
        await select_models(conn)
        await select_accounts(conn)
        await select_baseline_states(conn)
        await select_credentials(conn)
    except (StartError, ValueError, msgspec.ValidationError) as error:
        raise StartError(f"{file} has a row that the service cannot read: {error}. Nothing was restored.") from error


def _unknown(file: Path, entry: dumps.DumpEntry) -> StartError:
    return StartError(f"{file} has the {entry.kind.lower()} {entry.tag}, which no database of trader has.")


async def _check(dsn: str) -> Checked:
    async with open_database(dsn) as database:
        books = await audit(database)
        record = await verify(database, [])
    findings = [f"record: {finding.kind}: {finding.text}" for finding in record.findings]
    return Checked(books.runs, books.entries, record.links, [*books.problems, *findings])


def _restore_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a file from `trader backup`, or another in pg_dump's custom format")
    parser.add_argument(
        "--keep-credentials",
        action="store_true",
        help="of a backup of your own: keep its tokens, keys and webhooks, and models with code or addresses, in force",
    )
    add_database_options(parser)


@command("restore", example="trader restore trader-2026-11-22.dump", arguments=_restore_arguments)
async def restore(options: argparse.Namespace) -> Result:
    """Restore a backup into an empty database.

    The database is that of DATABASE_URL, or the embedded one of the working folder.

    The restored tokens, agents' keys and webhooks are revoked and listed, models that run a file or send prompts to an
    address of their own are paused, and unfinished commands are withdrawn; --keep-credentials keeps them.

    To move from the embedded PostgreSQL to a server, or back, make a backup and restore it. The restore is atomic; the
    command then audits and verifies the result. It refuses a database that has tables.
    """
    file: Path = options.file
    if not await asyncio.to_thread(file.is_file):
        raise StartError(f"There is no file {file}.")
    has_checksum = await asyncio.to_thread(dumps.has_checksum, file)
    facts = await _read_facts(file)
    async with _place(options, facts) as (dsn, where):
        show(f"database: {where}", on_stderr=True)
        brought = await restore_file(file, dsn, facts.schema_version, keeps_credentials=options.keep_credentials)
        checked = await _check(dsn)
    lines = [
        *checked.lines,
        *([_KEPT if options.keep_credentials else _DISARMED] if brought else []),
        *(f"  {line}" for line in brought),
        f"restored {file}, of {facts.market_identity} ({facts.trading_mode}), into {where}",
    ]
    if not has_checksum:
        lines.append("Unlike files from `trader backup` it has no checksum, so damage may go unnoticed.")
    if facts.schema_version < schema_version():
        lines.append(f"Its schema version was {facts.schema_version}; it was upgraded to {schema_version()}.")
    value = {"file": str(file), "place": where, "backup": facts, "problems": checked.problems}
    value |= {"brought": brought, "isInForce": options.keep_credentials}
    return Result(value, lines, EXIT_FAILED if checked.problems else EXIT_DONE)


async def _powers(conn: Connection) -> list[str]:
    """Return a line for each valid credential, file that a model runs, and address that gets prompts or views."""
    models = await select_models(conn)
    lines = [
        f"the {'key of' if each.account_id else 'token'} {each.name} ({each.prefix}…) may {', '.join(each.scopes)}"
        for each in await select_credentials(conn)
        if each.revoked_at is None
    ]
    lines += [f"{model.id} runs {model.router_model_name}" for model in models if model.provider == "strategy"]
    for model in models:
        if (provider := model.configuration.provider_definition) is not None:
            keys = "" if provider.key_variable is None else f", with the keys in {provider.key_variable},"
            lines.append(f"{model.id} sends its prompts{keys} to {_host_of(provider.base_url)}")
    webhooks = await select_webhooks(conn)
    lines += [f"{model_id} gets its views at {_host_of(each.url)}" for model_id, each in webhooks.items()]
    return [printable(line) for line in lines]


async def _disarm(conn: Connection) -> list[str]:
    """Revoke all credentials, remove webhooks, pause models that reach out, and withdraw unfinished commands.

    Return a line for each of the commands.
    """
    await update_all_revoked(conn)
    await delete_webhooks(conn)
    await update_reaching_out_inactive(conn)
    commands = await update_all_withdrawn(conn, CommandOutcome(note="restored from a backup; give the command again"))
    return [printable(f"the {each.verb} of {scope(each.account_id)} by {each.asked_by}") for each in commands]


def _host_of(url: str) -> str:
    """Return the host of an address, the rest of which may hold a secret."""
    try:
        return urlsplit(url).hostname or "an invalid address"
    except ValueError:
        return "an invalid address"


class BackupFacts(NamedTuple):
    """Metadata of the database in a backup. `venue_account` is set in live trading."""

    schema_version: int
    market_identity: str
    trading_mode: str
    venue_account: str | None


async def _read_facts(file: Path) -> BackupFacts:
    """Return the metadata of a backup.

    :raises StartError: the file is not a backup of this program, or comes from a newer version
    """
    rows = await dumps.read_rows(file, "schema_version", "service_state")
    versions, states = rows.get("schema_version"), rows.get("service_state")
    if not versions:
        raise StartError(f"{file} is not a backup of trader: it has no table schema_version.")
    if not states:
        raise StartError(f"{file} comes from a database on which no service has ever run: there is nothing to restore.")
    text, state = versions[0].get("version", ""), states[0]
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise StartError(f"{file} is not a backup of trader: its schema version is {text[:20]!r}.")
    version = int(text)
    if version > schema_version():
        raise StartError(
            f"{file} has schema version {version}, made by a newer version of trader; this one has {schema_version()}. "
            "Restore it with the newer version."
        )
    account = state.get("venue_account_index", _NULL)
    return BackupFacts(version, state["market_identity"], state["trading_mode"], None if account == _NULL else account)


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
