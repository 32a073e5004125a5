"""Origins and hosts: which browser requests the service refuses.

Browsers use the headers of aiohttp-cors to enforce which pages may read a response. But a POST takes effect, and a
stream opens, before the browser hides the response, so the service itself refuses foreign origins (`OriginRule`). To
the browser, a page whose host name resolves to this machine (DNS rebinding) has the same origin: `HostRule` refuses
names that are not the service's.
"""

import logging
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.hdrs import HOST, METH_GET, METH_HEAD, ORIGIN
from multidict import istr

from trader.settings.settings import Settings

FETCH_SITE, FETCH_MODE, FETCH_DEST = istr("Sec-Fetch-Site"), istr("Sec-Fetch-Mode"), istr("Sec-Fetch-Dest")

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
    """Logs each refused name once, and at most a hundred, because callers can invent any number."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._names: set[str] = set()

    def log(self, name: str) -> None:
        if name not in self._names and len(self._names) < _LOGGED_MAX:
            self._names.add(name)
            log.warning(self._message, name)


class OriginRule:
    """Which `Origin` a request may carry: one of CORS_ORIGINS, or the server's own.

    The server's own origins are SERVER_URL's and the listen address as `localhost` and `127.0.0.1`; never the
    Host header, because the caller chooses it (DNS rebinding).
    """

    def __init__(self, settings: Settings) -> None:
        self._listed = {*settings.cors_origins, origin_of(settings.server_url)}
        self._port = settings.port
        self._refused = _LoggedOnce("refused the origin %s; CORS_ORIGINS lists the allowed ones")

    def refusal(self, request: web.Request) -> str | None:
        """Return why the request is refused, or None. Callers without the header are not browsers."""
        origins = request.headers.getall(ORIGIN, None)
        if origins is None:
            return _refusal_of_site(request)
        if self.allows(origins, self._port or _reached(request)[1]):
            return None
        shown = ", ".join(origins)[:_NAME_SHOWN]
        self._refused.log(ascii(shown))
        return f"the origin {shown} is not allowed; CORS_ORIGINS lists the allowed ones"

    def allows(self, origins: Iterable[str], port: int) -> bool:
        here = {origin_of(f"http://{host}:{port}") for host in ("localhost", "127.0.0.1")}
        return all(origin in self._listed or origin in here for origin in origins)


def _refusal_of_site(request: web.Request) -> str | None:
    """Return why a request without an origin is refused: a page of another origin sends or embeds it.

    Such requests come from forms, images, scripts and frames. Links to the service's pages are allowed anywhere.
    """
    is_link = request.headers.get(FETCH_MODE) == "navigate" and request.headers.get(FETCH_DEST) == "document"
    is_read = request.method in (METH_GET, METH_HEAD) and not request.path.startswith("/api/events")
    if request.headers.get(FETCH_SITE, "none") in ("none", "same-origin") or (is_link and is_read):
        return None
    return "a page of another origin may not use this service; CORS_ORIGINS lists the origins that may"


class HostRule:
    """Which names the `Host` header may have: this machine's, the host of SERVER_URL, and ALLOWED_HOSTS.

    This machine's names are loopback, HOST, and the address that the caller reached.
    """

    def __init__(self, settings: Settings) -> None:
        server = urlsplit(settings.server_url).hostname
        self._names = {"localhost", settings.host.lower(), *settings.allowed_hosts, *([server] if server else [])}
        self._accepted: set[str] = set()  # whole headers, so that most requests need no parsing
        self._refused = _LoggedOnce(
            "refused the host %s; ALLOWED_HOSTS lists names of the service in addition to SERVER_URL"
        )

    def refusal(self, request: web.Request) -> str | None:
        """Return why the request is refused, or None. Callers of HTTP/1.0 may name no host."""
        text = request.headers.get(HOST, "localhost")
        if text in self._accepted:
            return None
        name = _host_name(text)
        if name in self._names or _is_loopback(name) or name == _reached(request)[0]:
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


def _reached(request: web.Request) -> tuple[str | None, int]:
    """Return the address and the port that the caller reached, with PORT=0 the one that the system chose."""
    address = request.get_extra_info("sockname")
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else (None, 0)


ORIGINS: Final = web.AppKey("origins", OriginRule)
HOSTS: Final = web.AppKey("hosts", HostRule)
