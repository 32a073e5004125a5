"""Results in the chain: each row that affects a ranking is recorded once, and later changes to it are named."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal

import pytest
from msgspec.structs import replace
from support.records import make_snapshot
from support.trading_floor import Floor, calling, hold, open_floor, opening

from trader.agents.entrants import Entrants
from trader.agents.sql.models import select_models
from trader.agents.verification import verify
from trader.core.variant_id import VariantId
from trader.database.pool import Connection, Database
from trader.exchange.domain.halts import Halt, HaltCause
from trader.exchange.domain.ledger import unopened_account
from trader.exchange.domain.orders import ExitPlan, Order, OrderSide, OrderStatus, OrderType
from trader.exchange.sql.halts import insert_halt, update_halts_lifted
from trader.market.domain.markets import Candle
from trader.market.sql.candles import insert_minutes
from trader.portfolio.audit import audit
from trader.portfolio.domain.baselines import BaselineState, rule_agent
from trader.portfolio.domain.seasons import SeasonRecord
from trader.portfolio.snapshots import PortfolioService
from trader.portfolio.sql.seasons import insert_season_record
from trader.portfolio.sql.snapshots import SavedBaseline, insert_snapshots, upsert_baselines
from trader.record.results import SETTLED_AFTER, record_results

BASELINE = rule_agent(VariantId.APEX)


async def _hour(floor: Floor) -> None:
    """Let an hour pass: positions pay funding, and the equity of accounts and of the baseline is written."""
    await floor.see(after_s=3600)
    now = floor.clock.now()
    await PortfolioService(floor.database, floor.exchange, floor.clock, floor.settings).take_snapshots(now)
    async with floor.database.connection() as conn:
        await insert_minutes(conn, [("BTC", Candle(now.replace(second=0), 94_000, 94_100, 93_900, 94_000, 1))])
        run_id = await conn.fetchval("SELECT run_id FROM baselines")
        await insert_snapshots(conn, [replace(make_snapshot(BASELINE.id, now, "10010"), run_id=run_id)])


async def _record(floor: Floor) -> None:
    assert floor.exchange.term is not None
    await record_results(floor.database, floor.exchange.term, floor.clock.now())


@pytest.fixture
async def season(database: Database) -> AsyncIterator[Floor]:
    """Two models and a baseline: a position that pays funding, a reset, a halt, a missed cycle, hours of equity."""
    async with open_floor(database) as floor:
        await floor.add("ada", "bob")
        floor.provider.scripts = {"ada": [calling(opening()), hold()], "bob": [hold()]}
        await floor.cycle()
        now = floor.clock.now()
        async with database.transaction() as conn:
            await insert_halt(conn, Halt(account_id="bob", cause=HaltCause.OPERATOR, reason="lunch", by="eve", at=now))
            await update_halts_lifted(conn, "bob", "eve")
            state = BaselineState(account=unopened_account(BASELINE.id, Decimal(10_000), "USDT", now))
            await upsert_baselines(conn, [SavedBaseline(BASELINE, state, now)])
            await insert_season_record(conn, SeasonRecord(step="amended", season=1, number=0, at=now, reason="rain"))
            models = await select_models(conn)
        await Entrants(database, floor.settings).count_missed(models, now)
        for _ in range(2):
            await _hour(floor)
            await _record(floor)
        await floor.exchange.reset_account("bob")
        await _hour(floor)
        await floor.see(after_s=4200)
        await _record(floor)
        yield floor


async def _found(database: Database) -> list[str]:
    return [finding.text for finding in (await verify(database, [])).findings]


async def test_results_are_recorded_once_and_verified(season: Floor) -> None:
    report = await verify(season.database, [])
    assert (list(report.findings), report.has_results, report.waiting) == ([], True, 0)
    await _record(season)
    again = await verify(season.database, [])
    assert (again.records, again.rows) == (report.records, report.rows), "nothing is new, so nothing is recorded"
    async with season.database.connection() as conn:
        for table, count in (("fills", 1), ("funding_payments", 4), ("portfolio_hourly", 9), ("runs", 3)):
            rows = await conn.fetchval(f"SELECT count(*) FROM {table}")
            recorded = await conn.fetchval(
                "SELECT count(DISTINCT r->>'account_id' || coalesce(r->>'sequence', r->>'hour', r->>'number')) "
                "FROM chain_links, jsonb_array_elements(record::jsonb #> ARRAY['rows', $1::text]) r",
                table,
            )
            assert (rows >= count, rows - recorded) == (True, 0), table


EDITS: dict[str, tuple[str, str]] = {
    "hourly equity raised": (
        "UPDATE portfolio_hourly SET last = last * 1.2 WHERE account_id = 'ada'",
        "portfolio_hourly ada, 2",
    ),
    "a baseline lowered": (
        f"UPDATE portfolio_hourly SET last = last * 0.8 WHERE account_id = '{BASELINE.id}'",
        f"portfolio_hourly {BASELINE.id}, 2",
    ),
    "an hour removed": ("DELETE FROM portfolio_hourly WHERE account_id = 'bob'", "is gone"),
    "a baseline's capital": ("UPDATE baselines SET initial_capital = 12000", "initial_capital is 12000"),
    "when an entrant began": (
        "UPDATE entrants SET began_at = began_at + interval '1 day' WHERE model_id = 'ada'",
        "entrants ada, 1: began_at is",
    ),
    "cycles missed": ("UPDATE invocation_counts SET missed = 0 WHERE model_id = 'ada'", "missed is 0, and was"),
    "more cycles missed": ("UPDATE invocation_counts SET missed = 9 WHERE model_id = 'bob'", "missed is 9, and was"),
    "cycles decided": (
        "UPDATE invocation_counts SET finished = finished + 5 WHERE model_id = 'ada'",
        "invocation_counts ada, 1, 1: finished is 6, and 1 by the invocations",
    ),
    "cycles failed": ("UPDATE invocation_counts SET failed = 1 WHERE model_id = 'ada'", "failed is 1, and 0"),
    "a fill's price": ("UPDATE fills SET price = price * 0.9", "price is 84600.09, and was recorded as 94000.1"),
    "a fill's fee": ("UPDATE fills SET fee = 0", "fee is 0, and was recorded as"),
    "funding": ("UPDATE funding_payments SET amount = 100", "amount is 100, and was recorded as"),
    "funding removed": ("DELETE FROM funding_payments", "is gone"),
    "a run's capital": (
        "UPDATE runs SET initial_capital = 9000 WHERE account_id = 'ada'",
        "runs ada, 1: initial_capital",
    ),
    "a run's start": (
        "UPDATE runs SET started_at = started_at - interval '1 day' WHERE account_id = 'ada'",
        "runs ada, 1: started_at",
    ),
    "a reset": (
        "UPDATE runs SET ended_at = ended_at - interval '1 minute' WHERE account_id = 'bob'",
        "runs bob, 1: ended_at",
    ),
    "a halt": ("UPDATE halts SET reason = 'rest'", "reason is rest, and was recorded as lunch"),
    "a halt removed": ("DELETE FROM halts", "halts 1 is gone"),
    "a halt lifted": ("UPDATE halts SET lifted_by = 'mallory'", "lifted_by is mallory"),
    "an amendment": (
        "UPDATE season_records SET record = '{}', digest = sha256('{}')",
        "season_records 1, 0: record is {}",
    ),
    "an amendment removed": ("DELETE FROM season_records", "season_records 1, 0 is gone"),
    "a record": (
        "UPDATE chain_links SET record = replace(record, 'lunch', 'rest') WHERE kind = 'halts'",
        "the record halts was changed",
    ),
    "a model's name": (
        "UPDATE models SET name = 'Bob' WHERE id = 'ada'",
        "models ada: name is Bob, and was recorded as",
    ),
    "a provider's name": (
        "UPDATE models SET router_model_name = 'x' WHERE id = 'ada'",
        "models ada: router_model_name is x",
    ),
    "a model's cut-off and owner": (
        """UPDATE models SET configuration = '{"training_cutoff": "2020-01-01", "owner": "eve"}' WHERE id = 'ada'""",
        "models ada: training_cutoff is 2020-01-01",
    ),
    "a model inserted": (
        "INSERT INTO models (id, name, variant, provider, router_model_name, created_at) "
        "VALUES ('eve', 'Eve', 'Apex', 'p', 'r', now())",
        "models eve is in no record",
    ),
    "what an agent declared": (
        """UPDATE entrants SET configuration = '{"external": {"version": "9"}}' WHERE model_id = 'ada'""",
        'declared is {"version": "9"}',
    ),
    "an hour of the market": ("UPDATE candles SET high = high * 2 WHERE minutes = 60", "high is 188200.0"),
    "an hour of the market removed": ("DELETE FROM candles", "candles BTC, 2"),
    "a mark of the batches": ("UPDATE chain_marks SET sequence = 0; DELETE FROM fills", "is gone"),
}


class _Uncommitted:
    """A database as seen by an uncommitted transaction."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[Connection]:
        yield self._conn


async def test_every_edit_is_named(season: Floor) -> None:
    """One service for all edits: the transaction that made an edit is rolled back before the next one."""
    unnamed = {}
    for name, (statement, expected) in EDITS.items():
        async with season.database.connection() as conn:
            transaction = conn.transaction()
            await transaction.start()
            await conn.execute(
                "SET LOCAL session_replication_role = replica"
            )  # as a superuser, bypassing every trigger
            await conn.execute(statement)
            texts = [finding.text for finding in (await verify(_Uncommitted(conn), [])).findings]  # type: ignore[arg-type]
            await transaction.rollback()
        if not any(expected in text for text in texts):
            unnamed[name] = texts
    assert unnamed == {}
    assert await _found(season.database) == []


AUDITED: dict[str, tuple[str, str]] = {
    "a fill's price": ("UPDATE fills SET price = price * 0.99", "average price was reported as 94000.1, is 93060.099"),
    "a fill's fee": ("UPDATE fills SET fee = fee / 2", "fees was reported as"),
    "a fill's quantity": ("UPDATE fills SET quantity = quantity / 2", "filled quantity was reported as 0.1, is 0.05"),
    "an answer that was told": (
        "UPDATE tool_calls SET metadata = jsonb_set(metadata, '{results,0,fees}', '\"1\"') "
        "WHERE type = 'CREATE_POSITION'",
        "fees was reported as 1, is",
    ),
    "equity of a position raised": (
        "UPDATE portfolio_hourly SET last = last * 1.2 WHERE account_id = 'ada'",
        "account ada, run 1: equity at",
    ),
    "equity without a position": (
        "UPDATE portfolio_hourly SET last = last + 0.01 WHERE account_id = 'bob'",
        "account bob, run 2: equity at 2025",
    ),
    "a baseline lowered": (
        f"UPDATE portfolio_hourly SET last = last * 0.8 WHERE account_id = '{BASELINE.id}'",
        "-19.92 % from 10000; the market and its leverage allow",
    ),
    "an hour of a baseline": (
        f"UPDATE portfolio_hourly SET last = last * 1.2 WHERE account_id = '{BASELINE.id}' "
        "AND hour = (SELECT max(hour) FROM portfolio_hourly)",
        "+20.00 % from 10010",
    ),
}


async def test_the_audit_compares_fills_with_answers_and_equity_with_books_and_marks(season: Floor) -> None:
    report = await audit(season.database)
    assert (report.problems, report.hours) == ([], 9)
    unnamed = {}
    for name, (statement, expected) in AUDITED.items():
        async with season.database.connection() as conn:
            transaction = conn.transaction()
            await transaction.start()
            await conn.execute("SET LOCAL session_replication_role = replica")
            await conn.execute(statement)
            problems = (await audit(_Uncommitted(conn))).problems  # type: ignore[arg-type]
            await transaction.rollback()
        if not any(expected in problem for problem in problems):
            unnamed[name] = problems
    assert unnamed == {}


async def test_the_audit_waits_for_the_minutes_of_an_hour(season: Floor) -> None:
    async with season.database.connection() as conn:
        transaction = conn.transaction()
        await transaction.start()
        await conn.execute("SET LOCAL session_replication_role = replica")
        await conn.execute(AUDITED["an hour of a baseline"][0])
        await conn.execute("DELETE FROM candles WHERE minutes = 1 AND open_time = (SELECT max(open_time) FROM candles)")
        assert (await audit(_Uncommitted(conn))).is_clean  # type: ignore[arg-type]
        await transaction.rollback()


async def test_an_account_removed_by_an_operator_is_not_a_finding(season: Floor) -> None:
    limit = Order(
        account_id="zoe", symbol="BTC", side=OrderSide.BUY, type=OrderType.LIMIT, quantity=Decimal("0.01"),
        limit_price=Decimal(80_000), leverage=Decimal(1),
    )  # fmt: skip
    for _ in range(2):
        assert (await season.exchange.place_orders(limit))[0].status is OrderStatus.RESTING
        await _hour(season)
        await season.see(after_s=4200)
        await _record(season)
        assert await season.exchange.remove_account("zoe")
        assert await _found(season.database) == []
    async with season.database.connection() as conn:
        await conn.execute("DELETE FROM portfolio_hourly WHERE account_id = 'ada'")
    assert any("portfolio_hourly ada" in text for text in await _found(season.database))


async def test_manual_trades_and_the_plan_of_a_closed_position_stay_in_the_record(season: Floor) -> None:
    buy = Order(
        account_id="bob", symbol="BTC", side=OrderSide.BUY, type=OrderType.MARKET, quantity=Decimal("0.01"),
        leverage=Decimal(1), exit_plan=ExitPlan(stop=Decimal(80_000)), manual=True,
    )  # fmt: skip
    for order in (buy, replace(buy, side=OrderSide.SELL, exit_plan=None, reduce_only=True)):
        assert (await season.exchange.place_orders(order))[0].status is OrderStatus.FILLED
    await _record(season)
    assert await _found(season.database) == []
    for statement, expected in (
        ("UPDATE orders SET stop = NULL WHERE account_id = 'bob'", "stop is None, and was recorded as 80000"),
        ("UPDATE order_requests SET answer = answer - 'manual'", "manual is False, and was recorded as True"),
    ):
        async with season.database.connection() as conn:
            await conn.execute(statement)
        assert any(expected in text for text in await _found(season.database)), statement


async def test_an_hour_is_recorded_only_once_it_has_been_over_for_a_while(season: Floor) -> None:
    await _hour(season)
    begun = season.clock.now().replace(minute=0, second=0, microsecond=0)
    assert season.exchange.term is not None
    recorded = []
    for early in (timedelta(milliseconds=1), timedelta(0)):
        settled = begun + timedelta(hours=1) + SETTLED_AFTER
        await record_results(season.database, season.exchange.term, settled - early)
        async with season.database.connection() as conn:
            assert await conn.fetchval("SELECT max(hour) FROM portfolio_hourly") == begun
            query = "SELECT max(hour) FROM chain_marks WHERE account_id NOT LIKE 'candles/%'"
            recorded.append(await conn.fetchval(query) == begun)
    assert recorded == [False, True]


async def test_a_clock_set_back_adds_nothing_to_an_hour_that_is_recorded(season: Floor) -> None:
    query = "SELECT account_id, hour, total, count, last FROM portfolio_hourly ORDER BY account_id, hour"
    async with season.database.connection() as conn:
        recorded = await conn.fetch(query)
        count = await conn.fetchval("SELECT count(*) FROM portfolio_snapshots")
    season.clock.set_by(-timedelta(hours=2))
    for _ in range(2):
        await season.see(after_s=60)
        now = season.clock.now()
        portfolio = PortfolioService(season.database, season.exchange, season.clock, season.settings)
        await portfolio.take_snapshots(now)
    season.clock.set_by(timedelta(hours=3))
    await _record(season)
    assert not (await verify(season.database, [])).findings
    async with season.database.connection() as conn:
        hours = await conn.fetch(query)
        assert [row for row in hours if row in recorded] == recorded
        assert await conn.fetchval("SELECT count(*) FROM portfolio_snapshots") == count + 4, "nothing is left out"
