"""The combined stream: several streams on one connection, with ids for clients that reconnect."""

import asyncio
import re
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import orjson
import pytest
from aiohttp.test_utils import TestServer
from support.manual_clock import ManualClock
from support.records import START
from support.served import make_stream_app
from support.sse import workflow_step
from support.waiting import until

from trader.api import streams
from trader.api.broadcast import EVENTS_MAX, EventRing
from trader.core.errors import Unavailable
from trader.core.events import EventBus, LeadershipChanged, MarketChecked

STATES = ("positions", "trades", "conversations", "portfolio", "candles")
PATIENCE_S = 60.0


class Service:
    """The streams behind a real server; every load returns `state`, or the number of loads so far."""

    def __init__(self) -> None:
        self.loads = 0
        self.error: Exception | None = None
        self.state: bytes | None = None
        self.events = EventBus()
        self.broadcasters = streams.Broadcasters(dict.fromkeys(STATES, self._load), self.events, ManualClock(START))
        self.address = ""

    async def _load(self) -> bytes:
        if self.error is not None:
            raise self.error
        self.loads += 1
        return self.state or b"[%d]" % self.loads

    def step(self, number: int) -> None:
        self.events.publish(workflow_step(START, number))


@asynccontextmanager
async def serving() -> AsyncIterator[Service]:
    service = Service()
    app = make_stream_app(service.broadcasters, streams.Timing(watch_s=0.05))
    async with TestServer(app) as server:
        service.address = str(server.make_url("/api/events"))
        yield service


class Reader:
    """A client that reads events as a browser does."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.last_id = ""

    async def line(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            return (await self.response.content.readline()).rstrip(b"\n")

    async def event(self) -> tuple[str, object]:
        fields: dict[str, str] = {}
        while "data" not in fields:
            while line := await self.line():
                name, _, value = line.decode().partition(":")
                fields[name] = value.strip()
        self.last_id = fields.get("id", self.last_id)
        return fields["event"], orjson.loads(fields["data"]) if fields["data"] else None

    async def events(self, count: int) -> list[tuple[str, object]]:
        return [await self.event() for _ in range(count)]


@asynccontextmanager
async def reading(service: Service, query: str = "", **headers: str) -> AsyncIterator[Reader]:
    headers.setdefault("Accept-Encoding", "identity")
    async with aiohttp.ClientSession() as http, http.get(service.address + query, headers=headers) as response:
        yield Reader(response)


def steps(events: list[tuple[str, object]]) -> list[int]:
    return [data["step"] for _, data in events if isinstance(data, dict) and "step" in data]


async def test_every_event_has_the_name_of_its_stream_and_an_id() -> None:
    async with serving() as service, reading(service) as reader:
        assert reader.response.headers["Content-Type"] == "text/event-stream"
        assert reader.response.headers["Cache-Control"] == "no-cache, no-transform"
        assert await reader.line() == b"retry: 2000"
        first = await reader.events(6)
        assert first[0][0] == "connected"
        assert {name for name, _ in first} == {"connected", *STATES}
        assert re.fullmatch(r"[0-9a-f]{8}-0", reader.last_id)
        service.step(1)
        data = {**workflow_step(START, 1).details, "type": "workflow:step", "timestamp": "2026-03-04T00:00:00.000Z"}
        assert await reader.event() == ("workflow:step", data)
        assert reader.last_id.endswith("-1")
        service.events.publish(MarketChecked(START))
        assert {name for name, _ in await reader.events(2)} == {"positions", "portfolio"}
        assert reader.last_id.endswith("-1")
        assert {name: len(broadcaster) for name, broadcaster in service.broadcasters.all.items()} == dict.fromkeys(
            (*STATES, "workflow"), 1
        )


async def test_a_subset_is_a_subscriber_of_its_streams_only() -> None:
    async with serving() as service:
        async with reading(service, "?streams=trades,portfolio&streams=trades") as reader:
            assert {name for name, _ in await reader.events(2)} == {"trades", "portfolio"}
            assert {name for name, broadcaster in service.broadcasters.all.items() if len(broadcaster)} == {
                "trades",
                "portfolio",
            }
        await until(lambda: not any(len(broadcaster) for broadcaster in service.broadcasters.all.values()))


@pytest.mark.parametrize("how", ["header", "query"])
async def test_a_client_that_returns_gets_the_events_it_missed(how: str) -> None:
    async with serving() as service:
        async with reading(service) as reader:
            await reader.events(6)
            service.step(1)
            service.step(2)
            assert steps(await reader.events(2)) == [1, 2]
        for number in range(3, 1003):
            service.step(number)
        headers = {"Last-Event-ID": reader.last_id} if how == "header" else {}
        query = f"?lastEventId={reader.last_id}" if how == "query" else ""
        async with reading(service, query, **headers) as again:
            events = await again.events(1006)
            assert steps(events) == list(range(3, 1003))
            assert {name for name, _ in events} == {"connected", "workflow:step", *STATES}


async def test_a_reset_comes_first_when_events_were_lost() -> None:
    async with serving() as service:
        async with reading(service, "?streams=workflow") as reader:
            await reader.event()
            service.step(0)
            await reader.event()
        for number in range(1, EVENTS_MAX + 2):
            service.step(number)
        async with reading(service, "?streams=workflow", **{"Last-Event-ID": reader.last_id}) as again:
            events = await again.events(2 + EVENTS_MAX)
            assert [name for name, _ in events][:2] == ["reset", "connected"]
            assert steps(events) == list(range(2, EVENTS_MAX + 2))
        async with reading(service, "?streams=workflow&lastEventId=00000000-5") as other:
            assert [name for name, _ in await other.events(2)] == ["reset", "connected"]


async def test_a_takeover_resets_connected_and_returning_clients() -> None:
    async with serving() as service, reading(service, "?streams=workflow") as reader:
        await reader.event()
        service.step(1)
        await reader.event()
        before = reader.last_id
        service.events.publish(LeadershipChanged("this process has taken over"))
        service.step(2)
        assert [name for name, _ in await reader.events(2)] == ["reset", "workflow:step"]
        assert reader.last_id.endswith("-1")
        assert reader.last_id != before
        async with reading(service, "?streams=workflow", **{"Last-Event-ID": before}) as again:
            events = await again.events(3)
            assert [name for name, _ in events] == ["reset", "connected", "workflow:step"]
            assert steps(events) == [2]
        async with reading(service, "?streams=workflow", **{"Last-Event-ID": reader.last_id}) as again:
            assert [name for name, _ in await again.events(1)] == ["connected"]


def test_only_retained_events_can_be_resumed() -> None:
    ring = EventRing(str.encode, events_max=3)
    ids = [ring.append(str(number), b"").event_id for number in range(5)]
    names = [[event.name for event in ring.first_events(last_id)] for last_id in ids]
    assert names == [
        ["reset", "connected", "2", "3", "4"],
        ["connected", "2", "3", "4"],
        ["connected", "3", "4"],
        ["connected", "4"],
        ["connected"],
    ]
    # A client cut off after any of these events resumes there.
    for start in ids:
        first = ring.first_events(start)
        for number, event in enumerate(first):
            rest = [each.name for each in ring.first_events(event.event_id) if each.name.isdigit()]
            assert rest == [each.name for each in first[number + 1 :] if each.name.isdigit()]


async def test_a_bad_request_names_what_is_allowed() -> None:
    async with serving() as service:
        for query, said in (
            ("?streams=positions,orders", "'orders' is not a stream; expected one of positions, trades, conversations"),
            ("?streams=", "'' is not a stream"),
            ("?lastEventId=7", "'7' is not the id of a message, such as 5f0c77d1-42"),
        ):
            async with reading(service, query) as reader:
                assert reader.response.status == 400
                assert said in (await reader.response.json())["error"]
        assert not any(len(broadcaster) for broadcaster in service.broadcasters.all.values())


async def test_a_full_stream_refuses_subsets_that_include_it() -> None:
    async with serving() as service:
        service.broadcasters.states["trades"].capacity = 0
        async with reading(service) as reader:
            assert reader.response.status == 503
            assert int(reader.response.headers["Retry-After"]) >= 1
            assert await reader.response.json() == {"error": "All 0 places of the stream trades are taken"}
        async with reading(service, "?streams=positions,workflow") as reader:
            assert reader.response.status == 200
        service.error = Unavailable("The database cannot be reached now.")
        async with reading(service, "?streams=positions,workflow") as reader:
            assert reader.response.status == 503


@pytest.mark.parametrize("path", ["", "/positions"])
async def test_callers_that_accept_gzip_can_read_each_message_on_arrival(path: str) -> None:
    async with serving() as service:
        service.address += path
        received = []
        for _ in range(2):
            async with aiohttp.ClientSession(auto_decompress=False) as http:
                headers = {"Accept-Encoding": "gzip, br"}
                async with http.get(service.address, headers=headers) as response:
                    assert response.headers["Content-Encoding"] == "gzip"
                    assert "Accept-Encoding" in response.headers["Vary"]
                    unpacker = zlib.decompressobj(wbits=31)
                    text = b""
                    while b"[" not in text or text.count(b"\n\n") < (6 if not path else 1):
                        text += unpacker.decompress(await response.content.readany())
                    service.events.publish(MarketChecked(START))
                    text = b""
                    while text.count(b"\n\n") < (2 if not path else 1):
                        text += unpacker.decompress(await response.content.readany())
                    received.append(text)
        assert all(b"data: [" in text for text in received)


async def test_new_records_follow_the_first_list() -> None:
    async with serving() as service, reading(service, "?streams=trades") as reader:
        assert await reader.event() == ("trades", [1])
        service.broadcasters.states["trades"].changed()
        assert await reader.event() == ("trades", [2])  # nothing in common with the list before
        service.state = b"[3,2]"
        service.broadcasters.states["trades"].changed()
        assert await reader.event() == ("trades:new", [3])
        service.broadcasters.states["trades"].changed()  # without a new record nothing is sent
        async with reading(service, "?streams=trades") as other:
            assert await other.event() == ("trades", [3, 2])
            service.state = b"[4,3,2]"
            service.broadcasters.states["trades"].changed()
            for each in (reader, other):
                assert await each.event() == ("trades:new", [4])
