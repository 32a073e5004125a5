"""Prometheus metrics at `GET /metrics`.

Every part of the service keeps its own counts, which are collected on request. Labels have few values, all defined by
the service; callers cannot add any.
"""

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from typing import Final

from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from trader.agents.domain.shares import Budget
from trader.agents.providers.client import ProviderClient
from trader.agents.providers.providers import Provider, find_outages
from trader.agents.schedule import InvocationScheduler
from trader.api.broadcast import Broadcaster
from trader.api.context import ACCOUNTS, ALARMS, CONTEXT, DATABASE, HALTS, PROVIDERS, RELAY, ROLE, SCHEDULERS
from trader.api.requests import BUCKETS_S, REQUESTS, Latencies
from trader.api.routes import Documented, Route
from trader.api.rpc import DISPATCHER, Dispatcher
from trader.api.state_broadcast import StateBroadcaster
from trader.api.streams import BROADCASTERS
from trader.core import tasks
from trader.core.errors import Unavailable
from trader.core.schedulers import JobStatus
from trader.database.pool import Database
from trader.exchange.accounts import Tally
from trader.operations.alarms import Alarms
from trader.operations.sql.history import MaintenanceRun, select_maintenance

METRICS: Final = Route(
    "/metrics",
    "Metrics of the service, in the Prometheus format",
    tag="health",
    responses={
        200: Documented("The metrics; as OpenMetrics if the `Accept` header requests it.", str, media_type="text/plain")
    },
)

MAINTENANCE_EVERY_S: Final = 60.0
LAG_EVERY_S: Final = 0.25
LAG_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class LoopLag:
    """Lag of the event loop: how late a timer fires, measured four times a second."""

    def __init__(self) -> None:
        self.counts = [0] * (len(LAG_BUCKETS_S) + 1)
        self.sum_s = 0.0

    async def watch(self) -> None:
        """Measure until canceled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LAG_EVERY_S
            await asyncio.sleep(LAG_EVERY_S)
            late_s = max(0.0, loop.time() - due_s)
            self.sum_s += late_s
            self.counts[sum(late_s > bound for bound in LAG_BUCKETS_S)] += 1


class Maintenance:
    """The last recorded backup, audit and verification, read from the database once a minute."""

    def __init__(self) -> None:
        self.runs: Sequence[MaintenanceRun] = ()
        self._read_s = 0.0

    async def watch(self, database: Database) -> None:
        """Read until canceled."""
        while True:
            with suppress(Unavailable):  # the last figures grow older until the database answers
                async with database.connection() as conn:
                    self.runs = await select_maintenance(conn)
                self._read_s = time.monotonic()
            await asyncio.sleep(MAINTENANCE_EVERY_S)

    def figures(self) -> Iterator[Metric]:
        """Yield the age of the last success, and the problems of the last run, by task."""
        since_s = time.monotonic() - self._read_s
        ages = {str(run.task): run.success_age_s + since_s for run in self.runs if run.success_age_s is not None}
        yield _gauges("trader_maintenance_success_age_seconds", "Time since the last clean run.", "task", ages)
        problems = {str(run.task): run.problems for run in self.runs}
        yield _gauges("trader_maintenance_problems", "Problems that the last run found.", "task", problems)


class _Figures(Collector):
    def __init__(self, app: web.Application, lag: LoopLag, maintenance: Maintenance) -> None:
        self._app = app
        self._lag = lag
        self._maintenance = maintenance

    def collect(self) -> Iterator[Metric]:
        app, context = self._app, self._app[CONTEXT]
        yield _requests_of(app[REQUESTS].latencies)
        lag = HistogramMetricFamily("trader_event_loop_lag_seconds", "Delay of due timers in the loop.")
        lag.add_metric([], _buckets(LAG_BUCKETS_S, self._lag.counts), self._lag.sum_s)
        yield lag
        yield from _streams_of(app[BROADCASTERS].all.values())
        yield from _schedulers_of(app[SCHEDULERS].status())
        yield from _condition_of(app)
        yield from _database_of(app[DATABASE])
        yield GaugeMetricFamily(
            "trader_disk_free_bytes", "Free space in the working folder.", shutil.disk_usage(".").free
        )
        yield from _trading_of(app[ACCOUNTS].tally)
        yield _gauges("trader_account_equity", "Equity of an account.", "account", context.portfolio.equity())
        yield from _providers_of(app[PROVIDERS])
        yield from _alarms_of(app[ALARMS])
        yield from _budgets_of(context.agents.budgets.states(context.models.by_id))
        yield from _answers_of(app[DISPATCHER])
        yield from _models_of(context.agents)
        yield from self._maintenance.figures()


def _database_of(database: Database) -> Iterator[Metric]:
    pool = database.use()
    yield CounterMetricFamily("trader_write_failures", "Failed writes.", database.write_failures)
    states = {"idle": pool.idle, "used": pool.size - pool.idle}
    yield _gauges("trader_database_connections", "Connections of the pool.", "state", states)
    yield GaugeMetricFamily("trader_database_connections_max", "Maximum number of connections.", pool.size_max)


def _answers_of(dispatcher: Dispatcher) -> Iterator[Metric]:
    cache, large = dispatcher.cache, dispatcher.large_answers.counts
    results = {"hit": cache.hits, "miss": cache.misses}
    yield _counters("trader_kept_answers", "Calls of procedures with cached responses.", "result", results)
    yield GaugeMetricFamily("trader_kept_answers_bytes", "Size of the cached responses.", cache.size)
    yield _counters("trader_large_answers", "Responses over 1 MB before compression.", "procedure", large)


def _models_of(agents: InvocationScheduler) -> Iterator[Metric]:
    yield GaugeMetricFamily("trader_models_running", "Models deciding now.", len(agents.running()))
    waiting = len(agents.waiting())
    yield GaugeMetricFamily("trader_models_waiting", "Models waiting for a slot.", waiting)
    yield _counters("trader_model_cycles_skipped", "Cycles in which a model was skipped.", "state", agents.skipped)
    failing = {model_id: failure.in_a_row for model_id, failure in agents.failing().items()}
    yield _gauges("trader_model_failures", "Consecutive failures of a model with three or more.", "model", failing)
    in_cooldown = dict.fromkeys(agents.in_cooldown(), 1)
    yield _gauges("trader_provider_cooldown", "1 while a provider or key is unusable.", "provider", in_cooldown)


def _requests_of(latencies: Mapping[tuple[str, int], Latencies]) -> Metric:
    family = HistogramMetricFamily(
        "trader_request_duration_seconds",
        "Requests by procedure (or path) and status; for a stream, how long it was open.",
        labels=["procedure", "status"],
    )
    for (name, status), each in sorted(latencies.items()):
        family.add_metric([name, str(int(status))], _buckets(BUCKETS_S, each.counts), each.sum_s)
    return family


def _streams_of(broadcasters: Iterable[Broadcaster]) -> Iterator[Metric]:
    subscribers = GaugeMetricFamily("trader_stream_subscribers", "Open streams.", labels=["stream"])
    capacity = GaugeMetricFamily("trader_stream_capacity", "Maximum number of open streams.", labels=["stream"])
    dropped = CounterMetricFamily("trader_stream_drops", "Subscribers that could not keep up.", labels=["stream"])
    loads = CounterMetricFamily("trader_stream_loads", "States loaded for sending.", labels=["stream"])
    failures = CounterMetricFamily("trader_stream_load_failures", "Loads that failed.", labels=["stream"])
    for broadcaster in broadcasters:
        subscribers.add_metric([broadcaster.name], len(broadcaster))
        capacity.add_metric([broadcaster.name], broadcaster.capacity)
        dropped.add_metric([broadcaster.name], broadcaster.dropped)
        if isinstance(broadcaster, StateBroadcaster):
            loads.add_metric([broadcaster.name], broadcaster.loads)
            failures.add_metric([broadcaster.name], broadcaster.failures)
    yield from (subscribers, capacity, dropped, loads, failures)


def _schedulers_of(schedulers: Mapping[str, JobStatus]) -> Iterator[Metric]:
    label = "scheduler"
    each = schedulers.items()
    yield _gauges("trader_scheduler_running", "1 while it runs here.", label, {n: int(s.running) for n, s in each})
    yield _counters("trader_scheduler_runs", "Runs that ended.", label, {n: s.runs for n, s in each})
    yield _counters("trader_scheduler_failures", "Runs that failed.", label, {n: s.failures for n, s in each})
    yield _counters("trader_scheduler_skips", "Due times skipped during a run.", label, {n: s.skipped for n, s in each})
    lags = {name: (status.last_lag_ms or 0) / 1000 for name, status in each}
    yield _gauges("trader_scheduler_lag_seconds", "How late the last run started.", label, lags)
    durations = {name: (status.last_duration_ms or 0) / 1000 for name, status in each}
    yield _gauges("trader_scheduler_last_duration_seconds", "How long the last run took.", label, durations)


def _condition_of(app: web.Application) -> Iterator[Metric]:
    context = app[CONTEXT]
    market, troubles = context.market, len(context.exchange.troubles)
    yield GaugeMetricFamily("trader_leader", "1 on the leader, else 0.", int(app[ROLE].role == "leader"))
    if (lag_s := app[RELAY].lag_s()) is not None:
        yield GaugeMetricFamily("trader_lag_seconds", "Age of the newest record seen from the leader.", lag_s)
    healthy = GaugeMetricFamily("trader_healthy", "1 while /health has no reason, else 0.")
    healthy.add_metric([], int(app[ALARMS].is_healthy))
    yield healthy
    yield GaugeMetricFamily("trader_halts", "Halts in force.", len(app[HALTS].in_force))
    yield GaugeMetricFamily("trader_disagreements", "Accounts whose books and venue disagree.", troubles)
    yield GaugeMetricFamily("trader_market_stale", "1 while the market is too stale to trade.", int(market.is_stale()))
    if market.last_update_at is not None:
        age_s = (context.clock.now() - market.last_update_at).total_seconds()
        yield GaugeMetricFamily("trader_market_age_seconds", "Time since the last update of the market.", age_s)


def _trading_of(tally: Tally) -> Iterator[Metric]:
    orders = {status.value: count for status, count in tally.orders.items()}
    yield _counters("trader_orders", "Orders by resulting status.", "status", orders)
    fills = {"maker": tally.maker_fills, "taker": tally.taker_fills}
    yield _counters("trader_fills", "Fills of orders, exits and liquidations.", "role", fills)
    yield CounterMetricFamily("trader_trades", "Completed trades.", tally.trades)


def _providers_of(providers: Mapping[str, Provider]) -> Iterator[Metric]:
    attempts = CounterMetricFamily(
        "trader_provider_attempts", "Calls of AI providers by outcome.", labels=["provider", "outcome"]
    )
    tokens = CounterMetricFamily("trader_provider_tokens", "Tokens as charged.", labels=["provider", "direction"])
    cooldowns = CounterMetricFamily(
        "trader_provider_key_cooldowns", "Cooldowns of keys.", labels=["provider", "reason"]
    )
    unmetered = CounterMetricFamily(
        "trader_provider_unmetered_attempts", "Calls that may have cost unreported tokens.", labels=["provider"]
    )
    outages = find_outages(providers)
    for name, provider in providers.items():
        if not isinstance(provider, ProviderClient):
            continue
        usage = provider.usage
        for outcome, count in usage.attempts.items():
            attempts.add_metric([name, outcome], count)
        tokens.add_metric([name, "input"], usage.input_tokens)
        tokens.add_metric([name, "output"], usage.output_tokens)
        tokens.add_metric([name, "cached"], usage.cached_tokens)
        for reason, count in usage.cooldowns.items():
            cooldowns.add_metric([name, reason], count)
        unmetered.add_metric([name], usage.unmetered_attempts)
    yield from (attempts, tokens, unmetered, cooldowns)
    down = {name: int(name in outages) for name, provider in providers.items() if isinstance(provider, ProviderClient)}
    yield _gauges("trader_provider_out", "1 while no model can use it.", "provider", down)


def _alarms_of(alarms: Alarms) -> Iterator[Metric]:
    raised = CounterMetricFamily("trader_alarms", "Alarms raised.", labels=["cause"])
    for kind, count in sorted(alarms.counts.items()):
        raised.add_metric([kind], count)
    firing = GaugeMetricFamily("trader_alarms_firing", "Alarms firing now.", labels=["cause", "subject"])
    for condition in alarms.firing():
        firing.add_metric(condition.alarm.cause, 1)
    sent = CounterMetricFamily("trader_notifications", "Notices by sink of NOTIFY_URL.", labels=["sink", "outcome"])
    for outlet in alarms.outlets:
        for outcome, count in outlet.outcomes.items():
            sent.add_metric([outlet.name, outcome], count)
    waiting = {outlet.name: len(outlet) for outlet in alarms.outlets}
    yield from (raised, firing, sent, _gauges("trader_notifications_waiting", "Notices waiting.", "sink", waiting))


def _budgets_of(budgets: Mapping[str, Budget]) -> Iterator[Metric]:
    label, each = "model", budgets.items()
    own = {model_id: float(budget.usd) for model_id, budget in each if budget.usd is not None}
    spent = {model_id: float(budget.spent) for model_id, budget in each}
    yield _gauges("trader_model_cost_today_usd", "Known cost since 00:00 UTC of a model with a budget.", label, spent)
    yield _gauges("trader_model_budget_usd", "Daily budget of a model (UTC).", label, own)
    closed = {model_id: int(budget.state != "open") for model_id, budget in each}
    yield _gauges("trader_model_budget_spent", "1 while a budget that limits it is spent.", label, closed)


def _gauges(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, meaning, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _counters(name: str, meaning: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, meaning, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _buckets(bounds: Iterable[float], counts: Iterable[int]) -> list[tuple[str, float]]:
    """Return cumulative counts by upper bound, as the format requires."""
    return list(zip([*map(str, bounds), "+Inf"], accumulate(counts), strict=True))


FIGURES: Final = web.AppKey("figures", CollectorRegistry)


async def answer_metrics(request: web.Request) -> web.Response:
    """Respond with all metrics, in the format that the caller accepts."""
    encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
    return web.Response(body=encode(request.app[FIGURES]), headers={hdrs.CONTENT_TYPE: content_type})


def routes() -> list[web.RouteDef]:
    return METRICS.get(answer_metrics)


async def measure(app: web.Application) -> AsyncIterator[None]:
    """Measure the lag of the event loop while the application runs, and register the figures of its parts."""
    lag = LoopLag()
    app[FIGURES] = registry = CollectorRegistry()
    maintenance = Maintenance()
    registry.register(_Figures(app, lag, maintenance))
    ProcessCollector(registry=registry)
    watching = [
        tasks.keep(lag.watch, "loop lag"),
        tasks.keep(partial(maintenance.watch, app[DATABASE]), "maintenance"),
    ]
    yield
    await tasks.end(*watching)
