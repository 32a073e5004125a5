"""Compression of responses: gzip, for callers that accept it."""

import asyncio
import zlib
from typing import Final

from aiohttp import hdrs, web

LEVEL: Final = 6

BYTES_MIN: Final = 1024
"""Shorter bodies fit into one packet as they are."""

THREAD_BYTES_MIN: Final = 32 * 1024
"""Longer texts are compressed in a thread: these take about a millisecond."""

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
