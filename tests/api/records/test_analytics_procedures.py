"""Variants and statistics, byte for byte as seen by a caller."""

import json
import re
from collections.abc import Awaitable, Callable
from datetime import datetime
from decimal import Decimal
from operator import itemgetter
from typing import Any

import pytest
from msgspec.structs import replace
from support.records import HOUR, START, id_of, make_model
from support.seasons import add_season

from trader.agents.variants import color_of
from trader.database.pool import Database
from trader.portfolio.domain.seasons import SeasonRecord
from trader.portfolio.sql.seasons import insert_season_record

Call = Callable[..., Awaitable[Any]]
CallRaw = Callable[..., Awaitable[bytes]]


# -- variants


async def test_every_variant_of_the_build_is_listed(call: Call) -> None:
    answer = await call("variants.getVariants")
    assert [(each["id"], each["label"], each["temperature"], each["color"]) for each in answer["variants"]] == [
        ("Apex", "Apex (Kelly Engine)", Decimal("0.7"), "#a855f7"),
        ("Trendsurfer", "Trendsurfer (Momentum)", Decimal("0.5"), "#06b6d4"),
        ("Contrarian", "Contrarian (Reverter)", Decimal("0.6"), "#e11d48"),
        ("Sovereign", "Sovereign (Adaptive)", Decimal("0.8"), "#eab308"),
    ]
    assert all(each["description"] and len(each) == 5 for each in answer["variants"])


@pytest.mark.usefixtures("season")
async def test_variant_history(call: Call) -> None:
    answer = await call("variants.getVariantHistory")
    apex, trendsurfer, _, sovereign = answer["variants"]
    assert list(apex) == ["variantId", "label", "color", "history"]
    assert (apex["variantId"], apex["color"], len(apex["history"])) == ("Apex", "#a855f7", 50)
    assert trendsurfer["history"] == []
    assert sovereign["history"] == [{"timestamp": "2026-03-04T01:00:00.000Z", "value": Decimal("5000.5")}]
    assert answer["aggregate"][:2] == [
        {"timestamp": "2026-03-04T00:00:00.000Z", "value": 10_000},
        {"timestamp": "2026-03-04T01:00:00.000Z", "value": Decimal("7500.75")},
    ]
    day = await call("variants.getVariantHistory", window="24h")
    assert len(day["aggregate"]) == 20, "05:30 on the 5th cuts the hour whose snapshot was at 05:00"
    assert await call("variants.getVariantHistory", window="1h") == (400, [["window"]])


@pytest.mark.usefixtures("season")
async def test_numbers_are_written_plainly(call_raw: CallRaw) -> None:
    """The database returns 10000 as 1E+4, which is the same number but looks like a mistake."""
    for name, request in (
        ("variants.getVariantHistory", {"window": "30d"}),
        ("trading.getPortfolioHistory", {}),
        ("trading.getTrades", {}),
        ("simulator.getCompletedTradesFromDB", {}),
        ("analytics.getLeaderboard", {}),
        ("analytics.getEvidence", {}),
        ("variants.getVariantStats", {}),
    ):
        body = re.sub(rb'"[^"]*"', b'""', await call_raw(name, **request))
        numbers = re.findall(rb"[:\[,](-?[0-9][^,}\]]*)", body)
        assert numbers
        for number in numbers:
            assert re.fullmatch(rb"-?[0-9]+(\.[0-9]+)?(e-[0-9]+)?", number), f"{name}: {number!r}"
            assert not re.fullmatch(rb".*\.[0-9]{20,}", number), f"{name}: {number!r}"


@pytest.mark.usefixtures("season")
async def test_variant_statistics(call: Call) -> None:
    apex, trendsurfer, *_ = (await call("variants.getVariantStats"))["stats"]
    assert apex == {
        "variantId": "Apex",
        "label": "Apex (Kelly Engine)",
        "color": "#a855f7",
        "modelCount": 1,
        "totalTrades": 2,
        "winRate": 50,
        "winRateInterval": None,
        "totalPnl": Decimal("8.75"),
        "avgPnl": Decimal("4.375"),
    }
    assert (trendsurfer["modelCount"], trendsurfer["winRate"], trendsurfer["avgPnl"]) == (0, None, None)


# -- analytics


@pytest.mark.usefixtures("season")
async def test_model_statistics_overall(call: Call) -> None:
    answer = await call("analytics.getModelStats")
    assert list(answer) == ["overall"]
    ax, so = answer["overall"]
    assert ax == {
        "modelId": "ax",
        "modelName": "Model ax",
        "variant": "Apex",
        "accountValue": Decimal("10018.75"),
        "startValue": 10_000,
        "returnPercent": Decimal("0.1875"),
        "totalPnl": Decimal("8.75"),
        "winRate": 50,
        "winRateInterval": None,
        "biggestWin": Decimal("19.75"),
        "biggestLoss": -11,
        "tradesCount": 2,
        "sharpeRatio": "N/A",
        "sharpeInterval": None,
        "maxDrawdown": 0,
        "tradeSignalToNoise": pytest.approx(Decimal("0.2012")),
        "inputTokens": 0,
        "outputTokens": 0,
        "costUsd": 0,
        "netAfterCost": Decimal("18.75"),
    } | {"tradeSignalToNoise": ax["tradeSignalToNoise"], "entrants": ax["entrants"]}
    (entrant,) = ax["entrants"]
    about = {"entrant": 0, "fingerprint": None, "startedAt": "2026-03-04T00:00:00.000Z", "endedAt": None}
    figures = {key: value for key, value in ax.items() if key != "entrants"}
    assert entrant == {**figures, **about, "coverage": 50, "ranked": False}, "the only one: its figures are the run's"
    assert float(ax["tradeSignalToNoise"]) == pytest.approx(4.375 / (30.75 / 2**0.5))
    absent = {"winRate", "biggestWin", "biggestLoss", "sharpeRatio", "tradeSignalToNoise"}
    assert {key for key, value in so.items() if value == "N/A"} == absent


@pytest.mark.usefixtures("season")
async def test_model_statistics_advanced(call: Call) -> None:
    answer = await call("analytics.getModelStats", mode="advanced", variant="Apex")
    assert list(answer) == ["advanced"]
    (ax,) = answer["advanced"]
    assert len(ax) == 40
    assert len(ax["entrants"][0]) == 39 + 6
    assert (ax["avgTradeSize"], ax["longPercent"], ax["failureRate"], ax["recoveryFactor"]) == (
        1000,
        50,
        50,
        "Infinity",
    )
    assert (ax["failedWorkflowCount"], ax["failedToolCallCount"], ax["failedCount"], ax["invocationCount"]) == (
        1,
        0,
        1,
        2,
    )
    assert (ax["currentStreakType"], ax["currentStreakCount"], ax["decisionQualityScore"]) == ("win", 1, "N/A")
    assert ax["avgLossDurationMinutes"] == 60


@pytest.mark.usefixtures("season")
async def test_leaderboard(call: Call) -> None:
    answer = await call("analytics.getLeaderboard", details=True)
    first, second = answer["entries"]
    assert answer["window"] == "7d"
    assert first == {
        "rank": None,
        "modelId": "ax",
        "modelName": "Model ax",
        "variant": "Apex",
        "color": color_of(make_model("ax")),
        "pnlPercent": Decimal("0.1875"),
        "pnlAbsolute": Decimal("18.75"),
        "maxDrawdown": first["maxDrawdown"],
        "startValue": 10_000,
        "endValue": Decimal("10018.75"),
        "tradesCount": 2,
        "modelIds": ["ax"],
        "replicates": 1,
        "since": answer["start"],
        "ci95": None,
        "details": {
            "ci95Reason": "2 completed trades; a statement about a model needs 10",
            "tie": False,
            "verdict": {
                "above": None,
                "below": {
                    "modelId": "so",
                    "verdict": "not distinguishable yet",
                    "smallestDifference": None,
                    "reason": first["details"]["verdict"]["below"]["reason"],
                },
            },
            "entrant": 0,
            "runNumber": 1,
            "fingerprint": None,
            "coverage": 50,
            "withinMinute": 0,
            "trainingCutoff": None,
            "contamination": "unknown",
            "owner": None,
            "fees": first["details"]["fees"],
            "costUsd": 0,
            "netAfterCost": first["pnlAbsolute"],
        },
    }
    fees = [each["fees"] for each in (await call("trading.getTrades", modelId="ax"))["trades"]]
    assert first["details"]["fees"] == sum(fees) > 0
    assert float(first["maxDrawdown"]) == pytest.approx(100 * 30.25 / 10_049)
    assert (second["rank"], second["modelId"], second["ci95"]) == (None, "so", None)
    for entry in answer["entries"]:
        del entry["details"]
    del answer["bestTradeId"]
    assert await call("analytics.getLeaderboard") == answer
    by_drawdown = await call("analytics.getLeaderboard", sortBy="maxDrawdown", window="30d", details=True)
    assert {entry["details"]["verdict"] for entry in by_drawdown["entries"]} == {None}
    drawdowns = [entry["maxDrawdown"] for entry in by_drawdown["entries"]]
    assert drawdowns == sorted(drawdowns)
    assert by_drawdown["window"] == "30d"
    assert (await call("analytics.getLeaderboard", window="run"))["window"] == "run"


@pytest.mark.usefixtures("season")
async def test_evidence(call: Call) -> None:
    answer = await call("analytics.getEvidence")
    assert (answer["window"], answer["best"]) == ("run", None)
    ax, so = answer["entrants"]
    assert (ax["modelId"], so["modelId"]) == ("ax", "so")
    assert (ax["entrant"], ax["fingerprint"], ax["endedAt"], ax["ranked"]) == (0, None, None, False)
    assert (ax["tradesCount"], ax["losingTradesCount"], ax["interval"]) == (2, 1, None)
    assert ax["reason"] == "2 completed trades; a statement about a model needs 10"
    assert {
        each["reference"]: (each["referenceId"], each["verdict"], each["reason"]) for each in ax["differences"]
    } == {
        "ruleAgent": ("baseline/apex-rules", "not distinguishable yet", "this baseline has no whole hours yet"),
        "holdNothing": (None, "not distinguishable yet", "2 completed trades; a statement about a model needs 10"),
        "buyAndHold": ("baseline/buy-and-hold", "not distinguishable yet", "this baseline has no whole hours yet"),
        "bestOther": (
            None,
            "not distinguishable yet",
            "there are no two entrants old enough for a rank, with enough trades",
        ),
    }
    assert [row["modelId"] for row in (await call("analytics.getEvidence", variant="Sovereign"))["entrants"]] == ["so"]
    assert [row["modelId"] for row in (await call("analytics.getEvidence", modelId="ax"))["entrants"]] == ["ax"]
    assert (await call("analytics.getEvidence", modelId="nobody"))["entrants"] == []
    assert await call("analytics.getEvidence", window="1y") == (400, [["window"]])


@pytest.mark.usefixtures("season")
async def test_comparison(call: Call) -> None:
    answer = await call("analytics.getComparison", modelId="ax", against="so")
    found = answer["difference"]
    assert (answer["until"], found["referenceId"], found["verdict"]) == (
        "2026-03-06T05:00:00.000Z",
        "so",
        "not distinguishable yet",
    )
    assert found["reason"] == "1 common hour; an interval needs 24"
    assert [each["at"] for each in answer["curve"]] == ["2026-03-04T02:00:00.000Z"]
    assert {each["interval"] for each in answer["curve"]} == {None}
    held = sum(
        (datetime.fromisoformat(each["until"]) - datetime.fromisoformat(each["since"])) / HOUR
        for each in answer["disagreements"]
    )
    assert float(answer["disagreedHours"]) == pytest.approx(held)
    same = await call("analytics.getComparison", modelId="ax", against="ax")
    assert same["difference"]["reason"] == "the two are one entrant: replicates are compared by their mean"
    assert (same["curve"], same["disagreements"]) == ([], [])
    nobody = await call("analytics.getComparison", modelId="ax", against="nobody")
    assert (nobody["difference"]["reason"], nobody["curve"]) == ("there is no such model", [])
    assert await call("analytics.getComparison", modelId="ax") == (400, [["against"]])


@pytest.mark.usefixtures("season")
async def test_behaviour(call: Call) -> None:
    behaviour = (await call("analytics.getBehaviour", modelId="ax"))["behaviour"]
    assert (behaviour["positions"], behaviour["flips"], behaviour["leverageByVolatility"]) == (1, 0, None), (
        "without the one that was opened before the run"
    )
    assert behaviour["stops"] == {"planned": 0, "byStop": 0, "byTarget": 0, "byDecision": 0, "otherwise": 0}
    assert (behaviour["holdingTimes"], behaviour["withinMinute"]) == ({"low": 60, "median": 60, "high": 60}, 0)
    assert (behaviour["fees"], behaviour["captured"]) == (None, None), "it gained nothing and was never ahead"
    assert (behaviour["replicates"], behaviour["alike"]) == ([], None)
    assert await call("analytics.getBehaviour", modelId="nobody") == {"behaviour": None}
    assert await call("analytics.getBehaviour") == (400, [["modelId"]])


@pytest.mark.usefixtures("season")
async def test_failures(call: Call) -> None:
    answer = await call("analytics.getFailures")
    (failure,) = answer["failures"]
    (tool_call,) = failure.pop("toolCalls")
    assert json.loads(tool_call.pop("metadata")) == {"raw": {"reason": "wait"}, "decisions": [], "results": []}
    assert tool_call == {
        "id": str(id_of("call", id_of("invocation", "ax", START + HOUR), 1)),
        "toolCallType": "HOLDING",
        "createdAt": "2026-03-04T01:00:00.000Z",
    }
    steps = [
        {
            "stepNumber": number,
            "toolNames": ["holding"],
            "inputTokens": 10 * number,
            "outputTokens": number,
            "totalTokens": 11 * number,
            "timestamp": f"2026-03-04T00:0{number}:00.000Z",
        }
        for number in (1, 2)
    ]
    assert failure == {
        "invocationId": str(id_of("invocation", "ax", START + HOUR)),
        "modelId": "ax",
        "modelName": "Model ax",
        "response": None,
        "responsePayload": None,
        "createdAt": "2026-03-04T01:00:00.000Z",
        "failureReason": "it broke",
        "stepTelemetry": steps,
        "totalSteps": 2,
        "totalInputTokens": 30,
        "totalOutputTokens": 3,
    }
    assert answer["modelStats"][1] == {
        "modelId": "so",
        "modelName": "Model so",
        "variant": "Sovereign",
        "failedWorkflowCount": 0,
        "failedToolCallCount": 0,
        "failedCount": 0,
        "invocationCount": 0,
        "failureRate": None,
    }
    none = await call("analytics.getFailures", variant="Contrarian")
    assert none == {"failures": [], "modelStats": []}


@pytest.mark.usefixtures("season")
async def test_run_info(call: Call) -> None:
    assert await call("analytics.getRunInfo") == {
        "runStartTime": "2026-03-04T00:00:00.000Z",
        "tradingMode": "simulated",
        "models": 2,
        "invocations": 2,
        "trades": 2,
        "entrants": [
            {
                "modelId": model_id,
                "entrant": 0,
                "fingerprint": None,
                "startedAt": "2026-03-04T00:00:00.000Z",
                "endedAt": None,
                "invocations": count,
                "trades": count,
                "coverage": coverage,
                "ranked": False,
            }
            for model_id, count, coverage in (("ax", 2, 50), ("so", 0, None))
        ],
    }


@pytest.mark.usefixtures("season")
async def test_a_season_is_named_with_every_board(call: Call, database: Database) -> None:
    assert await call("analytics.getSeason") == {}
    async with database.connection() as conn:
        rules = await add_season(conn, start=START, end=START + 31 * 24 * HOUR, entrants=["ax"])
        amended = replace(rules, alpha=0.01, end=rules.end + HOUR)
        record = SeasonRecord(step="amended", season=1, number=1, at=START, rules=amended, reason="agreed by all")
        await insert_season_record(conn, record)
        await conn.execute("UPDATE invocation_counts SET season = 1")  # they started within it
    season = (await call("analytics.getSeason"))["season"]
    assert (season["state"], season["rules"]["alpha"]) == ("running", Decimal("0.01"))
    (amendment,) = season["amendments"]
    assert amendment["changes"][0] == {
        "rule": "end",
        "before": "2026-04-04T00:00:00.000Z",
        "after": "2026-04-04T01:00:00.000Z",
    }
    board = await call("analytics.getLeaderboard", details=True)
    evidence = await call("analytics.getEvidence")
    assert board["season"] == evidence["season"] == season
    assert [row["modelId"] for row in (*board["entries"], *evidence["entrants"])] == ["ax", "ax"], "`so` is not listed"
    assert board["entries"][0]["details"]["offBoard"] == "it decided 50.0 % of its due cycles; a rank needs 95 %"


@pytest.mark.usefixtures("season")
async def test_trades_are_totaled_by_group(call: Call) -> None:
    won = {"trades": 1, "won": 1, "grossPnl": Decimal("20.5"), "fees": Decimal("0.5"), "funding": Decimal("-0.25")}
    lost = {"trades": 1, "won": 0, "grossPnl": -10, "fees": 1, "funding": 0}
    parts = [{"key": "SHORT", **lost, "netPnl": -11}, {"key": "LONG", **won, "netPnl": Decimal("19.75")}]
    for by, keys in {
        "day": ["2026-03-04", "2026-03-05"],
        "side": ["SHORT", "LONG"],
    }.items():
        rows = (await call("analytics.getTradeTotals", by=by))["rows"]
        wanted = sorted(({**part, "key": key} for part, key in zip(parts, keys, strict=True)), key=itemgetter("key"))
        assert rows == wanted, "only models, not accounts traded by hand"
    whole = {"trades": 2, "won": 1, "grossPnl": Decimal("10.5"), "netPnl": Decimal("8.75")}
    for by, key in {"week": "2026-03-02", "market": "BTC", "reason": "order"}.items():
        (row,) = (await call("analytics.getTradeTotals", by=by, modelId="ax", variant="Apex"))["rows"]
        assert {**row, "key": key, **whole} == row
    assert await call("analytics.getTradeTotals", by="market", variant="Sovereign") == {"rows": []}


async def test_an_empty_database_is_answered(call: Call) -> None:
    assert await call("trading.getTrades") == {"trades": []}
    assert await call("analytics.getLeaderboard") == {"entries": [], "window": "7d", "start": None}
    assert await call("analytics.getModelStats", mode="advanced") == {"advanced": []}
    assert await call("analytics.getFailures") == {"failures": [], "modelStats": []}
    info = await call("analytics.getRunInfo")
    assert (info["runStartTime"], info["models"]) == (None, 0)
    history = await call("variants.getVariantHistory", window="30d")
    assert [each["history"] for each in history["variants"]] == [[], [], [], []]
    assert history["aggregate"] == []
    assert (await call("trading.getPortfolioHistory"))["history"] == []


@pytest.mark.parametrize(
    ("name", "request_fields", "path"),
    [
        ("trading.getTrades", {"limit": 0}, "limit"),
        ("trading.getTrades", {"limit": 501}, "limit"),
        ("trading.getTrades", {"limit": "5"}, "limit"),
        ("trading.getTrades", {"variant": "none"}, "variant"),
        ("simulator.getCompletedTradesFromDB", {"variant": "all"}, "variant"),
        ("analytics.getModelStats", {"mode": "all"}, "mode"),
        ("analytics.getLeaderboard", {"sortBy": "name"}, "sortBy"),
        ("analytics.getFailures", {"limit": 101}, "limit"),
        ("analytics.getTradeTotals", {"by": "colour"}, "by"),
        ("analytics.getRunInfo", {"x": 1}, "x"),
        ("variants.getVariants", {"x": 1}, "x"),
    ],
)
async def test_an_invalid_input(call: Call, name: str, request_fields: dict[str, object], path: str) -> None:
    assert await call(name, **request_fields) == (400, [[path]])
