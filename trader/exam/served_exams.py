"""The exams that a service shows: a list of those in the folder of `EXAMS`, each with its report."""

import asyncio
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import quote

import msgspec
from aiohttp import hdrs, web

from trader.api.dashboard.document import document, table
from trader.api.routes import Route
from trader.exam.report import CARD_FILE, REPORT_FILE
from trader.settings.settings import Settings

EXAMS: Final = Route("/exams", head=True)

_HEADERS: Final = {
    hdrs.CONTENT_TYPE: "text/html; charset=utf-8",
    hdrs.CACHE_CONTROL: "no-cache",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}
"""Nothing runs on these pages, whoever wrote them."""


class _Entrant(msgspec.Struct):
    entrant: str


class _Result(msgspec.Struct):
    states: int
    planned: int
    entrants: list[_Entrant]


class _Card(msgspec.Struct):
    result: _Result


class ShownExam(NamedTuple):
    """An exam with a card and a report. `name` is the name of its folder."""

    name: str
    result: _Result


def routes(settings: Settings) -> list[web.RouteDef]:
    """Return the routes of the list and of the reports; none without `EXAMS`."""
    folder = settings.exams
    if folder is None:
        return []

    async def answer_list(_request: web.Request) -> web.Response:
        exams = await asyncio.to_thread(lambda: list(shown_exams(folder)))
        return web.Response(body=_page(exams).encode(), headers=_HEADERS)

    async def answer_report(request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in {each.name for each in await asyncio.to_thread(lambda: list(shown_exams(folder)))}:
            raise web.HTTPNotFound
        body = await asyncio.to_thread((folder / name / REPORT_FILE).read_bytes)
        return web.Response(body=body, headers=_HEADERS)

    return [*EXAMS.get(answer_list), *Route(f"{EXAMS.path}/{{name}}", head=True).get(answer_report)]


def shown_exams(folder: Path) -> Iterator[ShownExam]:
    """Yield the exams in a folder that have a card and a report, by name; none if the folder does not exist."""
    for card in sorted(folder.glob(f"*/{CARD_FILE}")):
        if (card.parent / REPORT_FILE).is_file():
            try:
                yield ShownExam(card.parent.name, msgspec.json.decode(card.read_bytes(), type=_Card).result)
            except (OSError, msgspec.MsgspecError):
                continue  # such as the card of a season


def _page(exams: list[ShownExam]) -> str:
    rows = [
        (
            f'<a href="{EXAMS.path}/{quote(name)}">{escape(name)}</a>',
            escape(", ".join(each.entrant for each in result.entrants)),
            f"{result.states} of {result.planned}",
        )
        for name, result in exams
    ]
    body = table(("exam", "entrants", "states"), rows, text_columns=2) if rows else "<p>No exam has a report yet.</p>"
    return document("Exams", f"<h1>Exams</h1>{body}")
