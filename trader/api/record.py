"""The record at `GET /api/record`: the links of the chain with their canonical records, for whoever verifies them."""

import re
from collections.abc import Sequence
from typing import Annotated, Final

from aiohttp import hdrs, web
from msgspec import Meta

from trader.api.context import DATABASE
from trader.api.routes import Documented, Route, json_answer
from trader.api.schemas.common import Refusal, Wire
from trader.errors import InvalidInput, Issue
from trader.services.agents.chain import read_record

LINKS_MAX: Final = 200
"""Most links of one page; one that would have over a megabyte of records has fewer."""

_POSITION: Final = re.compile(r"[0-9]{1,16}", re.ASCII)

Hex = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class RecordHead(Wire):
    """The last link of the chain."""

    position: int
    digest: Hex


class RecordLink(Wire):
    """A link of the chain. `recordDigest` is the SHA-256 of `record`, canonical JSON; null: its row is gone.

    `digest` is the SHA-256 of the digest before it (of the first: 32 zero bytes) and of `recordDigest`, as bytes.
    """

    position: int
    kind: str
    record: str | None
    record_digest: Hex
    digest: Hex


class RecordPage(Wire):
    """Links in the order of the chain, its head (null: it has no link yet), and what to pass as `after` next."""

    links: Sequence[RecordLink]
    head: RecordHead | None
    next: int | None


RECORD: Final = Route(
    "/api/record",
    "The links of the chain, with their records",
    description="What decides a ranking, as it was recorded: every decision and every result, in one chain of digests. "
    "`docs/record.md` says what a record has and how to verify it.",
    tag="record",
    parameters={"after": "the position after which the links are, 0 without it"},
    forms={"after": {"type": "integer", "minimum": 0, "maximum": 10**16 - 1}},
    responses={
        200: Documented("The next links; those of the end have no `next`.", RecordPage),
        400: Documented("`after` is no position.", Refusal),
    },
)


async def _answer(request: web.Request) -> web.Response:
    after = request.query.get("after", "0")
    if _POSITION.fullmatch(after) is None:
        raise InvalidInput(Issue(("after",), f"{after[:40]!r} is not a position of the chain, such as 0 or 250"))
    links, head = await read_record(request.app[DATABASE], int(after), LINKS_MAX)
    page = RecordPage(
        links=[
            RecordLink(
                position=link.position,
                kind=link.kind,
                record=text,
                record_digest=link.record_digest.hex(),
                digest=link.digest.hex(),
            )
            for link, text in links
        ],
        head=None if head is None else RecordHead(position=head.position, digest=head.digest.hex()),
        next=links[-1][0].position if links and head is not None and links[-1][0].position < head.position else None,
    )
    return json_answer(200, page, {hdrs.CACHE_CONTROL: "no-cache"})


def routes() -> list[web.RouteDef]:
    return RECORD.get(_answer)
