"""External systems of the service: its market source, its database, and the venue of live trading."""

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass

from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres, database_name
from trader.gateways.lighter.account import LighterAccounts
from trader.gateways.market.source import MarketSource
from trader.gateways.sources import make_source
from trader.settings import Settings
from trader.store.database.pool import Database
from trader.store.database.schema import apply_schema, require_schema

log = logging.getLogger("trader")


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
        # One database per market and live account, so that all of them can share the folder.
        name = database_name(source.identity, None if accounts is None else accounts.default_index)
        log.info("embedded PostgreSQL %s in %s, database %s", server.version, server.data, name)
        dsn = await server.ensure_database(name)
    else:
        dsn = settings.database_url.reveal()
    is_reader = settings.role == "reader"
    database = await Database.connect(dsn, read_only=is_reader)
    stack.push_async_callback(database.close)
    is_written = not is_reader and not await database.is_replica()
    await (apply_schema(database) if is_written else require_schema(database, dsn))
    return ExternalSystems(source, database, dsn, server, accounts, is_written)


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
