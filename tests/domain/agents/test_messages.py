"""Messages to models: figures have the digits of the books, and absent values are null."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import orjson

from trader.domain.agents.conversation import storable
from trader.domain.agents.messages import opening_messages, plan_json, rules_text, tool_message
from trader.domain.agents.view import (
    LastAction,
    ObservedAccount,
    ObservedMarket,
    ObservedPosition,
    ObservedStats,
    ObservedTrade,
    VariantLimits,
    View,
)
from trader.domain.exchange.orders import ExitPlan, Side
from trader.domain.market.indicators import Indicators
from trader.domain.market.markets import Candle

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
VIEW = View(
    at=NOW, account=ACCOUNT, positions=(POSITION,), trades=(TRADE,), stats=ObservedStats(trade_count=1),
    markets={"BTC": MARKET},
)  # fmt: skip


def shown() -> tuple[str, dict[str, Any]]:
    user = opening_messages("Be calm.", VariantLimits(leverage_max=7), VIEW)[1]["content"]
    text = user.split("\n\n", 1)[1]
    return text, msgspec.json.decode(text)


def test_figures_are_those_of_the_books_in_plain_digits() -> None:
    text, data = shown()
    assert '"initialCapital":10000,' in text
    assert '"equity":10012.3456789012345678,' in text, "not a digit is lost"
    assert '"fundingRate":0.0000125,' in text
    assert '"quantity":0.1,' in text
    assert "E+" not in text
    assert "E-" not in text
    assert data["positions"][0]["exitPlan"]["stop"] == 93_000
    assert data["positions"][0]["funding"] == -0.0118
    assert data["trades"][0]["netPnl"] == 96.75
    assert data["markets"][0]["lastAction"] == {"action": "createPosition", "side": "LONG", "cyclesAgo": 2}


def test_what_is_absent_is_null_and_candles_are_rows() -> None:
    _, data = shown()
    market = data["markets"][0]
    assert market["indicators"]["15m"]["rsi"] is None
    assert market["indicators"]["15m"]["close"] == 94_100.5
    assert data["positions"][0]["liquidationPrice"] is None
    assert market["candles"] == {"15m": [["2025-01-02T12:00:00.250Z", 94_000.123, 1, 2, 3, 0.000012345679]]}


def test_every_field_of_the_view_is_shown() -> None:
    _, data = shown()
    assert data.keys() == {field.encode_name for field in msgspec.structs.fields(View)}
    assert data["account"].keys() == {field.encode_name for field in msgspec.structs.fields(ObservedAccount)}
    assert data["markets"][0].keys() == {field.encode_name for field in msgspec.structs.fields(ObservedMarket)}


def test_rules_carry_the_limits_of_the_variant() -> None:
    limits = VariantLimits(leverage_max=7, position_notional_max=4, day_loss_max_percent=12, reversal_cycles=6)
    text = rules_text(limits)
    for part in ("at most 7", "at most 4 × equity", "loss of 12 %", "within 6 cycles"):
        assert part in text
    system = opening_messages("Be calm.\n", limits, VIEW)[0]
    assert system == {"role": "system", "content": f"Be calm.\n\n{text}"}


def test_results_and_plans() -> None:
    message = tool_message("c1", {"result": "ok"})
    assert message == {"role": "tool", "tool_call_id": "c1", "content": '{"result":"ok"}'}
    assert plan_json(ExitPlan(stop=D("1E+5"), time_exit=NOW + timedelta(hours=1))) == {
        "stop": "100000", "target": None, "invalidation": None, "invalidationPrice": None,
        "timeExit": "2025-01-02T13:00:00.250Z",
    }  # fmt: skip


def test_storable_keeps_all_but_nul() -> None:
    value = {"a\x00": ["b\x00", {"c": 1, "d": None}], "e": 2.5}
    assert storable(value) == {"a": ["b", {"c": 1, "d": None}], "e": 2.5}
    assert orjson.dumps(storable(value))
