"""Slots are shared: no caller can take all accounts or all streams from the others."""

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from decimal import Decimal

import pytest
from aiohttp.test_utils import make_mocked_request
from support.manual_clock import ManualClock
from support.operated_exchange import operating
from support.records import START, add_model
from support.served import make_stream_app, served
from support.venue import Venue, running
from support.waiting import until

from trader.api.broadcast import Broadcaster
from trader.api.origins import OriginRule
from trader.api.requests import address_of
from trader.api.stream_table import STREAMS
from trader.api.streams import Broadcasters, Timing
from trader.api.subscriber import Subscriber
from trader.core.errors import InvalidInput, Unavailable
from trader.core.events import EventBus, PositionsChanged
from trader.database.pool import Database
from trader.exchange.domain.halts import Verb
from trader.exchange.domain.orders import OrderStatus, OrderType
from trader.portfolio.audit import audit
from trader.settings.settings import Settings

LINK = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}


@pytest.fixture
async def venue(database: Database) -> AsyncIterator[Venue]:
    async with database.connection() as conn:
        await add_model(conn, "apex")
    async with running(database, SIM_MAX_ACCOUNTS="2") as venue:
        await venue.see({"BTC": "94000"})
        yield venue


async def test_only_accepted_orders_open_accounts(venue: Venue) -> None:
    for number in range(5):
        answer = await venue.buy("1000", account_id=f"invented-{number}")
        assert (answer.status, answer.account_id) == (OrderStatus.REJECTED, f"invented-{number}")
        await venue.exchange.reset_account(f"invented-{number}")
    assert set(venue.exchange.accounts) == {"apex"}
    async with venue.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM accounts") == 1
    assert (await venue.buy("0.01", account_id="real")).status is OrderStatus.FILLED


async def test_models_have_separate_slots(venue: Venue) -> None:
    await venue.exchange.open_account("apex")
    await venue.buy("0.01", account_id="one")
    await venue.buy("0.01", account_id="two")
    with pytest.raises(InvalidInput, match="'three' does not exist, and no more than 2"):
        await venue.buy("0.01", account_id="three")
    assert (await venue.buy("0.01", account_id="apex")).status is OrderStatus.FILLED
    assert (await venue.buy("0.01", account_id="one")).status is OrderStatus.FILLED


async def test_an_operator_frees_the_slot_of_an_account_that_has_never_traded(database: Database) -> None:
    async with operating(database, SIM_MAX_ACCOUNTS="2") as operated:
        venue = operated.venue
        await operated.see({"BTC": "94000"})
        await venue.buy("0.01", account_id="trader")
        resting = {"type": OrderType.LIMIT, "limit_price": Decimal(90000)}
        await venue.buy("0.01", account_id="invented", client_order_id="once", **resting)
        with pytest.raises(InvalidInput, match="no more than 2"):
            await venue.buy("0.01", account_id="third")
        await operated.do(Verb.HALT, "invented")
        assert (await operated.do(Verb.REMOVE, "invented")).left == ()
        (left,) = (await operated.do(Verb.REMOVE, "trader")).left
        assert left.reason == "it has traded or belongs to a model, and is kept"
        assert set(venue.exchange.accounts) == {"trader"}
        await operated.halts.load()
        assert list(operated.halts.in_force) == [], "its halt went with it"
        assert (await venue.buy("0.01", account_id="third")).status is OrderStatus.FILLED
        async with database.connection() as conn:
            for table in ("accounts", "runs", "order_requests", "limit_orders"):
                column = "id" if table == "accounts" else "account_id"
                assert not await conn.fetchval(f"SELECT count(*) FROM {table} WHERE {column} = 'invented'"), table
            assert (await audit(database)).problems == []


def placed(broadcaster: Broadcaster, *addresses: str) -> list[Subscriber]:
    """Subscribers from these addresses; `*` is a caller with a key."""
    subscribers = [Subscriber(address=address, is_known=address == "*") for address in addresses]
    for subscriber in subscribers:
        broadcaster.add(subscriber)
    return subscribers


def test_a_single_address_may_have_every_slot_of_a_stream() -> None:
    broadcaster = Broadcaster("positions", capacity=50)
    subscribers = placed(broadcaster, *["a"] * 50)
    with pytest.raises(Unavailable, match="All 50 places of the stream positions are taken"):
        placed(broadcaster, "a")
    assert len(broadcaster) == 50
    assert not any(subscriber.ended for subscriber in subscribers)


def test_other_addresses_get_their_share_of_a_full_stream() -> None:
    broadcaster = Broadcaster("positions", capacity=4)
    greedy = placed(broadcaster, "a", "a", "a", "a")
    placed(broadcaster, "b")
    assert [each.ended for each in greedy] == [True, False, False, False], "the oldest made room"
    placed(broadcaster, "b")
    with pytest.raises(Unavailable):
        placed(broadcaster, "b")
    placed(broadcaster, "c")
    assert (len(broadcaster), sum(each.ended for each in greedy)) == (4, 3)


def test_keys_and_tokens_always_get_a_slot() -> None:
    broadcaster = Broadcaster("positions", capacity=3)
    placed(broadcaster, "a", "b", "c")
    known = placed(broadcaster, "*", "*", "*")
    with pytest.raises(Unavailable):
        placed(broadcaster, "*")
    with pytest.raises(Unavailable):
        placed(broadcaster, "d")
    assert not any(each.ended for each in known)


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_the_addresses_of_a_network_count_as_one(remote: str, address: str) -> None:
    request = make_mocked_request("GET", "/").clone(remote=remote)
    assert address_of(request) == address


class Large:
    """A state of 10 kB that differs each time."""

    def __init__(self) -> None:
        self.count = 0

    async def __call__(self) -> bytes:
        self.count += 1
        return b'["%06d%b"]' % (self.count, b"x" * 10_000)


@asynccontextmanager
async def streams(**timing: float) -> AsyncIterator[tuple[int, Broadcasters, EventBus]]:
    events = EventBus()
    broadcasters = Broadcasters({stream.name: Large() for stream in STREAMS if stream.load}, events, ManualClock(START))
    async with served(make_stream_app(broadcasters, Timing(**timing))) as client:
        yield client.port, broadcasters, events


def unread(port: int) -> Iterator[socket.socket]:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", port))
    sock.sendall(b"GET /api/events/positions HTTP/1.1\r\nHost: localhost\r\n\r\n")
    yield sock


async def test_a_reader_that_accepts_nothing_is_disconnected_even_if_its_messages_fit() -> None:
    async with streams(watch_s=0.02, stalled_s=0.3) as (port, broadcasters, events), AsyncExitStack() as open_sockets:
        for sock in unread(port):
            open_sockets.enter_context(closing(sock))
        broadcaster = broadcasters.all["positions"]
        await until(lambda: len(broadcaster))

        def is_dropped() -> bool:
            events.publish(PositionsChanged(START, ()))
            return not len(broadcaster)

        await until(is_dropped)
        assert broadcaster.dropped == 1


@pytest.mark.parametrize(
    ("path", "headers", "is_refused"),
    [
        ("/api/events/positions", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, True),
        (
            "/api/events",
            LINK,
            True,
        ),
        ("/", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}, True),
        ("/", LINK, False),
        ("/", {**LINK, "Sec-Fetch-Site": "same-site"}, False),
        ("/api/events/positions", {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "no-cors"}, True),
        ("/health", {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, True),
        ("/health", {"Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"}, False),
        ("/health", {"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost:3000"}, False),
        ("/health", {"Sec-Fetch-Site": "same-origin", "Origin": "http://elsewhere.example"}, True),
        ("/health", {}, False),
    ],
)
def test_pages_of_other_sites_are_refused_without_an_origin_too(
    path: str, headers: dict[str, str], is_refused: bool
) -> None:
    rule = OriginRule(Settings.load({}, None, demo=True))
    assert (rule.refusal(make_mocked_request("GET", path, headers=headers)) is not None) is is_refused
