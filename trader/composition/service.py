"""Composition root: creates every part of the service once, in order, and passes the shared parts to each."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

import msgspec

from trader.agents.invocations import InvocationReader
from trader.agents.model_warnings import Warnings
from trader.agents.providers.provider import Provider
from trader.agents.providers.providers import find_in_cooldown, make_providers
from trader.agents.providers.taapi import make_supplier
from trader.agents.providers.webhook import WebhookClient
from trader.agents.recorder import StoredStates
from trader.agents.schedule import InvocationScheduler
from trader.agents.services import AgentServices, KnownModels
from trader.agents.webhooks import Webhooks
from trader.api import streams
from trader.api.context import Context
from trader.api.health import present_alarms
from trader.api.schemas.agents import ViewOutput
from trader.api.schemas.common import ENCODER, decoder_of, encoded
from trader.api.stream_table import state_loaders
from trader.composition.external import ExternalSystems, halts_file, make_recorder
from trader.composition.leadership import PRICE_TRACKER_EVERY, Coordination, Leadership, TradingParts
from trader.core.clock import Clock, iso
from trader.core.events import EventBus, MarketChecked
from trader.core.schedulers import Job, JobFunction, Schedulers
from trader.database.leadership import SILENCE_S, LeaderLock
from trader.database.partitions import ensure_partitions
from trader.database.pool import Database
from trader.database.relay import LeaderView, RelayedQuote, RelayReader, RelayWriter
from trader.exchange.accounts import Accounts
from trader.exchange.events import log_trades
from trader.exchange.halts import Halts
from trader.exchange.ledger_writer import LedgerWriter
from trader.exchange.paper import PaperExchange
from trader.exchange.protocol import Exchange
from trader.exchange.read_only import ReadOnlyExchange
from trader.exchange.sql.accounts import select_lived_until
from trader.live.approvals import Approvals
from trader.live.drift import DriftRecorder
from trader.live.exchange import LiveExchange
from trader.live.ladder import Ladder, read_ladder
from trader.live.ledger import LiveContext
from trader.live.shadow import Shadow
from trader.live.source import VenueSource
from trader.live.venues import VENUES
from trader.market.candles import Candles
from trader.market.feed import MarketFeed
from trader.market.followed_market import FollowedMarket
from trader.market.sources.source import MarketSource
from trader.operations.alarms import Alarms
from trader.operations.domain.alarms import Alarm, AlarmCause
from trader.operations.loss_limits import LossLimits
from trader.operations.notifications import sender_of
from trader.operations.operator_commands import OperatorCommands
from trader.portfolio.analytics import Analytics
from trader.portfolio.baselines import Baselines
from trader.portfolio.evidence import Evidence
from trader.portfolio.hour_bounds import HourBounds
from trader.portfolio.run_statistics import CurrentRuns
from trader.portfolio.seasons import require_running
from trader.portfolio.snapshots import PortfolioService
from trader.record.anchors import Anchors, make_sink
from trader.record.results import record_results
from trader.settings.settings import Settings

log = logging.getLogger("trader")


@dataclass(frozen=True, slots=True)
class Service:
    """The parts of the running service that its HTTP application and its tasks use."""

    context: Context
    database: Database
    providers: Mapping[str, Provider]
    broadcasters: streams.Broadcasters
    schedulers: Schedulers
    trading: TradingParts
    leadership: Leadership
    coordination: Coordination
    anchors: Anchors
    alarms: Alarms
    started_at: datetime


@dataclass(frozen=True, slots=True)
class _Foundations:
    """The parts that the others depend on.

    `leader` is what a reader knows of the leader; None for any other process.
    """

    settings: Settings
    external: ExternalSystems
    database: Database
    events: EventBus
    relay: RelayReader
    leader: RelayReader | None
    clock: Clock
    market: MarketFeed
    accounts: Accounts
    halts: Halts


async def make_service(settings: Settings, external: ExternalSystems, alarms: Alarms, stack: AsyncExitStack) -> Service:
    """Create every part of the service; the stack closes those that need closing."""
    base = await _lay_foundations(settings, external, alarms)
    database, events = base.database, base.events
    exchange = _make_exchange(base)
    _begin_shadow(base, exchange, stack)
    trading = _make_trading(base, exchange)
    shared = _make_agent_services(base, exchange, stack)
    context = _make_context(base, shared, trading.operations)
    if external.is_written:
        alarms.keep_history(database, sender_of(settings))
    alarms.sources.append(lambda: _agent_problems(context.agents, shared.models, shared.providers))
    client, view = WebhookClient(loopback=settings.webhook_loopback == "on"), decoder_of(ViewOutput)
    webhooks = Webhooks(database, context.desk, client, base.clock, lambda opened: encoded(ViewOutput.of(opened), view))
    stack.push_async_callback(webhooks.close)
    schedulers = _make_schedulers(database, context, events, trading.baselines, webhooks)
    writer = RelayWriter(database, events, lambda: leader_view(context, alarms), ENCODER.encode)
    lock = None if base.leader is not None else LeaderLock(external.dsn, SILENCE_S)  # a reader has none
    coordination = Coordination(lock, writer, base.relay)
    leadership = Leadership(context, database, events, schedulers, trading, coordination)
    alarms.is_leader = lambda: leadership.role == "leader"
    if (sink := make_sink(settings.anchor_url)) is not None:
        stack.push_async_callback(sink.close)
    return Service(
        context=context,
        database=database,
        providers=shared.providers,
        broadcasters=streams.Broadcasters(state_loaders(context), events, base.clock),
        schedulers=schedulers,
        trading=trading,
        leadership=leadership,
        coordination=coordination,
        anchors=Anchors(database, sink, alarms.is_leader),
        alarms=alarms,
        started_at=base.clock.now(),
    )


async def _lay_foundations(settings: Settings, external: ExternalSystems, alarms: Alarms) -> _Foundations:
    database, events = external.database, EventBus()
    events.subscribe(log_trades)
    events.subscribe(alarms.on_event)
    relay = RelayReader(database, events)
    leader = relay if settings.role == "reader" else None
    source = external.source if leader is None else FollowedMarket(external.source, leader)
    clock = await _make_clock(source, external)
    return _Foundations(
        settings=settings,
        external=external,
        database=database,
        events=events,
        relay=relay,
        leader=leader,
        clock=clock,
        market=MarketFeed(source, clock, recorder=make_recorder(settings, source) if leader is None else None),
        accounts=Accounts(database, LedgerWriter(database), events),
        halts=Halts(database, clock, events, halts_file(external.dsn)),
    )


def _make_exchange(base: _Foundations) -> Exchange:
    """Return the exchange that the settings select. Only this function and `open_external` know which one it is."""
    settings, market, clock, accounts, halts = base.settings, base.market, base.clock, base.accounts, base.halts
    if base.leader is not None:
        return ReadOnlyExchange(market, clock, settings, accounts, base.leader)
    venue = base.external.venue_accounts
    if venue is None:
        return PaperExchange(base.database, market, clock, settings, accounts, halts)
    context = LiveContext(
        database=base.database, market=market, clock=clock, settings=settings, accounts=accounts, events=base.events,
        venue=venue, halts=halts, drift=DriftRecorder(base.database), ladder=_make_ladder(base),
    )  # fmt: skip
    return LiveExchange(context)


def _make_ladder(base: _Foundations) -> Ladder | None:
    """Return the ladder of a live service; None without LADDER_FILE. Raise `SettingsError` for a contradictory one."""
    if (path := base.settings.ladder_file) is None:
        log.warning("LIVE: LADDER_FILE is not set: no step was proven, and no cap in USD applies")
        return None
    file = read_ladder(path, base.external.source.markets.values())
    return Ladder(base.database, base.clock, base.halts, base.events, file, base.settings)


def _begin_shadow(base: _Foundations, exchange: Exchange, stack: AsyncExitStack) -> None:
    """Let the ladder's shadow follow the paper orders on live prices, if there is a key to sign them with."""
    settings, source = base.settings, base.external.source
    if settings.venue_api_key is None or settings.ladder_file is None:
        return
    if isinstance(exchange, PaperExchange) and isinstance(source, VenueSource):
        signer, file = VENUES[settings.venue].make_order_signer(settings), read_ladder(settings.ladder_file)
        stack.push_async_callback(signer.close)
        shadow = Shadow(base.database, base.market, base.clock, source, signer, file)
        stack.push_async_callback(shadow.close)
        exchange.answered = shadow.take


def _make_trading(base: _Foundations, exchange: Exchange) -> TradingParts:
    database, settings, halts = base.database, base.settings, base.halts
    limits = LossLimits(database, exchange, halts, settings)
    baselines = Baselines(database, exchange, base.market, base.clock, settings)
    bounds, operations = HourBounds(database, exchange, halts), OperatorCommands(database, exchange, halts, limits)
    return TradingParts(base.accounts, baselines, halts, limits, bounds, operations)


def _make_agent_services(base: _Foundations, exchange: Exchange, stack: AsyncExitStack) -> AgentServices:
    providers = make_providers(base.settings, StoredStates(base.database))
    stack.push_async_callback(providers.close)
    supplier = make_supplier(base.settings, base.clock)
    if supplier is not None:
        stack.push_async_callback(supplier.close)
    return AgentServices(
        database=base.database,
        exchange=exchange,
        market=base.market,
        clock=base.clock,
        events=base.events,
        settings=base.settings,
        providers=providers,
        models=KnownModels(base.database),
        supplier=supplier,
        require_season=partial(require_running, base.database, base.clock),
    )


def _make_context(base: _Foundations, shared: AgentServices, operations: OperatorCommands) -> Context:
    database, settings, clock, market = base.database, base.settings, base.clock, base.market
    exchange, models, agents = shared.exchange, shared.models, InvocationScheduler(shared)
    runs = CurrentRuns(database)
    warnings = agents.warnings if base.leader is None else partial(_warnings_of, base.leader)
    invocations = InvocationReader(database, models, warnings)
    base.events.subscribe(invocations.on_event)
    return Context(
        settings=settings,
        clock=clock,
        market=market,
        exchange=exchange,
        portfolio=PortfolioService(database, exchange, clock, settings, base.leader),
        analytics=Analytics(database, exchange, clock, runs),
        evidence=Evidence(database, runs, clock),
        models=models,
        invocations=invocations,
        agents=agents,
        desk=agents.external,
        candles=Candles(database, market, settings),
        operations=operations,
        approvals=Approvals(database, settings.ladder_file, settings.venue),
    )


def _warnings_of(leader: RelayReader) -> Warnings:
    """Return the leader's warnings about the models; none before its first report."""
    return Warnings(None, {}) if leader.view is None else Warnings(leader.view.warning, leader.view.model_warnings)


def _agent_problems(
    agents: InvocationScheduler, models: KnownModels, providers: Mapping[str, Provider]
) -> Iterator[Alarm]:
    """Yield the unavailable AI providers and keys, failing models, possibly for that reason, and wrong prices."""
    for name, why in find_in_cooldown(providers).items():
        yield Alarm(AlarmCause("provider", name), why)
    for name, failing in agents.failing().items():
        text = f"{name} failed {failing.in_a_row} times in a row: {failing.reason}"
        yield Alarm(AlarmCause("model", name), text, under=AlarmCause("provider", models.by_id[name].provider))
    for name, warning in agents.with_wrong_prices().items():
        yield Alarm(AlarmCause("price", name), warning)


async def _make_clock(source: MarketSource, external: ExternalSystems) -> Clock:
    """Return the market clock, which continues where the last process left off."""
    async with external.database.connection() as conn:
        clock = source.clock(resume_at=await select_lived_until(conn))
        if external.is_written:
            await ensure_partitions(conn, clock.now())
    log.info("the market's time is %s", iso(clock.now()))
    return clock


def leader_view(context: Context, alarms: Alarms) -> LeaderView:
    """Return the leader's view that is shown to its followers."""
    market, warnings = context.market, context.invocations.warnings()
    troubles = {symbol: trouble for symbol in market.markets if (trouble := market.trouble(symbol)) is not None}
    return LeaderView(
        now=context.clock.now(),
        updated_at=market.last_update_at,
        quotes=tuple(RelayedQuote(q.symbol, q.at, q.bid, q.ask, q.mark) for q in market.quotes().values()),
        markets=msgspec.json.encode(list(market.markets.values())).decode(),
        market_troubles=troubles,
        account_troubles=dict(context.exchange.troubles),
        warning=warnings.summary,
        model_warnings=dict(warnings.by_model),
        alarms=ENCODER.encode(present_alarms(alarms)).decode(),
        snapshots_created=context.portfolio.created,
    )


def _make_schedulers(
    database: Database, context: Context, events: EventBus, baselines: Baselines, webhooks: Webhooks
) -> Schedulers:
    async def start_batch(now: datetime) -> None:
        await webhooks.begin_cycle(await context.agents.start_batch(now))
        await baselines.decide(now, {model.variant for model in context.models.by_id.values() if model.active})

    async def take_snapshots(now: datetime) -> None:
        await context.portfolio.take_snapshots(now)
        await baselines.record(now)
        runs = (account.run.started_at for account in context.exchange.accounts.values())
        await context.candles.record(now, min(runs, default=now))
        if (term := context.exchange.term) is not None:
            await record_results(database, term, now)

    return Schedulers(jobs(events, start_batch, take_snapshots), context.clock)


def jobs(events: EventBus, start_batch: JobFunction, take_snapshots: JobFunction) -> tuple[Job, ...]:
    """Return the three jobs of the service, in the order in which they run when they are due at the same time."""

    async def check_market(now: datetime) -> None:
        events.publish(MarketChecked(at=now))

    return (
        Job("priceTracker", PRICE_TRACKER_EVERY, check_market),
        Job("tradeExecutor", timedelta(seconds=60), start_batch),
        Job("portfolioSnapshot", timedelta(seconds=60), take_snapshots),
    )
