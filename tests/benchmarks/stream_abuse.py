"""Abusive callers of the stream benchmark: a process that runs until its standard input ends.

Every stream has ten of them, which keep reconnecting: two read nothing, two read slowly, two close their half of the
connection, and four disconnect within a second.
"""

import asyncio
import random
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

from benchmarks.stream_readers import STREAMS, leave_server_core

STALL_S: Final = 20.0
"""Longer than the write timeout of the service, once socket and buffers are full."""

RECEIVED_BYTES_MAX: Final = 4096
"""Receive buffer of a slow reader: small, so that its server notices."""

SLOW_BYTES_PER_S: Final = (10_000, 32_000)
"""One reader is too slow to be waited for, one receives only some of the states."""

PAUSE_S: Final = 0.05

REFUSED: Final = b"HTTP/1.1 503"
"""The connection of a predecessor still counts."""


@asynccontextmanager
async def subscribed(port: int, name: str, received_bytes_max: int | None = None) -> AsyncIterator[socket.socket]:
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        if received_bytes_max is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, received_bytes_max)
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        await loop.sock_sendall(sock, f"GET /api/events/{name} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        yield sock


async def read_all(sock: socket.socket) -> None:
    while await asyncio.get_running_loop().sock_recv(sock, 65536):
        pass


async def stall(port: int, name: str, _: random.Random) -> None:
    async with subscribed(port, name, RECEIVED_BYTES_MAX):
        await asyncio.sleep(STALL_S)


async def read_slowly(port: int, name: str, chance: random.Random) -> None:
    piece_bytes = round(chance.choice(SLOW_BYTES_PER_S) * PAUSE_S)
    async with subscribed(port, name, RECEIVED_BYTES_MAX) as sock:
        piece = b"HTTP"
        while piece and REFUSED not in piece:
            await asyncio.sleep(PAUSE_S)
            piece = await asyncio.get_running_loop().sock_recv(sock, piece_bytes)


async def close_half(port: int, name: str, _: random.Random) -> None:
    async with subscribed(port, name) as sock:
        await asyncio.get_running_loop().sock_recv(sock, 512)
        sock.shutdown(socket.SHUT_WR)
        await read_all(sock)


async def vanish(port: int, name: str, chance: random.Random) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(chance.random()), subscribed(port, name) as sock:
            await read_all(sock)


Abuse = Callable[[int, str, random.Random], Coroutine[Any, Any, None]]
ABUSES: Final[tuple[Abuse, ...]] = (stall, stall, read_slowly, read_slowly, close_half, close_half, *[vanish] * 4)


async def again_and_again(abuse: Abuse, port: int, name: str, seed: int) -> None:
    chance = random.Random(f"{abuse.__name__}:{name}:{seed}")
    while True:
        with suppress(OSError):
            await abuse(port, name, chance)
        await asyncio.sleep(PAUSE_S)


async def main(port: int) -> None:
    abusers = [
        asyncio.create_task(again_and_again(abuse, port, name, seed))
        for name in STREAMS
        for seed, abuse in enumerate(ABUSES)
    ]
    await asyncio.to_thread(sys.stdin.read)
    for task in abusers:
        task.cancel()
    for outcome in await asyncio.gather(*abusers, return_exceptions=True):
        if not isinstance(outcome, asyncio.CancelledError):
            raise RuntimeError("an abusive caller ended early") from outcome


if __name__ == "__main__":
    leave_server_core()
    asyncio.run(main(int(sys.argv[1])))
