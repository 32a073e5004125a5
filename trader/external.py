"""External systems of the service: its market source, its database, and the venue of live trading."""

import logging
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from secrets import randbits
from typing import Final

from trader.domain.market.presets import PRESET_MARKETS
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres, database_name
from trader.errors import StartError
from trader.gateways.lighter.account import LighterAccounts
from trader.gateways.lighter.api import MAINNET_URL, LighterApi
from trader.gateways.lighter.source import VenueSource
from trader.gateways.market.recorded import RecordedSource
from trader.gateways.market.recorder import Recorder, find_recording
from trader.gateways.market.replay import ReplaySource
from trader.gateways.market.source import MarketSource, Seed, SeededSource
from trader.gateways.market.synthetic import SyntheticSource
from trader.settings import Settings
from trader.store.database.pool import Database
from trader.store.database.schema import apply_schema, require_schema
from trader.store.exchange.accounts import insert_seed, select_identity, select_seed

log = logging.getLogger("trader")

_SEED_BITS: Final = 128
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
    await (apply_schema(database) if is_written else require_schema(database, dsn))
    await settle_seed(source, database, is_written=is_written)
    return ExternalSystems(source, database, dsn, server, accounts, is_written)


def make_source(settings: Settings) -> MarketSource:
    """Return the source that MARKET_SOURCE names. Raises `StartError` for an unknown one."""
    kind, _, place = settings.market_source.partition(":")
    rows = PRESET_MARKETS[settings.venue_preset]
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
            return VenueSource(LighterApi(settings.venue_url or MAINNET_URL), settings.markets)
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
    """Return the address of the embedded database of an open source, which is made if it is missing.

    There is one per market and live account, so that all of them can share the folder.
    """
    name = database_name(source.identity, live_account)
    if isinstance(source, SeededSource) and source.seed is None:
        earlier = database_name(f"{source.identity}:{_EARLIER_DEFAULT}")
        if await server.has_database(earlier) and not await server.has_database(name):
            name = earlier
    log.info("embedded PostgreSQL %s in %s, database %s", server.version, server.data, name)
    return await server.ensure_database(name)


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
