"""Compression of responses: gzip, for callers that accept it."""

import asyncio
import zlib
from typing import Final

from aiohttp import hdrs, web

GZIP: Final = "gzip"

LEVEL: Final = 6

BYTES_MIN: Final = 1024
"""Shorter bodies fit into one packet uncompressed."""

THREAD_BYTES_MIN: Final = 32 * 1024
"""Longer texts are compressed in a thread; texts of this size take about a millisecond."""

_GZIP_WINDOW: Final = 16 + zlib.MAX_WBITS


def accepts_gzip(request: web.Request) -> bool:
    """Return whether the header `Accept-Encoding` has gzip (or `*`) with a weight above 0."""
    weights: dict[str, bool] = {}
    for header in request.headers.getall(hdrs.ACCEPT_ENCODING, ()):
        for coding in header.split(","):
            name, _, parameters = coding.partition(";")
            weight = parameters.strip().lower().removeprefix("q=").strip()
            weights[name.strip().lower()] = not weight or weight.strip("0.") != ""
    return weights.get("gzip", weights.get("*", False))


async def compressed(body: bytes) -> bytes:
    """Return the body as gzip. A long one is compressed in a thread."""
    if len(body) < THREAD_BYTES_MIN:
        return _gzip(body)
    return await asyncio.to_thread(_gzip, body)


def _gzip(body: bytes) -> bytes:
    return zlib.compress(body, LEVEL, wbits=_GZIP_WINDOW)


class StreamPacker:
    """Gzip encoder of a response sent in pieces, each readable on arrival; it may also pass them on unchanged."""

    def __init__(self, *, compress: bool) -> None:
        self._packer = zlib.compressobj(LEVEL, wbits=_GZIP_WINDOW) if compress else None

    @property
    def compresses(self) -> bool:
        return self._packer is not None

    async def pack(self, piece: bytes) -> bytes:
        """Return the bytes of the next piece. A long one is compressed in a thread."""
        if len(piece) < THREAD_BYTES_MIN:
            return self._pack(piece)
        return await asyncio.to_thread(self._pack, piece)

    def end(self) -> bytes:
        return b"" if self._packer is None else self._packer.flush()

    def _pack(self, piece: bytes) -> bytes:
        return piece if self._packer is None else self._packer.compress(piece) + self._packer.flush(zlib.Z_SYNC_FLUSH)


def is_worth_compressing(response: web.Response) -> bool:
    """Return whether a body is long enough, not compressed yet, and neither a font nor a picture."""
    body = response.body
    if not isinstance(body, bytes) or len(body) < BYTES_MIN or hdrs.CONTENT_ENCODING in response.headers:
        return False
    return response.content_type.startswith(("text/", "application/"))


async def compress_response(request: web.Request, response: web.Response) -> None:
    """Compress the body of a response if the caller accepts gzip."""
    if hdrs.VARY not in response.headers:
        response.headers[hdrs.VARY] = hdrs.ACCEPT_ENCODING
    if accepts_gzip(request):
        assert isinstance(response.body, bytes)
        response.body = await compressed(response.body)
        response.headers[hdrs.CONTENT_ENCODING] = GZIP
