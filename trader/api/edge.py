"""Edge of the application: the middleware, the response hook and the CORS rules for every request.

It gives requests ids and logs them, refuses foreign hosts and origins, answers every error as JSON, compresses long
responses, and completes the headers of each response.
"""

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Final

import aiohttp_cors
from aiohttp import HttpVersion11, hdrs, web
from multidict import istr

from trader.api import batch, mcp, openapi, rpc
from trader.api.compression import compress_response, is_worth_compressing
from trader.api.connections import SERVER, connection_of
from trader.api.context import ACCESS, RELAY
from trader.api.origins import FETCH_SITE, HOSTS, ORIGINS, HostRule, OriginRule
from trader.api.requests import (
    INFO,
    REQUESTS,
    UNKNOWN,
    WAITING_BODIES,
    Handler,
    RequestInfo,
    RequestLog,
    WaitingBodies,
    address_of,
)
from trader.api.routes import answer_expectation, refusal, unmet_expectation
from trader.core.errors import Forbidden, TooManyRequests, Unauthorized
from trader.operations.access import Access, Caller, require_reader
from trader.settings.settings import Settings

CORS_PATHS: Final = ("/api/", "/health", mcp.PATH)
"""Pages of CORS_ORIGINS may read paths with one of these prefixes."""

_REST: Final = "/{path:(api/|health).*}"
"""The paths of `CORS_PATHS` without any other route."""

_OPEN_PATHS: Final = ("/health", "/health/live", "/api/health", "/api/health/live")
"""The paths that READ_TOKEN leaves open, for supervisors and proxies."""

_AGENT_PATHS: Final = (mcp.PATH, *(route.path for route in (openapi.SKILL, openapi.CONTRACT, openapi.DOCUMENT)))
"""The paths beside agent.* that READ_TOKEN leaves open to the keys of agents."""

_METHODS: Final = ("GET", "POST")
_ALLOWED_HEADERS: Final = (
    "content-type", "last-event-id", "x-orpc-batch", "x-csrf-token", "authorization", "accept", "cache-control",
    *(name.lower() for name in (mcp.VERSION_HEADER, mcp.METHOD_HEADER, mcp.NAME_HEADER)),
)  # fmt: skip
_EXPOSED_HEADERS: Final = ("x-request-id", "retry-after")
_PREFLIGHT_AGE_S: Final = 600

_ID_HEADER: Final = istr("X-Request-Id")
_LAG_HEADER: Final = istr("X-Lag-Seconds")
_TYPE_HEADER: Final = istr("X-Content-Type-Options")

log = logging.getLogger(__name__)


def make_app(
    settings: Settings, access: Access, dispatcher: rpc.Dispatcher, routes: Iterable[web.RouteDef] = ()
) -> web.Application:
    """Return the application of a service or of a backtest: its procedures, MCP and further routes behind this edge."""
    app = web.Application()
    app[ACCESS], app[rpc.DISPATCHER] = access, dispatcher
    app.add_routes([*dispatcher.routes(), *mcp.McpServer(dispatcher).routes(), *routes])
    app[REQUESTS], app[WAITING_BODIES] = RequestLog(), WaitingBodies()
    app[HOSTS], app[ORIGINS] = HostRule(settings), OriginRule(settings)
    app.middlewares.append(answer)
    app.on_response_prepare.append(finish_head)
    _allow_origins(app, settings)
    return app


def _allow_origins(app: web.Application, settings: Settings) -> None:
    """Let pages of CORS_ORIGINS read every response below `CORS_PATHS`, including 404 and 405."""
    options = aiohttp_cors.ResourceOptions(  # type: ignore[no-untyped-call]  # the library's types are partial
        allow_credentials=settings.cors_credentials,
        expose_headers=_EXPOSED_HEADERS,
        allow_headers=_ALLOWED_HEADERS,
        allow_methods=_METHODS,
        max_age=_PREFLIGHT_AGE_S,
    )
    cors = aiohttp_cors.setup(app, defaults=dict.fromkeys(settings.cors_origins, options))
    covered = [each for each in app.router.resources() if each.canonical.startswith(CORS_PATHS)]
    for name, path in (("rest", _REST), ("elsewhere", "/{path:.*}")):
        app.add_routes(  # one per method: aiohttp-cors rejects a route for all methods
            web.route(method, path, _find_nothing, name=name, expect_handler=answer_expectation)
            for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        )
    for resource in (*covered, app.router.named_resources()["rest"]):
        cors.add(resource)


@web.middleware
async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every request, turn errors into responses, and record latency and status."""
    started_s, requests, connection = time.perf_counter(), request.app[REQUESTS], connection_of(request)
    request[INFO] = info = RequestInfo(requests.new_id(), Caller(address=address_of(request)))
    if connection is not None:
        connection.begin(request.content)
    status = 500
    try:
        response = await _respond(request, handler)
        status = response.status
        if info.given_up and not response.prepared:
            await _answer_and_close(request, response)
        return response
    finally:
        requests.finished(_name_of(request), status, started_s, info.id, changes=info.changes)
        if connection is not None:
            connection.end()


async def finish_head(request: web.Request, response: web.StreamResponse) -> None:
    """Complete the headers of a response before it is sent.

    aiohttp-cors omits `Vary`: no cache may serve one origin's response to another.
    """
    app, headers = request.app, response.headers
    vary = headers.get(hdrs.VARY)
    headers[hdrs.VARY] = f"{vary}, {hdrs.ORIGIN}" if vary else hdrs.ORIGIN
    info = request.get(INFO)
    headers[_ID_HEADER] = app[REQUESTS].new_id() if info is None else info.id
    headers[hdrs.SERVER] = SERVER
    headers[_TYPE_HEADER] = "nosniff"
    if request.rel_url.raw_path.startswith(rpc.PREFIX):
        headers.setdefault(hdrs.CACHE_CONTROL, "no-store")
    if (relay := app.get(RELAY)) is not None and (lag_s := relay.lag_s()) is not None:
        headers[_LAG_HEADER] = f"{lag_s:.3f}"


async def _respond(request: web.Request, handler: Handler) -> web.StreamResponse:
    response: web.StreamResponse
    if (misdirected := request.app[HOSTS].refusal(request)) is not None:
        return refusal(421, misdirected)
    if hdrs.EXPECT in request.headers and (expected := unmet_expectation(request)) is not None:
        response = refusal(417, f"Expect: {expected[:100]} is not supported here; use 100-continue, or omit it")
        response.force_close()  # the body may or may not follow
        return response
    if hdrs.TRANSFER_ENCODING in request.headers and request.version < HttpVersion11:
        request[INFO].given_up = True  # a proxy may see another end of this request (RFC 9112, section 6.1)
        return refusal(400, "HTTP/1.0 has no Transfer-Encoding; send Content-Length")
    try:
        if hdrs.ORIGIN in request.headers or FETCH_SITE in request.headers:
            _check_origin(request)
        access = request.app[ACCESS]
        if access.closes_reading or hdrs.AUTHORIZATION in request.headers:
            await _admit(request, access)
        response = await handler(request)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed):
        response = await _refuse_path(request)
    except web.HTTPException as error:  # a preflight that aiohttp-cors refuses
        response = refusal(error.status, error.text or error.reason)
    except rpc.ANSWERED as error:
        response = rpc.refuse(request, error)
    except Exception:
        log.exception("request %s: %s %s failed", request[INFO].id, request.method, request.path)
        response = _answer_bug(request)
    if isinstance(response, web.Response) and is_worth_compressing(response):
        await compress_response(request, response)
    return response


async def _admit(request: web.Request, access: Access) -> None:
    """Identify the caller of the request, and count the request, before reading its body.

    Procedures check read access themselves, because procedures that change something have their own rules.

    :raises TooManyRequests: the caller sends too many requests, or its address too many wrong secrets
    :raises Unauthorized: READ_TOKEN restricts reading, and the secret is missing or wrong
    """
    try:
        if hdrs.AUTHORIZATION in request.headers:
            request[INFO].caller = await access.identify(request.headers[hdrs.AUTHORIZATION], address_of(request))
        caller = request[INFO].caller
        if caller.is_known and (connection := connection_of(request)) is not None:
            connection.know()
        access.admit(caller)
        is_call = request.method == hdrs.METH_POST and request.path.startswith(rpc.PREFIX)
        path = request.path.removesuffix("/")
        is_open = path in _OPEN_PATHS or request.method == hdrs.METH_OPTIONS
        is_agents = caller.is_agent and path in _AGENT_PATHS
        if access.closes_reading and not (is_call or is_open or is_agents):
            require_reader(caller, "This service")
    except (TooManyRequests, Unauthorized):
        if not request.content.is_eof():
            request[INFO].given_up = True
        raise


def _check_origin(request: web.Request) -> None:
    """Refuse foreign origins, except for preflights and requests without a route, which have no effect.

    :raises Forbidden: the request has an effect and its origin is not allowed
    """
    if request.method == hdrs.METH_OPTIONS:
        return
    is_batch = request.match_info.route.name == rpc.OTHERS and batch.HEADER in request.headers
    if is_batch or _resource_of(request) is not None:
        why = request.app[ORIGINS].refusal(request)
        if why is not None:
            raise Forbidden(why)


async def _find_nothing(_: web.Request) -> web.StreamResponse:
    """Handle paths and methods without a route: aiohttp-cors adds headers only to responses of resources it knows."""
    raise web.HTTPNotFound


async def _refuse_path(request: web.Request) -> web.Response:
    """Answer a request without a route: 405 if its path has other methods, otherwise 404."""
    if request.path.startswith(rpc.PREFIX):
        return request.app[rpc.DISPATCHER].refuse_path(request)
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        if resource.name is None:
            _, methods = await resource.resolve(request)
            if methods:
                request[INFO].name = _name_of_path(resource.canonical)
                allowed |= methods - {hdrs.METH_OPTIONS}
    if not allowed:
        return refusal(404, "Not Found")
    return refusal(405, "Method Not Allowed", {hdrs.ALLOW: ", ".join(sorted(allowed))})


def _answer_bug(request: web.Request) -> web.Response:
    """Return the response for an unexpected exception, without its cause."""
    if request.writer.output_size and request.transport is not None:  # a response was started
        request.transport.abort()
    response = refusal(500, "Internal server error")
    response.force_close()
    return response


async def _answer_and_close(request: web.Request, response: web.StreamResponse) -> None:
    """Respond at once and close the connection: aiohttp would wait for the rest of the body, and inflate it."""
    response.force_close()
    with suppress(ConnectionError):  # the caller has disconnected
        await response.prepare(request)
        await response.write_eof()
    if request.transport is not None:
        request.transport.close()


def _resource_of(request: web.Request) -> web.AbstractResource | None:
    """Return the resource of a request; None without one, or for a catch-all resource, which has a name."""
    resource = request.match_info.route.resource
    return None if resource is None or resource.name is not None else resource


def _name_of(request: web.Request) -> str:
    """Return the name of a request in logs and metrics: one of a fixed set, because callers must not add names."""
    if (resource := _resource_of(request)) is not None:
        return _name_of_path(resource.canonical)
    return request[INFO].name


@cache
def _name_of_path(path: str) -> str:
    if "{" in path:  # a catch-all route: the path below it does not exist
        return UNKNOWN
    if path.startswith(rpc.PREFIX):
        return path.removeprefix(rpc.PREFIX).strip("/").replace("/", ".")
    return path.removeprefix("/api").strip("/")
