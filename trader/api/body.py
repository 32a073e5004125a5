"""Reading a request's body within bounds of size and time."""

import asyncio
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError

from trader.errors import InvalidInput, Issue, PayloadTooLarge

BODY_SIZE_MAX: Final = 2**20
"""Bytes of a request body, after decompression."""

GIVEN_UP: Final = web.RequestKey("given_up", bool)
"""Set when the rest of the body must not be waited for: the connection closes after the answer."""


class BodyTimeout(Exception):
    """The caller took too long to send its body."""


async def read_body(request: web.Request, wait_s: float) -> bytes:
    """The request's body, decompressed, waited for at most `wait_s` seconds.

    A body that says its size is refused before it is read; any other, a compressed one too, as soon as it is over.

    :raises PayloadTooLarge: it is over `BODY_SIZE_MAX`
    :raises InvalidInput: its compression is broken, or it ends early
    :raises BodyTimeout: it did not arrive in time
    """
    content = request.content
    if content.is_eof() and content.exception() is None:  # it came with the head: nothing to wait for
        whole = content.read_nowait()
        _check_size(len(whole))
        return whole
    if request.content_length is not None:
        _check_size(request.content_length)
    body = bytearray()
    try:
        async with asyncio.timeout(wait_s):
            while chunk := await content.readany():
                body += chunk
                _check_size(len(body))
    except TimeoutError:
        request[GIVEN_UP] = True
        raise BodyTimeout(f"the body did not arrive within {wait_s:g} s") from None
    except (ContentEncodingError, web.RequestPayloadError, ConnectionError) as error:  # the last: the caller has left
        request[GIVEN_UP] = True
        why = " ".join(str(error).removeprefix("400, message:").split())  # the framework's words, on a line of ours
        raise InvalidInput(Issue((), f"the body cannot be read: {why}")) from None
    except PayloadTooLarge:
        if "Content-Encoding" in request.headers:  # aiohttp would go on to inflate the rest, to reuse the connection
            request[GIVEN_UP] = True
        raise
    return bytes(body)


def _check_size(size: int) -> None:
    if size > BODY_SIZE_MAX:
        raise PayloadTooLarge(f"the body is over {BODY_SIZE_MAX} bytes")
