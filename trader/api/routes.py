"""Routes for GET requests: each is declared once, with its path, methods and documentation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import hdrs, web

from trader.api.compression import compress_response
from trader.api.requests import Handler
from trader.api.site import JSON, Site, refusal


class Documented(NamedTuple):
    """One response of a route in the OpenAPI document. `body` is the type of the body, `headers` are names."""

    description: str
    body: Any
    headers: tuple[str, ...] = ("X-Request-Id",)
    media_type: str = JSON


@dataclass(frozen=True, slots=True)
class Route:
    """A path for GET requests, with its documentation.

    `event_data` is the type of what a stream sends as the data of an event; `parameters` are those of the query, with
    their descriptions.
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

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path,) if self.alias is None else (self.path, self.alias)

    @property
    def name(self) -> str:
        """The name in the log and in metrics."""
        return self.path.removeprefix("/api").strip("/")

    def add_to(self, site: Site, handler: Handler) -> None:
        """Serve GET (and HEAD); every other method is a 405, except the OPTIONS of a browser's preflight."""
        for path in self.paths:
            site.add(path, self.name, for_reading(site, handler, head=self.head))


def for_reading(site: Site, handler: Handler, *, head: bool = False) -> Handler:
    """Wrap the handler of GET (and HEAD) for all methods. Origins are checked, and long responses compressed."""
    allowed = (hdrs.METH_GET, hdrs.METH_HEAD) if head else (hdrs.METH_GET,)

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        if request.method in allowed:
            foreign = None if site.origins is None else site.origins.refusal(request)
            if foreign is not None:
                return refusal(403, foreign)
            response = await handler(request)
            if isinstance(response, web.Response):
                await compress_response(request, response)
            return response
        if request.method == hdrs.METH_OPTIONS:
            answer = await site.answer_options(request)
            answer.headers[hdrs.ALLOW] = ", ".join(allowed)
            return answer
        return refusal(405, "Method Not Allowed", {hdrs.ALLOW: ", ".join(allowed)})

    return handle
