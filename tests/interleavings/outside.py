"""The surroundings of the processes: the agents' webhook, the sink of anchors, and the commands of seasons."""

import asyncio
from datetime import datetime, timedelta

import msgspec
from support.seasons import RULES

from trader.agents.verification import read_links
from trader.api.schemas.common import ENCODER
from trader.core.clock import iso
from trader.core.errors import SinkUnavailable, StartError
from trader.database.pool import Connection, Database
from trader.portfolio import seasons
from trader.portfolio.domain.seasons import SeasonResult
from trader.record.domain.chain import Anchor
from trader.seasons.record_reader import RecordReader


class AgentsWebhook:
    """The webhook of every agent. It buys at each request, under another client order ID."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """The view of each request."""

    async def call(self, url: str, secret: str, view_id: str, body: bytes, limit_s: float) -> bytes:
        order = {"symbol": "BTC", "side": "buy", "quantity": 0.05, "exitPlan": {"stop": 90_000}}
        arguments = {"clientOrderId": f"asked {len(self.asked)}", **order}
        self.asked.append(view_id)
        await asyncio.sleep(0)
        return ENCODER.encode({"decisions": [{"name": "placeOrder", "arguments": arguments}]})

    async def close(self) -> None:
        pass


class Sink:
    """The receiver of anchors."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.is_down = False

    async def send(self, anchor: Anchor) -> None:
        await asyncio.sleep(0)
        if self.is_down:
            raise SinkUnavailable("it is down")
        self.received.append(anchor.position)

    async def close(self) -> None:
        pass


async def open_season(database: Database, start: datetime) -> None:
    """Open a season of an hour, as the command does.

    :raises StartError: a season is open
    :raises InvalidInput: its start is over
    """
    async with database.transaction() as conn:
        await seasons.open_season(conn, msgspec.structs.replace(RULES, start=start, end=start + timedelta(hours=1)))


async def read_record(conn: Connection) -> RecordReader:
    reader = RecordReader()
    for _, text in await read_links(conn, 0, 1000):
        assert text is not None
        reader.read(text)
    return reader


async def close_season(database: Database) -> None:
    """Close the season on what the record has, as the command does.

    :raises StartError: it cannot be closed yet
    """
    async with database.reading() as conn:
        season = await seasons.require_open(conn)
    async with database.reading() as conn:
        reader = await read_record(conn)
    complete = reader.complete_until(season.rules)
    if complete is None:
        raise StartError("the record has no hour of equity yet")
    until = iso(min(complete, season.rules.end))
    result = SeasonResult(until=until, position=reader.position, head="", card="", version="", code="")
    async with database.transaction() as conn:
        await seasons.close_season(conn, season, result, is_decided=False)


async def prolong_season(database: Database) -> None:
    """Amend the end of the season to an hour later."""
    async with database.transaction() as conn:
        rules = (await seasons.require_open(conn)).rules
        longer = msgspec.structs.replace(rules, end=rules.end + timedelta(hours=1))
        await seasons.amend_season(conn, longer, "it is exciting")
