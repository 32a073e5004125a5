"""Routes that are only read: what streams and health share."""

from collections.abc import Mapping

import msgspec
from aiohttp import HttpVersion11, hdrs, web

from trader.api.cors import answer_options
from trader.api.requests import UNKNOWN, Handler, noted
from trader.api.schemas.common import ENCODER
from trader.api.schemas.streams import Refusal


def json_answer(status: int, body: msgspec.Struct, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        status=status, body=ENCODER.encode(body), headers={hdrs.CONTENT_TYPE: "application/json", **(headers or {})}
    )


def refusal(status: int, error: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return json_answer(status, Refusal(error=error), headers)


async def _refuse_expectation(request: web.Request) -> web.Response:
    expected = request.headers.get(hdrs.EXPECT, "")[:100]
    response = refusal(417, f"Expect: {expected} is not supported here; use 100-continue, or leave it out")
    response.force_close()  # whether the body will come is not known
    return response


async def answer_expect(request: web.Request) -> web.StreamResponse | None:
    """`Expect: 100-continue` is told to go on, anything else refused as JSON; the framework's own refusal is text."""
    if request.version < HttpVersion11:
        return None
    if request.headers.get(hdrs.EXPECT, "").lower() != "100-continue":
        return await noted(UNKNOWN, _refuse_expectation)(request)
    if request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return None


def add_read_only(app: web.Application, path: str, handler: Handler, *, head: bool = False) -> None:
    """Serve GET (and HEAD) of a path; every other method is a 405, except the OPTIONS of a browser's preflight."""
    allowed = (hdrs.METH_GET, hdrs.METH_HEAD) if head else (hdrs.METH_GET,)

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.method in allowed:
            return await handler(request)
        if request.method == hdrs.METH_OPTIONS:
            answer = await answer_options(request)
            answer.headers[hdrs.ALLOW] = ", ".join(allowed)
            return answer
        return refusal(405, "Method Not Allowed", {hdrs.ALLOW: ", ".join(allowed)})

    name = UNKNOWN if "{" in path else path.removeprefix("/api").strip("/")
    app.router.add_route(hdrs.METH_ANY, path, noted(name, handle), expect_handler=answer_expect)
