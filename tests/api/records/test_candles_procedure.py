"""Candles as a caller sees them."""

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from trader.core.clock import iso
from trader.database.pool import Database

Call = Callable[..., Awaitable[Any]]


async def test_candles_are_columns_and_pages_reach_back(call: Call, context: Any) -> None:
    now = context.clock.now()
    await context.candles.record(now, now)
    answer = await call("trading.getCandles", symbol="btcusdt", interval="1m")
    assert (answer["symbol"], answer["interval"], len(answer["times"])) == ("BTC", "1m", 1000)
    assert answer["times"][-1] == iso(now - timedelta(minutes=1))
    assert answer["nextBefore"] == answer["times"][0]
    minutes = await context.candles.read("BTC", timedelta(minutes=1), None, now)
    for column in ("open", "high", "low", "close", "volume"):
        assert [float(value) for value in answer[column]] == [getattr(candle, column) for candle in minutes[1:]]
    earlier = await call("trading.getCandles", symbol="BTC", interval="1m", before=answer["nextBefore"])
    assert (len(earlier["times"]), "nextBefore" in earlier) == (440, False)
    assert earlier["times"][-1] < answer["times"][0]
    cut = await call(
        "trading.getCandles", symbol="BTC", interval="1m", **{"from": answer["times"][7]}, to=answer["times"][9]
    )
    assert cut["times"] == answer["times"][7:9]
    future = await call("trading.getCandles", symbol="BTC", interval="1d", **{"from": "2099-01-01"})
    assert future["times"] == []


@pytest.mark.parametrize(
    ("request_fields", "path"),
    [
        ({"symbol": "DOGE", "interval": "1m"}, "symbol"),
        ({"symbol": "BTC", "interval": "2m"}, "interval"),
        ({"symbol": "BTC"}, "interval"),
        ({"symbol": "BTC", "interval": "1m", "from": "soon"}, "from"),
        ({"symbol": "BTC", "interval": "1m", "from": "2026-03-05", "to": "2026-03-04"}, "from"),
        ({"symbol": "BTC", "interval": "1m", "limit": 5}, "limit"),
    ],
)
async def test_bad_ranges_are_refused(call: Call, request_fields: dict[str, object], path: str) -> None:
    assert await call("trading.getCandles", **request_fields) == (400, [[path]])


@pytest.mark.usefixtures("season")
async def test_trades_of_one_market_even_if_it_is_no_longer_traded(call: Call, database: Database) -> None:
    assert len((await call("trading.getTrades", symbol="btc/usdt"))["trades"]) == 3
    assert len((await call("trading.getTrades", symbol="btc/usdt", variant="Apex"))["trades"]) == 2
    assert (await call("trading.getTrades", symbol="BTC", variant="Contrarian"))["trades"] == []
    async with database.transaction() as conn:
        await conn.execute("UPDATE orders SET symbol = 'OLD' WHERE status = 'CLOSED'")
    assert len((await call("trading.getTrades", symbol="old"))["trades"]) == 3
    for procedure in ("trading.getTrades", "analytics.getTradeTotals"):
        assert await call(procedure, symbol="older", **({"by": "day"} if "Totals" in procedure else {})) == (
            400, [["symbol"]],
        )  # fmt: skip
