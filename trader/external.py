"""External systems of the service: its market source, its database, and the venue of live trading."""

import logging
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits
from typing import Final

from trader.embedded import dumps
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres, database_name
from trader.errors import StartError
from trader.gateways.lighter.account import LighterAccounts
from trader.gateways.lighter.api import MAINNET_URL, LighterApi
from trader.gateways.lighter.source import VenueSource
from trader.gateways.market.recorded import RecordedSource
from trader.gateways.market.recorder import Recorder, find_recording
from trader.gateways.market.replay import ReplaySource
from trader.gateways.market.rows import preset_rows
from trader.gateways.market.source import MarketSource, Seed, SeededSource
from trader.gateways.market.synthetic import SyntheticSource
from trader.services.portfolio.seasons import require_terms
from trader.settings import Settings, require_provider
from trader.store.agents.models import select_has_keyless_provider
from trader.store.database.loading import select_schema_name
from trader.store.database.pool import Database
from trader.store.database.schema import SCHEMA_VERSION, apply_schema, require_schema, select_schema_version
from trader.store.exchange.accounts import insert_seed, select_identity, select_seed
from trader.store.operations.halts import select_halts

log = logging.getLogger("trader")

_SEED_BITS: Final = 128
BACKUPS_FOLDER: Final = EMBEDDED_FOLDER.parent / "backups"
"""Where the backups of before upgrades of the embedded database are kept."""

_EARLIER_DEFAULT: Final = 0
"""SIM_SEED when nothing gave it, in earlier versions: embedded databases of it go on."""


@dataclass(frozen=True, slots=True)
class ExternalSystems:
    """The open systems that the service depends on.

    `server` is the embedded PostgreSQL, None with DATABASE_URL; `venue_accounts` are None on paper, and for a reader.
    `is_written`: this process may write the database now, since it is no reader, and the database no replica.
    """

    source: MarketSource
    database: Database
    dsn: str
    server: EmbeddedPostgres | None
    venue_accounts: LighterAccounts | None
    is_written: bool


async def open_external(settings: Settings, stack: AsyncExitStack) -> ExternalSystems:
    """Open the market source, the venue and the database, and apply its schema where it may be written."""
    accounts = await _open_venue(settings, stack)
    source = make_source(settings)
    await source.open()
    stack.push_async_callback(source.close)
    server = None
    if settings.database_url is None:
        server = await stack.enter_async_context(EmbeddedPostgres(EMBEDDED_FOLDER))
        dsn = await ensure_embedded_database(server, source, None if accounts is None else accounts.default_index)
    else:
        dsn = settings.database_url.reveal()
    is_reader = settings.role == "reader"
    database = await Database.connect(dsn, read_only=is_reader)
    stack.push_async_callback(database.close)
    is_written = not is_reader and not await database.is_replica()
    await (_prepare_schema(database, dsn, server) if is_written else require_schema(database, dsn))
    await require_provider_or_model(settings, database)
    await settle_seed(source, database, is_written=is_written)
    if is_written:
        await require_terms(database, settings)
    return ExternalSystems(source, database, dsn, server, accounts, is_written)


async def _prepare_schema(database: Database, dsn: str, server: EmbeddedPostgres | None) -> None:
    """Create the tables in a new database; upgrade those of an earlier version in an embedded one, after a backup.

    :raises StartError: a database on a server has tables of another version; the message says what to do
    """
    async with database.connection() as conn:
        version = await select_schema_version(conn)
        schema = await select_schema_name(conn)
    if version is None:
        await apply_schema(database)
    elif server is None or version >= SCHEMA_VERSION:
        await require_schema(database, dsn)
    else:
        file = BACKUPS_FOLDER / dumps.upgrade_backup_name(SCHEMA_VERSION)
        file.parent.mkdir(parents=True, exist_ok=True)
        await dumps.back_up(dsn, file, schema)
        log.warning("the database of before the upgrade is in %s", file)
        await apply_schema(database, backup=str(file.absolute()))


async def check_external(settings: Settings, stack: AsyncExitStack) -> list[str]:
    """Connect to everything that the service needs, and change nothing. Return a line per part.

    :raises StartError: something is missing, too old, or of another market
    :raises SettingsError: there is no AI provider
    """
    accounts = await _open_venue(settings, stack)
    where = "" if accounts is None else f": account {accounts.default_index} at {accounts.url}"
    source = make_source(settings)
    await source.open()
    stack.push_async_callback(source.close)
    live_account = None if accounts is None else accounts.default_index
    dsn = await _find_dsn(settings, source, live_account, stack)
    lines = [f"settings: valid, {settings.trading_mode}{where}"]
    if dsn is None:
        require_provider(settings)
        database_lines = [f"database: embedded in ./{EMBEDDED_FOLDER}, which the first start creates"]
    else:
        database = await Database.connect(dsn, size=1, read_only=True)
        stack.push_async_callback(database.close)
        database_lines = await _check_database(database, dsn, source, is_embedded=settings.database_url is None)
        await require_provider_or_model(settings, database)
    return [*lines, f"market: {source.identity} with {', '.join(source.markets)}", *database_lines]


async def _find_dsn(
    settings: Settings, source: MarketSource, live_account: int | None, stack: AsyncExitStack
) -> str | None:
    """Return the address of the database, or None when the embedded one is still to be made."""
    if settings.database_url is not None:
        return settings.database_url.reveal()
    if not EMBEDDED_FOLDER.exists():
        return None
    server = await stack.enter_async_context(EmbeddedPostgres(EMBEDDED_FOLDER).attach())
    name = await embedded_database_name(server, source, live_account)
    return server.dsn(name) if await server.has_database(name) else None


async def _check_database(database: Database, dsn: str, source: MarketSource, *, is_embedded: bool) -> list[str]:
    latency_ms = await database.ping()
    async with database.connection() as conn:
        version = await select_schema_version(conn)
    if version is None:
        return [f"database: connected, {latency_ms:.1f} ms; empty: the first start creates its tables"]
    if is_embedded and version < SCHEMA_VERSION:
        how = f"schema version {version}: the next start upgrades it to {SCHEMA_VERSION}, after a backup"
        return [f"database: connected, {latency_ms:.1f} ms; {how}"]
    await require_schema(database, dsn)
    async with database.connection() as conn:
        halts, identity = await select_halts(conn), await select_identity(conn)
    if identity is not None:
        await settle_seed(source, database, is_written=False)
    lines = [f"database: connected, schema in place, {latency_ms:.1f} ms"]
    return [*lines, *(f"halted: {halt}" for halt in halts)]


async def require_provider_or_model(settings: Settings, database: Database) -> None:
    """Check that a service which trades has an AI provider: in its settings, or one without a key of a model.

    :raises SettingsError: it has none
    """
    async with database.connection() as conn:
        is_empty = await select_schema_version(conn) is None
        if is_empty or not await select_has_keyless_provider(conn):
            require_provider(settings)


def make_source(settings: Settings) -> MarketSource:
    """Return the source that MARKET_SOURCE names. Raises `StartError` for an unknown one."""
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
            )
        case "venue":
            return VenueSource(LighterApi(settings.venue_url or MAINNET_URL), settings.markets, rows)
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


async def ensure_embedded_database(server: EmbeddedPostgres, source: MarketSource, live_account: int | None) -> str:
    """Return the address of the embedded database of an open source, which is made if it is missing."""
    name = await embedded_database_name(server, source, live_account)
    log.info("embedded PostgreSQL %s in %s, database %s", server.version, server.data, name)
    return await server.ensure_database(name)


async def embedded_database_name(server: EmbeddedPostgres, source: MarketSource, live_account: int | None) -> str:
    """Return the name of the embedded database of an open source.

    There is one per market and live account, so that all of them can share the folder.
    """
    name = database_name(source.identity, live_account)
    if isinstance(source, SeededSource) and source.seed is None:
        earlier = database_name(f"{source.identity}:{_EARLIER_DEFAULT}")
        if await server.has_database(earlier) and not await server.has_database(name):
            name = earlier
    return name


async def settle_seed(source: MarketSource, database: Database, *, is_written: bool) -> None:
    """Give an open source the seed of the database; a new database gets a secret one, unless SIM_SEED gave one.

    :raises StartError: the database is new, and this process may not write it
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
    elif identity is not None:  # a database of another market, which its identity refuses in any case
        source.use_seed(Seed(randbits(_SEED_BITS), is_secret=True))
    else:
        raise StartError("The database has no seed yet, which the first start of a service draws that may write it.")


async def _open_venue(settings: Settings, stack: AsyncExitStack) -> LighterAccounts | None:
    """Return the accounts at a real venue; None on paper, and for a reader.

    Nothing but this and the composition root knows the mode.

    :raises StartError: the venue's SDK is missing or cannot sign
    """
    if settings.trading_mode != "live" or settings.role == "reader":
        return None
    accounts = LighterAccounts(settings)
    stack.push_async_callback(accounts.close)
    accounts.prove()
    return accounts
