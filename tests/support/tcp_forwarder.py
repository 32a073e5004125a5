"""A TCP forwarder with a changeable target, like a load balancer in front of several processes."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

from support.waiting import turns


class TcpForwarder:
    """Forwards connections to the address last set, and counts bytes sent to callers; `to` drops open ones."""

    def __init__(self) -> None:
        self._target: tuple[str, int] | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.url = ""
        self.bytes_back = 0

    def to(self, url: str | None) -> None:
        """Forward to this address from now on; None refuses."""
        parts = urlsplit(url or "")
        self._target = (parts.hostname or "", parts.port or 0) if url else None
        for writer in list(self._writers):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = {writer}
        try:
            if self._target is not None:
                far_reader, far_writer = await asyncio.open_connection(*self._target)
                ends.add(far_writer)
                self._writers |= ends
                await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer, self._count))
        except OSError:
            pass  # the target is unreachable, so the caller is dropped
        finally:
            self._writers -= ends
            for end in ends:
                end.transport.abort()

    def _count(self, size: int) -> None:
        self.bytes_back += size


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, count: Callable[[int], None] = lambda _: None
) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            count(len(data))
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def forwarding() -> AsyncIterator[TcpForwarder]:
    switch = TcpForwarder()
    server = await asyncio.start_server(switch.serve, "127.0.0.1", 0)
    switch.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield switch
    finally:
        server.close()
        switch.to(None)
        await turns(1)  # closes the connections
