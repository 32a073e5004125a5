"""Rows of models and invocations: round trips, closed invocations that stay closed, filters and order of lists."""

import asyncio
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import permutations
from typing import Any
from uuid import UUID, uuid5

import msgspec
import pytest
from support.tables import SELECT_IS_WAITING
from support.waiting import until

from trader.agents.domain.invocations import Invocation, Step, ToolCall
from trader.agents.domain.models import Model
from trader.agents.domain.observation import LastFill, latest_first
from trader.agents.sql.agent_view import (
    select_lowest_equity,
    select_run_past,
)
from trader.agents.sql.invocations import (
    insert_invocation,
    insert_step,
    insert_tool_call,
    select_invocations,
    select_steps,
    select_tool_calls,
    update_interrupted,
    update_invocation,
)
from trader.agents.sql.models import select_models, upsert_model
from trader.core.variant_id import VariantId
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database, Page
from trader.exchange.domain.orders import Side
from trader.record.domain.chain import NO_PAYLOAD
from trader.record.sql.chain import insert_link

AT = datetime(2025, 1, 2, 12, tzinfo=UTC)
SPACE = UUID("00000000-0000-4000-8000-000000000000")
ADA = Model(
    id="ada", name="Ada", variant=VariantId.APEX, provider="openai", router_model_name="gpt", created_at=AT,
    logo="a.png",
)  # fmt: skip
BOB = Model(
    id="bob", name="Bob", variant=VariantId.SOVEREIGN, provider="nim", router_model_name="llama",
    created_at=AT - timedelta(days=1), active=False,
)  # fmt: skip


def running(model: Model, minute: int) -> Invocation:
    at = AT + timedelta(minutes=minute)
    return Invocation(id=uuid5(SPACE, f"{model.id}{minute}"), model_id=model.id, status="running", started_at=at)


def ended(invocation: Invocation, **changes: Any) -> Invocation:
    fields = {"status": "completed", "finished_at": invocation.started_at + timedelta(seconds=5)} | changes
    return msgspec.structs.replace(invocation, **fields)


async def add_models(conn: Connection) -> None:
    for model in (ADA, BOB):
        await upsert_model(conn, model)


async def test_models_are_listed_oldest_first(database: Database) -> None:
    async with database.connection() as conn:
        await add_models(conn)
        assert await select_models(conn) == [BOB, ADA]
        changed = msgspec.structs.replace(ADA, name="Ada L.", active=False, created_at=AT + timedelta(days=9))
        await upsert_model(conn, changed)
        assert (await select_models(conn))[1] == msgspec.structs.replace(changed, created_at=AT)


async def test_an_invocation_from_start_to_end(database: Database) -> None:
    run = running(ADA, 0)
    async with database.connection() as conn:
        await add_models(conn)
        await insert_invocation(conn, run)
        assert await select_invocations(conn, Page(10)) == []
        await update_invocation(conn, msgspec.structs.replace(run, step_count=1, input_tokens=5))
        closed = ended(
            run, status="failed", failure_reason="why", response="words", step_count=2, input_tokens=10,
            output_tokens=20, cost_usd=Decimal("0.0025"),
        )  # fmt: skip
        await update_invocation(conn, closed)
        assert await select_invocations(conn, Page(10)) == [closed]
        await update_invocation(conn, ended(run))
        assert await select_invocations(conn, Page(10)) == [closed], "what is closed stays as it is"


async def test_closing_interrupted_invocations_never_deadlocks_with_a_closing_one(database: Database) -> None:
    """A transaction that closes an invocation of the same model has appended it to the chain, and then counts it."""
    async with database.connection() as conn:
        await add_models(conn)
        for minute in (0, 1):
            await insert_invocation(conn, running(ADA, minute))
        await update_invocation(conn, ended(running(ADA, 0)))
    async with database.connection() as waiting:
        pid = await waiting.fetchval("SELECT pg_backend_pid()")
        async with database.connection() as watching, database.transaction() as closing:
            await insert_link(closing, running(ADA, 0).id, NO_PAYLOAD, bytes(32))
            interrupted = asyncio.create_task(update_interrupted(waiting, "interrupted", AT))
            await until(lambda: watching.fetchval(SELECT_IS_WAITING, pid))
            await insert_invocation(closing, running(ADA, 2))
            await update_invocation(closing, ended(running(ADA, 2)))
        assert await interrupted == [(running(ADA, 1).id, "ada")]


async def test_steps_and_calls_are_kept_once_and_in_order(database: Database) -> None:
    run = running(ADA, 0)
    steps = [
        Step(
            invocation_id=run.id, number=number, provider="openai", key_number=2, model="gpt", tool_names=["holding"],
            input_tokens=1, output_tokens=2, cost_usd=None, duration_ms=30, created_at=AT,
        )
        for number in (1, 2)
    ]  # fmt: skip
    calls = [
        ToolCall(
            id=uuid5(run.id, str(number)), invocation_id=run.id, number=number, type="HOLDING", status="ok",
            metadata={"raw": {"name": "holding", "arguments": "{}"}, "decisions": [], "results": [{"n": number}]},
            created_at=AT,
        )
        for number in (1, 2)
    ]  # fmt: skip
    async with database.connection() as conn:
        await add_models(conn)
        await insert_invocation(conn, run)
        for _ in range(2):
            for step in reversed(steps):
                await insert_step(conn, step)
            for call in reversed(calls):
                await insert_tool_call(conn, call)
        assert await select_steps(conn, [run.id]) == {run.id: steps}
        assert await select_tool_calls(conn, [run.id, SPACE]) == {run.id: calls}


RUN = uuid5(SPACE, "run")
OLD_RUN = uuid5(SPACE, "old run")


@pytest.fixture
async def traded(database: Database) -> Database:
    """An account with a run of three trades and an open position, and an earlier run with one trade."""
    async with database.connection() as conn:
        await conn.execute("INSERT INTO accounts (id, created_at, changed_at) VALUES ('ada', $1, $1)", AT)
        for run_id, number, end in ((OLD_RUN, 1, AT), (RUN, 2, None)):
            await conn.execute(
                "INSERT INTO runs (id, account_id, number, initial_capital, quote_currency, started_at, ended_at) "
                "VALUES ($1, 'ada', $2, 1000, 'USDT', $3, $4)",
                run_id, number, AT - timedelta(days=3 - number), end,
            )  # fmt: skip
        await add_trade(conn, OLD_RUN, "BTC", "LONG", "100", minute=0)
        await add_trade(conn, RUN, "BTC", "LONG", "30", minute=1)
        await add_trade(conn, RUN, "ETH", "SHORT", "-10", minute=2)
        await add_trade(conn, RUN, "SOL", "LONG", "0", minute=3)
        await add_trade(conn, RUN, "BTC", "SHORT", None, minute=4)
    return database


async def add_trade(conn: Connection, run_id: UUID, symbol: str, side: str, pnl: str | None, minute: int) -> None:
    """A trade of 2 units at 50 that gained `pnl` (None: it is still open), and its fills."""
    order_id, at = uuid5(run_id, str(minute)), AT + timedelta(minutes=minute)
    gross = None if pnl is None else Decimal(pnl)
    left = None if gross is None else 100 + (gross if side == "LONG" else -gross)
    await conn.execute(
        """INSERT INTO orders (id, account_id, run_id, symbol, side, status, quantity, entry_notional, margin,
           leveraged, exit_notional, gross_pnl, fees, funding, net_pnl, close_reason, opened_at, funded_until,
           closed_at) VALUES ($1, 'ada', $2, $3, $4, $5, 2, 100, 20, true, $6, $7, 0, 0, $7, $8, $9, $9, $10)""",
        order_id, run_id, symbol, side, "OPEN" if pnl is None else "CLOSED", left, gross,
        None if pnl is None else "order", at, None if pnl is None else at + timedelta(seconds=30),
    )  # fmt: skip
    opens, closes = ("buy", "sell") if side == "LONG" else ("sell", "buy")
    fills = [(opens, at, "order")] + ([] if pnl is None else [(closes, at + timedelta(seconds=30), "order")])
    for number, (fill_side, filled_at, cause) in enumerate(fills):
        await conn.execute(
            """INSERT INTO fills (account_id, sequence, run_id, order_id, symbol, side, quantity, price, fee,
               liquidation_fee, maker, cause, created_at)
               VALUES ('ada', $1, $2, $3, $4, $5, 2, 50, 0, 0, false, $6, $7)""",
            minute * 10 + number, run_id, order_id, symbol, fill_side, cause, filled_at,
        )  # fmt: skip


async def test_trades_and_statistics_cover_only_the_run(traded: Database) -> None:
    async with traded.connection() as conn:
        past = (await select_run_past(conn, "ada", RUN, 2, []))[1]
        trades, stats = past.trades, past.stats
        assert [(trade.symbol, trade.net_pnl) for trade in trades] == [("SOL", Decimal(0)), ("ETH", Decimal(-10))]
        assert (trades[1].entry_price, trades[1].exit_price) == (Decimal(50), Decimal(55))
        assert (stats.trade_count, stats.net_pnl) == (3, Decimal(20))
        assert (stats.average_win, stats.average_loss) == (Decimal(30), Decimal(10))
        assert stats.win_rate_percent == pytest.approx(100 / 3)
        assert stats.expectancy is not None
        assert float(stats.expectancy) == pytest.approx(20 / 3)
        empty = (await select_run_past(conn, "ada", SPACE, 2, []))[1].stats
        assert (empty.trade_count, empty.win_rate_percent, empty.average_win, empty.net_pnl) == (
            0,
            None,
            None,
            Decimal(0),
        )


async def test_trades_of_one_moment_are_in_the_order_of_a_backtest(traded: Database) -> None:
    async with traded.connection() as conn:
        await conn.execute("UPDATE orders SET opened_at = $1, closed_at = $1 WHERE status = 'CLOSED'", AT)
        trades = (await select_run_past(conn, "ada", RUN, 3, []))[1].trades
        assert [trade.symbol for trade in trades] == ["BTC", "ETH", "SOL"]
        assert {latest_first(each) for each in permutations(trades)} == {trades}
        await conn.execute("UPDATE orders SET symbol = 'ETH' WHERE symbol = 'SOL'")
        trades = (await select_run_past(conn, "ada", RUN, 3, []))[1].trades
        assert [trade.net_pnl for trade in trades] == [30, -10, 0]
        assert {latest_first(each) for each in permutations(trades)} == {trades}


async def test_last_actions(traded: Database) -> None:
    async with traded.connection() as conn:
        actions = (await select_run_past(conn, "ada", RUN, 2, ["BTC", "ETH", "SOL", "XRP"]))[1].last_fills
        assert actions == {
            "BTC": LastFill(Side.SHORT, False, AT + timedelta(minutes=4)),
            "ETH": LastFill(Side.SHORT, True, AT + timedelta(minutes=2, seconds=30)),
            "SOL": LastFill(Side.LONG, True, AT + timedelta(minutes=3, seconds=30)),
        }
        shuffled = (await select_run_past(conn, "ada", RUN, 2, ["XRP", "SOL", "BTC", "ETH"]))[1].last_fills
        assert list(shuffled) == list(actions) == ["BTC", "ETH", "SOL"]


async def test_equity_of_the_run(traded: Database) -> None:
    async with traded.connection() as conn:
        await ensure_partitions(conn, AT)
        for hour, run_id, last in ((0, OLD_RUN, 900), (1, RUN, 1000), (2, RUN, 1010)):
            await conn.execute(
                "INSERT INTO portfolio_hourly VALUES ('ada', $1, $2, $3, 1, $3, $1)",
                AT + timedelta(hours=hour), run_id, Decimal(last),
            )  # fmt: skip
        for minute, run_id, worth in ((0, OLD_RUN, 1), (1, RUN, 5), (2, RUN, 7), (3, RUN, 6)):
            await conn.execute(
                "INSERT INTO portfolio_snapshots VALUES ('ada', $1, $2, $2, 0, $3)",
                run_id, Decimal(worth), AT + timedelta(minutes=minute),
            )  # fmt: skip
        assert (await select_run_past(conn, "ada", RUN, 2, []))[0] == [
            (AT + timedelta(hours=1), Decimal(1000)),
            (AT + timedelta(hours=2), Decimal(1010)),
        ]
        assert await select_lowest_equity(conn, "ada", RUN, AT) == 5
        assert await select_lowest_equity(conn, "ada", RUN, AT + timedelta(minutes=2)) == 6
        assert await select_lowest_equity(conn, "ada", RUN, AT + timedelta(hours=1)) is None
