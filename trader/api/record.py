"""The record at `GET /api/record`: the links of the chain with their canonical records, for verifiers."""

import re
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Final

from aiohttp import hdrs, web
from msgspec import Meta

from trader.agents.verification import read_record
from trader.api.context import DATABASE
from trader.api.requests import INFO
from trader.api.routes import Documented, Route, json_answer
from trader.api.schemas.common import Refusal, Wire
from trader.api.turns import Turns
from trader.core.errors import InvalidInput, Issue

LINKS_MAX: Final = 200
"""Maximum links per page; a page stops earlier before its records exceed a megabyte."""

_POSITION: Final = re.compile(r"[0-9]{1,16}", re.ASCII)

Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class RecordHead(Wire):
    """The last link of the chain."""

    position: int
    digest: Hex


class RecordLink(Wire):
    """A link of the chain. `recordDigest` is the SHA-256 of `record`, canonical JSON; null: its row is gone.

    `digest` is the SHA-256 of the previous digest (for the first link, 32 zero bytes) and `recordDigest`, as bytes.
    """

    position: int
    kind: str
    record: str | None
    record_digest: Hex
    digest: Hex


class RecordPage(Wire):
    """Links in chain order, the head (null: no link yet), and the next value for `after`."""

    links: Sequence[RecordLink]
    head: RecordHead | None
    next: int | None


RECORD: Final = Route(
    "/api/record",
    "The links of the chain, with their records",
    description="Everything that determines a ranking: every decision and every result, in one chain of digests. "
    "`docs/record.md` describes the records and how to verify them.",
    tag="record",
    parameters={"after": "return the links after this position; default: 0"},
    forms={"after": {"type": "integer", "minimum": 0, "maximum": 10**16 - 1}},
    responses={
        200: Documented("The next links; the last page has no `next`.", RecordPage),
        400: Documented("`after` is not a position.", Refusal),
    },
)


async def _answer(turns: Turns, request: web.Request) -> web.Response:
    after = request.query.get("after", "0")
    if _POSITION.fullmatch(after) is None:
        raise InvalidInput(Issue(("after",), f"{after[:40]!r} is not a position of the chain, such as 0 or 250"))
    async with turns.of(request[INFO].caller):
        links, head = await read_record(request.app[DATABASE], int(after), LINKS_MAX)
    page = RecordPage(
        links=[RecordLink.from_attributes(link, record=text) for link, text in links],
        head=None if head is None else RecordHead.from_attributes(head),
        next=links[-1][0].position if links and head is not None and links[-1][0].position < head.position else None,
    )
    return json_answer(200, page, {hdrs.CACHE_CONTROL: "no-cache"})


def routes() -> list[web.RouteDef]:
    return RECORD.get(partial(_answer, Turns()))
