"""The figures of `GET /metrics`, parsed as Prometheus parses them."""

import logging
from collections.abc import AsyncIterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from pytest_aiohttp.plugin import AiohttpClient
from support.composed import composed
from support.served import AppClient, counted, make_app
from support.service_parts import START, ServiceParts

from trader.agents.domain.invocations import Failing
from trader.agents.providers.client import ProviderAccess, ProviderClient
from trader.agents.providers.provider import PROVIDERS, RuleProvider
from trader.api import context as keys
from trader.api import metrics, rpc
from trader.api.broadcast import Broadcaster
from trader.api.registry import Registry
from trader.api.routes import Route
from trader.api.schemas.common import Empty, Wire
from trader.api.stream_messages import EventsMessage, NumberedEvent
from trader.api.subscriber import Subscriber
from trader.core.schedulers import JobStatus
from trader.exchange.accounts import Tally
from trader.exchange.domain.orders import OrderStatus
from trader.operations.alarms import Alarms
from trader.operations.domain.alarms import Alarm, AlarmCause
from trader.operations.notifications import make_sinks
from trader.settings.forms import Secret
from trader.settings.settings import Settings

Figures = dict[tuple[str, tuple[str, ...]], float]

registry = Registry()


class Context:
    def __init__(self) -> None:
        self.settings = Settings.load({}, None, demo=True)
        self.calls = 0
        self.token: object = 1


class Figure(Wire):
    value: int


@registry.procedure("demo.count", token=lambda context: context.token)
async def count_calls(context: Context, _: Empty) -> Figure:
    context.calls += 1
    return Figure(value=context.calls)


class Parts(ServiceParts):
    """The parts that count."""

    def __init__(self) -> None:
        super().__init__()
        self.context = Context()
        self.broadcaster = Broadcaster("workflow", capacity=3)
        self.status = JobStatus(interval_ms=1000, running=True, runs=7, failures=2, skipped=1, last_lag_ms=250)
        self.tally = Tally()
        self.provider = ProviderClient(PROVIDERS["openai"], ProviderAccess([Secret("k" * 30)]))
        self.alarms = Alarms(make_sinks([Secret("http://127.0.0.1:9/")], "here"))
        self.agents.started = {"m": START}
        self.agents.queued = {"n": START, "o": START}

    def hand_to(self, app: web.Application, settings: Settings | None = None) -> None:
        super().hand_to(app, settings)
        parts: dict[web.AppKey[Any], object] = {
            keys.SCHEDULERS: SimpleNamespace(status=lambda: {"priceTracker": self.status}),
            keys.ACCOUNTS: SimpleNamespace(tally=self.tally),
            keys.PROVIDERS: {"openai": self.provider, "rules": RuleProvider()},
            keys.ALARMS: self.alarms,
        }
        for key, part in parts.items():
            app[key] = part


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    parts = Parts()
    yield parts
    await parts.alarms.close()


@pytest.fixture
async def client(parts: Parts, aiohttp_client: AiohttpClient) -> AppClient:
    async def health(_: web.Request) -> web.Response:
        return web.json_response({})

    app = make_app(metrics.routes(), Route("/health").get(health), context=parts.context, registry=registry)
    parts.hand_to(app)
    app.cleanup_ctx.append(metrics.measure)
    return await aiohttp_client(app)


async def figures(client: AppClient) -> Figures:
    async with client.get("/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        text = await response.text()
    values = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            values[sample.name, tuple(value for _, value in sorted(sample.labels.items()))] = sample.value
    return values


async def test_requests_are_counted_by_procedure_and_status(client: AppClient) -> None:
    for path, body in (("/api/rpc/demo.count", "{}"), ("/api/rpc/demo/count", "{}"), ("/api/rpc/demo.count", "[]")):
        await client.post(path, data=body)
    await client.get("/health")
    seen = await figures(client)
    name = "trader_request_duration_seconds"
    assert seen[f"{name}_count", ("demo.count", "200")] == 2
    assert seen[f"{name}_count", ("demo.count", "400")] == 1
    assert seen[f"{name}_count", ("health", "200")] == 1
    assert seen[f"{name}_bucket", ("+Inf", "demo.count", "200")] == 2
    assert 0 < seen[f"{name}_sum", ("demo.count", "200")] < 2
    steps = [
        value
        for (key, labels), value in seen.items()
        if key == f"{name}_bucket" and labels[1:] == ("demo.count", "200")
    ]
    assert steps == sorted(steps)
    assert (await figures(client))[f"{name}_count", ("metrics", "200")] == 1


async def test_callers_cannot_add_labels(client: AppClient) -> None:
    for number in range(20):
        await client.post(f"/api/rpc/demo.none{number}")
        await client.get(f"/path{number}")
        await client.request("BREW", f"/api/rpc/x/{number}")
    names = {labels[0] for (key, labels) in await figures(client) if key == "trader_request_duration_seconds_count"}
    assert names == {"unknown"}


async def test_metrics_expose_the_counts_of_the_parts(client: AppClient, parts: Parts) -> None:
    for backlog_bytes_max in (1, 1000):
        parts.broadcaster.add(Subscriber(backlog_bytes_max=backlog_bytes_max))
    for _ in range(2):
        parts.broadcaster.send(EventsMessage([NumberedEvent("workflow:step", b"{}", "1")]))
    parts.tally.orders[OrderStatus.FILLED] += 3
    parts.tally.maker_fills, parts.tally.taker_fills, parts.tally.trades = 2, 5, 4
    parts.agents.failures = {"m": Failing(3, "no answer")}
    parts.agents.rests = {"nim key 2": "is out of credit (402)"}
    parts.provider.usage.attempts["rate_limited"] += 1
    parts.provider.usage.input_tokens = 900
    parts.provider.usage.cooldowns["out_of_credit"] += 1
    parts.provider.usage.unmetered_attempts = 2
    parts.alarms.outlets[0].outcomes["failed"] += 3
    parts.alarms.counts["provider"] += 2
    parts.alarms.sources.append(lambda: [Alarm(AlarmCause("provider", "nim"), "is out")])
    parts.alarms.watch([])
    seen = await figures(client)
    expected: Figures = {
        ("trader_stream_subscribers", ("workflow",)): 2,
        ("trader_stream_capacity", ("workflow",)): 3,
        ("trader_stream_drops_total", ("workflow",)): parts.broadcaster.dropped,
        ("trader_scheduler_running", ("priceTracker",)): 1,
        ("trader_scheduler_runs_total", ("priceTracker",)): 7,
        ("trader_scheduler_failures_total", ("priceTracker",)): 2,
        ("trader_scheduler_skips_total", ("priceTracker",)): 1,
        ("trader_scheduler_lag_seconds", ("priceTracker",)): 0.25,
        ("trader_database_connections", ("used",)): 2,
        ("trader_database_connections", ("idle",)): 3,
        ("trader_database_connections_max", ()): 20,
        ("trader_orders_total", ("filled",)): 3,
        ("trader_fills_total", ("maker",)): 2,
        ("trader_fills_total", ("taker",)): 5,
        ("trader_trades_total", ()): 4,
        ("trader_provider_attempts_total", ("rate_limited", "openai")): 1,
        ("trader_provider_tokens_total", ("input", "openai")): 900,
        ("trader_provider_key_cooldowns_total", ("openai", "out_of_credit")): 1,
        ("trader_provider_unmetered_attempts_total", ("openai",)): 2,
        ("trader_provider_out", ("openai",)): 0,
        ("trader_alarms_total", ("provider",)): 3,
        ("trader_alarms_firing", ("provider", "nim")): 1,
        ("trader_notifications_total", ("failed", "json 1")): 3,
        ("trader_notifications_waiting", ("json 1",)): 1,
        ("trader_models_running", ()): 1,
        ("trader_models_waiting", ()): 2,
        ("trader_model_cycles_skipped_total", ("waiting",)): 4,
        ("trader_model_failures", ("m",)): 3,
        ("trader_provider_cooldown", ("nim key 2",)): 1,
    }
    assert {key: seen.get(key) for key in expected} == expected
    assert parts.broadcaster.dropped == 1
    assert seen["process_open_fds", ()] > 0


async def test_large_answers_are_counted_and_logged_once_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    large = rpc.LargeAnswers()
    for size in (1_000_000, 1_000_001, 19_000_000):
        large.note("trading.getPortfolioHistory", size)
    assert large.counts == {"trading.getPortfolioHistory": 2}
    assert [record.getMessage() for record in caplog.records] == [
        "an answer of trading.getPortfolioHistory has 1.0 MB before compression"
    ]


async def test_cached_responses_are_counted_and_reused_while_the_token_stays(client: AppClient, parts: Parts) -> None:
    async def value() -> int:
        async with client.post("/api/rpc/demo.count", data="{}") as response:
            return int((await response.json())["value"])

    assert [await value(), await value()] == [1, 1]
    parts.context.token = 2
    assert [await value(), await value()] == [2, 2]
    parts.context.token = None
    assert [await value(), await value()] == [3, 4]
    seen = await figures(client)
    assert seen["trader_kept_answers_total", ("hit",)] == 2
    assert seen["trader_kept_answers_total", ("miss",)] == 2
    assert seen["trader_kept_answers_bytes", ()] == len(b'{"value":2}')


async def test_open_metrics_is_served_on_request(client: AppClient) -> None:
    async with client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await response.text()).endswith("# EOF\n")


async def test_requests_other_than_calls_are_one_line_each_too(
    client: AppClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "trader.request")
    told = []
    for path in ("/health", "/nowhere", "/api/nowhere"):
        async with client.get(path) as response:
            told.append(
                (response.headers["X-Request-Id"], "health" if path == "/health" else "unknown", response.status)
            )
    lines = [vars(record) for record in caplog.records if record.name == "trader.request"]
    assert [(line["request_id"], line["procedure"], line["status"]) for line in lines] == told


async def test_a_handler_that_raises_is_counted_as_a_failure(aiohttp_client: AiohttpClient) -> None:
    async def broken(_: web.Request) -> web.Response:
        raise RuntimeError("bug")

    app = make_app(Route("/health").get(broken))
    client = await aiohttp_client(app)
    async with client.get("/health") as response:
        assert response.status == 500
    assert counted(app) == {("health", "500"): 1}


async def test_gauges_show_the_condition_of_the_service(client: AppClient, parts: Parts) -> None:
    parts.market.last_update_at = START - timedelta(seconds=90)
    parts.troubles = {"apex-1": "ETH: a position that the books do not know"}
    values = await figures(client)
    expected = {
        "leader": 1, "halts": 0, "disagreements": 1, "market_stale": 0, "market_age_seconds": 90,
        "write_failures_total": 2,
    }  # fmt: skip
    assert {name: values[f"trader_{name}", ()] for name in expected} == expected
    assert values["trader_account_equity", ("apex-1",)] == 10500.25
    assert values["trader_disk_free_bytes", ()] > 0


async def test_metrics_can_be_turned_off(dsn: str) -> None:
    async with composed(dsn, METRICS="off") as (_, client), client.get("/metrics") as response:
        assert (response.status, await response.json()) == (404, {"error": "Not Found"})
