"""Prometheus metrics at `GET /metrics`.

Every part of the service keeps its own counts, which are collected on request. Labels have few values, all defined by
the service; callers cannot add any.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, cast

from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trader import __version__
from trader.agents.domain.shares import Budget
from trader.agents.providers.client import ProviderClient
from trader.agents.providers.provider import Provider
from trader.agents.providers.providers import find_outages
from trader.agents.schedule import InvocationScheduler
from trader.api.broadcast import Broadcaster
from trader.api.context import ACCOUNTS, ALARMS, CONTEXT, DATABASE, HALTS, PROVIDERS, RELAY, ROLE, SCHEDULERS
from trader.api.requests import REQUESTS
from trader.api.routes import Documented, Route
from trader.api.rpc import DISPATCHER, Dispatcher
from trader.api.state_broadcast import StateBroadcaster
from trader.api.streams import BROADCASTERS
from trader.core import tasks
from trader.core.logs import lost_lines
from trader.core.schedulers import JobStatus
from trader.database.pool import Database
from trader.exchange.accounts import Tally
from trader.operations.alarms import Alarms, Maintenance

METRICS: Final = Route(
    "/metrics",
    "Metrics of the service, in the Prometheus format",
    tag="health",
    responses={
        200: Documented("The metrics; as OpenMetrics if the `Accept` header requests it.", str, media_type="text/plain")
    },
)

disable_created_metrics()  # type: ignore[no-untyped-call]  # the time of each first observation tells nothing here

LAG_EVERY_S: Final = 0.25
LAG_BUCKETS_S: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


async def _watch_lag(lag: Histogram) -> None:
    """Measure how late a timer of the event loop fires, four times a second until canceled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_EVERY_S
        await asyncio.sleep(LAG_EVERY_S)
        lag.observe(max(0.0, loop.time() - due_s))


def _maintenance_of(maintenance: Maintenance) -> Iterator[Metric]:
    """Yield the age of the last success, and the problems of the last run, by task."""
    ages = {str(run.task): age_s for run in maintenance.runs if (age_s := maintenance.success_age_s(run)) is not None}
    yield _gauges("trader_maintenance_success_age_seconds", "Time since the last clean run.", "task", ages)
    problems = {str(run.task): run.problems for run in maintenance.runs}
    yield _gauges("trader_maintenance_problems", "Problems that the last run found.", "task", problems)


class _Figures(Collector):
    def __init__(self, app: web.Application) -> None:
        self._app = app

    def collect(self) -> Iterator[Metric]:
        app, context = self._app, self._app[CONTEXT]
        yield from app[REQUESTS].durations.collect()
        yield from _streams_of(app[BROADCASTERS].all.values())
        yield from _schedulers_of(app[SCHEDULERS].status())
        yield from _condition_of(app)
        yield from _database_of(app[DATABASE])
        yield GaugeMetricFamily(
            "trader_disk_free_bytes", "Free space in the working folder.", shutil.disk_usage(".").free
        )
        size = app[ALARMS].database_bytes
        yield GaugeMetricFamily("trader_database_bytes", "Size of the database on its disk.", size)
        yield CounterMetricFamily("trader_log_lines_lost", "Lines of the log that were never written.", lost_lines())
        yield _gauges("trader_build_info", "1; its label is the version of this process.", "version", {__version__: 1})
        yield from _trading_of(app[ACCOUNTS].tally)
        equities = {key: float(each.net_portfolio) for key, each in context.portfolio.live().values.items()}
        yield _gauges("trader_account_equity", "Equity of an account.", "account", equities)
        yield from _providers_of(app[PROVIDERS])
        yield from _alarms_of(app[ALARMS])
        yield from _budgets_of(context.agents.budgets.states(context.models.by_id))
        yield from _answers_of(app[DISPATCHER])
        yield from _models_of(context.agents)
        yield from _maintenance_of(app[ALARMS].maintenance)


def _database_of(database: Database) -> Iterator[Metric]:
    size, idle, size_max = database.use()
    yield CounterMetricFamily("trader_write_failures", "Failed writes.", database.write_failures)
    states = {"idle": idle, "used": size - idle}
    yield _gauges("trader_database_connections", "Connections of the pool.", "state", states)
    yield GaugeMetricFamily("trader_database_connections_max", "Maximum number of connections.", size_max)


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
    yield _counters("trader_model_invocations", "Invocations by what ended them.", "ended_by", agents.ends)
    failing = {model_id: failure.in_a_row for model_id, failure in agents.failing().items()}
    yield _gauges("trader_model_failures", "Consecutive failures of a model with three or more.", "model", failing)
    in_cooldown = dict.fromkeys(agents.in_cooldown(), 1)
    yield _gauges("trader_provider_cooldown", "1 while a provider or key is unusable.", "provider", in_cooldown)


def _streams_of(broadcasters: Iterable[Broadcaster]) -> Iterator[Metric]:
    label, each = "stream", {broadcaster.name: broadcaster for broadcaster in broadcasters}
    states = {name: broadcaster for name, broadcaster in each.items() if isinstance(broadcaster, StateBroadcaster)}
    yield _gauges("trader_stream_subscribers", "Open streams.", label, {n: len(b) for n, b in each.items()})
    yield _gauges("trader_stream_capacity", "Maximum number of open streams.", label, _of(each, "capacity"))
    yield _counters("trader_stream_drops", "Subscribers that could not keep up.", label, _of(each, "dropped"))
    yield _counters("trader_stream_loads", "States loaded for sending.", label, _of(states, "loads"))
    yield _counters("trader_stream_load_failures", "Loads that failed.", label, _of(states, "failures"))


def _schedulers_of(schedulers: Mapping[str, JobStatus]) -> Iterator[Metric]:
    label, each = "scheduler", schedulers
    yield _gauges("trader_scheduler_running", "1 while it runs here.", label, _of(each, "running"))
    yield _counters("trader_scheduler_runs", "Runs that ended.", label, _of(each, "runs"))
    yield _counters("trader_scheduler_failures", "Runs that failed.", label, _of(each, "failures"))
    yield _counters("trader_scheduler_skips", "Due times skipped during a run.", label, _of(each, "skipped"))
    lags = {name: (status.last_lag_ms or 0) / 1000 for name, status in each.items()}
    yield _gauges("trader_scheduler_lag_seconds", "How late the last run started.", label, lags)
    durations = {name: (status.last_duration_ms or 0) / 1000 for name, status in each.items()}
    yield _gauges("trader_scheduler_last_duration_seconds", "How long the last run took.", label, durations)


def _condition_of(app: web.Application) -> Iterator[Metric]:
    context = app[CONTEXT]
    market, troubles = context.market, len(context.exchange.troubles)
    yield GaugeMetricFamily("trader_leader", "1 on the leader, else 0.", int(app[ROLE].role == "leader"))
    if (lag_s := app[RELAY].lag_s()) is not None:
        yield GaugeMetricFamily("trader_lag_seconds", "Age of the newest record seen from the leader.", lag_s)
    is_healthy = int(app[ALARMS].is_healthy)
    yield GaugeMetricFamily("trader_healthy", "1 while /health has no reason, else 0.", is_healthy)
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
    clients = {name: provider for name, provider in providers.items() if isinstance(provider, ProviderClient)}
    usage, outages = {name: client.usage for name, client in clients.items()}, find_outages(providers)
    attempts = {(name, outcome): count for name, each in usage.items() for outcome, count in each.attempts.items()}
    yield _counters("trader_provider_attempts", "Calls of AI providers by outcome.", "provider outcome", attempts)
    kinds = ("input", "output", "cached")
    tokens = {(name, kind): getattr(each, f"{kind}_tokens") for name, each in usage.items() for kind in kinds}
    yield _counters("trader_provider_tokens", "Tokens as charged.", "provider direction", tokens)
    meaning = "Calls that may have cost unreported tokens."
    yield _counters("trader_provider_unmetered_attempts", meaning, "provider", _of(usage, "unmetered_attempts"))
    cooldowns = {(name, reason): count for name, each in usage.items() for reason, count in each.cooldowns.items()}
    yield _counters("trader_provider_key_cooldowns", "Cooldowns of keys.", "provider reason", cooldowns)
    down = {name: name in outages for name in clients}
    yield _gauges("trader_provider_out", "1 while no model can use it.", "provider", down)


def _alarms_of(alarms: Alarms) -> Iterator[Metric]:
    yield _counters("trader_alarms", "Alarms raised.", "cause", dict(sorted(alarms.counts.items())))
    firing = {condition.alarm.cause: 1 for condition in alarms.firing()}
    yield _gauges("trader_alarms_firing", "Alarms firing now.", "cause subject", firing)
    sent = {(outlet.name, outcome): n for outlet in alarms.outlets for outcome, n in outlet.outcomes.items()}
    yield _counters("trader_notifications", "Notices by sink of NOTIFY_URL.", "sink outcome", sent)
    waiting = {outlet.name: len(outlet) for outlet in alarms.outlets}
    yield _gauges("trader_notifications_waiting", "Notices waiting.", "sink", waiting)


def _budgets_of(budgets: Mapping[str, Budget]) -> Iterator[Metric]:
    label = "model"
    own = {model_id: float(budget.usd) for model_id, budget in budgets.items() if budget.usd is not None}
    spent = {model_id: float(budget.spent) for model_id, budget in budgets.items()}
    yield _gauges("trader_model_cost_today_usd", "Known cost since 00:00 UTC of a model with a budget.", label, spent)
    yield _gauges("trader_model_budget_usd", "Daily budget of a model (UTC).", label, own)
    closed = {model_id: budget.state != "open" for model_id, budget in budgets.items()}
    yield _gauges("trader_model_budget_spent", "1 while a budget that limits it is spent.", label, closed)


def _of(parts: Mapping[str, object], name: str) -> dict[str, float]:
    """Return an attribute of each part."""
    return {key: getattr(part, name) for key, part in parts.items()}


def _labeled(family: Any, values: Mapping[Any, float]) -> Metric:
    for key, value in values.items():
        family.add_metric([key] if isinstance(key, str) else key, value)
    return cast("Metric", family)


def _gauges(name: str, meaning: str, labels: str, values: Mapping[Any, float]) -> Metric:
    """Return a gauge with a value for each label's value, or for each tuple of several labels' values."""
    return _labeled(GaugeMetricFamily(name, meaning, labels=labels.split()), values)


def _counters(name: str, meaning: str, labels: str, values: Mapping[Any, float]) -> Metric:
    """Return a counter as `_gauges` does a gauge."""
    return _labeled(CounterMetricFamily(name, meaning, labels=labels.split()), values)


FIGURES: Final = web.AppKey("figures", CollectorRegistry)


async def answer_metrics(request: web.Request) -> web.Response:
    """Respond with all metrics, in the format that the caller accepts."""
    encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
    return web.Response(body=encode(request.app[FIGURES]), headers={hdrs.CONTENT_TYPE: content_type})


def routes() -> list[web.RouteDef]:
    return METRICS.get(answer_metrics)


async def measure(app: web.Application) -> AsyncIterator[None]:
    """Measure the lag of the event loop while the application runs, and register the figures of its parts."""
    app[FIGURES] = registry = CollectorRegistry()
    registry.register(_Figures(app))
    lag = Histogram(
        "trader_event_loop_lag_seconds", "Delay of due timers in the loop.", registry=registry, buckets=LAG_BUCKETS_S
    )
    ProcessCollector(registry=registry)
    watching = tasks.keep(partial(_watch_lag, lag), "loop lag")
    yield
    await tasks.end(watching)
