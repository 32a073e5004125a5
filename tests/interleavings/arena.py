"""Arena of the interleavings: processes of the service on one database and one market, built as in the service."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, Final, cast
from uuid import UUID, uuid4

import msgspec
from interleavings.callers import Callers
from interleavings.gaps import GapDatabase, run_as
from interleavings.journal import Journal, JournaledAccounts
from interleavings.outside import AgentsWebhook, Sink
from support.scripted import ScriptedSource, make_book, make_settings
from support.tasks import ended
from support.trading_floor import ScriptedProvider
from support.venue import without_depth
from support.waiting import until

from trader.agents.domain.models import EXTERNAL, Model, ModelConfiguration, TokenPrice
from trader.agents.domain.tools import Holding, PlaceOrder, PlannedExit
from trader.agents.invocations import InvocationReader
from trader.agents.providers.providers import Providers
from trader.agents.providers.webhook import WebhookClient
from trader.agents.schedule import InvocationScheduler
from trader.agents.services import AgentServices, KnownModels
from trader.agents.sql.external import Webhook, upsert_webhook
from trader.agents.sql.models import upsert_model
from trader.agents.webhooks import Webhooks
from trader.api.context import Context
from trader.api.schemas.common import ENCODER
from trader.composition.leadership import Coordination, Leadership, TradingParts
from trader.core.clock import SystemClock
from trader.core.errors import TraderError, Unavailable, ViewDecided
from trader.core.events import Event, EventBus, WorkflowProgress
from trader.core.schedulers import Schedulers
from trader.core.variant_id import VariantId
from trader.database.leadership import LeaderLock
from trader.database.partitions import ensure_partitions
from trader.database.relay import LeaderView, RelayReader, RelayWriter
from trader.exchange.domain import rules as rules_of_exchange
from trader.exchange.domain.account import Account
from trader.exchange.domain.halts import HaltCause, OperatorCommand, Verb
from trader.exchange.domain.ledger import unopened_account
from trader.exchange.domain.orders import ExitPlan, Order, OrderAnswer, OrderSide, OrderType, PlanTarget
from trader.exchange.domain.tick_rules import Moment
from trader.exchange.halts import Halts
from trader.exchange.paper import PaperExchange
from trader.exchange.sql import halts as halts_store
from trader.live.approvals import Approvals
from trader.market.candles import Candles
from trader.market.domain.markets import Quote, Tick
from trader.market.feed import MarketFeed
from trader.operations.loss_limits import LossLimits
from trader.operations.operator_commands import OperatorCommands
from trader.portfolio.analytics import Analytics
from trader.portfolio.baselines import Baselines
from trader.portfolio.domain.baselines import BaselineState, rule_agent
from trader.portfolio.evidence import Evidence
from trader.portfolio.hour_bounds import HourBounds
from trader.portfolio.run_statistics import CurrentRuns
from trader.portfolio.snapshots import PortfolioService
from trader.portfolio.sql.snapshots import SavedBaseline, upsert_baselines
from trader.record.anchors import Anchors
from trader.record.results import record_results

START: Final = datetime(2025, 1, 1, 12, 59, 50, tzinfo=UTC)
"""Ten seconds before funding is due."""

QUIET: Final = {"BTC": "94000", "ETH": "3300", "SOL": "200"}
STOPPED: Final = {**QUIET, "BTC": "92500"}
STOP: Final = Decimal(93000)
PLAN: Final = ExitPlan(stop=STOP, targets=(PlanTarget(price=Decimal(99_000), fraction=Decimal("0.5")),))
MODEL: Final = "ada"
AGENT: Final = "scout"
OTHER_AGENT: Final = "ranger"
DECIDED: Final = PlaceOrder(
    symbol="BTC", side="buy", quantity=0.05, client_order_id="decided", exit_plan=PlannedExit(stop=90_000)
)
PRICE: Final = TokenPrice(input=15, output=75)
ATTEMPTS: Final = 3
D = Decimal


RECORDED_AFTER: Final = timedelta(minutes=6)
"""How long after its end an hour is certainly recorded by the next snapshot."""

LATENCY: Final = timedelta(milliseconds=5)
"""How long a tick takes from its own time to the processes."""


class ArenaClock(SystemClock):
    """One time for all processes, advanced by the market and by anyone who sets it."""

    origin = "arena"

    def __init__(self) -> None:
        self.moment = START
        self.set_by = timedelta(0)

    def now(self) -> datetime:
        return self.moment

    def steady_s(self) -> float:
        return (self.moment - self.set_by - START).total_seconds()

    async def advance_to(self, moment: datetime) -> None:
        self.moment = max(self.moment, moment)


class ArenaSource(ScriptedSource):
    """The market of all processes; each tick read from history arrives after an await, as from a network."""

    identity = "replay:arena"
    """As in a replay, the time of seasons is the market's, not the server's."""

    async def history(self, after: datetime, until: datetime):  # type: ignore[no-untyped-def]  # an async iterator
        for tick in list(self.script):
            if after < tick.at <= until:
                await asyncio.sleep(0)
                yield tick


class SwitchLock(LeaderLock):
    """A leader lock that the test can take away, with or without its holder's knowledge."""

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
        """Let its holder notice."""
        self._was_lost.set()


class RecordingExchange(PaperExchange):
    """A paper exchange that records the orders it receives."""

    asked: dict[tuple[str, str], list[Order]]
    tick_began: asyncio.Event
    before_order: Callable[[], Awaitable[None]] | None = None
    """What happens just before the next order of the model."""

    journal: Journal

    async def on_tick(self, tick: Tick) -> None:
        self.tick_began.set()
        await super().on_tick(tick)

    async def follow(self) -> None:
        self.journal.is_following = True
        try:
            await super().follow()
        finally:
            self.journal.is_following = False

    async def place_orders(self, *orders: Order) -> Sequence[OrderAnswer]:
        if self.before_order is not None and orders[0].account_id == MODEL:
            begin, self.before_order = self.before_order, None
            await begin()
        for order in orders:
            assert order.client_order_id is not None
            self.asked.setdefault((order.account_id, order.client_order_id), []).append(order)
        return await super().place_orders(*orders)


class Process:
    """One process of the service: everything that decides, books, records and follows."""

    def __init__(self, arena: "Arena", name: str) -> None:
        self.arena, self.name = arena, name
        self.events: list[Event] = []
        self.bus = bus = EventBus()
        self.journal = Journal(arena.seen, arena.database.keeper)
        bus.subscribe(self.events.append)
        bus.subscribe(self.journal.note)
        database, clock, settings = arena.database, arena.clock, arena.settings
        self.market = MarketFeed(arena.source, clock)
        self.accounts = JournaledAccounts(database, bus, self.journal)
        self.halts = Halts(database, clock, bus)
        self.exchange = RecordingExchange(database, self.market, clock, settings, self.accounts, self.halts)
        self.exchange.asked, self.exchange.tick_began = arena.asked, asyncio.Event()
        self.exchange.journal = self.journal
        # Exits meet a book only with a later tick, as in a service; orders meet the current one, without another task.
        msgspec.structs.force_setattr(self.exchange.rules, "latency", timedelta(milliseconds=200))
        self.limits = LossLimits(database, self.exchange, self.halts, settings)
        self.bounds = HourBounds(database, self.exchange, self.halts)
        self.operations = OperatorCommands(database, self.exchange, self.halts, self.limits)
        self.provider = ScriptedProvider()
        providers = Providers(self.provider)
        runs = CurrentRuns(database)
        self.portfolio = PortfolioService(database, self.exchange, clock, settings)
        self.models = KnownModels(database)
        shared = database, self.exchange, self.market, clock, bus, settings, providers
        self.agents = InvocationScheduler(AgentServices(*shared, self.models))
        webhook = cast("WebhookClient", arena.webhook)
        self.webhooks = Webhooks(database, self.agents.external, webhook, clock, lambda _: b"{}")
        self.anchors = Anchors(database, arena.sink, lambda: self.leads, interval_s=0)
        self.relay, self.relayed = RelayWriter(database, bus, self._view, ENCODER.encode), RelayReader(database, bus)
        self._records_awaited, self._has_relayed = 0, asyncio.Event()
        self.context = context = Context(
            settings=settings,
            clock=clock,
            market=self.market,
            exchange=self.exchange,
            portfolio=self.portfolio,
            analytics=Analytics(database, self.exchange, clock, runs),
            evidence=Evidence(database, runs, clock),
            models=self.models,
            invocations=InvocationReader(database, self.models, self.agents.warnings),
            agents=self.agents,
            desk=self.agents.external,
            candles=Candles(database, self.market, settings),
            operations=self.operations,
            approvals=Approvals(database, settings.ladder_file, settings.venue),
        )
        self.baselines = Baselines(database, self.exchange, self.market, clock, settings)
        self.lock = SwitchLock(arena)
        self.leadership = Leadership(
            context,
            database,
            bus,
            Schedulers([], clock),
            TradingParts(self.accounts, self.baselines, self.halts, self.limits, self.bounds, self.operations),
            Coordination(self.lock, self.relay, self.relayed),
        )
        self._feeding = asyncio.Lock()

    def _view(self) -> LeaderView:
        self._records_awaited -= 1
        if not self._records_awaited:
            self._has_relayed.set()
        nothing: dict[str, str] = {}
        return LeaderView(self.arena.clock.now(), None, (), None, nothing, nothing, None, snapshots_created=0)

    @property
    def leads(self) -> bool:
        return self.leadership.role == "leader"

    async def take(self, tick: Tick) -> None:
        """Apply a tick as the feed does, one at a time."""
        async with self._feeding:
            await self.market.take(tick, self.leadership.on_tick)

    async def snapshot(self) -> None:
        """Do what the snapshots' scheduler does."""
        now = self.arena.clock.now()
        await self.portfolio.take_snapshots(now)
        await self.baselines.record(now)
        if (term := self.exchange.term) is not None:
            await record_results(self.arena.database, term, now)

    async def call_webhook(self) -> None:
        """Do what the executor does for the agents with a webhook."""
        await self.webhooks.begin_cycle([model for model in self.models.by_id.values() if model.is_external])
        await ended("webhook of")

    def act(self) -> None:
        """Publish an event of the models' workflow."""
        number = len(self.arena.acts)
        self.arena.acts.append(number)
        self.bus.publish(WorkflowProgress("workflow:step", self.arena.clock.now(), {"number": number}))

    async def relay_events(self) -> None:
        """Write two records for the followers: the second has the events of an unconfirmed first one."""
        if (term := self.exchange.term) is None:
            return
        self._records_awaited = 3  # when a third one begins, the second has ended
        self._has_relayed.clear()
        writing = asyncio.create_task(self.relay.run(term))
        try:
            await self._has_relayed.wait()
        finally:
            writing.cancel()
            await asyncio.wait([writing])

    async def lose_lock(self) -> None:
        """Lose the role, as when the lock's connection breaks."""
        keeping = asyncio.create_task(self.leadership.keep_role())
        await asyncio.sleep(0)
        self.lock.lose()
        await until(lambda: not (self.leads or self.arena.holder is self.lock))
        keeping.cancel()
        await asyncio.wait([keeping])

    def order(self, name: str, quantity: str = "0.05", **more: Any) -> Order:
        fields: dict[str, Any] = {"account_id": "a", "symbol": "BTC", "side": OrderSide.BUY, "leverage": D(5), **more}
        return Order(quantity=D(quantity), client_order_id=name, **fields)

    async def place(self, name: str, quantity: str = "0.05", **more: Any) -> OrderAnswer:
        """Place an order, the same one for the same name, and remember the acknowledged ones."""
        first = self.order(name, quantity, **more)
        key = (first.account_id, name)
        (answer,) = await self.exchange.place_orders(self.arena.asked.get(key, [first])[0])
        assert self.arena.acknowledged.setdefault(key, answer) == answer, f"{key} has two answers"
        return answer

    async def place_pair(self) -> None:
        """Place the same pair each time, and remember its acknowledged orders."""
        hedge = self.order("pair 2", "0.5", symbol="ETH", side=OrderSide.SELL)
        for answer in await self.exchange.place_orders(self.order("pair 1"), hedge):
            key = (answer.account_id, answer.client_order_id or "")
            assert self.arena.acknowledged.setdefault(key, answer) == answer, f"{key} has two answers"

    async def decide(self) -> None:
        """Place an order as the external agent in its view, and hold."""
        external, model = self.agents.external, self.models.by_id[AGENT]
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
        self.market_at = START
        self.has_touched = False
        """Whether the market reached the stop after the positions were opened."""

        self.is_clock_set = False
        """Whether the clock was set, so that times do not show the order of events."""

        self.seen: dict[tuple[str, str], datetime] = {}
        """The last tick before each decision (see `Journal`)."""

        self.commands: list[UUID] = []
        """The operators' requests."""

        self.killed: list[Process] = []
        self.settings = make_settings(MAX_DRAWDOWN_PERCENT="99")
        self.holder: SwitchLock | None = None
        self.webhook, self.sink = AgentsWebhook(), Sink()
        self.callers = Callers(database)
        self.acts: list[int] = []
        """The numbers of the workflow events that processes have published."""

        self.has_webhook = self.has_season = self.opens_season = False
        self.processes: dict[str, Process] = {}
        self.asked: dict[tuple[str, str], list[Order]] = {}
        self.acknowledged: dict[tuple[str, str], OrderAnswer] = {}
        self.resting: OrderAnswer | None = None
        self.view_id = ""
        self.decided_first = ""
        """The id of the external agent's order in its first answer."""

    def process(self, name: str) -> Process:
        """Return a process, created on first use."""
        if name not in self.processes:
            self.processes[name] = Process(self, name)
        return self.processes[name]

    @property
    def leader(self) -> Process | None:
        """The leading process; of two, the one that holds the lock."""
        leaders = [process for process in self.processes.values() if process.leads]
        return next((process for process in leaders if process.lock is self.holder), leaders[0] if leaders else None)

    async def see(self, mids: Mapping[str, str] = QUIET, *, after_s: float = 1, size: str = "1") -> None:
        """Move time and the market, for every process."""
        tick = self.move(mids, after_s=after_s, size=size)
        await asyncio.gather(*(run_as(process.name, process.take(tick)) for process in list(self.processes.values())))

    async def see_until(self, moment: datetime) -> None:
        """Move time and the market to this moment."""
        await self.see(after_s=(moment - self.market_at).total_seconds())

    def move(self, mids: Mapping[str, str] = QUIET, *, after_s: float = 1, size: str = "1") -> Tick:
        """Move time and the market; the tick has not reached any process yet."""
        self.market_at = at = self.market_at + timedelta(seconds=after_s)
        tick = Tick(at, {symbol: Quote.of(make_book(symbol, mid, at, size=size)) for symbol, mid in mids.items()})
        self.source.script.append(tick)
        self.clock.moment = at + LATENCY
        self.has_touched |= tick.quotes["BTC"].mark <= STOP
        return tick

    def set_clock(self, span: timedelta) -> None:
        """Set the clock ahead or back; the market follows, since a venue's times come from the machine's clock."""
        self.is_clock_set = True
        self.market_at += span
        self.clock.moment += span
        self.clock.set_by += span

    async def add_model(self, model_id: str, provider: str) -> None:
        async with self.database.connection() as conn:
            model = Model(
                id=model_id,
                name=model_id.title(),
                variant=VariantId.APEX,
                provider=provider,
                router_model_name=f"lab/{model_id}",
                created_at=START,
                configuration=ModelConfiguration(price=None if provider == EXTERNAL else PRICE),
            )
            await upsert_model(conn, model)

    async def open_view(self) -> None:
        """Create an external agent with an open view."""
        a = self.process("A")
        await self.add_model(AGENT, EXTERNAL)
        await a.models.reload()
        self.view_id = (await a.agents.external.view(a.models.by_id[AGENT], None)).id

    async def add_webhook(self) -> None:
        """Set up an external agent with a webhook, and with an open view, as after a restart."""
        a = self.process("A")
        await self.add_model(AGENT, EXTERNAL)
        async with self.database.connection() as conn:
            await upsert_webhook(conn, AGENT, Webhook("https://agent.example", "secret"))
        await a.models.reload()
        await a.agents.external.view(a.models.by_id[AGENT], None)
        self.has_webhook = True

    async def decide_elsewhere(self) -> None:
        """Have another agent decide on its own view."""
        a = self.process("A")
        await self.add_model(OTHER_AGENT, EXTERNAL)
        await a.models.reload()
        model, external = a.models.by_id[OTHER_AGENT], a.agents.external
        view_id = (await external.view(model, None)).id
        await external.decide(model, view_id, msgspec.structs.replace(DECIDED, client_order_id="decided elsewhere"))

    async def add_keys(self) -> None:
        """Set up two external agents with keys, whom A serves."""
        a = self.process("A")
        for agent in (AGENT, OTHER_AGENT):
            await self.add_model(agent, EXTERNAL)
            await self.callers.add(agent, a)
        await run_as("A", self.callers.serve(a))

    async def open(self) -> None:
        """Bring the arena to the start of every schedule: A leads, "a" is long with a stop, and an order rests."""
        a = self.process("A")
        async with self.database.connection() as conn:
            await ensure_partitions(conn, START)
        await self.add_model(MODEL, "fake")
        await self.see(STOPPED)  # before any position is opened
        await self.see()
        self.has_touched = False
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
        await self.callers.close()
        for process in (*self.processes.values(), *self.killed):
            await run_as(process.name, process.leadership.resign())

    async def halt(self, process: Process, verb: Verb, account_id: str = "a") -> None:
        """Halt an account as the loss limits do, and execute the command."""
        term = process.exchange.term
        await process.halts.halt(account_id, HaltCause.DRAWDOWN, "too much", "limit", verb, term=term)
        await process.operations.poll()
        await ended(f"{verb} ")

    async def command(self, verb: Verb, account_id: str | None) -> None:
        """Write an operator's command, as the command line does."""
        command = OperatorCommand(id=uuid4(), verb=verb, account_id=account_id, reason="odd", asked_by="someone")
        async with self.database.transaction() as conn:
            if verb is Verb.RESUME:
                await halts_store.update_halts_lifted(conn, account_id, "someone")
                await halts_store.insert_command(conn, command)
            else:
                await halts_store.insert_halting_command(conn, command)
        self.commands.append(command.id)

    # --- the end of a schedule ----------------------------------------------------------------------------------------

    async def settle(self) -> Process:
        """Settle with a leader that has read the rows, and with every account certain."""
        leader = self.leader
        if leader is None or leader.lock is not self.holder:
            if leader is not None:  # it has lost its role without noticing
                await run_as(leader.name, leader.lose_lock())
            leader = self.process("Z")
            await run_as("Z", leader.leadership.take_role())
        await self.see()
        for account_id in list(leader.accounts.by_id):
            order = partial(leader.place, f"settles {account_id}", "0.01", account_id=account_id)
            await run_as(leader.name, self._persist(order))
        await run_as(leader.name, leader.agents.external.begin_cycle([], self.clock.now()))
        if self.view_id:
            await run_as(leader.name, self._persist(leader.decide))
        if self.has_webhook:
            await run_as(leader.name, leader.call_webhook())
        if self.callers.views:
            await run_as(leader.name, self.callers.serve(leader))
        for agent in self.callers.views:
            await self._persist(partial(self.callers.decide, agent, leader))
        return leader

    async def let_old_leaders_go_on(self, leader: Process) -> None:
        """Let processes that do not know that they were replaced measure, poll and record after the leader has."""
        await self._poll(leader)
        tick = self.move(after_s=11)
        old = [process for process in self.processes.values() if process.leads and process is not leader]
        for process in (leader, *old):
            await run_as(process.name, process.take(tick))
        for process in old:
            await run_as(process.name, self._go_on(process))
        await self._poll(leader)

    async def _poll(self, leader: Process) -> None:
        for _ in range(2):  # the first may write a halt, with the command that the second one finds
            await run_as(leader.name, leader.operations.poll())
            await ended("halt ")
            await ended("flatten ")

    async def _go_on(self, process: Process) -> None:
        with suppress(TraderError):
            await self.halt(process, Verb.FLATTEN, "b")
        with suppress(TraderError):
            await process.snapshot()

    async def restart(self) -> Process:
        """Kill every process, let the market touch the stop while none runs, and let another one lead."""
        for process in self.processes.values():
            process.exchange.suspend()
        self.killed += self.processes.values()
        self.processes.clear()
        self.holder = None
        self.move(STOPPED)
        self.move()
        self.clock.moment = self.market_at + timedelta(seconds=3)
        leader = self.process("Y")
        await run_as("Y", leader.leadership.take_role())
        self.market_at += timedelta(seconds=3)
        await self.see()
        if self.has_webhook:
            await run_as("Y", leader.call_webhook())
        return leader

    async def _persist(self, ask: Callable[[], Awaitable[object]]) -> None:
        """Repeat a request with one client order id until it is answered, as a careful client does."""
        for attempt in range(ATTEMPTS):
            try:
                await ask()
                return
            except Unavailable:
                if attempt == ATTEMPTS - 1:
                    raise


def same(accounts: Mapping[str, Account], other: Mapping[str, Account]) -> bool:
    """Whether accounts are equal, except for the depth that they have taken."""
    return {key: without_depth(account) for key, account in accounts.items()} == {
        key: without_depth(account) for key, account in other.items()
    }
