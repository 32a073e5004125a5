"""The prompt: figures in few digits, tables that grow at their end, and what changes every minute last."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rs_bpe.bpe import openai

from trader.clock import floor_time
from trader.domain.agents.prompt import (
    GLOSSARY,
    ROWS_ADDED_MAX,
    ROWS_MIN,
    cadence_text,
    opening_messages,
    rules_text,
    view_text,
)
from trader.domain.agents.tools import TOOL_SCHEMAS
from trader.domain.agents.view import (
    LastAction,
    ObservedAccount,
    ObservedMarket,
    ObservedOrder,
    ObservedPosition,
    ObservedStats,
    ObservedTrade,
    Reason,
    Supplementary,
    VariantLimits,
    View,
)
from trader.domain.exchange.orders import ExitPlan, OrderSide, Side
from trader.domain.market.indicators import Indicators
from trader.domain.market.markets import INTERVALS, Candle, Interval
from trader.domain.models import VariantId
from trader.variants import VARIANTS

NOW = datetime(2025, 1, 2, 12, 0, 0, 250_000, tzinfo=UTC)
D = Decimal

ACCOUNT = ObservedAccount(
    initial_capital=D("1E+4"), equity=D("10012.3456789012345678"), cash=D(10_000), available_cash=D("9012.5"),
    margin=D(1_000), exposure=D(9_400), day_opening_equity=D("1.0E+4"), peak_equity=D(10_100),
    drawdown_percent=D("0.87"), day_loss_percent=D(0), taker_fee_rate=D("0.0005"),
)  # fmt: skip
POSITION = ObservedPosition(
    symbol="BTC", side=Side.LONG, quantity=D("0.10000"), entry_price=D(94_000), mark=D("94100.50"),
    notional=D("9410.05"), margin=D(940), leverage=D(10), unrealized=D("10.05"), fees=D("4.7"), funding=D("-0.0118"),
    risk=D(100), liquidation_price=None, exit_plan=ExitPlan(stop=D(93_000), time_exit=NOW), confidence=D(55),
    opened_at=NOW,
)  # fmt: skip
TRADE = ObservedTrade(
    symbol="ETH", side=Side.SHORT, quantity=D(1), entry_price=D(3_300), exit_price=D(3_200), net_pnl=D("96.75"),
    fees=D("3.25"), funding=D(0), close_reason="target", confidence=None, opened_at=NOW, closed_at=NOW,
)  # fmt: skip
MARKET = ObservedMarket(
    symbol="BTC", quoted_at=NOW, stale=False, price=D("94100.50"), bid=D(94_100), ask=D(94_101), spread=D(1),
    funding_rate=D("0.0000125"), tick=D("0.1"), lot=D("0.00001"), min_notional=D(10), leverage_max=40,
    candles={"15m": (Candle(NOW, 94_000.123456789, 1.0, 2.0, 3.0, 0.000012345678912),)},
    indicators={"15m": Indicators(close=94_100.5)},
    last_action=LastAction(action="createPosition", side=Side.LONG, cycles_ago=2),
)  # fmt: skip
ORDER = ObservedOrder(
    symbol="BTC", side=OrderSide.BUY, quantity=D(1), remaining=D(1), limit_price=D(93_500), reduce_only=False,
    created_at=NOW,
)  # fmt: skip
SUPPLEMENTARY = Supplementary(source="taapi.io", venue="binance", interval="1h", fetched_at=NOW)
VIEW = View(
    at=NOW, account=ACCOUNT, positions=(POSITION,), trades=(TRADE,), stats=ObservedStats(trade_count=1),
    markets={"BTC": MARKET},
)  # fmt: skip


def shown(view: View = VIEW) -> tuple[str, dict[str, Any]]:
    text = opening_messages("Be calm.", VariantLimits(leverage_max=7), view)[1]["content"]
    return text, msgspec.json.decode(text)


def test_amounts_are_in_plain_digits_and_eight_of_them() -> None:
    text, data = shown()
    assert '"initialCapital":10000,' in text
    assert '"equity":10012.346,' in text
    assert '"fundingRate":0.0000125' in text
    assert '"quantity":0.1,' in text
    assert "E+" not in text
    assert "E-" not in text
    assert data["positions"][0]["exitPlan"]["stop"] == 93_000
    assert data["positions"][0]["funding"] == -0.0118
    assert data["now"]["BTC"]["lastAction"] == {"action": "createPosition", "side": "LONG", "cyclesAgo": 2}


def test_candles_and_trades_are_tables_with_minutes() -> None:
    _, data = shown()
    minute = 28_930_320  # of 2025-01-02T12:00Z
    assert data["minute"] == minute
    assert data["15m"]["candles"] == [["minute", "BTC"], [minute, [94_000.1, 1, 2, 3, 0.0000123]]]
    assert data["15m"]["indicators"]["columns"] == ["BTC"]
    assert data["15m"]["indicators"]["close"] == [94_100.5]
    assert data["15m"]["indicators"]["rsi"] == [None]
    assert data["positions"][0]["liquidationPrice"] is None
    (columns, row) = data["trades"]
    assert dict(zip(columns, row, strict=True)) | {"netPnl": 96.75, "openedMinute": minute} == dict(
        zip(columns, row, strict=True)
    )


def test_a_market_without_a_candle_has_none_in_its_row() -> None:
    other = replace(MARKET, symbol="ETH", candles={"15m": ()}, indicators={"15m": Indicators()})
    _, data = shown(replace(VIEW, markets={"BTC": MARKET, "ETH": other}))
    assert data["15m"]["candles"][0] == ["minute", "BTC", "ETH"]
    assert data["15m"]["candles"][1][2] is None


def test_every_field_of_the_view_is_shown() -> None:
    view = replace(
        VIEW,
        markets={"BTC": replace(MARKET, open_interest=D(5), supplementary=SUPPLEMENTARY)},
        orders=(ORDER,),
        reasons=(Reason(at=NOW, text="nothing to do"),),
    )
    text, data = shown(view)
    named = set(re.findall(r'"(\w+)"', text))
    for struct in (
        ObservedAccount, ObservedPosition, ObservedStats, ObservedMarket, ObservedOrder, LastAction, Indicators,
        Supplementary, ExitPlan,
    ):  # fmt: skip
        missing = {field.encode_name for field in msgspec.structs.fields(struct)} - named - NAMED_OTHERWISE
        assert not missing, struct
    assert data["reasons"] == [[28_930_320, "nothing to do"]]
    assert data["orders"][0]["limitPrice"] == 93_500
    assert data["now"]["BTC"]["openInterest"] == 5


NAMED_OTHERWISE = {"symbol", "quotedAt", "candles", "indicators"}
"""Markets are named by their keys, `stale` says what the time of the quote is for, and an interval has its tables."""


@given(minutes=st.integers(0, 10_000))
def test_a_minute_later_only_the_end_of_the_prompt_differs(minutes: int) -> None:
    """Unless a candle has closed: then the table of its interval grows at its end, or begins a few rows later."""
    before, after = (view_text(view_at(NOW + timedelta(minutes=minutes + later))) for later in (0, 1))
    has_closed = (NOW + timedelta(minutes=minutes + 1)).minute % 5 == 0
    kept = next(n for n, (pair, other) in enumerate(zip(before, after, strict=False)) if pair != other)
    assert has_closed or kept > before.index('"at":')
    for text in (before, after):
        for interval in ("5m", "1h"):
            rows = len(msgspec.json.decode(text)[interval]["candles"]) - 1
            assert ROWS_MIN <= rows < ROWS_MIN + ROWS_ADDED_MAX


@pytest.mark.parametrize("variant", VariantId)
def test_a_full_view_fits_into_6500_tokens_with_the_tools(variant: VariantId) -> None:
    """Three markets, each with a position and as many candles as are ever shown, five trades and three reasons."""
    count, made = openai.o200k_base().count, VARIANTS[variant]
    base, at = {"BTC": 106_521.3, "ETH": 3_368.25, "SOL": 253.591}, datetime(2025, 1, 3, 7, 59, tzinfo=UTC)
    markets = {symbol: market_of(symbol, price, made.intervals, at) for symbol, price in base.items()}
    said = "BTC: no range, ADX 27.1; ETH: range with ADX 15.2, but 3381.32 is 0.9 deviations from VWAP 3308.31; " * 2
    view = replace(
        VIEW,
        at=at,
        markets=markets,
        positions=tuple(
            replace(
                POSITION, symbol=symbol, entry_price=D(repr(price)), unrealized=D("-123.4567890123"), confidence=D(62),
                fees=D("4.70123456789"), liquidation_price=D("91234.56789012"),
                exit_plan=ExitPlan(stop=D(93_000), target=D(99_000), invalidation=said, time_exit=NOW),
            )
            for symbol, price in base.items()
        ),
        trades=(replace(TRADE, quantity=D("12.3456"), net_pnl=D("-96.7512345678"), fees=D("3.2512345678")),) * 5,
        reasons=(Reason(at=NOW, text=said[:160]),) * 3,
    )  # fmt: skip
    messages = opening_messages(made.prompt, made.limits, view)
    tools = msgspec.json.encode(TOOL_SCHEMAS).decode()
    assert count("".join([tools, *(message["content"] for message in messages)])) <= 6_500


def market_of(symbol: str, price: float, intervals: Sequence[Interval], at: datetime) -> ObservedMarket:
    """A market with 24 candles and every indicator at each interval."""
    values: dict[str, Any] = dict.fromkeys(Indicators.__struct_fields__, price / 3.1)
    indicators = Indicators(**values)
    candles: dict[Interval, tuple[Candle, ...]] = {}
    for interval in intervals:
        span = INTERVALS[interval]
        opens = [floor_time(at, span) - n * span for n in range(24, 0, -1)]
        prices = [price * (1 + n % 19 / 997) for n in range(24)]
        candles[interval] = tuple(
            Candle(opened, each, each * 1.0012, each * 0.9987, each * 1.0003, 1_234.5 + each)
            for opened, each in zip(opens, prices, strict=True)
        )
    return replace(MARKET, symbol=symbol, candles=candles, indicators=dict.fromkeys(intervals, indicators))


def view_at(at: datetime) -> View:
    """A view whose candles are those that have closed at this time."""
    candles: dict[Interval, tuple[Candle, ...]] = {}
    for interval in ("5m", "1h"):
        span = INTERVALS[interval]
        opens = [floor_time(at, span) - n * span for n in range(24, 0, -1)]
        candles[interval] = tuple(Candle(opened, 100 + opened.minute, 200, 50, 100, 7) for opened in opens)
    indicators = {interval: Indicators(close=candles[interval][-1].close) for interval in candles}
    return replace(VIEW, at=at, markets={"BTC": replace(MARKET, candles=candles, indicators=indicators)})


def test_rules_carry_the_limits_of_the_variant() -> None:
    limits = VariantLimits(leverage_max=7, position_notional_max=4, day_loss_max_percent=12, reversal_cycles=6)
    text = rules_text(limits)
    for part in ("at most 7", "at most 4 × equity", "loss of 12 %", "within 6 cycles"):
        assert part in text
    system = opening_messages("Be calm.\n", limits, replace(VIEW, every_minutes=5))[0]["content"]
    assert system == f"Be calm.\n\n{text}\n\n{GLOSSARY}\n\n{cadence_text(5)}"
    assert "You are asked every 5 minutes." in system
