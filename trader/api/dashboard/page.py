"""The page at `/`: the dashboard, or, with `DASHBOARD=off`, a short JSON list of where things are."""

from collections.abc import Mapping
from html import escape
from typing import Final

import msgspec
from aiohttp import web

from trader import __version__
from trader.api.dashboard import assets
from trader.api.routes import JSON, Route
from trader.settings import Settings

INDEX: Final = Route("/", head=True)

PLACES: Final[Mapping[str, str]] = {
    "reference": "/api/docs",
    "openapi": "/api/openapi.json",
    "procedures": "/api/rpc/",
    "streams": "/api/events",
    "health": "/health",
}


def setup(app: web.Application, settings: Settings) -> None:
    """Serve `/` and the files of the pages."""
    assets.setup(app)
    if settings.dashboard == "on":
        content = assets.Content.of(render(settings).encode(), "text/html; charset=utf-8")
        headers = assets.PAGE_HEADERS
    else:
        content = assets.Content.of(msgspec.json.encode({"service": f"trader {__version__}", **PLACES}), JSON)
        headers = {}

    async def answer(request: web.Request) -> web.Response:
        return content.respond(request, headers)

    INDEX.add_to(app, answer)


def render(settings: Settings) -> str:
    """Return the HTML of the dashboard. What it shows of the settings is in the data attributes of its body."""
    data = {
        "version": __version__,
        "mode": settings.trading_mode,
        "market": settings.market_source.partition(":")[0],
        "currency": settings.quote_currency,
        "demo": "off" if not settings.demo else "history" if settings.demo_history else "fresh",
        "public": settings.public,
    }
    return assets.text_of("index.html").format(
        folder=assets.FOLDER,
        preloads="\n".join(
            f'<link rel="modulepreload" href="{assets.FOLDER}/{name}">'
            for name in assets.FILES
            if name.endswith(".js") and "/" not in name and name not in _NOT_OF_THE_PAGE
        ),
        data=" ".join(f'data-{name}="{escape(value)}"' for name, value in data.items()),
    )


_NOT_OF_THE_PAGE: Final = ("theme.js", "reference.js", "report.js")
"""Scripts that the dashboard does not import as modules."""
