"""Cached answers are never stale: random writes and reads over HTTP, compared with services without a cache."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer
from support.manual_clock import ManualClock
from support.records import make_model
from support.run_profile import is_nightly
from support.scripted import START, ScriptedSource, make_settings, make_tick
from support.served import AppClient, call, make_app
from support.service_context import make_context
from support.waiting import turns, until

from trader.agents.providers.provider import RuleProvider
from trader.agents.providers.providers import Providers
from trader.agents.services import AgentServices, KnownModels
from trader.agents.sql.models import upsert_model
from trader.api import rpc
from trader.api.context import Context
from trader.api.envelope import BodyStyle
from trader.api.registry import REGISTRY
from trader.api.response_cache import Answer, ResponseCache
from trader.composition.leadership import Coordination, Leadership, TradingParts
from trader.composition.service import leader_view
from trader.core.errors import Unavailable
from trader.core.events import EventBus
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.database.relay import RelayReader, upsert_relay
from trader.exchange.accounts import Accounts
from trader.exchange.halts import Halts
from trader.exchange.ledger_writer import LedgerWriter
from trader.exchange.paper import PaperExchange
from trader.exchange.read_only import ReadOnlyExchange
from trader.market.candles import Candles
from trader.market.feed import MarketFeed
from trader.market.followed_market import FollowedMarket
from trader.operations.access import ANYBODY
from trader.operations.alarms import Alarms
from trader.portfolio.analytics import Analytics
from trader.portfolio.evidence import Evidence
from trader.portfolio.run_statistics import CurrentRuns
from trader.portfolio.snapshots import PortfolioService
from trader.portfolio.sql import snapshots

READS: list[tuple[str, list[dict[str, object]]]] = [
    ("trading.getPositions", [{}, {"modelId": "m1"}, {"variant": "Apex"}]),
    ("trading.getTrades", [{}, {"limit": 3}, {"variant": "Contrarian"}]),
    ("trading.getCryptoPrices", [{}, {"symbols": ["eth"]}]),
    ("simulator.getCompletedTradesFromDB", [{}, {"modelId": "m2"}]),
    ("variants.getVariantHistory", [{}, {"window": "24h"}]),
    ("variants.getVariantStats", [{}]),
    ("analytics.getEvidence", [{}, {"window": "7d"}]),
    ("analytics.getLeaderboard", [{}, {"window": "24h", "sortBy": "maxDrawdown"}]),
    ("trading.getPortfolioHistory", [{}, {"modelId": "m1"}, {"startDate": "2025-01-01T12:00:30Z", "maxPoints": 100}]),
    ("trading.getEquityCurves", [{}, {"variant": "Apex", "points": 50}, {"window": "run"}]),
    ("analytics.getComparison", [{"modelId": "m1", "against": "m2"}]),
    ("analytics.getBehaviour", [{"modelId": "m1"}, {"modelId": "m2"}]),
    ("analytics.getTradeTotals", [{"by": "market"}, {"by": "day", "modelId": "m1"}]),
    ("variants.getVariants", [{}]),
]


class PaperBench:
    """A service with cached answers, its changes, and its expected answers."""

    def __init__(self, context: Context, database: Database, client: AppClient, parts: tuple[Any, Any, Any]) -> None:
        self.context = context
        self.database = database
        self.source, self.exchange, self.accounts = parts
        self.post = partial(call, client)
        self.clock: Any = context.clock
        self.prices = {"BTC": 94000, "ETH": 3300}

    async def expected(self, name: str, asked: dict[str, object]) -> Any:
        """The answer of newly created services."""
        context, database = self.context, self.database
        shared = context.exchange, context.clock
        fresh = replace(
            context,
            portfolio=PortfolioService(database, *shared, context.settings),
            analytics=Analytics(database, *shared, CurrentRuns(database)),
            evidence=Evidence(database, CurrentRuns(database), context.clock),
            candles=Candles(database, context.market, context.settings),
        )
        target = rpc.Target(REGISTRY.procedures[name], BodyStyle.PLAIN)
        answer = await rpc.Dispatcher(REGISTRY, fresh).call(target, json.dumps(asked).encode(), ANYBODY, "oracle")
        assert answer.status == HTTPStatus.OK
        return json.loads(answer.body)

    async def see(self, chance: random.Random) -> None:
        self.prices = {symbol: max(100, price + chance.randint(-300, 300)) for symbol, price in self.prices.items()}
        await self.clock.advance(timedelta(seconds=1))
        await self.see_prices()

    async def see_prices(self, **prices: int) -> None:
        self.prices |= prices
        tick = make_tick(self.clock.now(), {symbol: str(price) for symbol, price in self.prices.items()})
        untyped: Any = self.context.market
        await untyped.take(tick, self.context.exchange.on_tick)

    async def order(self, chance: random.Random) -> None:
        account, symbol = chance.choice(["m1", "m2", "manual"]), chance.choice(["BTC", "ETH"])
        asked: dict[str, object] = {"accountId": account, "symbol": symbol, "leverage": chance.randint(1, 5)}
        asked |= {"side": chance.choice(["buy", "sell"]), "quantity": chance.choice([0.01, 0.02, 0.05])}
        if chance.random() < 0.3:
            asked |= {"type": "limit", "limitPrice": self.prices[symbol] + chance.randint(-200, 200)}
        await self.post("simulator.placeOrder", asked)

    async def reset(self, chance: random.Random) -> None:
        await self.post("simulator.resetAccount", {"accountId": chance.choice(["m1", "manual"])})

    async def snapshot(self, _: random.Random) -> None:
        await self.clock.advance(timedelta(minutes=1))
        for name, inputs in READS:  # cached in the same second as the write
            await self.post(name, inputs[0])
        await self.context.portfolio.take_snapshots(self.clock.now())

    async def wait(self, chance: random.Random) -> None:
        await self.clock.advance(timedelta(seconds=chance.choice([1, 40, 4000])))

    async def decide(self, _: random.Random) -> None:
        """The models decide: what they did is recorded, though most hold."""
        await self.context.agents.start_batch(self.clock.now())
        await until(lambda: not self.context.agents.running())

    async def rename(self, chance: random.Random) -> None:
        """A script writes a model; the service loads it in its next cycle."""
        model = make_model(chance.choice(["m1", "m2", "m3"]), chance.choice(list(VariantId)))
        async with self.database.connection() as conn:
            await upsert_model(conn, model)
        await self.context.agents.follow()
        await self.context.exchange.open_account(model.id)

    async def read(self, chance: random.Random) -> None:
        name, inputs = chance.choice(READS)
        asked = chance.choice(inputs)
        answers = await asyncio.gather(*(self.post(name, asked) for _ in range(2)))
        wanted = await self.expected(name, asked)
        assert answers == [wanted, wanted], (name, asked)


@pytest.fixture
async def desk(database: Database) -> AsyncIterator[PaperBench]:
    clock, source, settings, events = ManualClock(START), ScriptedSource(), make_settings(), EventBus()
    market = MarketFeed(source, clock)
    accounts = Accounts(database, LedgerWriter(database), events)
    exchange = PaperExchange(database, market, clock, settings, accounts, Halts(database, clock, events))
    await exchange.lead()
    async with database.connection() as conn:
        for model in (make_model("m1"), make_model("m2", VariantId.CONTRARIAN)):
            await upsert_model(conn, model)
    models = KnownModels(database)
    context = make_context(
        AgentServices(database, exchange, market, clock, events, settings, Providers(RuleProvider()), models)
    )
    await context.agents.start()
    async with TestClient(TestServer(make_app(context=context))) as client:
        yield PaperBench(context, database, client, (source, exchange, accounts))
    await exchange.resign()


class Reader:
    """A process that follows a bench's service through its database, with its own cache."""

    def __init__(self, desk: PaperBench) -> None:
        self._desk = desk
        database, settings, clock = desk.database, desk.context.settings, desk.clock
        events = EventBus()
        relay = RelayReader(database, events)
        self._market = MarketFeed(FollowedMarket(ScriptedSource(), relay), clock)
        accounts = Accounts(database, LedgerWriter(database), events)
        self._exchange = exchange = ReadOnlyExchange(self._market, clock, settings, accounts, relay)
        shared = database, exchange, self._market, clock, events, settings, Providers(RuleProvider())
        context = make_context(AgentServices(*shared, KnownModels(database)), relay)
        unused: Any = None
        trading = TradingParts(accounts, unused, unused, unused, unused, unused)
        self._role = Leadership(context, database, events, unused, trading, Coordination(None, unused, relay))
        self.dispatcher = rpc.Dispatcher(REGISTRY, context)
        self._targets = {name: rpc.Target(declared, BodyStyle.PLAIN) for name, declared in REGISTRY.procedures.items()}
        self._feed = asyncio.create_task(self._market.run(exchange.on_tick, START))
        self._number = 0

    async def look(self) -> None:
        """Read the leader's changes so far, as the next poll would."""
        context, self._number = self._desk.context, self._number + 1
        record = msgspec.json.encode(leader_view(context, Alarms([]))).decode()
        async with self._desk.database.connection() as conn:
            await upsert_relay(conn, self._number, record, context.exchange.term or 0)
        await self._role.take_role()
        await until(lambda: dict(self._market.marks) == dict(context.market.marks))

    async def call(self, name: str, asked: dict[str, object]) -> Answer:
        return await self.dispatcher.cached_or_call(self._targets[name], json.dumps(asked).encode(), ANYBODY, "reader")

    async def close(self) -> None:
        self._feed.cancel()
        await asyncio.wait([self._feed])


@pytest.mark.parametrize("seed", range(20 if is_nightly() else 2))
async def test_a_reader_answers_as_its_leader_does(desk: PaperBench, seed: int) -> None:
    chance = random.Random(seed)
    await desk.see(chance)
    await desk.snapshot(chance)
    reader = Reader(desk)
    acts = [desk.order] * 4 + [desk.see] * 2 + [desk.snapshot, desk.wait, desk.rename, desk.reset, desk.decide]
    try:
        for _ in range(25):
            act = chance.choice(acts)
            if act in (desk.order, desk.reset):
                await desk.see(chance)
            await act(chance)
            await reader.look()
            for name, inputs in chance.sample(READS, 4):
                asked = chance.choice(inputs)
                wanted = await desk.expected(name, asked)
                for _ in range(2):
                    answer = await reader.call(name, asked)
                    assert answer.status == HTTPStatus.OK
                    assert json.loads(answer.body) == wanted, (name, asked)
        assert reader.dispatcher.cache.hits >= 80
        refused = await reader.call("simulator.placeOrder", {"symbol": "BTC", "side": "buy", "quantity": 1})
        assert refused.status == HTTPStatus.SERVICE_UNAVAILABLE
    finally:
        await reader.close()


async def test_a_reader_shows_a_snapshot_of_the_same_minute(desk: PaperBench) -> None:
    await desk.see_prices()
    await desk.context.exchange.open_account("m1")
    reader = Reader(desk)
    try:
        for _ in range(2):
            await reader.look()
            answer = await reader.call("variants.getVariantHistory", {})
            assert json.loads(answer.body) == await desk.expected("variants.getVariantHistory", {})
            await desk.context.portfolio.take_snapshots(desk.clock.now())
    finally:
        await reader.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20 if is_nightly() else 2))
async def test_read_after_write_is_never_stale(desk: PaperBench, seed: int) -> None:
    chance = random.Random(seed)
    await desk.see(chance)
    await desk.snapshot(chance)
    acts: list[Callable[[random.Random], Awaitable[None]]]
    acts = [desk.order] * 4 + [desk.see] * 2 + [desk.snapshot, desk.wait, desk.rename, desk.reset, desk.decide]
    for _ in range(40):
        act = chance.choice(acts)
        if act in (desk.order, desk.reset):
            await desk.see(chance)  # a price to trade on
            # Readers during the write may get either state; readers after it must not get the old one.
            await asyncio.gather(act(chance), *(desk.post(name, inputs[0]) for name, inputs in READS))
        else:
            await act(chance)
        for _ in range(3):
            await desk.read(chance)


@pytest.mark.usefixtures("desk")
def test_every_cached_answer_is_read() -> None:
    assert {name for name, declared in REGISTRY.procedures.items() if declared.token} == {name for name, _ in READS}


async def change_nothing(_: PaperBench) -> None:
    pass


async def report_trouble(desk: PaperBench) -> None:
    desk.source.troubles["BTC"] = "halted by the venue"


async def change_model(desk: PaperBench) -> None:
    async with desk.database.connection() as conn:
        await upsert_model(conn, make_model("m1", VariantId.SOVEREIGN))
    await desk.context.models.reload()


async def end_term(desk: PaperBench) -> None:
    await desk.exchange.resign()
    await desk.exchange.lead()


async def remove_account(desk: PaperBench) -> None:
    assert await desk.exchange.remove_account("manual")


async def lose_acknowledgement(desk: PaperBench) -> None:
    """An account that was reread may differ from the answers given while it was in doubt."""
    desk.accounts.mark_missed("manual")
    await desk.accounts.settle("manual")


async def lose_snapshot(desk: PaperBench) -> None:
    """A snapshot whose write was not confirmed may have been written."""

    async def fail(*_: object) -> int:
        raise Unavailable("the answer was lost")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Unavailable):
        patch.setattr(snapshots, "insert_snapshots", fail)
        await desk.context.portfolio.take_snapshots(desk.clock.now())


ORDER: dict[str, object] = {"accountId": "manual", "symbol": "BTC", "side": "buy", "quantity": 0.01}
ACCOUNTS = {"positions", "trades", "rankings", "evidence"}
HISTORIES = {"histories", "rankings", "evidence"}
CHANGES: dict[str, tuple[Callable[[PaperBench], Awaitable[object]], set[str]]] = {
    "nothing": (change_nothing, set()),
    "a price": (lambda desk: desk.see_prices(BTC=94001), {"prices", "positions", "rankings"}),
    "a trouble": (report_trouble, {"prices"}),
    "a minute, which makes prices old": (
        lambda desk: desk.clock.advance(timedelta(minutes=1)),
        {"prices", "trades", *HISTORIES},
    ),
    "an order": (lambda desk: desk.post("simulator.placeOrder", ORDER), ACCOUNTS),
    "an account": (lambda desk: desk.context.exchange.open_account("newcomer"), ACCOUNTS),
    "an account less": (remove_account, ACCOUNTS),
    "an account read again": (lose_acknowledgement, ACCOUNTS),
    "a model": (change_model, {*ACCOUNTS, *HISTORIES}),
    "a snapshot": (lambda desk: desk.context.portfolio.take_snapshots(desk.clock.now()), HISTORIES),
    "a snapshot that may have been written": (lose_snapshot, HISTORIES),
    "an invocation": (lambda desk: desk.decide(random.Random(0)), {"rankings", "evidence"}),
    "a term": (end_term, {*ACCOUNTS, *HISTORIES}),
}


@pytest.mark.parametrize("change", CHANGES)
async def test_each_change_alters_the_tokens_of_what_it_changes(desk: PaperBench, change: str) -> None:
    tokens = {
        token: token.__name__.removesuffix("_token") for each in REGISTRY.procedures.values() if (token := each.token)
    }
    await desk.see_prices()
    await desk.context.exchange.open_account("manual")
    act, changed = CHANGES[change]
    before = {name: token(desk.context) for token, name in tokens.items()}
    await act(desk)
    assert {name for token, name in tokens.items() if token(desk.context) != before[name]} == changed


# -- the cache on its own


def answer_of(body: bytes, status: int = 200) -> Callable[[], Awaitable[Answer]]:
    async def make() -> Answer:
        return Answer(status, body)

    return make


async def test_only_successes_are_cached() -> None:
    kept = ResponseCache()
    assert (await kept.make(("a", b""), 1, answer_of(b"no", 503))).status == 503
    assert kept.find(("a", b""), 1) is None
    assert len(kept) == 0
    with pytest.raises(ZeroDivisionError):
        await kept.make(("a", b""), 1, fail)
    assert (await kept.make(("a", b""), 1, answer_of(b"yes"))).body == b"yes"
    assert kept.find(("a", b""), 1) == Answer(200, b"yes")
    assert kept.find(("a", b""), 2) is None


async def fail() -> Answer:
    raise ZeroDivisionError


async def test_a_caller_that_waited_for_a_failure_computes_its_own_response() -> None:
    kept, gate, tries = ResponseCache(), asyncio.Event(), 0

    async def make() -> Answer:
        nonlocal tries
        tries += 1
        first = tries == 1
        await gate.wait()
        return Answer(503 if first else 200, b"")

    waiting = [asyncio.create_task(kept.make(("a", b""), 1, make)) for _ in range(5)]
    await turns(1)
    assert tries == 1
    gate.set()
    assert sorted(answer.status for answer in await asyncio.gather(*waiting)) == [200] * 4 + [503]
    assert tries == 2


async def test_while_all_calls_fail_no_caller_waits_in_a_queue() -> None:
    kept, began = ResponseCache(), 0
    gates = [asyncio.Event() for _ in range(3)]

    async def make() -> Answer:
        nonlocal began
        began += 1
        await gates[min(began, 3) - 1].wait()
        return Answer(503, b"")

    waiting = [asyncio.create_task(kept.make(("a", b""), 1, make)) for _ in range(20)]
    for gate in gates:
        await turns(5)
        at_once = began
        gate.set()
    assert at_once == 20, "the first, the second, and then all others at once"
    assert {answer.status for answer in await asyncio.gather(*waiting)} == {503}
    assert len(kept) == kept.size == 0


async def test_waiting_callers_share_an_uncached_response() -> None:
    kept, gate, tries = ResponseCache(bytes_max=1), asyncio.Event(), 0

    async def make() -> Answer:
        nonlocal tries
        tries += 1
        await gate.wait()
        return Answer(200, b"too long to be kept")

    waiting = [asyncio.create_task(kept.make(("a", b""), 1, make)) for _ in range(5)]
    await turns(1)
    gate.set()
    assert {answer.status for answer in await asyncio.gather(*waiting)} == {200}
    assert (tries, len(kept), kept.size) == (1, 0, 0)


async def test_a_response_for_an_old_token_is_not_cached_for_the_new_one() -> None:
    kept, gate = ResponseCache(), asyncio.Event()

    async def slow() -> Answer:
        await gate.wait()
        return Answer(200, b"old")

    older = asyncio.create_task(kept.make(("a", b""), 1, slow))
    await turns(1)
    assert (await kept.make(("a", b""), 2, answer_of(b"new"))).body == b"new"
    gate.set()
    assert (await older).body == b"old"
    assert kept.find(("a", b""), 2) == Answer(200, b"new")
    assert kept.size == 3
