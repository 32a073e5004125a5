"""The procedures for the records, on a small season of real rows."""

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from support.manual_clock import ManualClock
from support.records import (
    HOUR,
    MINUTE,
    START,
    FakeExchange,
    add_invocation,
    add_model,
    add_run,
    add_trade,
    make_account,
    make_run,
    make_snapshot,
)
from support.scripted import make_settings

from trader.agents.budgets import Budgets
from trader.agents.domain.invocations import Step
from trader.agents.sql import invocations as agents_store
from trader.api import rpc
from trader.api.envelope import BodyStyle
from trader.api.registry import REGISTRY, load_procedures
from trader.core.variant_id import VariantId
from trader.database.partitions import ensure_partitions
from trader.database.pool import Database
from trader.market.candles import Candles
from trader.market.feed import MarketFeed
from trader.market.sources.synthetic import SyntheticSource
from trader.operations.access import ANYBODY
from trader.portfolio.analytics import Analytics
from trader.portfolio.evidence import Evidence
from trader.portfolio.run_statistics import CurrentRuns
from trader.portfolio.snapshots import PortfolioService
from trader.portfolio.sql import snapshots as portfolio_store
from trader.settings.settings import Settings

Call = Callable[..., Awaitable[Any]]
CallRaw = Callable[..., Awaitable[bytes]]

NOW = START + timedelta(days=2, hours=5, minutes=30)


@dataclass
class RecordsAgents:
    """The part of the agents that these procedures use."""

    budgets: Budgets


@dataclass
class RecordsContext:
    """The part of the context that these procedures use."""

    settings: Settings
    clock: ManualClock
    portfolio: PortfolioService
    analytics: Analytics
    evidence: Evidence
    agents: RecordsAgents
    exchange: FakeExchange
    market: MarketFeed
    candles: Candles


@pytest.fixture
async def context(database: Database) -> RecordsContext:
    exchange: Any = FakeExchange(marks={"BTC": "50000"})
    clock, settings = ManualClock(START), make_settings()
    await clock.advance(NOW - START)
    market = MarketFeed(SyntheticSource(0, ("BTC",)), clock)
    return RecordsContext(
        settings=settings,
        clock=clock,
        portfolio=PortfolioService(database, exchange, clock, settings),
        analytics=Analytics(database, exchange, clock, CurrentRuns(database)),
        evidence=Evidence(database, CurrentRuns(database), clock),
        agents=RecordsAgents(Budgets(database, None, 60_000, 8_192)),
        exchange=exchange,
        market=market,
        candles=Candles(database, market, settings),
    )


@pytest.fixture
def dispatcher(context: RecordsContext) -> rpc.Dispatcher:
    load_procedures()
    return rpc.Dispatcher(REGISTRY, context)


@pytest.fixture
def call(dispatcher: rpc.Dispatcher) -> Call:
    """Call a procedure by name with an input object. Return its output, or its status and the paths of its issues."""

    async def call_procedure(name: str, **request: object) -> Any:
        target = rpc.Target(REGISTRY.procedures[name], BodyStyle.PLAIN)
        answer = await dispatcher.call(target, json.dumps(request).encode(), ANYBODY, "test")
        body = json.loads(answer.body, parse_float=Decimal)
        return body if answer.status == 200 else (answer.status, [issue["path"] for issue in body["issues"]])

    return call_procedure


@pytest.fixture
def call_raw(dispatcher: rpc.Dispatcher) -> CallRaw:
    """The same, with the body as sent on the wire."""

    async def call_procedure(name: str, **request: object) -> bytes:
        target = rpc.Target(REGISTRY.procedures[name], BodyStyle.PLAIN)
        answer = await dispatcher.call(target, json.dumps(request).encode(), ANYBODY, "test")
        assert answer.status == 200
        return answer.body

    return call_procedure


@pytest.fixture
async def season(database: Database, context: RecordsContext) -> None:
    """Two models and a manual account with trades, snapshots and invocations."""
    async with database.connection() as conn:
        await ensure_partitions(conn, START)
        await add_model(conn, "ax", VariantId.APEX)
        await add_model(conn, "so", VariantId.SOVEREIGN, capital="5000")
        await add_run(conn, "manual", make_run("manual"))
        await add_trade(
            conn, "ax", START + 26 * HOUR + 5 * MINUTE, gross="20.5", fees="0.5", funding="-0.25", leverage=4,
            confidence=80, held=26 * HOUR + 5 * MINUTE + timedelta(seconds=59),
        )  # fmt: skip
        await add_trade(conn, "ax", START + 3 * HOUR, gross="-10", side="SHORT")
        await add_trade(conn, "manual", START + 4 * HOUR, leverage=2)
        hours = [make_snapshot("ax", START + hour * HOUR, str(10_000 + hour)) for hour in range(50)]
        await portfolio_store.insert_snapshots(conn, [*hours, make_snapshot("so", START + HOUR, "5000.5")])
        failed = await add_invocation(conn, "ax", START + HOUR, "failed", calls=("failed",))
        await add_invocation(conn, "ax", START + 2 * HOUR)
        for number in (1, 2):
            await agents_store.insert_step(conn, _step(failed, number))
    context.exchange.put(make_account("ax", realized=Decimal("18.75")))
    context.exchange.put(make_account("so", "5000"))


def _step(invocation_id: Any, number: int) -> Step:
    return Step(
        invocation_id=invocation_id,
        number=number,
        provider="rules",
        key_number=None,
        model="m",
        tool_names=["holding"],
        input_tokens=10 * number,
        output_tokens=number,
        cost_usd=None,
        duration_ms=5,
        created_at=START + number * MINUTE,
    )
