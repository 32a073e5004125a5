"""Cross-origin access: what browsers of other origins may read, and which origins may send a POST at all.

Reading is the browser's to refuse, by the headers set here. A POST does its work before the browser hides the answer,
so one from a foreign origin is refused by the service itself (`OriginRule`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.hdrs import ORIGIN

from trader.errors import Forbidden
from trader.settings import Settings

PATHS: Final = ("/api/", "/health")
"""Where cross-origin answers exist: every path that starts with one of these."""

METHODS: Final = "GET, POST, OPTIONS"
ALLOWED_HEADERS: Final = "content-type, last-event-id, x-orpc-batch, x-csrf-token, authorization"
EXPOSED_HEADERS: Final = "x-request-id, retry-after"
PREFLIGHT_AGE_S: Final = 600

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


def origin_of(address: str) -> str | None:
    """The origin of a URL as browsers write it: lower case, without the scheme's own port."""
    parts = urlsplit(address)
    if not parts.scheme or parts.hostname is None:
        return None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    if parts.port is None or parts.port == _DEFAULT_PORTS.get(parts.scheme):
        return f"{parts.scheme}://{host}"
    return f"{parts.scheme}://{host}:{parts.port}"


@dataclass(frozen=True, slots=True)
class OriginRule:
    """Which `Origin` a POST may carry: one of CORS_ORIGINS, or the server's own.

    The server's own are the origin of SERVER_URL and the listen address as `localhost` and `127.0.0.1`; never what the
    Host header says, since that is the caller's word (DNS rebinding).
    """

    listed: frozenset[str]
    own: frozenset[str]
    port: int

    @classmethod
    def of(cls, settings: Settings) -> "OriginRule":
        server = origin_of(settings.server_url) if settings.server_url else None
        own = {server} if server else set()
        return cls(frozenset(settings.cors_origins), frozenset(own), settings.port)

    def check(self, request: web.Request) -> None:
        """Raises Forbidden for an origin that is not allowed. Callers without the header are no browsers."""
        origins = request.headers.getall(ORIGIN, None)
        if origins is None:
            return
        if not self.allows(origins, self.port or _listen_port(request)):
            raise Forbidden(f"the origin {', '.join(origins)[:100]} is not allowed; CORS_ORIGINS lists those that are")

    def allows(self, origins: Iterable[str], port: int) -> bool:
        here = {origin_of(f"http://{host}:{port}") for host in ("localhost", "127.0.0.1")}
        return all(origin in self.listed or origin in self.own or origin in here for origin in origins)


def _listen_port(request: web.Request) -> int:
    """The port that the system gave when PORT is 0."""
    address = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return int(address[1]) if isinstance(address, tuple) else 0


def setup(app: web.Application, settings: Settings) -> None:
    """Put cross-origin headers on every answer below `PATHS`: streams, errors and preflights included."""
    allowed = frozenset(settings.cors_origins)

    async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
        if not request.rel_url.raw_path.startswith(PATHS):
            return
        headers = response.headers
        headers.add("Vary", "Origin")
        origin = request.headers.get(ORIGIN)
        if origin not in allowed:
            return
        headers["Access-Control-Allow-Origin"] = origin
        headers["Access-Control-Allow-Credentials"] = "true"
        if request.method == "OPTIONS":
            headers["Access-Control-Allow-Methods"] = METHODS
            headers["Access-Control-Allow-Headers"] = ALLOWED_HEADERS
            headers["Access-Control-Max-Age"] = str(PREFLIGHT_AGE_S)
        else:
            headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS

    if allowed:
        app.on_response_prepare.append(add_headers)
