"""The commands backup and restore: the whole database to one file, while the service runs, and back."""

import argparse
import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from trader.commands.audit import LINES_MAX
from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result, command, print_result, run_to_end, show
from trader.commands.database import TargetDatabase, add_database_options, database_command
from trader.embedded import dumps
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres, database_name
from trader.errors import StartError
from trader.services.agents.chain import verify
from trader.services.exchange.audit import audit
from trader.settings import read_database_url
from trader.store.database.pool import Database, place
from trader.store.database.schema import SCHEMA_VERSION, open_database
from trader.store.operations.status import analyze, select_server_major, select_table_count

_NULL: Final = r"\N"


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


@database_command("backup", example="trader backup trader-2026-11-22.dump", arguments=_backup_arguments)
async def backup(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Back up the database as of one moment to a file, while the service runs, and test that it can be restored.

    The file is restored into a server of its own in the folder for temporary files (TMPDIR), and audited and verified
    there; only then it gets its name. Fails when it cannot, or when the books or the record are not clean.
    """
    file = options.file
    if file.exists():
        raise StartError(f"{file} exists already; name a new file.")
    unfinished = file.with_name(f"{file.name}.unfinished")
    address = dumps.libpq_address(target.dsn)
    async with target.database.connection() as conn:
        major = await select_server_major(conn)
    try:
        await dumps.dump(address, major, unfinished)
        await asyncio.to_thread(dumps.seal, unfinished)
        show(
            f"dumped {unfinished.stat().st_size / 1e6:,.1f} MB; restoring it into a server of its own to check it",
            on_stderr=True,
        )
        checked = await _check_copy(unfinished)
        unfinished.rename(file)
    except OSError as error:
        raise StartError(f"{file} cannot be written: {error.strerror}.") from None
    finally:
        unfinished.unlink(missing_ok=True)
    size = file.stat().st_size
    lines = [*checked.lines, f"{file}: {size / 1e6:,.1f} MB"]
    value = {"file": str(file), "bytes": size, "isClean": not checked.problems, "checked": checked}
    return Result(value, lines, EXIT_FAILED if checked.problems else EXIT_DONE)


async def _check_copy(file: Path) -> Checked:
    """Restore the file into a scratch server, and audit and verify the copy.

    :raises StartError: it cannot be restored
    """
    try:
        with _scratch_folder() as folder:
            async with EmbeddedPostgres(folder / "server", durable=False) as server:
                dsn = await server.ensure_database("copy")
                await _restore(file, dsn)
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
        folder.chmod(0o755)  # as root the server runs as `nobody`, which must have access
        yield folder


async def _restore(file: Path, dsn: str) -> None:
    """Restore a file into an empty database, and collect the planner's statistics.

    :raises StartError: the database is not empty, or the file cannot be restored
    """
    address = dumps.libpq_address(dsn)
    database = await Database.connect(dsn, size=1)
    try:
        async with database.connection() as conn:
            tables = await select_table_count(conn)
        if tables:
            raise StartError(
                f"The database at {place(dsn)} has {tables} tables already; a backup is restored into an empty one "
                "only. Nothing was changed."
            )
        await dumps.restore(file, address)
        async with database.connection() as conn:
            await analyze(conn)
    finally:
        await database.close()


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
    is_sealed = await asyncio.to_thread(dumps.is_sealed, file)
    facts = await _read_facts(file)
    async with _place(options, facts) as (dsn, where):
        show(f"database: {where}", on_stderr=True)
        await _restore(file, dsn)
        problems: list[str] = []
        lines = [f"restored {file}, of {facts.market_identity} ({facts.trading_mode}), into {where}"]
        if not is_sealed:
            lines.append("It has no digest, unlike those of `trader backup`: nobody can tell whether it was changed.")
        if facts.schema_version == SCHEMA_VERSION:
            checked = await _check(dsn)
            lines, problems = [*checked.lines, *lines], checked.problems
        else:
            lines.append(f"Its schema version is {facts.schema_version}: the next start upgrades it; audit it then.")
    value = {"file": str(file), "place": where, "backup": facts, "problems": problems}
    return Result(value, lines, EXIT_FAILED if problems else EXIT_DONE)


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
    version, state = int(versions[0]["version"]), states[0]
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
