"""A TCP proxy in front of a PostgreSQL server that simulates network faults."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

from trader.database.pool import Database


class FaultyProxy:
    """Passes bytes between clients and the server of `dsn` until a fault is set.

    `stop` refuses connections and drops open ones; `stall` keeps them open but passes nothing; `cut` drops open ones;
    `pass_on` ends all faults. `cut_after` drops a connection after this many more bytes from the client, possibly in
    the middle of a transaction.
    """

    def __init__(self, dsn: str) -> None:
        parts = urlsplit(dsn)
        options = parse_qs(parts.query)
        self._socket = options["host"][0] + "/.s.PGSQL.5432" if "host" in options else None
        self._address = (parts.hostname or "127.0.0.1", parts.port or 5432)
        self._user = parts.username or "postgres"
        self._database = parts.path.strip("/")
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._refusing = False
        self._bytes_left: int | None = None
        self.connections = 0

    async def start(self) -> str:
        """Listen, and return the connection string through the proxy."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        return f"postgresql://{self._user}@127.0.0.1:{port}/{self._database}"

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self._flowing.set()
        self.cut()
        await self._server.wait_closed()

    def stop(self) -> None:
        self._refusing = True
        self.cut()

    def stall(self) -> None:
        self._flowing.clear()

    def pass_on(self) -> None:
        self._refusing = False
        self._bytes_left = None
        self._flowing.set()

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def cut_after(self, count: int) -> None:
        self._bytes_left = count

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refusing:
            writer.transport.abort()
            return
        self.connections += 1
        try:
            if self._socket is not None:
                server_reader, server_writer = await asyncio.open_unix_connection(self._socket)
            else:
                server_reader, server_writer = await asyncio.open_connection(*self._address)
        except OSError:  # the server is not running
            writer.transport.abort()
            return
        both = {writer, server_writer}
        self._writers |= both
        try:
            await asyncio.gather(
                self._pump(reader, server_writer, self._count), self._pump(server_reader, writer, _nothing)
            )
        except ConnectionError:
            pass
        finally:
            self._writers -= both
            for peer in both:
                peer.transport.abort()

    async def _count(self, size: int) -> None:
        if self._bytes_left is None:
            return
        self._bytes_left -= size
        if self._bytes_left <= 0:
            self._bytes_left = None
            raise ConnectionResetError("cut after the set number of bytes")

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passed: Callable[[int], Awaitable[None]]
    ) -> None:
        while data := await reader.read(65536):
            await self._flowing.wait()
            await passed(len(data))
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError("closed by the other side")


async def _nothing(_: int) -> None:
    pass


@asynccontextmanager
async def behind_proxy(
    dsn: str, *, size: int = 4, command_timeout_s: float = 0.5
) -> AsyncIterator[tuple[FaultyProxy, Database]]:
    """A proxy, and a pool that reaches the database through it."""
    proxy = FaultyProxy(dsn)
    database = await Database.connect(await proxy.start(), size=size, command_timeout_s=command_timeout_s)
    try:
        yield proxy, database
    finally:
        await database.close()
        await proxy.close()
