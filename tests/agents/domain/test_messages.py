"""Results of tool calls: plain digits, and no NUL characters."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal

import orjson

from trader.agents.domain.conversation import storable
from trader.agents.domain.messages import indicators_json, plan_json, tool_message
from trader.exchange.domain.orders import ExitPlan
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import Candle

NOW = datetime(2025, 1, 2, 12, 0, 0, 250_000, tzinfo=UTC)
D = Decimal


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


def test_fetched_candles_are_rows_one_interval_apart() -> None:
    candle = Candle(datetime(2025, 1, 2, 12, 0, tzinfo=UTC), 94_000.123456, 1.0, 2.0, 3.5, 0.000012345678912)
    result = indicators_json("BTC", "1h", [candle], Indicators(close=94_100.56789))
    assert result["columns"] == ("open", "high", "low", "close", "volume")
    assert result["from"] == "2025-01-02T12:00Z"
    assert result["candles"] == [[94_000.1, 1, 2, 3.5, 0.0000123]]
    assert result["indicators"]["close"] == 94_100.6
    assert result["indicators"]["rsi"] is None
