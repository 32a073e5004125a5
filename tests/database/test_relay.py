"""The relay passes what the leader sees and publishes to the processes that follow it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal
from typing import Any, cast

import msgspec
import pytest
from support.manual_clock import ManualClock
from support.records import HOUR, START, add_invocation, add_model, add_run, add_trade, make_run, make_snapshot
from support.scripted import ScriptedSource
from support.waiting import until

from trader.agents.sql.linked_invocations import select_chain_models
from trader.api.schemas.common import ENCODER
from trader.core.clock import LockstepClock, SystemClock
from trader.core.errors import Unavailable
from trader.core.events import EventBus, MarketChecked, WorkflowProgress
from trader.database.leadership import update_term
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database
from trader.database.relay import EVENTS_MAX, SLOTS, LeaderView, RelayedQuote, RelayReader, RelayWriter, upsert_relay
from trader.exchange.sql.accounts import DatabaseIdentity, upsert_service_state
from trader.market.domain.markets import MARKETS, Market
from trader.market.feed import MarketFeed
from trader.market.followed_market import FollowedMarket
from trader.market.sources.synthetic import SyntheticSource
from trader.portfolio.sql.analytics import select_changes
from trader.portfolio.sql.snapshots import insert_snapshots

D = Decimal
DETAILS: dict[str, Any] = {"modelId": "a", "price": D("89071.80"), "share": 0.1, "text": "ü", "none": None, "l": [1]}


def quote(mark: str, symbol: str = "BTC") -> RelayedQuote:
    return RelayedQuote(symbol, START, D(mark) - 1, D(mark) + 1, D(mark))


ALL_MARKETS = tuple(MARKETS.values())


def view(*quotes: RelayedQuote, markets: Sequence[Market] | None = ALL_MARKETS, **fields: Any) -> LeaderView:
    rules = None if markets is None else msgspec.json.encode(markets).decode()
    empty: dict[str, Any] = {"market_troubles": {}, "account_troubles": {}, "warning": None, "snapshots_created": 0}
    return LeaderView(now=START, updated_at=START, quotes=quotes, markets=rules, **{**empty, **fields})


class Relayed:
    """A leader's end of the relay, and a follower's."""

    def __init__(self, database: Database, term: int) -> None:
        self.database = database
        self.term = term
        self.bus, self.seen = EventBus(), list[WorkflowProgress]()
        self.view = view()
        self.writer = RelayWriter(database, self.bus, lambda: self.view, ENCODER.encode)
        self.writer.open()
        following = EventBus()
        following.subscribe(self.seen.append)  # type: ignore[arg-type]
        self.reader = RelayReader(database, following)

    def publish(self, number: int, **details: Any) -> WorkflowProgress:
        event = WorkflowProgress("workflow:step", START + timedelta(seconds=number), {**DETAILS, **details})
        self.bus.publish(event)
        return event

    async def write(self) -> None:
        """Write one record, as the leader does."""
        before = await self.count()
        task = asyncio.create_task(self.writer.run(self.term))
        await self.written(before + 1)
        task.cancel()
        await asyncio.wait([task])

    async def written(self, number: int) -> None:
        """Wait for a record with this number or a later one."""

        async def is_written() -> bool:
            return await self.count() >= number

        await until(is_written, f"record {number}")

    async def count(self) -> int:
        async with self.database.connection() as conn:
            number: int = await conn.fetchval("SELECT coalesce(max(number), 0) FROM relay")
            return number


@pytest.fixture
async def relayed(database: Database) -> Relayed:
    async with database.connection() as conn:
        await upsert_service_state(conn, DatabaseIdentity("synthetic:0", "simulated"))
        return Relayed(database, await update_term(conn))


async def test_a_follower_publishes_the_same_events_as_the_leader(relayed: Relayed) -> None:
    await relayed.write()
    await relayed.reader.poll()
    sent = [relayed.publish(number) for number in range(3)]
    relayed.bus.publish(MarketChecked(START))
    await relayed.write()
    sent += [relayed.publish(7)]
    await relayed.write()
    await relayed.reader.poll()
    await relayed.reader.poll()
    assert [(event.type, event.at) for event in relayed.seen] == [(event.type, event.at) for event in sent]
    assert [ENCODER.encode(event.details) for event in relayed.seen] == [ENCODER.encode(e.details) for e in sent]


async def test_a_new_follower_has_the_newest_view_and_no_old_events(relayed: Relayed) -> None:
    relayed.publish(1)
    relayed.view = view(quote("90000"), warning="nobody trades", snapshots_created=3)
    await relayed.write()
    for number in range(SLOTS + 5):  # the ring wraps around, with most records lacking the markets' rules
        async with relayed.database.connection() as conn:
            await upsert_relay(conn, await relayed.count() + 1, _text(view(quote(str(number + 1)), markets=None)), 1)
    relayed.view = view(quote("90001"), warning="still nobody")
    await relayed.write()
    reader = relayed.reader
    await reader.poll()
    assert reader.view is not None
    assert (reader.view.quotes, reader.view.warning) == ((quote("90001"),), "still nobody")
    assert not relayed.seen
    lag_s = reader.lag_s()
    assert lag_s is not None
    assert lag_s < 5
    async with relayed.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM relay") == SLOTS
    relayed.publish(2)
    await relayed.write()
    reader.forget()  # it has led in the meantime, and was the one writing
    assert reader.lag_s() is None
    await reader.poll()
    assert not relayed.seen


def _text(record: LeaderView) -> str:
    return ENCODER.encode(record).decode()


async def test_a_leader_whose_term_is_over_relays_nothing(relayed: Relayed) -> None:
    await relayed.write()
    async with relayed.database.connection() as conn:
        await update_term(conn)
        await upsert_relay(conn, 2, _text(view()), relayed.term)
    assert await relayed.count() == 1


async def test_events_per_second_are_bounded_and_events_before_leading_are_dropped(relayed: Relayed) -> None:
    await relayed.write()
    await relayed.reader.poll()
    for number in range(EVENTS_MAX + 10):
        relayed.publish(number)
    await relayed.write()
    relayed.publish(1)  # unwritten when the term ends
    relayed.writer.close()
    async with relayed.database.connection() as conn:
        relayed.term = await update_term(conn)
    relayed.publish(1)
    relayed.writer.open()
    await relayed.write()
    await relayed.reader.poll()
    assert len(relayed.seen) == EVENTS_MAX


@pytest.mark.parametrize(
    "wrong", [{"price": D("NaN")}, {"price": D("Infinity")}, {"text": object()}, {"text": "\ud800"}, {"l": {(1, 2): 3}}]
)
async def test_an_event_that_no_follower_could_read_is_logged_and_the_others_are_relayed(
    relayed: Relayed, caplog: pytest.LogCaptureFixture, wrong: dict[str, Any]
) -> None:
    await relayed.write()
    await relayed.reader.poll()
    sent = [relayed.publish(1)]
    relayed.publish(2, **wrong)
    sent.append(relayed.publish(3))
    await relayed.write()
    await relayed.reader.poll()
    assert [event.at for event in relayed.seen] == [event.at for event in sent]
    assert [record.exc_info is not None for record in caplog.records if record.levelname == "ERROR"] == [True]


class Failing(Database):
    """A database that is unreachable at first."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.failures = 2
        self.uses, self.lost_use = 0, 0
        """How often a connection was used, and the number of the use whose acknowledgment is lost."""

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        if self.failures:
            self.failures -= 1
            raise Unavailable("the database cannot be reached")
        async with self._database.connection() as conn:
            yield conn
        self.uses += 1
        if self.uses == self.lost_use:
            raise Unavailable("the connection was lost")


async def test_unwritten_events_are_in_the_next_record(
    relayed: Relayed, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trader.database.relay.EVERY_S", 0.01)
    await relayed.write()
    await relayed.reader.poll()
    relayed.writer = RelayWriter(Failing(database), relayed.bus, lambda: relayed.view, ENCODER.encode)
    relayed.writer.open()
    sent = [relayed.publish(1), relayed.publish(2)]
    await relayed.write()
    await relayed.reader.poll()
    assert [event.at for event in relayed.seen] == [event.at for event in sent]


async def test_events_during_the_write_of_a_record_are_in_the_next(
    relayed: Relayed, monkeypatch: pytest.MonkeyPatch
) -> None:
    await relayed.write()
    await relayed.reader.poll()
    sent = [relayed.publish(1)]

    async def publish_first(*args: Any) -> None:
        monkeypatch.setattr("trader.database.relay.upsert_relay", upsert_relay)
        sent.append(relayed.publish(2))
        await upsert_relay(*args)

    monkeypatch.setattr("trader.database.relay.upsert_relay", publish_first)
    await relayed.write()
    await relayed.write()
    await relayed.reader.poll()
    assert [event.at for event in relayed.seen] == [event.at for event in sent]


async def test_a_follower_has_the_trading_rules_of_a_leader_that_regains_the_lead(
    relayed: Relayed, database: Database
) -> None:
    """Another one with other rules has led in between, and the follower has read its records."""
    first, other = (RelayWriter(database, EventBus(), lambda: relayed.view, ENCODER.encode) for _ in range(2))
    for writer, rules in ((first, '["first"]'), (other, '["other"]'), (first, '["first"]')):
        relayed.view = msgspec.structs.replace(relayed.view, markets=rules)
        relayed.writer = writer
        writer.open()
        await relayed.write()
        await relayed.reader.poll()
        assert relayed.reader.markets == rules
        writer.close()


async def test_a_view_that_cannot_be_encoded_loses_no_event(relayed: Relayed) -> None:
    await relayed.write()
    await relayed.reader.poll()
    relayed.writer.open()
    sent, whole = [relayed.publish(1)], relayed.view
    relayed.view = msgspec.structs.replace(whole, market_troubles={"BTC": cast("str", object())})
    with pytest.raises(TypeError):
        await relayed.writer.run(relayed.term)
    relayed.view = whole
    await relayed.write()
    await relayed.reader.poll()
    assert [event.at for event in relayed.seen] == [event.at for event in sent]


async def test_events_with_an_unacknowledged_record_are_published_once(
    relayed: Relayed, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trader.database.relay.EVERY_S", 0.01)
    await relayed.write()
    await relayed.reader.poll()
    failing = Failing(database)
    failing.failures, failing.lost_use = 0, 2  # the first use reads the number of the newest record
    relayed.writer = RelayWriter(failing, relayed.bus, lambda: relayed.view, ENCODER.encode)
    relayed.writer.open()
    task = asyncio.create_task(relayed.writer.run(relayed.term))
    sent = [relayed.publish(1), relayed.publish(2)]
    await relayed.written(3)
    sent.append(relayed.publish(3))
    async with asyncio.timeout(30):
        while len(relayed.seen) < len(sent):
            await relayed.reader.poll()
    task.cancel()
    await asyncio.wait([task])
    await relayed.reader.poll()
    assert [event.at for event in relayed.seen] == [event.at for event in sent]


async def test_a_followed_market_has_the_prices_troubles_and_rules_of_the_leader(relayed: Relayed) -> None:
    clock, source = ManualClock(START), ScriptedSource()
    followed = FollowedMarket(source, relayed.reader)
    feed = MarketFeed(followed, clock)
    seen = asyncio.Event()

    async def on_tick(_: object) -> None:
        seen.set()

    following = asyncio.create_task(feed.run(on_tick, START))

    async def see(record: LeaderView) -> None:
        relayed.view = record
        await relayed.write()
        seen.clear()
        await relayed.reader.poll()
        async with asyncio.timeout(5):
            await seen.wait()

    try:
        changed = msgspec.structs.replace(MARKETS["BTC"], leverage_max=7)
        await see(view(quote("90000"), quote("3000", "ETH"), market_troubles={"SOL": "one-sided book"}))
        first = feed.quote("ETH")
        assert feed.trouble("SOL") == "one-sided book"
        await see(view(quote("90001.5"), quote("3000", "ETH"), markets=(changed,)))
        assert feed.marks == {"BTC": D("90001.5"), "ETH": D(3000)}
        assert feed.quote("ETH") is first, "so cached answers remain valid"
        assert feed.last_update_at == START
        assert feed.markets["BTC"].leverage_max == 7
    finally:
        following.cancel()
        await asyncio.wait([following])


def test_a_real_time_market_keeps_the_system_clock(database: Database) -> None:
    reader = RelayReader(database, EventBus())
    assert isinstance(FollowedMarket(SyntheticSource(0, ("BTC",)), reader).clock(None), SystemClock)
    of_recording = FollowedMarket(ScriptedSource(), reader).clock(START)
    assert isinstance(of_recording, LockstepClock)
    assert of_recording.now() == START


Change = Callable[[Connection], Awaitable[object]]


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("postings", lambda conn: conn.execute("UPDATE accounts SET sequence = sequence + 1 WHERE id = 'b'")),
        ("postings", lambda conn: add_run(conn, "c", make_run("c"))),
        ("models", lambda conn: conn.execute("UPDATE models SET active = false WHERE id = 'a'")),
        ("models", lambda conn: conn.execute("UPDATE models SET configuration = '{\"x\": 1}' WHERE id = 'a'")),
        ("snapshots", lambda conn: insert_snapshots(conn, [make_snapshot("a", START + HOUR / 2, "2")])),
        ("snapshots", lambda conn: insert_snapshots(conn, [make_snapshot("b", START + HOUR, "2")])),
    ],
)
async def test_every_change_alters_what_followers_compare(database: Database, kind: str, change: Change) -> None:
    async with database.connection() as conn:
        await ensure_partitions(conn, START, START + timedelta(days=1))
        await add_model(conn, "a")
        await add_model(conn, "b")
        await insert_snapshots(conn, [make_snapshot("a", START, "1")])
        before = await select_changes(conn)
        assert await select_changes(conn) == before
        await change(conn)
        after = await select_changes(conn)
    assert {name for name, pair, other in zip(before._fields, before, after, strict=True) if pair != other} == {kind}


async def test_an_invocation_counts_once_it_ends(database: Database) -> None:
    async with database.connection() as conn:
        await add_model(conn, "a")
        await add_trade(conn, "a", START)
        before = await select_changes(conn)
        ended = await add_invocation(conn, "a", START)
        link = "INSERT INTO chain_links (invocation_id, record_digest) VALUES ($1, sha256('x'))"
        await conn.execute(link, ended)
        after = await select_changes(conn)
        assert after.invocations == before.invocations + 1
        assert await select_chain_models(conn, before.invocations, after.invocations) == ["a"]
        assert await select_chain_models(conn, after.invocations, after.invocations) == []
