"""The database that a tool reads: of --database-url, of DATABASE_URL, or of the embedded PostgreSQL of this folder."""

import argparse
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from trader.dotenv import add_env_file_option
from trader.embedded.server import EMBEDDED_FOLDER, EmbeddedPostgres
from trader.errors import StartError
from trader.settings import read_database_url
from trader.store.database.pool import Connection, place
from trader.store.database.schema import open_database


def add_database_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `reading` needs."""
    parser.add_argument("--database-url", help="default: DATABASE_URL, from the environment or .env")
    add_env_file_option(parser)
    parser.add_argument("--database", metavar="NAME", help="of the embedded PostgreSQL, if it has several")


@asynccontextmanager
async def reading(options: argparse.Namespace) -> AsyncIterator[tuple[Connection, str]]:
    """Open the database for a read of one moment. Yields a connection and the place of the database, for messages.

    :raises StartError: it cannot be opened, or there is a choice
    """
    async with AsyncExitStack() as stack:
        dsn = options.database_url or read_database_url(os.environ, options.env_file)
        if not dsn:
            server = await stack.enter_async_context(EmbeddedPostgres(EMBEDDED_FOLDER).attach())
            names = [options.database] if options.database else await server.databases()
            if len(names) != 1:
                raise StartError(f"Choose one with --database: {', '.join(names) or 'there is none'}.")
            dsn = server.dsn(names[0])
        database = await stack.enter_async_context(open_database(dsn))
        async with database.connection() as conn, conn.transaction(isolation="repeatable_read", readonly=True):
            yield conn, place(dsn)
