"""Composition root: makes every part of the service once, in order, and hands to each what it shares with others."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime

from trader.api import streams
from trader.api.context import Context
from trader.api.schemas.agents import ViewOutput
from trader.api.schemas.common import ENCODER
from trader.api.stream_table import state_loaders
from trader.clock import Clock, iso
from trader.domain.operations.alarms import Alarm, AlarmCause
from trader.external import ExternalSystems, make_recorder
from trader.gateways.agents.anchor_sinks import make_sink
from trader.gateways.agents.providers import Provider, find_in_cooldown, make_providers
from trader.gateways.agents.taapi import make_supplier
from trader.gateways.agents.webhook import WebhookClient
from trader.gateways.market.source import MarketSource
from trader.leadership import Leadership, Relay, TradingControls
from trader.schedulers import Schedulers, jobs
from trader.services.agents.anchors import Anchors
from trader.services.agents.recorder import StoredStates
from trader.services.agents.results import record_results
from trader.services.agents.schedule import Agents
from trader.services.agents.webhooks import Webhooks
from trader.services.events import EventBus, log_trades
from trader.services.exchange.accounts import Accounts
from trader.services.exchange.halts import Halts
from trader.services.exchange.ledger_writer import LedgerWriter
from trader.services.exchange.paper import PaperExchange
from trader.services.exchange.protocol import Exchange
from trader.services.exchange.read_only import ReadOnlyExchange
from trader.services.live.drift import DriftRecorder
from trader.services.live.exchange import LiveExchange
from trader.services.market.candles import Candles
from trader.services.market.feed import MarketFeed
from trader.services.market.followed import FollowedMarket
from trader.services.operations.alarms import Alarms
from trader.services.operations.loss_limits import LossLimits
from trader.services.operations.operator_commands import OperatorCommands
from trader.services.portfolio.analytics import Analytics
from trader.services.portfolio.baselines import Baselines
from trader.services.portfolio.evidence import Evidence
from trader.services.portfolio.luck import LuckTable
from trader.services.portfolio.run_statistics import CurrentRuns
from trader.services.portfolio.snapshots import Portfolio
from trader.services.relay import LeaderView, RelayedQuote, RelayReader, RelayWriter
from trader.settings import Settings
from trader.store.database.leadership import SILENCE_S, LeaderLock
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Database
from trader.store.exchange.accounts import select_lived_until

log = logging.getLogger("trader")


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of the running service that its HTTP application and its tasks use."""

    context: Context
    database: Database
    accounts: Accounts
    providers: Mapping[str, Provider]
    hubs: streams.Hubs
    schedulers: Schedulers
    controls: TradingControls
    leadership: Leadership
    relay: Relay
    anchors: Anchors
    alarms: Alarms
    started_at: datetime


async def make_service(settings: Settings, external: ExternalSystems, alarms: Alarms, stack: AsyncExitStack) -> Service:
    """Make every part of the service, and let the stack end those that have an end."""
    database, events = external.database, EventBus()
    events.subscribe(log_trades)
    events.subscribe(alarms.on_event)
    followed = RelayReader(database, events)
    leader = followed if settings.role == "reader" else None
    source = external.source if leader is None else FollowedMarket(external.source, leader)
    clock = await _make_clock(source, external)
    recorder = make_recorder(settings, source) if leader is None else None
    market = MarketFeed(source, clock, recorder=recorder)
    accounts = Accounts(database, LedgerWriter(database), events)
    halts = Halts(database, clock, events)
    exchange = _make_exchange(settings, external, market, clock, events, accounts, halts, leader)
    limits = LossLimits(database, exchange, halts, settings)
    controls = TradingControls(halts, limits, OperatorCommands(database, exchange, halts, limits))
    providers = make_providers(settings, StoredStates(database))
    stack.push_async_callback(providers.close)
    supplier = make_supplier(settings, clock)
    if supplier is not None:
        stack.push_async_callback(supplier.close)
    runs, luck = CurrentRuns(database), LuckTable(database, market, settings)
    stack.push_async_callback(luck.close)
    context = Context(
        settings=settings,
        clock=clock,
        market=market,
        exchange=exchange,
        portfolio=Portfolio(database, exchange, clock, settings, leader),
        analytics=Analytics(database, exchange, clock, runs),
        evidence=Evidence(database, runs, luck, clock),
        agents=Agents(database, exchange, market, clock, events, settings, providers, supplier=supplier, leader=leader),
        candles=Candles(database, market, settings),
    )
    alarms.sources.append(lambda: _agent_problems(context.agents, providers))
    baselines = Baselines(database, exchange, market, clock, settings)
    webhooks = _make_webhooks(context, database)
    stack.push_async_callback(webhooks.close)
    schedulers = _make_schedulers(database, context, events, baselines, webhooks)
    hubs = streams.Hubs(state_loaders(context), events, clock)
    lock = None if leader is not None else _make_lock(external)
    relay = Relay(RelayWriter(database, events, lambda: leader_view(context), ENCODER.encode), followed)
    leadership = Leadership(context, database, accounts, events, schedulers, lock, controls, baselines, relay)
    alarms.is_leader = lambda: leadership.role == "leader"
    anchors, now = _make_anchors(settings, database, alarms, stack), clock.now()
    return Service(
        context, database, accounts, providers, hubs, schedulers, controls, leadership, relay, anchors, alarms, now
    )


def _make_anchors(settings: Settings, database: Database, alarms: Alarms, stack: AsyncExitStack) -> Anchors:
    sink = make_sink(settings.anchor_url)
    if sink is not None:
        stack.push_async_callback(sink.close)
    return Anchors(database, sink, alarms.is_leader)


def _agent_problems(agents: Agents, providers: Mapping[str, Provider]) -> Iterator[Alarm]:
    """Yield the AI providers and keys that cannot be used now, and the failing models, which these may explain."""
    for name, why in find_in_cooldown(providers).items():
        yield Alarm(AlarmCause("provider", name), why)
    for name, failing in agents.failing().items():
        text = f"{name} failed {failing.in_a_row} times in a row: {failing.reason}"
        yield Alarm(AlarmCause("model", name), text, under=AlarmCause("provider", agents.models[name].provider))


def _make_exchange(
    settings: Settings,
    external: ExternalSystems,
    market: MarketFeed,
    clock: Clock,
    events: EventBus,
    accounts: Accounts,
    halts: Halts,
    leader: RelayReader | None,
) -> Exchange:
    """Return the exchange of the settings. Nothing but this and `open_external` knows which it is."""
    if leader is not None:
        return ReadOnlyExchange(market, clock, settings, accounts, leader)
    database, venue = external.database, external.venue_accounts
    if venue is None:
        return PaperExchange(database, market, clock, settings, accounts, halts)
    drift = DriftRecorder(database)
    return LiveExchange(database, market, clock, events, settings, venue, accounts, halts, drift)


def _make_lock(external: ExternalSystems) -> LeaderLock:
    # A silent leader's lock is freed on paper only: the venue cannot refuse the orders of a leader whose term is over.
    return LeaderLock(external.dsn, SILENCE_S if external.venue_accounts is None else 0)


async def _make_clock(source: MarketSource, external: ExternalSystems) -> Clock:
    """Return the clock of the market, from where the last process left off."""
    async with external.database.connection() as conn:
        clock = source.clock(resume_at=await select_lived_until(conn))
        if external.is_written:
            await ensure_partitions(conn, clock.now())
    log.info("the market's time is %s", iso(clock.now()))
    return clock


def leader_view(context: Context) -> LeaderView:
    """Return what the leader shows to the processes that follow it."""
    market = context.market
    troubles = {symbol: trouble for symbol in market.markets if (trouble := market.trouble(symbol)) is not None}
    return LeaderView(
        now=context.clock.now(),
        updated_at=market.last_update_at,
        quotes=tuple(RelayedQuote(q.symbol, q.at, q.bid, q.ask, q.mark) for q in market.quotes().values()),
        markets=tuple(market.markets.values()),
        market_troubles=troubles,
        account_troubles=dict(context.exchange.troubles),
        warning=context.agents.warning(),
        model_warnings=dict(context.agents.model_warnings()),
        snapshots_created=context.portfolio.created,
    )


def _make_webhooks(context: Context, database: Database) -> Webhooks:
    client = WebhookClient(loopback=context.settings.webhook_loopback == "on")
    return Webhooks(
        database, context.agents.external, client, context.clock, lambda opened: ENCODER.encode(ViewOutput.of(opened))
    )


def _make_schedulers(
    database: Database, context: Context, events: EventBus, baselines: Baselines, webhooks: Webhooks
) -> Schedulers:
    async def start_batch(now: datetime) -> None:
        await webhooks.begin_cycle(await context.agents.start_batch(now))
        await baselines.decide(now, {model.variant for model in context.agents.models.values() if model.active})

    async def take_snapshots(now: datetime) -> None:
        await context.portfolio.take_snapshots(now)
        await baselines.record(now)
        runs = (account.run.started_at for account in context.exchange.accounts.values())
        await context.candles.record(now, min(runs, default=now))
        if (term := context.exchange.term) is not None:
            await record_results(database, term, now)

    return Schedulers(jobs(events, start_batch, take_snapshots), context.clock)
