"""Trades and equity over time, byte for byte as seen by a caller."""

import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from support.records import HOUR, MINUTE, START, id_of, make_account

from trader.agents.sql.models import select_models
from trader.api.schemas.common import ENCODER
from trader.api.schemas.portfolio import PortfolioUpdate
from trader.api.schemas.trades import hours_and_minutes
from trader.database.pool import Database

Call = Callable[..., Awaitable[Any]]


# -- trades


@pytest.mark.usefixtures("season")
async def test_trades_are_listed_in_full(call: Call) -> None:
    newest, manual, oldest = (await call("trading.getTrades"))["trades"]
    assert newest == {
        "id": str(id_of("trade", "ax", START + 26 * HOUR + 5 * MINUTE, "")),
        "modelId": "ax",
        "modelName": "Model ax",
        "modelVariant": "Apex",
        "modelRouterName": "rules/ax",
        "modelKey": "rules/ax",
        "side": "LONG",
        "symbol": "BTC",
        "quantity": Decimal("0.01"),
        "entryPrice": 100_000,
        "exitPrice": 102_050,
        "leverage": 4,
        "grossPnl": Decimal("20.5"),
        "fees": Decimal("0.5"),
        "funding": Decimal("-0.25"),
        "netPnl": Decimal("19.75"),
        "closeReason": "order",
        "confidence": 80,
        "openedAt": "2026-03-03T23:59:01.000Z",
        "closedAt": "2026-03-05T02:05:00.000Z",
        "holdingTime": "26h 05m",
        "timestamp": "2026-03-05T02:05:00.000Z",
        "manual": True,
    }
    assert (manual["modelId"], manual["modelName"], manual["modelKey"]) == ("manual", "manual", "manual")
    assert "modelVariant" not in manual
    assert manual["modelRouterName"] is None
    assert (oldest["side"], "leverage" in oldest, "confidence" in oldest) == ("SHORT", False, False)


@pytest.mark.usefixtures("season")
@pytest.mark.parametrize(
    ("request_fields", "models"),
    [
        ({"limit": 1}, ["ax"]),
        ({"modelId": "manual"}, ["manual"]),
        ({"variant": "Apex"}, ["ax", "ax"]),
        ({"variant": "all"}, ["ax", "manual", "ax"]),
        ({"variant": "Sovereign"}, []),
        ({"variant": "Sovereign", "modelId": "ax"}, []),
        ({"variant": "Apex", "modelId": "ax", "limit": 1}, ["ax"]),
        ({"modelId": "nobody"}, []),
    ],
)
async def test_trades_are_filtered(call: Call, request_fields: dict[str, object], models: list[str]) -> None:
    assert [trade["modelId"] for trade in (await call("trading.getTrades", **request_fields))["trades"]] == models


@pytest.mark.usefixtures("season")
async def test_completed_trades_come_with_their_figures(call: Call) -> None:
    answer = await call("simulator.getCompletedTradesFromDB")
    assert answer["trades"][0] == {
        "id": str(id_of("trade", "ax", START + 26 * HOUR + 5 * MINUTE, "")),
        "modelId": "ax",
        "modelName": "Model ax",
        "symbol": "BTC",
        "direction": "LONG",
        "notional": 1000,
        "realizedPnl": Decimal("19.75"),
        "leverage": 4,
        "confidence": 80,
        "closedAt": "2026-03-05T02:05:00.000Z",
        "invocationId": None,
    }
    assert answer["stats"] == {
        "tradeCount": 3,
        "totalRealized": Decimal("17.75"),
        "expectancy": Decimal("5.9166666666666667"),
        "averageLeverage": 3,
        "medianLeverage": 3,
        "maxLeverage": 4,
        "leverageValues": [4, 2],
        "averageConfidence": 80,
        "medianConfidence": 80,
        "confidenceValues": [80],
    }
    nothing = await call("simulator.getCompletedTradesFromDB", modelId="so")
    assert nothing["trades"] == []
    assert nothing["stats"]["totalRealized"] == 0
    figures = {key: value for key, value in nothing["stats"].items() if key not in ("tradeCount", "totalRealized")}
    assert set(map(str, figures.values())) == {"None", "[]"}


def test_holding_times_have_hours_and_minutes() -> None:
    assert hours_and_minutes(timedelta(0)) == "0h 00m"
    assert hours_and_minutes(timedelta(hours=130, minutes=9, seconds=59)) == "130h 09m"


# -- portfolio


@pytest.mark.usefixtures("season")
async def test_portfolio_history(call: Call) -> None:
    answer = await call("trading.getPortfolioHistory", modelId="so")
    assert answer == {
        "history": [
            {
                "id": "so@2026-03-04T01:00:00.000Z",
                "modelId": "so",
                "netPortfolio": Decimal("5000.5"),
                "createdAt": "2026-03-04T01:00:00.000Z",
                "updatedAt": "2026-03-04T01:00:00.000Z",
                "model": {"name": "Model so", "variant": "Sovereign", "openRouterModelName": "rules/so"},
            }
        ],
        "resolution": "15m",
    }
    answer = await call("trading.getPortfolioHistory")
    created = [entry["createdAt"] for entry in answer["history"]]
    assert created == sorted(created)
    assert len(created) == 51
    part = await call("trading.getPortfolioHistory", startDate="2026-03-04T10:00:00Z", endDate="2026-03-04T14:00+02:00")
    assert [entry["netPortfolio"] for entry in part["history"]] == [10_010, 10_011, 10_012]
    assert part["resolution"] == "1m"
    assert (await call("trading.getPortfolioHistory", startDate="2026-03-04", variant="Apex"))["resolution"] == "5m"
    old = await call("trading.getPortfolioHistory", startDate="1970-01-01T00:00:00Z", endDate="1970-01-02")
    assert old == {"history": [], "resolution": "1h"}


@pytest.mark.parametrize(
    ("request_fields", "path"),
    [
        ({"startDate": "yesterday!"}, "startDate"),
        ({"endDate": "2026-13-01T00:00:00Z"}, "endDate"),
        ({"endDate": "0001-01-01T00:00:00+05:00"}, "endDate"),
        ({"startDate": "2026-03-05", "endDate": "2026-03-04"}, "startDate"),
        ({"startDate": "2200-01-01"}, "startDate"),
        ({"startDate": 5}, "startDate"),
        ({"maxPoints": 99}, "maxPoints"),
        ({"maxPoints": 15_001}, "maxPoints"),
        ({"variant": "apex"}, "variant"),
        ({"model": "x"}, "model"),
    ],
)
async def test_an_invalid_history_request(call: Call, request_fields: dict[str, object], path: str) -> None:
    assert await call("trading.getPortfolioHistory", **request_fields) == (400, [[path]])


@pytest.mark.usefixtures("season")
async def test_equity_curves_share_their_times(call: Call) -> None:
    answer = await call(
        "trading.getEquityCurves", startDate="2026-03-04T00:00:00Z", endDate="2026-03-06T05:30:00Z", points=60
    )
    assert answer["resolution"] == "1h"
    assert answer["times"][0] == "2026-03-04T01:00:00.000Z"
    assert answer["times"][-1] == "2026-03-06T06:00:00.000Z"  # the current hour
    apex, sovereign = answer["models"]
    assert apex == {
        "id": "ax", "name": "Model ax", "variant": "Apex",
        "values": [*range(10_000, 10_050), 10_049, None, None, None],
    }  # fmt: skip
    assert sovereign["values"] == [None, Decimal("5000.5"), Decimal("5000.5"), *[None] * 51]
    assert (answer["start"], answer["starts"]["ax"]["value"]) == ("2026-03-04T00:00:00.000Z", 10_000)
    week = await call("trading.getEquityCurves", modelId="so")
    assert (week["resolution"], len(week["times"]), len(week["models"])) == ("1h", 169, 1)
    assert (await call("trading.getEquityCurves", modelId="nobody"))["models"] == []
    assert await call("trading.getEquityCurves", points=49) == (400, [["points"]])


async def test_extreme_ranges_are_answered(call: Call) -> None:
    for name, end in (("2200-01-01T00:00:00.000Z", "2200-01-01T00:00:00.000Z"), ("1970-01-01", "2200-01-01")):
        answer = await call("trading.getEquityCurves", startDate=name, endDate=end)
        assert answer["models"] == []
        assert len(answer["times"]) <= 300
    for start, end in (("1970-01-01", "2200-01-01"), ("1970-01-01", "1970-01-01")):
        answer = await call("trading.getPortfolioHistory", startDate=start, endDate=end, maxPoints=100)
        assert answer["history"] == []
    assert (await call("trading.getPortfolioHistory", endDate="1970-01-02"))["history"] == []


@pytest.mark.usefixtures("season")
async def test_the_portfolio_stream_shows_models_only(context: Any, database: Database) -> None:
    context.exchange.put(make_account("manual"))
    async with database.connection() as conn:
        models = await select_models(conn)
    update = json.loads(ENCODER.encode(PortfolioUpdate.of(context.portfolio.live(), models)))
    assert update == {
        "lastUpdatedAt": "2026-03-06T05:30:00.000Z",
        "modelsUpdated": 2,
        "snapshotsCreated": 0,
        "snapshots": [
            {
                "modelId": "ax",
                "modelName": "Model ax",
                "variant": "Apex",
                "netPortfolio": 10_018.75,
                "cash": 10_018.75,
                "unrealizedPnl": 0,
                "createdAt": "2026-03-06T05:30:00.000Z",
            },
            {
                "modelId": "so",
                "modelName": "Model so",
                "variant": "Sovereign",
                "netPortfolio": 5000,
                "cash": 5000,
                "unrealizedPnl": 0,
                "createdAt": "2026-03-06T05:30:00.000Z",
            },
        ],
    }
