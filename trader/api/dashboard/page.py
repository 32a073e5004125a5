"""The page at `/`: the dashboard, or, with `DASHBOARD=off`, a short JSON list of addresses."""

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import lru_cache, partial
from html import escape
from typing import Final

import msgspec
from aiohttp import web

from trader import __version__
from trader.api.context import Context
from trader.api.dashboard import assets, preview
from trader.api.routes import JSON, Route, base_url
from trader.core.clock import floor_time, iso
from trader.settings.settings import Settings

INDEX: Final = Route("/", head=True)

_IMPORT: Final = re.compile(r"\bfrom '\./([^']+\.js)'")
"""A module that is needed for the first view; others are imported when they are first shown."""

_MINUTE: Final = timedelta(minutes=1)

PLACES: Final[Mapping[str, str]] = {
    "reference": "/api/docs",
    "openapi": "/api/openapi.json",
    "procedures": "/api/rpc/",
    "streams": "/api/events",
    "health": "/health",
}


def routes(context: Context) -> list[web.RouteDef]:
    """Return the routes of `/` and of the files of the pages."""
    places = assets.Content.of(msgspec.json.encode({"service": f"trader {__version__}", **PLACES}), JSON)
    page = lru_cache(maxsize=1)(partial(render, context.settings))

    async def answer(request: web.Request) -> web.Response:
        if context.settings.dashboard == "off":
            return places.respond(request, {})
        accounts = context.exchange.accounts
        starts = [accounts[model_id].run.started_at for model_id in context.models.by_id if model_id in accounts]
        ends_at = context.market.ends_at
        now = None if ends_at is None else floor_time(context.clock.now(), _MINUTE)
        content = page(len(context.models.by_id), min(starts, default=None), now, ends_at)
        return content.respond(request, assets.PAGE_HEADERS)

    return [*INDEX.get(answer), *preview.routes(context), *assets.routes()]


def render(
    settings: Settings,
    model_count: int = 0,
    run_start: datetime | None = None,
    now: datetime | None = None,
    ends_at: datetime | None = None,
) -> assets.Content:
    """Return the HTML of the dashboard.

    The data attributes of its body hold the settings that it shows, and the parameters of its curves, so that these
    need not wait for another response: the number of models, their start, and a replay's time and end.
    """
    market = settings.market_source.partition(":")[0]
    demo = "history" if settings.demo_history and market == "synthetic" else "fresh"
    data = {
        "models": str(model_count),
        "run": "" if run_start is None else iso(run_start),
        "now": "" if now is None else iso(now),
        "ends": "" if ends_at is None else iso(ends_at),
        "version": __version__,
        "mode": settings.trading_mode,
        "market": market,
        "demo": demo if settings.demo else "off",
        "public": settings.public,
    }
    text = assets.text_of("index.html").format(
        folder=assets.FOLDER,
        address=escape(base_url(settings)),
        preview=preview.PREVIEW.path,
        width=preview.SIZE[0],
        height=preview.SIZE[1],
        title=preview.title_of(settings, model_count),
        preloads="\n".join(
            f'<link rel="modulepreload" href="{assets.FOLDER}/{name}">' for name in assets.modules_of("app.js", _IMPORT)
        ),
        data=" ".join(f'data-{name}="{escape(value)}"' for name, value in data.items()),
    )
    return assets.Content.of(text.encode(), "text/html; charset=utf-8")
