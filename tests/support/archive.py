"""A server on loopback with monthly files as published by Binance, which can drop connections and send wrong data."""

import asyncio
import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.test_utils import TestServer

HEADER = (
    "open_time,open,high,low,close,volume,close_time,quote_volume,count,taker_buy_volume,taker_buy_quote_volume,ignore"
)


def packed(name: str, lines: list[str]) -> bytes:
    """Return the archive of one CSV file, stored without compression, so that its size is known."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(name.replace(".zip", ".csv"), "\n".join(lines) + "\n")
    return content.getvalue()


def klines(minutes: int, start_ms: int = 1_735_689_600_000) -> list[str]:
    """Return the lines of candles with a constant price."""
    opens = (start_ms + 60_000 * minute for minute in range(minutes))
    return [
        HEADER,
        *(f"{at},95000.0,95010.0,94990.0,95000.0,10.0,{at + 59_999},950000.0,7,5.0,475000.0,0" for at in opens),
    ]


class Archive:
    """Files by path, and the faults in serving them. `requests` has the path and Range of each request."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.bytes_a_connection: int | None = None
        """The connection is dropped after this many bytes of a body."""
        self.hangs_after: int | None = None
        """The body stops after this many bytes, and the connection stays open."""
        self.takes_ranges = True
        self.statuses: list[int] = []
        """Of the next answers, instead of files."""

    def add(self, path: str, content: bytes) -> None:
        """Add a file with its checksum."""
        name = path.rpartition("/")[2]
        self.files[path] = content
        self.files[f"{path}.CHECKSUM"] = f"{hashlib.sha256(content).hexdigest()}  {name}\n".encode()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        path = request.path.removeprefix("/")
        self.requests.append((path.rpartition("/")[2], request.headers.get("Range")))
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        if path not in self.files:
            return web.Response(status=404)
        content = self.files[path]
        begin = request.http_range.start or 0 if self.takes_ranges else 0
        if begin >= len(content) > 0 and begin > 0:
            return web.Response(status=416, headers={"Content-Range": f"bytes */{len(content)}"})
        response = web.StreamResponse(status=206 if begin else 200)
        if begin:
            response.headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        response.content_length = len(content) - begin
        await response.prepare(request)
        limit = self.bytes_a_connection if self.hangs_after is None else self.hangs_after
        await response.write(content[begin:] if limit is None else content[begin : begin + limit])
        if limit is not None and limit < len(content) - begin:
            if self.hangs_after is not None:
                await asyncio.Event().wait()
            assert request.transport is not None
            request.transport.close()
        return response


@asynccontextmanager
async def serving(archive: Archive) -> AsyncIterator[str]:
    """Serve an archive, and yield its base address."""
    app = web.Application()
    app.router.add_get("/{path:.*}", archive.answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/"))
