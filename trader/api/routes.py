"""Routes of GET requests, each declared once with its path and documentation, and their common JSON responses."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
from aiohttp import HttpVersion11, hdrs, web
from multidict import CIMultiDict

from trader.api.requests import Handler
from trader.api.schemas.common import Refusal, decoder_of, encoded
from trader.core.logs import printable
from trader.settings.settings import Settings

JSON: Final = "application/json"


class Documented(NamedTuple):
    """One response of a route in the OpenAPI document. `body` is the type of the body, `headers` are names."""

    description: str
    body: Any
    headers: tuple[str, ...] = ("X-Request-Id",)
    media_type: str = JSON


@dataclass(frozen=True, slots=True)
class Route:
    """A path for GET requests, with its documentation.

    `event_data` is the type of a stream's event data; `parameters` are the query parameters with their descriptions,
    and `forms` the JSON Schemas of those that are not text.
    """

    path: str
    summary: str = ""
    description: str = ""
    tag: str = ""
    responses: Mapping[int, Documented] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    event_data: Any = None
    alias: str | None = None
    head: bool = False
    forms: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if self.alias is None else (self.path, self.alias)

    @property
    def name(self) -> str:
        """The id of its operation in the OpenAPI document, with slashes."""
        return self.path.removeprefix("/api").strip("/")

    def get(self, handler: Handler) -> list[web.RouteDef]:
        """Return the routes that serve GET (and HEAD) at its paths; those of the API also with a trailing slash."""
        paths = [path + slash for path in self.paths for slash in (("", "/") if self.responses else ("",))]
        return [web.get(path, handler, allow_head=self.head, expect_handler=answer_expectation) for path in paths]


async def answer_expectation(request: web.Request) -> None:
    """Answer `Expect: 100-continue`. The middleware refuses any other expectation."""
    if request.transport is not None and unmet_expectation(request) is None and request.version >= HttpVersion11:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


def unmet_expectation(request: web.Request) -> str | None:
    """Return an expectation of the request other than `100-continue`. HTTP/1.0 expectations are ignored."""
    expected = request.headers.get(hdrs.EXPECT, "100-continue")
    return None if expected.lower() == "100-continue" or request.version < HttpVersion11 else expected


def base_url(settings: Settings) -> str:
    """Return the public address without a trailing slash; empty if the system chooses the port."""
    return "" if settings.server_url.endswith(":0") else settings.server_url.rstrip("/")


def json_answer(status: int, body: msgspec.Struct, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a response with a body that matches its schema."""
    own = CIMultiDict(headers or {})  # several lines of one name stay several lines
    own.setdefault(hdrs.CONTENT_TYPE, JSON)
    return web.Response(status=status, body=encoded(body, decoder_of(type(body))), headers=own)


def refusal(status: int, error: str, headers: Mapping[str, str] | None = None) -> web.Response:
    return json_answer(status, Refusal(error=printable(error)), headers)
