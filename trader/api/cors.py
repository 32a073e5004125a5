"""Cross-origin access: which origins may read responses in a browser, and which may send a request at all.

Browsers enforce reading by the headers that aiohttp-cors sets. A POST does its work before the browser hides the
response, and a stream is opened, so the service itself refuses foreign origins (`OriginRule`). A page whose host name
resolves to this machine (DNS rebinding) is of the same origin to the browser: `HostRule` refuses names that are not the
service's.
"""

import logging
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from ipaddress import ip_address
from typing import Final, cast
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.hdrs import (
    ACCESS_CONTROL_ALLOW_HEADERS,
    ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_REQUEST_METHOD,
    HOST,
    METH_OPTIONS,
    ORIGIN,
)
from aiohttp_cors import CorsConfig, ResourceOptions
from aiohttp_cors.abc import AbstractRouterAdapter

from trader.api.requests import Handler
from trader.settings import Settings

PATHS: Final = ("/api/", "/health")
"""The paths with cross-origin headers: every one that starts with one of these."""

METHODS: Final = ("GET", "POST", "OPTIONS")
ALLOWED_HEADERS: Final = ("content-type", "last-event-id", "x-orpc-batch", "x-csrf-token", "authorization")
EXPOSED_HEADERS: Final = ("x-request-id", "retry-after")
PREFLIGHT_AGE_S: Final = 600

_NAME_SHOWN: Final = 100
_LOGGED_MAX: Final = 100

log = logging.getLogger(__name__)

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def origin_of(address: str) -> str | None:
    """Return the origin of a URL as browsers write it: lower case, without the default port."""
    parts = urlsplit(address)
    if not parts.scheme or parts.hostname is None:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if parts.port is None or parts.port == _DEFAULT_PORTS.get(parts.scheme):
        return f"{parts.scheme}://{host}"
    return f"{parts.scheme}://{host}:{parts.port}"


class _LoggedOnce:
    """Logs each refused name once, and no more than a hundred: callers can make up any number."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._names: set[str] = set()

    def log(self, name: str) -> None:
        if name not in self._names and len(self._names) < _LOGGED_MAX:
            self._names.add(name)
            log.warning(self._message, name)


class OriginRule:
    """Which `Origin` a request may carry: one of CORS_ORIGINS, or the server's own.

    The server's own are the origin of SERVER_URL and the listen address as `localhost` and `127.0.0.1`; never what the
    Host header says, since the caller chooses it (DNS rebinding).
    """

    def __init__(self, settings: Settings) -> None:
        self._listed = {*settings.cors_origins, origin_of(settings.server_url)}
        self._port = settings.port
        self._refused = _LoggedOnce("refused the origin %s; CORS_ORIGINS lists those that are allowed")

    def refusal(self, request: web.BaseRequest) -> str | None:
        """Return why the request is refused, or None. Callers without the header are not browsers."""
        origins = request.headers.getall(ORIGIN, None)
        if origins is None or self.allows(origins, self._port or _listen_port(request)):
            return None
        shown = ", ".join(origins)[:_NAME_SHOWN]
        self._refused.log(ascii(shown))
        return f"the origin {shown} is not allowed; CORS_ORIGINS lists those that are"

    def allows(self, origins: Iterable[str], port: int) -> bool:
        here = {origin_of(f"http://{host}:{port}") for host in ("localhost", "127.0.0.1")}
        return all(origin in self._listed or origin in here for origin in origins)


class HostRule:
    """Which names the `Host` header may have: those of this machine, the host of SERVER_URL, and ALLOWED_HOSTS.

    Those of this machine are loopback, HOST, and the address that the caller reached.
    """

    def __init__(self, settings: Settings) -> None:
        server = urlsplit(settings.server_url).hostname
        self._names = {"localhost", settings.host.lower(), *settings.allowed_hosts, *([server] if server else [])}
        self._accepted: set[str] = set()  # whole headers, so that not every request takes its own apart
        self._refused = _LoggedOnce("refused the host %s; ALLOWED_HOSTS lists names of the service beside SERVER_URL")

    def refusal(self, request: web.BaseRequest) -> str | None:
        """Return why the request is refused, or None. Callers of HTTP/1.0 may name no host."""
        text = request.headers.get(HOST, "localhost")
        if text in self._accepted:
            return None
        name = _host_name(text)
        if name in self._names or _is_loopback(name) or name == _reached_address(request):
            if len(self._accepted) < _LOGGED_MAX:
                self._accepted.add(text)
            return None
        shown = ascii(text[:_NAME_SHOWN])
        self._refused.log(shown)
        return f"the host {shown} is not served here; ALLOWED_HOSTS lists the names that are"


def _host_name(text: str) -> str:
    try:
        return (urlsplit(f"//{text}").hostname or "").lower()
    except ValueError:
        return ""


def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _reached_address(request: web.BaseRequest) -> str | None:
    address = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return str(address[0]) if isinstance(address, tuple) else None


def _listen_port(request: web.BaseRequest) -> int:
    """Return the port that the system chose, for PORT=0."""
    address = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return int(address[1]) if isinstance(address, tuple) else 0


class _Prefixes(AbstractRouterAdapter):
    """Let aiohttp-cors decide by the prefix of a path, so that responses of no route (404, 405) are covered too.

    Its own adapter works on resources, and accepts none whose routes take every method, as ours do.
    """

    def __init__(self, options: Mapping[str, ResourceOptions]) -> None:
        self._options = options
        self._prefixes: tuple[str, ...] = ()
        self.preflight: Handler = answer_plain_options

    def add_preflight_handler(self, routing_entity: str, handler: Handler, webview: bool = False) -> None:
        self.preflight = handler

    def set_config_for_routing_entity(self, routing_entity: str, config: object) -> None:
        self._prefixes += (routing_entity,)

    def is_preflight_request(self, request: web.BaseRequest) -> bool:
        return request.method == METH_OPTIONS

    def is_cors_enabled_on_request(self, request: web.BaseRequest) -> bool:
        return request.rel_url.raw_path.startswith(self._prefixes)

    async def get_preflight_request_config(
        self, preflight_request: web.BaseRequest, origin: str, requested_method: str
    ) -> Mapping[str, ResourceOptions]:
        # The library's types are partial.
        options = self._options.get(origin)
        if options is not None and not options.is_method_allowed(requested_method):  # type: ignore[no-untyped-call]
            raise KeyError(requested_method)
        return self._options

    def get_non_preflight_request_config(self, request: web.BaseRequest) -> Mapping[str, ResourceOptions]:
        return self._options


async def answer_plain_options(_: web.BaseRequest) -> web.Response:
    """Answer an OPTIONS request that is no preflight."""
    return web.Response(status=HTTPStatus.NO_CONTENT)


class CrossOrigin:
    """Cross-origin headers on every response below `PATHS` (streams, errors and preflights included), by aiohttp-cors.

    aiohttp-cors has an application of its own here: its hook on the service's would be called for every response.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        options = ResourceOptions(  # type: ignore[no-untyped-call]  # the library's types are partial
            allow_credentials=True,
            expose_headers=EXPOSED_HEADERS,
            allow_headers=ALLOWED_HEADERS,
            allow_methods=METHODS,
            max_age=PREFLIGHT_AGE_S,
        )
        self._adapter = _Prefixes(dict.fromkeys(origins, options))
        app = web.Application()
        config = CorsConfig(app, router_adapter=self._adapter)
        for prefix in PATHS:
            config.add(prefix)
        self._on_response = app.on_response_prepare
        self._on_response.freeze()

    @classmethod
    def of(cls, settings: Settings) -> "CrossOrigin | None":
        return cls(settings.cors_origins) if settings.cors_origins else None

    async def add_headers(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Add the headers to the response to a request that has an origin."""
        await self._on_response.send(cast("web.Request", request), response)  # of an application that serves nothing

    async def answer_preflight(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer OPTIONS. aiohttp-cors decides on a preflight; the response then lists everything that is allowed.

        aiohttp-cors names only the requested method and headers, and a browser would ask again for the next.
        """
        is_preflight = ORIGIN in request.headers and ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if not is_preflight or not self._adapter.is_cors_enabled_on_request(request):
            return await answer_plain_options(request)
        try:
            response = await self._adapter.preflight(request)
        except web.HTTPForbidden:  # without the headers the browser refuses, and tells its user
            return await answer_plain_options(request)
        response.set_status(HTTPStatus.NO_CONTENT)
        response.headers[ACCESS_CONTROL_ALLOW_METHODS] = ", ".join(METHODS)
        response.headers[ACCESS_CONTROL_ALLOW_HEADERS] = ", ".join(ALLOWED_HEADERS)
        return response
