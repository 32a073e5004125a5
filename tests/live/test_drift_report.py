"""The drift of known rows: the figures of the table, and the self-contained page."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
from support.books import make_quote
from support.calls import Call
from support.chromium import is_installed
from support.manual_clock import ManualClock
from support.operated_exchange import make_operations
from support.records import START, add_model, add_trade, id_of
from support.reports import opened_report, report_data, rows_of

from trader.api.procedures.operations import get_activity
from trader.api.schemas.common import Empty
from trader.database.pool import Database
from trader.exchange.domain.matching import totals, walk
from trader.exchange.domain.orders import OrderSide
from trader.live.approvals import Approvals
from trader.live.domain.drift import Drift, ShadowDrift
from trader.live.sql.drift import insert_drift, insert_shadow_drift, select_drift_figures, select_uncompared
from trader.market.domain.markets import MARKETS, SIMULATED_MARKETS, Tick
from trader.market.sources.books import BookModel, Grid
from trader.market.sources.recorder import Recorder
from trader.market.sources.synthetic import SyntheticSource
from trader.settings.settings import Settings

INSERT_FILL = """
INSERT INTO fills (account_id, sequence, run_id, order_id, symbol, side, quantity, price, fee, liquidation_fee, maker,
                   cause, created_at)
VALUES ('apex', $1, $2, $3, $4, $5, $6, $7, 0, 0, false, 'order', $8)
"""

Row = tuple[str, OrderSide, str, str | None]
"""Market, side, quantity at a price of 1000, error in basis points."""


async def write(database: Database, rows: Sequence[Row], *, unsimulated: int = 0) -> None:
    async with database.connection() as conn:
        await add_model(conn, "apex")
        order_id = await add_trade(conn, "apex", START)
        run_id = id_of("run", "apex", 1)
        drifts = []
        for number in range(1, len(rows) + unsimulated + 1):
            symbol, side, quantity, bps = rows[min(number, len(rows)) - 1]
            at = START + timedelta(seconds=number)
            await conn.execute(
                INSERT_FILL, number, run_id, order_id, symbol, side, Decimal(quantity), Decimal(1000), at
            )
            drift = Drift(
                account_id="apex", sequence=number, symbol=symbol, side=side, quantity=Decimal(quantity), maker=False,
                venue_price=Decimal(1000), paper_price=None if bps is None else Decimal(1000),
                drift_bps=None if bps is None else Decimal(bps), quoted_at=at, filled_at=at,
            )  # fmt: skip
            drifts.append(drift)
        await insert_drift(conn, drifts[: len(rows)])


async def test_figures_per_market_side_and_size(database: Database, call: Call, tmp_path: Path) -> None:
    rows: list[Row] = [("BTC", OrderSide.BUY, "0.5", bps) for bps in ("1", "2", "6", "-4")]
    rows += [
        ("BTC", OrderSide.BUY, "5", "10"),
        ("BTC", OrderSide.SELL, "200", "-2.5"),
        ("ETH", OrderSide.BUY, "1", None),
    ]
    await write(database, rows, unsimulated=2)
    made = await call("drift")
    assert made.code == 0, made.err
    lines = made.out.splitlines()
    assert [line.split() for line in lines[1:5]] == [
        ["BTC", "buy", "<", "1k", "<", "0.3", "s", "4", "+1.25", "+1.50", "6.00", "+6.00"],
        ["BTC", "buy", "1k", "to", "10k", "<", "0.3", "s", "1", "+10.00", "+10.00", "10.00", "+10.00"],
        ["BTC", "sell", "≥", "100k", "<", "0.3", "s", "1", "-2.50", "-2.50", "2.50", "-2.50"],
        ["all", "6", "+2.08", "+1.50", "10.00", "+10.00"],
    ]
    assert lines[5] == "1 fills were larger than the visible book: no price on paper"
    assert lines[6] == "2 fills were never simulated (in paper trading none are)"
    assert len(report_data(tmp_path / "drift.html")["sections"]) == 1
    if not is_installed():
        return
    async with opened_report(tmp_path / "drift.html", tmp_path) as tab:
        heads, *shown = await rows_of(tab, "Fills of the venue")
        assert heads == [
            "market",
            "side",
            "size",
            "latency",
            "fills",
            "mean",
            "median",
            "p95",
            "worst",
            "-4.0 to +10.0",
        ]
        assert [row[:9] for row in shown] == [
            ["BTC", "buy", "< 1k", "< 0.3 s", "4", "+1.25", "+1.50", "6.00", "+6.00"],
            ["BTC", "buy", "1k to 10k", "< 0.3 s", "1", "+10.00", "+10.00", "10.00", "+10.00"],
            ["BTC", "sell", "≥ 100k", "< 0.3 s", "1", "-2.50", "-2.50", "2.50", "-2.50"],
            ["all", "", "", "", "6", "+2.08", "+1.50", "10.00", "+10.00"],
        ]
        assert await tab.evaluate("document.querySelectorAll('.interval .range + .value').length") == 4
        assert "1 fills were larger than the visible book" in await tab.evaluate("document.body.innerText")


async def test_sizes_begin_at_their_lower_bound_and_p95_is_by_nearest_rank(database: Database) -> None:
    rows: list[Row] = [("BTC", OrderSide.BUY, "0.99999", str(n)) for n in (*range(1, 20), -40)]
    rows += [("BTC", OrderSide.BUY, quantity, "0") for quantity in ("1", "9.99999", "10", "99.99999", "100")]
    await write(database, rows)
    async with database.connection() as conn:
        figures = await select_drift_figures(conn, START)
        assert await select_drift_figures(conn, START + timedelta(days=1)) == []
        assert await select_uncompared(conn, START) == (0, 0, 0, 0, 0)
    assert [(figure.size, figure.fills) for figure in figures] == [(0, 20), (1, 2), (2, 2), (3, 1), (None, 25)]
    assert figures[0][4:10] == (7.5, 9.5, 19.0, -40.0, -40.0, 18.0)


async def test_latencies_and_shadow_have_rows_of_their_own(database: Database, call: Call) -> None:
    await write(database, [("BTC", OrderSide.BUY, "0.5", bps) for bps in ("1", "2", "3", "4")])
    async with database.connection() as conn:
        for sequence, took_s in enumerate((0.2, 0.3, 2.9, 3), start=1):
            await conn.execute(
                "UPDATE fill_drift SET filled_at = quoted_at + make_interval(secs => $2) WHERE sequence = $1",
                sequence, took_s,
            )  # fmt: skip
        for bps in ("7", None):
            await insert_shadow_drift(
                conn,
                ShadowDrift(
                    account_id="apex", symbol="BTC", side=OrderSide.SELL, quantity=Decimal(1),
                    paper_price=Decimal(1000), drift_bps=None if bps is None else Decimal(bps), later_bps=None,
                    signed="hash", sent_at=START,
                ),
            )  # fmt: skip
        figures = await select_drift_figures(conn, START)
    assert [(each.latency, each.fills) for each in figures] == [(0, 1), (1, 1), (2, 1), (3, 1), (None, 4)]
    made = await call("drift")
    assert "0.00 bp in fees, 0.00 in funding were charged" in made.out
    assert made.out.splitlines()[-1] == "drift.html: 4 fills and 1 orders"


async def test_operators_see_the_drift_of_seven_days(database: Database) -> None:
    await write(database, [("BTC", OrderSide.BUY, "0.5", bps) for bps in ("1", "2", "-4")])
    async with database.connection() as conn:
        await conn.execute("UPDATE fill_drift SET filled_at = quoted_at + interval '1 s'")
        await conn.execute(
            "INSERT INTO shadow_drift (account_id, symbol, side, quantity, paper_price, drift_bps, signed, sent_at) "
            "SELECT 'apex', 'ETH', 'sell', 1, 2000, bps, 'hash', at "
            "FROM (VALUES (7, $1::timestamptz), (9, $1::timestamptz - interval '8 days')) rows (bps, at)",
            START,
        )
    exchange: Any = None  # it is not asked
    clock, settings = ManualClock(START + timedelta(hours=1)), Settings.load({}, None, demo=True)
    operations = make_operations(database, exchange, clock, settings)
    context: Any = SimpleNamespace(clock=clock, operations=operations, approvals=Approvals(database, None, "lighter"))
    found = (await get_activity(context, Empty())).drift
    errors = ["3", "-0.33", "+1.00", "4.00", "-4.00"]
    assert found == [
        ["venue", "BTC", "buy", "< 1k", "1 to 3 s", *errors],
        ["venue", "all", "", "", "", *errors],
        ["shadow", "ETH", "sell", "1k to 10k", "0.3 to 1 s", "1", "+7.00", "+7.00", "7.00", "+7.00"],
        ["shadow", "all", "", "", "", "1", "+7.00", "+7.00", "7.00", "+7.00"],
    ]


async def test_a_report_without_simulated_fills_says_so(database: Database, call: Call, tmp_path: Path) -> None:
    await write(database, [("BTC", OrderSide.BUY, "1", None)])
    made = await call("drift")
    assert made.code == 1
    assert "no simulated venue fill" in made.err
    assert not (tmp_path / "drift.html").exists()


def record_books(folder: Path, spread: str, count: int, symbol: str = "ETH") -> None:
    """Record a constant market with the rules of ETH, at 2,000 and half a spread on both sides, with 60,000 shown."""
    at, half = datetime(2025, 6, 2, 10, tzinfo=UTC), Decimal(spread) / 2
    source = SyntheticSource(0, ("ETH",))
    source.markets = {symbol: msgspec.structs.replace(MARKETS["ETH"], symbol=symbol)}
    recorder = Recorder(folder, source)
    recorder.open()
    for number in range(count):
        quote = make_quote("ETH", [(2000 - half, 30)], [(2000 + half, 30)], at=at + timedelta(seconds=number))
        recorder.record(Tick(quote.at, {symbol: quote}))
    recorder.close()


async def test_recorded_books_are_compared_with_the_model(database: Database, call: Call, tmp_path: Path) -> None:
    record_books(tmp_path / "recording", "4", count=60)
    await write(database, [("BTC", OrderSide.BUY, "1", "2")])
    made = await call("drift", "--recording", "recording")
    assert made.code == 0, made.err
    lines = [line.split() for line in made.out.splitlines()]
    at = lines.index(["market", "side", "size", "latency", "orders", "mean", "median", "p95", "worst"])
    row = SIMULATED_MARKETS["ETH"]
    model = (
        BookModel(Grid(row.rules), row.calm).quote(START, 2000 * 200, 1.0, 1.0).book
    )  # a usual book, without a history
    tried = [(side, notional) for side in OrderSide for notional in (500, 5_000, 50_000)]
    for line, (side, notional) in zip(lines[at + 1 : at + 7], tried, strict=True):
        filled, paid = totals(walk(model, side, Decimal(notional) / 2000))
        dearer = 10_000 * side.direction * (Decimal(2000 + 2 * side.direction) / (paid / filled) - 1)
        assert line[:2] == ["ETH", side.value]
        assert line[-5:] == ["6", *[f"{dearer:+.2f}"] * 2, f"{dearer:.2f}", f"{dearer:+.2f}"]
        assert 5 < dearer < 10, "the model is within a basis point or two of the mid, the recording is 10 away"
    assert lines[at + 7][:2] == ["all", "36"]
    assert made.out.splitlines()[at + 8] == "12 orders were larger than one of the books: no price to compare"
    assert made.out.splitlines()[-1] == "drift.html: 1 fills and 36 orders"
    shown = report_data(tmp_path / "drift.html")["sections"]
    assert [(each["title"], each["figures"][-1]["fills"]) for each in shown] == [
        ("Fills of the venue", 1),
        ("Recorded books", 36),
    ]


async def test_a_recording_is_compared_even_without_fills(database: Database, call: Call, tmp_path: Path) -> None:
    record_books(tmp_path / "recording", "1", count=20)
    await write(database, [("BTC", OrderSide.BUY, "1", None)])
    made = await call("drift", "--recording", "recording")
    assert made.code == 0, made.err
    assert made.out.splitlines()[-1] == "drift.html: 12 orders"
    (tmp_path / "empty").mkdir()
    refused = await call("drift", "--recording", "empty")
    assert refused.code == 1
    assert "empty holds no recording" in refused.err


async def test_a_recorded_market_without_a_model_is_not_compared(
    database: Database, call: Call, tmp_path: Path
) -> None:
    record_books(tmp_path / "recording", "1", count=20, symbol="LTC")
    await write(database, [("BTC", OrderSide.BUY, "1", "2")])
    made = await call("drift", "--recording", "recording")
    assert made.code == 0, made.err
    assert "this build has no market model of LTC: not compared" in made.out
