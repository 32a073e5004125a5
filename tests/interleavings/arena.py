"""Arena of the interleavings: processes of the service on one database and one market, as the service makes them."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, Final

from support.floor import ScriptedProvider
from support.gaps import GapDatabase, run_as
from support.scripted import ScriptedSource, make_book, make_settings
from support.tasks import ended
from support.venue import without_depth

from trader.api.context import Context
from trader.api.schemas.common import ENCODER
from trader.clock import SystemClock
from trader.domain.agents.tools import Holding, PlaceOrder, PlannedExit
from trader.domain.exchange import rules as rules_of_exchange
from trader.domain.exchange.account import Account
from trader.domain.exchange.halts import HaltCause, Verb
from trader.domain.exchange.ledger import unopened_account
from trader.domain.exchange.orders import ExitPlan, Order, OrderAnswer, OrderSide, OrderType
from trader.domain.exchange.tick_rules import Moment
from trader.domain.market.markets import Quote, Tick
from trader.domain.models import EXTERNAL, Model, VariantId
from trader.domain.portfolio.baselines import BaselineState, rule_agent
from trader.errors import Unavailable, ViewDecided
from trader.gateways.agents.providers import Providers
from trader.leadership import Leadership, Relay, TradingControls
from trader.schedulers import Schedulers
from trader.services.agents.results import record_results
from trader.services.agents.schedule import Agents
from trader.services.events import Event, EventBus
from trader.services.exchange.accounts import Accounts
from trader.services.exchange.halts import Halts
from trader.services.exchange.ledger_writer import LedgerWriter
from trader.services.exchange.paper import PaperExchange
from trader.services.market.candles import Candles
from trader.services.market.feed import MarketFeed
from trader.services.operations.loss_limits import LossLimits
from trader.services.operations.operator_commands import OperatorCommands
from trader.services.portfolio.analytics import Analytics
from trader.services.portfolio.baselines import Baselines
from trader.services.portfolio.evidence import Evidence
from trader.services.portfolio.luck import LuckTable
from trader.services.portfolio.run_statistics import CurrentRuns
from trader.services.portfolio.snapshots import Portfolio
from trader.services.relay import LeaderView, RelayReader, RelayWriter
from trader.store.agents.models import upsert_model
from trader.store.database.leadership import LeaderLock
from trader.store.database.partitions import ensure_partitions
from trader.store.portfolio.baselines import SavedBaseline, upsert_baselines

START: Final = datetime(2025, 1, 1, 12, 59, 50, tzinfo=UTC)
"""Ten seconds before funding is due."""

QUIET: Final = {"BTC": "94000", "ETH": "3300", "SOL": "200"}
STOP: Final = Decimal(93000)
PLAN: Final = ExitPlan(stop=STOP)
MODEL: Final = "ada"
AGENT: Final = "scout"
DECIDED: Final = PlaceOrder(
    symbol="BTC", side="buy", quantity=0.05, client_order_id="decided", exit_plan=PlannedExit(stop=90_000)
)
ATTEMPTS: Final = 3
D = Decimal


class ArenaClock(SystemClock):
    """One time for all processes, moved by the market."""

    def __init__(self) -> None:
        self.moment = START

    def now(self) -> datetime:
        return self.moment

    async def advance_to(self, moment: datetime) -> None:
        self.moment = max(self.moment, moment)


class ArenaSource(ScriptedSource):
    """The market of all processes; each tick that is read again comes after an await, as from a network."""

    async def history(self, after: datetime, until: datetime):  # type: ignore[no-untyped-def]  # an async iterator
        for tick in list(self.script):
            if after < tick.at <= until:
                await asyncio.sleep(0)
                yield tick


class SwitchLock(LeaderLock):
    """A leader lock that the test takes away, with or without its holder's knowledge."""

    def __init__(self, arena: "Arena") -> None:
        super().__init__("")
        self._arena = arena
        self._was_lost = asyncio.Event()

    async def try_acquire(self) -> bool:
        if self._arena.holder not in {None, self}:
            return False
        self._arena.holder = self
        self._was_lost.clear()
        return True

    async def lost(self) -> None:
        await self._was_lost.wait()

    async def release(self) -> None:
        if self._arena.holder is self:
            self._arena.holder = None

    def lose(self) -> None:
        """Let its holder know."""
        self._was_lost.set()


class RecordingExchange(PaperExchange):
    """A paper exchange that remembers what it was asked for."""

    asked: dict[tuple[str, str], Order]
    tick_began: asyncio.Event
    before_order: Callable[[], Awaitable[None]] | None = None
    """What happens just before the next order of the model."""

    async def on_tick(self, tick: Tick) -> None:
        self.tick_began.set()
        await super().on_tick(tick)

    async def place_order(self, order: Order) -> OrderAnswer:
        assert order.client_order_id is not None
        if self.before_order is not None and order.account_id == MODEL:
            begin, self.before_order = self.before_order, None
            await begin()
        self.asked.setdefault((order.account_id, order.client_order_id), order)
        return await super().place_order(order)


class Process:
    """One process of the service: everything that decides, books, records and follows."""

    def __init__(self, arena: "Arena", name: str) -> None:
        self.arena, self.name = arena, name
        self.events: list[Event] = []
        bus = EventBus()
        bus.subscribe(self.events.append)
        database, clock, settings = arena.database, arena.clock, arena.settings
        self.market = MarketFeed(arena.source, clock)
        self.accounts = Accounts(database, LedgerWriter(database), bus)
        self.halts = Halts(database, clock, bus)
        self.exchange = RecordingExchange(database, self.market, clock, settings, self.accounts, self.halts)
        self.exchange.asked, self.exchange.tick_began = arena.asked, asyncio.Event()
        limits = LossLimits(database, self.exchange, self.halts, settings)
        self.operations = OperatorCommands(database, self.exchange, self.halts, limits)
        self.provider = ScriptedProvider()
        providers = Providers(self.provider)
        runs = CurrentRuns(database)
        self.portfolio = Portfolio(database, self.exchange, clock, settings)
        self.agents = Agents(database, self.exchange, self.market, clock, bus, settings, providers)
        luck = LuckTable(database, self.market, settings)
        context = Context(
            settings=settings,
            clock=clock,
            market=self.market,
            exchange=self.exchange,
            portfolio=self.portfolio,
            analytics=Analytics(database, self.exchange, clock, runs),
            evidence=Evidence(database, runs, luck, clock),
            agents=self.agents,
            candles=Candles(database, self.market, settings),
        )
        self.baselines = Baselines(database, self.exchange, self.market, clock, settings)
        self.lock = SwitchLock(arena)
        self.leadership = Leadership(
            context,
            database,
            self.accounts,
            bus,
            Schedulers([], clock),
            self.lock,
            TradingControls(self.halts, limits, self.operations),
            self.baselines,
            Relay(RelayWriter(database, bus, self._view, ENCODER.encode), RelayReader(database, bus)),
        )
        self._feeding = asyncio.Lock()

    def _view(self) -> LeaderView:
        raise AssertionError("nothing is relayed")

    @property
    def leads(self) -> bool:
        return self.leadership.role == "leader"

    async def take(self, tick: Tick) -> None:
        """Apply a tick as the feed does, one after the other."""
        async with self._feeding:
            self.arena.clock.moment = max(self.arena.clock.moment, tick.at)  # nobody dates anything in between
            await self.market.take(tick, self.leadership.on_tick)

    async def snapshot(self) -> None:
        """Do what the snapshots' scheduler does."""
        now = self.arena.clock.now()
        await self.portfolio.take_snapshots(now)
        await self.baselines.record(now)
        if (term := self.exchange.term) is not None:
            await record_results(self.arena.database, term, now)

    async def lose_lock(self) -> None:
        """Lose the role, as when the lock's connection breaks."""
        keeping = asyncio.create_task(self.leadership.keep_role())
        await asyncio.sleep(0)
        self.lock.lose()
        while self.leads or self.arena.holder is self.lock:
            await asyncio.sleep(0.002)
        keeping.cancel()
        await asyncio.wait([keeping])

    def order(self, name: str, quantity: str = "0.05", **more: Any) -> Order:
        fields: dict[str, Any] = {"account_id": "a", "symbol": "BTC", "side": OrderSide.BUY, "leverage": D(5), **more}
        return Order(quantity=D(quantity), client_order_id=name, **fields)

    async def place(self, name: str, quantity: str = "0.05", **more: Any) -> OrderAnswer:
        """Place an order, the same one each time that its name is asked for; what is acknowledged is remembered."""
        first = self.order(name, quantity, **more)
        key = (first.account_id, name)
        answer = await self.exchange.place_order(self.arena.asked.get(key, first))
        assert self.arena.acknowledged.setdefault(key, answer) == answer, f"{key} has two answers"
        return answer

    async def decide(self) -> None:
        """Order as the external agent does in its view, and hold."""
        external, model = self.agents.external, self.agents.models[AGENT]
        answer = await external.decide(model, self.arena.view_id, DECIDED)
        first = self.arena.decided_first = self.arena.decided_first or answer["orderId"]
        assert answer["orderId"] == first, "the agent's order has two answers"
        with suppress(ViewDecided):
            await external.decide(model, self.arena.view_id, Holding(reason="bought"))


class Arena:
    """Processes on one database and one market."""

    def __init__(self, database: GapDatabase) -> None:
        self.database = database
        self.clock = ArenaClock()
        self.source = ArenaSource()
        self.settings = make_settings()
        self.holder: SwitchLock | None = None
        self.processes: dict[str, Process] = {}
        self.asked: dict[tuple[str, str], Order] = {}
        self.acknowledged: dict[tuple[str, str], OrderAnswer] = {}
        self.resting: OrderAnswer | None = None
        self.view_id = ""
        self.decided_first = ""
        """The id of the external agent's order, as it was first answered."""

    def process(self, name: str) -> Process:
        """Return a process, which is made when it is first asked for."""
        if name not in self.processes:
            self.processes[name] = Process(self, name)
        return self.processes[name]

    @property
    def leader(self) -> Process | None:
        """The process that leads; of two, the one that holds the lock."""
        leaders = [process for process in self.processes.values() if process.leads]
        return next((process for process in leaders if process.lock is self.holder), leaders[0] if leaders else None)

    async def see(self, mids: Mapping[str, str] = QUIET, *, after_s: float = 1, size: str = "1") -> None:
        """Move time and the market, for every process."""
        last = self.source.script[-1].at if self.source.script else START
        at = last + timedelta(seconds=after_s)
        tick = Tick(at, {symbol: Quote.of(make_book(symbol, mid, at, size=size)) for symbol, mid in mids.items()})
        self.source.script.append(tick)
        await asyncio.gather(*(run_as(process.name, process.take(tick)) for process in list(self.processes.values())))

    async def add_model(self, model_id: str, provider: str) -> None:
        async with self.database.connection() as conn:
            model = Model(
                id=model_id,
                name=model_id.title(),
                variant=VariantId.APEX,
                provider=provider,
                router_model_name=f"lab/{model_id}",
                created_at=START,
            )
            await upsert_model(conn, model)

    async def open_view(self) -> None:
        """Have an external agent with an open view."""
        a = self.process("A")
        await self.add_model(AGENT, EXTERNAL)
        await a.agents.reload_models()
        self.view_id = (await a.agents.external.view(a.agents.models[AGENT], None)).id

    async def open(self) -> None:
        """Bring the arena to where every schedule begins: A leads, "a" is long with a stop and an order rests."""
        a = self.process("A")
        async with self.database.connection() as conn:
            await ensure_partitions(conn, START)
        await self.add_model(MODEL, "fake")
        await self.see()
        await self._save_baseline(a)
        await run_as("A", a.leadership.take_role())
        await self.see()
        await run_as("A", self._trade(a))

    async def _save_baseline(self, a: Process) -> None:
        """Save a baseline that is long with a stop."""
        now, rules = self.clock.now(), a.exchange.rules
        account = unopened_account("baseline/apex-rules", D(10_000), "USDT", now)
        bought = a.order("bought", "0.1", account_id=account.id, exit_plan=PLAN)
        moment = Moment(now, a.market.quotes(), a.market.marks)
        posting = rules_of_exchange.place(account, bought, moment, rules, a.market.funding_rate)
        state = BaselineState(account=account).after(posting)
        async with self.database.connection() as conn:
            await upsert_baselines(conn, [SavedBaseline(rule_agent(VariantId.APEX), state, now)])

    async def _trade(self, a: Process) -> None:
        await a.place("long", "0.1", exit_plan=PLAN)
        limit = {"symbol": "ETH", "type": OrderType.LIMIT, "limit_price": D(3200)}
        self.resting = await a.place("rests", "0.5", **limit)
        await a.place("other", "0.1", account_id="b")
        await a.snapshot()

    async def close(self) -> None:
        for process in self.processes.values():
            await run_as(process.name, process.leadership.resign())

    async def halt(self, process: Process, verb: Verb) -> None:
        """Halt an account as the watch over losses does, and carry out its command."""
        await process.halts.halt("a", HaltCause.DRAWDOWN, "too much", "limit", verb)
        await process.operations.poll()
        await ended(f"{verb} ")

    # --- the end of a schedule ----------------------------------------------------------------------------------------

    async def settle(self) -> Process:
        """Let somebody lead who knows the rows, and every account be certain."""
        leader = self.leader
        if leader is None or leader.lock is not self.holder:
            if leader is not None:  # it has lost its role and does not know it
                await run_as(leader.name, leader.lose_lock())
            leader = self.process("Z")
            await run_as("Z", leader.leadership.take_role())
        await self.see()
        for account_id in list(leader.accounts.by_id):
            order = partial(leader.place, f"settles {account_id}", "0.01", account_id=account_id)
            await run_as(leader.name, self._persist(order))
        if self.view_id:
            await run_as(leader.name, self._persist(leader.decide))
        return leader

    async def _persist(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Ask with one client order id until there is an answer, as a careful client does."""
        for attempt in range(ATTEMPTS):
            try:
                await ask()
                return
            except Unavailable:
                if attempt == ATTEMPTS - 1:
                    raise


def same(accounts: Mapping[str, Account], other: Mapping[str, Account]) -> bool:
    """Whether accounts are equal, but for the depth that they have taken."""
    return {key: without_depth(account) for key, account in accounts.items()} == {
        key: without_depth(account) for key, account in other.items()
    }
