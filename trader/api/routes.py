"""Routes for GET requests: each is declared once, with its path, methods and documentation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aiohttp import hdrs, web

from trader.api.edge import EDGE, JSON, Edge, answer_expect, answer_options, refusal, served
from trader.api.requests import UNKNOWN, Handler


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
        return UNKNOWN if "{" in self.path else self.path.removeprefix("/api").strip("/")

    def add_to(self, app: web.Application, handler: Handler) -> None:
        """Serve GET (and HEAD); every other method is a 405, except the OPTIONS of a browser's preflight."""
        allowed = (hdrs.METH_GET, hdrs.METH_HEAD) if self.head else (hdrs.METH_GET,)

        origins = (app.get(EDGE) or Edge()).origins

        async def handle(request: web.Request) -> web.StreamResponse:
            if request.method in allowed:
                foreign = None if origins is None else origins.refusal(request)
                return await handler(request) if foreign is None else refusal(403, foreign)
            if request.method == hdrs.METH_OPTIONS:
                answer = await answer_options(request)
                answer.headers[hdrs.ALLOW] = ", ".join(allowed)
                return answer
            return refusal(405, "Method Not Allowed", {hdrs.ALLOW: ", ".join(allowed)})

        for path in self.paths:
            app.router.add_route(hdrs.METH_ANY, path, served(app, self.name, handle), expect_handler=answer_expect)
