"""Picture of the equity curves at `/preview.png`, for link previews of the page: drawn in a thread, and cached."""

import asyncio
import io
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from aiohttp import hdrs, web

from trader.agents.variants import color_of
from trader.api.context import Context
from trader.api.dashboard.assets import Content
from trader.api.response_cache import Answer, ResponseCache
from trader.api.routes import Route
from trader.api.schemas.portfolio import EquityCurve
from trader.core.clock import floor_time
from trader.portfolio.run_statistics import WindowStart
from trader.portfolio.snapshots import Curves
from trader.settings.settings import Settings

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

PREVIEW: Final = Route("/preview.png", head=True)

SIZE: Final = (1200, 630)
"""Pixels, in the proportions of link previews."""

PLOT: Final = (48, 150, 820, 560)
"""Left, top, right and bottom of the curves, in pixels of the picture."""

_KEPT_FOR: Final = timedelta(minutes=10)
_HEADERS: Final[Mapping[str, str]] = {hdrs.CACHE_CONTROL: f"private, max-age={_KEPT_FOR.seconds}"}
"""Reading may be restricted, and a shared cache must not bypass that."""

_POINTS: Final = 200
_NAMED: Final = 5
_NAME_MAX: Final = 18
_LAST_LATIN: Final = "\u024f"
_LINE_PX: Final = 34
_FINE: Final = 2
"""Drawing pixels per picture pixel, in each direction: Pillow draws lines with hard edges."""

_GROUND, _TEXT, _SOFT = "#0b0d10", "#e7eaef", "#98a1b0"
_DECODER: Final = msgspec.json.Decoder(EquityCurve)


class Curve(NamedTuple):
    """A line of the picture: percent above its first value at each time, None without a record."""

    name: str
    color: str
    returns: Sequence[float | None]

    @property
    def last(self) -> float:
        """The latest return, in percent."""
        return next((value for value in reversed(self.returns) if value is not None), 0.0)


def routes(context: Context) -> list[web.RouteDef]:
    """Return the route of the picture. All callers of ten minutes share one."""
    cache = ResponseCache(entries_max=1)

    async def answer(request: web.Request) -> web.Response:
        token = floor_time(context.clock.now(), _KEPT_FOR), context.models.version
        key = PREVIEW.path, b""
        kept = cache.find(key, token) or await cache.make(key, token, partial(_make, context))
        return Content.of(kept.body, "image/png", compress=False).respond(request, _HEADERS)

    return PREVIEW.get(answer)


def title_of(settings: Settings, model_count: int) -> str:
    """Return the title of a link to the page, also shown above its picture."""
    who = "1 model trades" if model_count == 1 else f"{model_count} models trade"
    return f"{who} perpetuals {'live' if settings.trading_mode == 'live' else 'on paper'}"


async def _make(context: Context) -> Answer:
    """Draw the curves of all models since the first one started."""
    models = context.models.by_id
    start, now, starts = await context.analytics.window("run")
    found = await context.portfolio.equity_curves(start=start, end=now, points_max=_POINTS)
    colors = {model_id: color_of(model) for model_id, model in models.items()}
    heading = title_of(context.settings, len(models))
    return Answer(200, await asyncio.to_thread(lambda: draw(curves_of(found, starts, colors), heading, start, now)))


def curves_of(found: Curves, starts: Mapping[str, WindowStart], colors: Mapping[str, str]) -> list[Curve]:
    """Return the lines of models since their start; if the font may lack a name's characters, use the id."""
    curves = []
    for record in map(_DECODER.decode, found.records):
        name = record.name if max(record.name) <= _LAST_LATIN else record.id
        if (start := starts.get(record.id)) is not None and start.value > 0:
            of_run = [None if at < start.at else value for at, value in zip(found.times, record.values, strict=True)]
            returns = [None if value is None else 100 * value / float(start.value) - 100 for value in of_run]
            curves.append(Curve(name, colors.get(record.id, _SOFT), returns))
    return curves


def draw(curves: Sequence[Curve], heading: str, start: datetime, end: datetime) -> bytes:
    """Return a PNG of the curves, with the best ones named, a heading, and the days that they cover."""
    from PIL import Image, ImageDraw  # noqa: PLC0415 - a start takes a twentieth less without it

    image = Image.new("RGB", (SIZE[0] * _FINE, SIZE[1] * _FINE), _GROUND)
    canvas = ImageDraw.Draw(image)
    values = [value for curve in curves for value in curve.returns if value is not None]
    low, high = min([-0.1, *values]), max([0.1, *values])
    left, top, right, bottom = (edge * _FINE for edge in PLOT)

    def y_of(value: float) -> float:
        return bottom - (value - low) / (high - low) * (bottom - top)

    write = partial(_write, canvas)
    write((PLOT[0], 40), heading, 44, _TEXT)
    write((PLOT[0], 98), "Return since the start, in percent", 24, _SOFT)
    write((PLOT[0], 582), f"{start:%Y-%m-%d} to {end:%Y-%m-%d %H:%M} UTC", 22, _SOFT)
    canvas.line([(left, y_of(0)), (right, y_of(0))], fill=_SOFT, width=_FINE)
    ranked = sorted(curves, key=lambda curve: curve.last, reverse=True)
    for place in reversed(range(len(ranked))):  # the best ones on top
        curve, width = ranked[place], (3 if place < _NAMED else 1) * _FINE
        step = (right - left) / max(1, len(curve.returns) - 1)
        points = [(left + at * step, y_of(value)) for at, value in enumerate(curve.returns) if value is not None]
        canvas.line(points, fill=curve.color, width=width, joint="curve")
    for place, curve in enumerate(ranked[:_NAMED]):
        at = (PLOT[2] + 24, PLOT[1] + place * _LINE_PX)
        name = curve.name if len(curve.name) <= _NAME_MAX else f"{curve.name[: _NAME_MAX - 1]}…"
        write(at, f"{name}  {curve.last:+.1f} %", 24, curve.color)
    picture = io.BytesIO()
    image.resize(SIZE, Image.Resampling.BOX).save(picture, "PNG")
    return picture.getvalue()


def _write(canvas: "ImageDraw", at: tuple[int, int], text: str, size: int, color: str) -> None:
    """Write a line of text with its top left corner at a position in the picture."""
    from PIL import ImageFont  # noqa: PLC0415 - as above

    canvas.text((at[0] * _FINE, at[1] * _FINE), text, fill=color, font=ImageFont.load_default(size * _FINE))
