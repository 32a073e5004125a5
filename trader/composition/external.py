"""External systems of the service: its market source, its database, and the venue of live trading."""

import hashlib
import logging
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits
from typing import Final

from trader.agents.sql.models import select_has_keyless_provider
from trader.core.clock import SystemClock
from trader.core.errors import StartError
from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded import dumps
from trader.database.embedded.server import EmbeddedPostgres, database_name
from trader.database.loading import select_schema_name
from trader.database.pool import IDLE_IN_TRANSACTION_S, Database, place, require_own_sessions
from trader.database.schema import apply_schema, require_schema, schema_version, select_schema_version
from trader.exchange.sql.accounts import insert_seed, select_identity, select_seed
from trader.exchange.sql.halts import select_halts
from trader.live.budget import RequestBudget
from trader.live.ladder import read_ladder
from trader.live.rehearsals import require_rehearsal
from trader.live.venue import VenueAccounts
from trader.live.venues import VENUES
from trader.market.sources.recorded import RecordedSource
from trader.market.sources.recorder import Recorder, find_recording
from trader.market.sources.replay import ReplaySource
from trader.market.sources.rows import preset_rows, read_rows, require_rules
from trader.market.sources.source import MarketSource, Seed, SeededSource
from trader.market.sources.synthetic import SyntheticSource
from trader.portfolio.seasons import require_terms
from trader.settings.settings import Settings, require_provider

log = logging.getLogger("trader")

_SEED_BITS: Final = 128
BACKUPS_FOLDER: Final = EMBEDDED_FOLDER.parent / "backups"
"""Folder of the backups made before upgrades of the embedded database."""


@dataclass(frozen=True, slots=True)
class ExternalSystems:
    """The open systems that the service depends on.

    `server` is the embedded PostgreSQL, None with DATABASE_URL; `venue_accounts` is None on paper and for a reader.
    `is_written`: this process may write to the database now, since it is not a reader and the database not a replica.
    """

    source: MarketSource
    database: Database
    dsn: str
    server: EmbeddedPostgres | None
    venue_accounts: VenueAccounts | None
    is_written: bool


def halts_file(dsn: str) -> Path:
    """Return the file that keeps halts while this database does not accept them."""
    return EMBEDDED_FOLDER.parent / f"halts-{hashlib.sha256(place(dsn).encode()).hexdigest()[:12]}.json"


async def open_external(settings: Settings, stack: AsyncExitStack) -> ExternalSystems:
    """Open the market source, the venue and the database, and apply the schema if the database may be written."""
    accounts = await _open_venue(settings, stack)
    source = make_source(settings, None if accounts is None else accounts.budget)
    await source.open()
    stack.push_async_callback(source.close)
    if accounts is not None:
        require_rules(source.markets, read_rows(settings.markets_file))
    server = None
    if settings.database_url is None:
        if not EMBEDDED_FOLDER.exists():
            require_provider(settings)  # a new database has no model with a keyless provider: so nothing is created
        server = await stack.enter_async_context(EmbeddedPostgres(EMBEDDED_FOLDER))
        name = database_name(source.identity, None if accounts is None else accounts.default_account)
        if not await server.has_database(name):
            require_provider(settings)
        dsn = await server.ensure_database(name)
        log.info("embedded PostgreSQL %s in %s, database %s", server.version, server.data, name)
    else:
        dsn = settings.database_url.reveal()
    if server is None:
        await require_own_sessions(dsn)
    is_reader = settings.role == "reader"
    database = await Database.connect(dsn, read_only=is_reader, idle_in_transaction_s=IDLE_IN_TRANSACTION_S)
    stack.push_async_callback(database.close)
    is_written = not is_reader and not await database.is_replica()
    await (_prepare_schema(settings, database, dsn, server) if is_written else require_schema(database, dsn))
    await require_provider_or_model(settings, database)
    await settle_seed(source, database, is_written=is_written)
    if is_written:
        await require_terms(database, settings)
    return ExternalSystems(source, database, dsn, server, accounts, is_written)


async def _prepare_schema(settings: Settings, database: Database, dsn: str, server: EmbeddedPostgres | None) -> None:
    """Create the tables in a new database; in an embedded one, upgrade tables of an earlier version after a backup.

    :raises SettingsError: a new database would have no AI provider
    :raises StartError: a database on a server has tables of another version; the message says what to do
    """
    async with database.connection() as conn:
        version = await select_schema_version(conn)
        schema = await select_schema_name(conn)
    if version is None:
        require_provider(settings)
    if version in {None, schema_version()}:
        await apply_schema(database)
    elif server is None or version > schema_version():
        await require_schema(database, dsn)
    else:
        file = BACKUPS_FOLDER / dumps.upgrade_backup_name(schema_version())
        file.parent.mkdir(parents=True, exist_ok=True)
        await dumps.back_up(dsn, file, schema)
        log.warning("the database before the upgrade is in %s", file)
        await apply_schema(database, backup=str(file.absolute()))


async def check_external(settings: Settings, stack: AsyncExitStack) -> list[str]:
    """Connect to everything that the service needs, without changing anything. Return one line per part.

    :raises StartError: something is missing, too old, or of another market
    :raises SettingsError: there is no AI provider
    """
    accounts = await _open_venue(settings, stack)
    where = "" if accounts is None else f": account {accounts.default_account} at {accounts.url}"
    source = make_source(settings)
    await source.open()
    stack.push_async_callback(source.close)
    live_account = None if accounts is None else accounts.default_account
    dsn = await _find_dsn(settings, source, live_account, stack)
    if settings.ladder_file is not None:
        read_ladder(settings.ladder_file, source.markets.values())
    lines = [f"settings: valid, {settings.trading_mode}{where}"]
    if dsn is None:
        require_provider(settings)
        database_lines = [f"database: embedded in ./{EMBEDDED_FOLDER}, which the first start creates"]
    else:
        if settings.database_url is not None:
            await require_own_sessions(dsn)
        database = await Database.connect(dsn, size=1, read_only=True)
        stack.push_async_callback(database.close)
        database_lines = await _check_database(database, dsn, source, is_embedded=settings.database_url is None)
        await require_provider_or_model(settings, database)
    return [*lines, f"market: {source.identity} with {', '.join(source.markets)}", *database_lines]


async def _find_dsn(
    settings: Settings, source: MarketSource, live_account: str | None, stack: AsyncExitStack
) -> str | None:
    """Return the address of the database, or None if the embedded one does not exist yet."""
    if settings.database_url is not None:
        return settings.database_url.reveal()
    if not EMBEDDED_FOLDER.exists():
        return None
    server = await stack.enter_async_context(EmbeddedPostgres(EMBEDDED_FOLDER).attach())
    name = database_name(source.identity, live_account)
    return server.dsn(name) if await server.has_database(name) else None


async def _check_database(database: Database, dsn: str, source: MarketSource, *, is_embedded: bool) -> list[str]:
    latency_ms = await database.ping()
    async with database.connection() as conn:
        version = await select_schema_version(conn)
    if version is None:
        return [f"database: connected, {latency_ms:.1f} ms; empty: the first start creates its tables"]
    if is_embedded and version < schema_version():
        how = f"schema version {version}: the next start upgrades it to {schema_version()}, after a backup"
        return [f"database: connected, {latency_ms:.1f} ms; {how}"]
    await require_schema(database, dsn)
    async with database.connection() as conn:
        halts, identity = await select_halts(conn), await select_identity(conn)
    if identity is not None:
        await settle_seed(source, database, is_written=False)
    lines = [f"database: connected, schema in place, {latency_ms:.1f} ms"]
    return [*lines, *(f"halted: {halt}" for halt in halts)]


async def require_provider_or_model(settings: Settings, database: Database) -> None:
    """Check that a trading service has an AI provider: one in its settings, or a model's provider that needs no key.

    :raises SettingsError: it has none
    """
    async with database.connection() as conn:
        is_empty = await select_schema_version(conn) is None
        if is_empty or not await select_has_keyless_provider(conn):
            require_provider(settings)


def make_source(settings: Settings, budget: RequestBudget | None = None) -> MarketSource:
    """Return the source named by MARKET_SOURCE. Raises `StartError` for an unknown one.

    `budget` is that of the accounts at the same venue, if there are any.
    """
    kind, _, place = settings.market_source.partition(":")
    rows = preset_rows(settings.venue_preset, settings.markets_file)
    match kind:
        case "synthetic":
            return SyntheticSource(settings.seed, settings.markets, rows)
        case "replay" if find_recording(Path(place).expanduser()):
            return RecordedSource(
                Path(place).expanduser(),
                settings.markets,
                speed=settings.replay_speed,
                start=settings.replay_start,
                end=settings.replay_end,
            )
        case "replay":
            return ReplaySource(
                Path(place).expanduser(),
                settings.markets,
                rows=rows,
                seed=settings.seed,
                speed=settings.replay_speed,
                start=settings.replay_start,
                end=settings.replay_end,
                surcharge_below_bps=settings.taker_fee_bps,
            )
        case "venue":
            return VENUES[settings.venue].make_source(settings, rows, budget)
        case _:
            raise StartError(
                f"MARKET_SOURCE {kind} is not available in this build; use venue, synthetic or replay:<folder or file>"
            )


def make_recorder(settings: Settings, source: MarketSource) -> Recorder | None:
    """Return the recorder of a source, ready to write; None without RECORD. Raises `StartError`."""
    if settings.record is None:
        return None
    recorder = Recorder(settings.record, source)
    recorder.open()
    return recorder


async def settle_seed(source: MarketSource, database: Database, *, is_written: bool) -> None:
    """Give an open source the database's seed; a new database gets a secret seed, unless SIM_SEED specifies one.

    :raises StartError: the database is new, and this process may not write to it
    """
    if not isinstance(source, SeededSource):
        return
    async with database.connection() as conn:
        if source.seed is None and is_written:
            await insert_seed(conn, randbits(_SEED_BITS))
        drawn, identity = await select_seed(conn), await select_identity(conn)
    known = (
        None if identity is None else re.fullmatch(rf"{re.escape(source.identity)}:([0-9]+)", identity.market_identity)
    )
    if source.seed is not None:
        source.use_seed(Seed(source.seed.value, is_secret=source.seed.value == drawn))
    elif known is not None:
        source.use_seed(Seed(int(known[1])))
    elif drawn is not None:
        source.use_seed(Seed(drawn, is_secret=True))
    elif identity is not None:  # a database of another market, which the identity check refuses in any case
        source.use_seed(Seed(randbits(_SEED_BITS), is_secret=True))
    else:
        raise StartError("The database has no seed yet; the first service that may write to it draws one at its start.")


async def _open_venue(settings: Settings, stack: AsyncExitStack) -> VenueAccounts | None:
    """Return the accounts at a real venue; None on paper, and for a reader.

    Only this function and the composition root know the trading mode.

    :raises StartError: the venue's SDK is missing or cannot sign, or live trading was not rehearsed
    """
    if settings.trading_mode != "live" or settings.role == "reader":
        return None
    accounts = VENUES[settings.venue].make_accounts(settings)
    stack.push_async_callback(accounts.close)
    accounts.prove()
    require_rehearsal(settings.live_rehearsal, settings.venue, accounts.url, SystemClock().now())
    return accounts
