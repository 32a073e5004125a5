"""The contract: every procedure of the running service, through the real oRPC client and through plain HTTP."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from support.orpc import run_client
from support.process import ServiceProcess, serving
from support.waiting import until
from support.wire import check_output

from trader.agents.variants import VARIANTS

pytestmark = pytest.mark.processes

VARIANT = ("Apex", "Trendsurfer", "Contrarian", "Sovereign")

READ_CALLS: Sequence[tuple[str, dict[str, Any]]] = (
    ("trading.getTrades", {}),
    ("trading.getTrades", {"variant": "Apex", "modelId": "by-hand", "limit": 1}),
    ("trading.getTrades", {"modelId": "by-hand"}),
    ("trading.getPositions", {}),
    ("trading.getPositions", {"modelId": "by-hand"}),
    ("trading.getPositions", {"modelId": "nobody"}),
    ("trading.getCryptoPrices", {}),
    ("trading.getCryptoPrices", {"symbols": ["ETH/USDT", "btc", "DOGE"]}),
    ("trading.getPortfolioHistory", {}),
    ("trading.getPortfolioHistory", {"variant": "Sovereign", "maxPoints": 100, "startDate": "2026-01-01"}),
    ("trading.getCandles", {"symbol": "btc/usdt", "interval": "1m"}),
    ("trading.getCandles", {"symbol": "ETH", "interval": "1d", "from": "2026-01-01"}),
    ("trading.getEquityCurves", {}),
    ("trading.getEquityCurves", {"variant": "Apex", "points": 50, "baselines": False}),
    ("models.getModels", {}),
    ("models.getInvocations", {}),
    ("models.getInvocations", {"variant": "Trendsurfer", "limit": 1}),
    ("simulator.getAccount", {"accountId": "by-hand"}),
    ("simulator.getAccount", {}),
    ("simulator.getCompletedTradesFromDB", {}),
    ("simulator.getCompletedTradesFromDB", {"modelId": "by-hand", "limit": 2}),
    ("analytics.getModelStats", {}),
    ("analytics.getModelStats", {"mode": "advanced", "variant": "all"}),
    ("analytics.getTradeTotals", {"by": "day"}),
    ("analytics.getSeason", {}),
    ("analytics.getTradeTotals", {"by": "market", "variant": "Apex", "modelId": "apex-rules"}),
    ("analytics.getBehaviour", {"modelId": "apex-rules"}),
    ("analytics.getComparison", {"modelId": "apex-rules", "against": "contrarian-rules"}),
    ("analytics.getLeaderboard", {}),
    ("analytics.getEvidence", {}),
    ("analytics.getEvidence", {"window": "7d", "variant": "Apex", "modelId": "apex-rules"}),
    ("analytics.getLeaderboard", {"details": True}),
    ("analytics.getLeaderboard", {"window": "30d", "sortBy": "maxDrawdown", "variant": "Contrarian"}),
    ("analytics.getFailures", {}),
    ("operations.getActivity", {}),
    ("analytics.getRunInfo", {}),
    ("variants.getVariants", {}),
    ("variants.getVariantStats", {}),
    ("variants.getVariantHistory", {}),
    ("variants.getVariantHistory", {"window": "24h"}),
)


async def add_models(dsn: str) -> None:
    """The four rule models of a demo, and one that fails in every run, since its provider is not configured."""
    conn = await asyncpg.connect(dsn)
    try:
        for number, variant in enumerate(VARIANT):
            await conn.execute(
                "INSERT INTO models VALUES ($1, $2, $3, 'rules', $4, NULL, true, now() + $5 * interval '1 ms')",
                f"{variant.lower()}-rules", f"{variant} Rules", variant, f"rules/{variant.lower()}", number,
            )  # fmt: skip
        await conn.execute(
            "INSERT INTO models VALUES ('broken', 'Broken', 'Apex', 'mistral', 'mistral/large', 'logo.svg', true, "
            "now() + interval '1 s')"
        )
    finally:
        await conn.close()


async def trade_by_hand(service: ServiceProcess) -> str:
    """Make two trades, two positions and a resting order. Return the id of the resting order."""

    async def place(**order: Any) -> Any:
        answer = await service.call("simulator.placeOrder", accountId="by-hand", **order)
        check_output("simulator.placeOrder", answer)
        return answer["order"]

    plan = {"stop": 1.0, "target": 10**7, "invalidation": "words", "timeExit": "2099-01-01T00:00:00+01:00"}
    first = await place(symbol="btcusdt", side="long", quantity=0.02, leverage=3, exitPlan=plan, confidence=62.5)
    assert (first["status"], first["side"], first["symbol"], first["type"]) == ("filled", "buy", "BTC", "market")
    assert first["totalQuantity"] == first["requestedQuantity"] == 0.02
    assert "clientOrderId" not in first
    assert "reason" not in first
    assert (await place(symbol="BTC", side="sell", quantity=0.01, reduceOnly=True))["status"] == "filled"
    assert (await place(symbol="ETH/USDT", side="short", quantity=0.5))["side"] == "sell"
    assert (await place(symbol="SOL", side="buy", quantity=1, leverage=2, confidence=10))["status"] == "filled"
    assert (await place(symbol="SOL", side="sell", quantity=1))["status"] == "filled"
    refused = await place(symbol="BTC", side="buy", quantity=1000, clientOrderId="too much")
    assert (refused["status"], refused["fills"], refused["averagePrice"]) == ("rejected", [], None)
    assert refused["clientOrderId"] == "too much"
    assert refused["reason"]
    resting = await place(symbol="BTC", side="buy", quantity=0.01, type="limit", limitPrice=1000)
    assert (resting["status"], resting["totalQuantity"]) == ("resting", 0)
    return str(resting["id"])


async def ran(service: ServiceProcess) -> bool:
    """Return whether every model has an invocation and a snapshot."""
    runs = (await service.call("models.getInvocations"))["conversations"]
    history = (await service.call("trading.getPortfolioHistory"))["history"]
    return len({run["modelId"] for run in runs}) == 5 and len({entry["modelId"] for entry in history}) == 5


def is_sorted(values: Iterable[Any], *, newest_first: bool = False) -> bool:
    listed = list(values)
    return listed == sorted(listed, reverse=newest_first)


async def test_every_procedure_keeps_the_contract_for_both_callers(tmp_path: Path, dsn: str, orpc_client: Path) -> None:
    await add_models(dsn)
    async with serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0") as service:
        resting_id = await trade_by_hand(service)
        await until(lambda: ran(service))

        plain = [await service.call(name, **request) for name, request in READ_CALLS]
        for (name, _), answer in zip(READ_CALLS, plain, strict=True):
            check_output(name, answer)
        check_values(plain)
        await check_single_trades(service)

        calls = [{"path": name.split("."), "input": request} for name, request in READ_CALLS]
        url = f"{service.url}/api/rpc"
        groups = await run_client(
            orpc_client,
            url,
            {"link": "single", "calls": calls},
            {"link": "buffered", "calls": calls},
            {"link": "streaming", "calls": calls, "flat": True},
        )
        # The next minute of the market, and thus the models' next cycle, may begin meanwhile.
        later = [await service.call(name, **request) for name, request in READ_CALLS]
        for group in groups:
            for (name, _), answer, *expected in zip(READ_CALLS, group["answers"], plain, later, strict=True):
                check_output(name, answer["output"])
                if name not in MOVING:
                    assert answer["output"] in expected, name

        changes = [
            {"path": ["simulator", "placeOrder"], "input": {"symbol": "SOL", "side": "buy", "quantity": 3}},
            {"path": ["simulator", "cancelOrder"], "input": {"accountId": "by-hand", "orderId": resting_id}},
        ]
        reset = [{"path": ["simulator", "resetAccount"], "input": {"accountId": "by-hand"}}]
        undefined = [{"path": ["variants", "getVariants"]}]
        groups = await run_client(
            orpc_client,
            url,
            {"link": "single", "calls": changes},
            {"link": "single", "calls": reset},
            {"link": "single", "calls": undefined},
        )
        answers = groups[0]["answers"] + groups[1]["answers"]
        for called, answer in zip(changes + reset, answers, strict=True):
            check_output(".".join(called["path"]), answer["output"])
        placed, cancelled, emptied = (answer["output"] for answer in answers)
        assert (placed["order"]["accountId"], placed["order"]["status"]) == ("default", "filled")
        assert (cancelled["order"]["id"], cancelled["order"]["status"]) == (resting_id, "cancelled")
        assert emptied["account"]["positions"] == emptied["account"]["openOrders"] == []
        assert emptied["account"]["equity"] == emptied["account"]["initialCapital"] == 10_000
        assert groups[2]["answers"][0]["output"] == plain[names().index("variants.getVariants")]
        assert await service.stop() == 0
        assert not service.traceback()


MOVING = {
    "trading.getPositions", "trading.getCryptoPrices", "trading.getPortfolioHistory", "trading.getEquityCurves",
    "trading.getCandles",
    "simulator.getAccount",
    "models.getModels", "models.getInvocations", "analytics.getModelStats", "analytics.getLeaderboard",
    "analytics.getFailures", "analytics.getRunInfo", "variants.getVariantHistory",
}  # fmt: skip
"""What the market may change, or the next cycle of the models more than once, between two calls."""


async def check_single_trades(service: ServiceProcess) -> None:
    """Each manual trade and position can be read in full by its id; a closed part has the entry of its position."""
    trades = (await service.call("trading.getTrades", modelId="by-hand"))["trades"]
    positions = await service.call("trading.getPositions", modelId="by-hand")
    assert [len(trades), len(positions)] == [2, 2]
    for listed in (*trades, *positions):
        answer = await service.call("trading.getTrade", id=listed["id"])
        check_output("trading.getTrade", answer)
        trade = answer["trade"]
        entries = [fill for fill in trade["fills"] if (fill["side"] == "buy") is (trade["side"] == "LONG")]
        exits = [fill for fill in trade["fills"] if fill not in entries]
        assert entries
        closed = trade["status"] == "CLOSED"
        assert sum(fill["quantity"] for fill in exits) == pytest.approx(trade["quantity"] if closed else 0)
        assert {name: trade[name] for name in ("symbol", "side", "openedAt", "exitPlan") if name in listed}.items() <= (
            listed.items()
        )
        assert trade["excursion"]["adversePercent"] <= 0 <= trade["excursion"]["favourablePercent"]
    status, answer = await service.try_call("trading.getTrade", id="00000000-0000-5000-8000-000000000000")
    assert (status, answer["code"]) == (404, "NOT_FOUND")


def names() -> list[str]:
    return [name for name, _ in READ_CALLS]


def check_values(answers: Sequence[Any]) -> None:
    """Check what schemas cannot express: orders of lists, relations between fields."""
    by_call = {(name, *sorted(request)): answer for (name, request), answer in zip(READ_CALLS, answers, strict=True)}
    check_books(by_call)
    check_models(by_call)
    check_variants(by_call)


def check_books(by_call: dict[tuple[str, ...], Any]) -> None:
    trades = by_call["trading.getTrades",]["trades"]
    assert is_sorted((trade["closedAt"] for trade in trades), newest_first=True)
    assert by_call["trading.getTrades", "limit", "modelId", "variant"] == {"trades": []}
    mine = by_call["trading.getTrades", "modelId"]["trades"]
    assert [(trade["symbol"], trade["side"]) for trade in mine] == [("SOL", "LONG"), ("BTC", "LONG")]
    for trade in mine:
        assert trade["modelId"] == trade["modelName"] == trade["modelKey"] == "by-hand"
        assert "modelVariant" not in trade
        assert trade["timestamp"] == trade["closedAt"] >= trade["openedAt"]
        assert abs(trade["grossPnl"] - trade["fees"] + trade["funding"] - trade["netPnl"]) < 1e-9
    assert [trade.get("confidence") for trade in mine] == [10, 62.5]
    assert [trade.get("leverage") for trade in mine] == [2, 3]

    positions = by_call["trading.getPositions",]
    assert is_sorted(position["openedAt"] for position in positions)
    held = by_call["trading.getPositions", "modelId"]
    assert held == [] or {position["modelId"] for position in held} == {"by-hand"}
    btc, eth = [position for position in positions if position["modelId"] == "by-hand"]
    assert (btc["symbol"], btc["side"], btc["quantity"], btc["leverage"]) == ("BTC", "LONG", "0.01", "3")
    assert (eth["symbol"], eth["side"], eth["quantity"]) == ("ETH", "SHORT", "0.5")
    assert "leverage" not in eth
    assert "confidence" not in eth
    assert btc["confidence"] == 62.5
    assert btc["exitPlan"] == {
        "stop": 1, "target": 10**7, "invalidation": "words", "invalidationPrice": None,
        "timeExit": "2098-12-31T23:00:00.000Z",
    }  # fmt: skip
    assert set(eth["exitPlan"].values()) == {None}

    prices = by_call["trading.getCryptoPrices",]["prices"]
    assert sorted(price["symbol"] for price in prices) == ["BTC", "ETH", "SOL"]
    asked = by_call["trading.getCryptoPrices", "symbols"]["prices"]
    assert sorted(price["symbol"] for price in asked) == ["BTC", "ETH"]
    assert not any("message" in price for price in prices)

    account = by_call["simulator.getAccount", "accountId"]["account"]
    assert [position["symbol"] for position in account["positions"]] == ["BTC", "ETH"]
    assert [order["limitPrice"] for order in account["openOrders"]] == [1000]
    assert abs(account["marginBalance"] - sum(position["margin"] for position in account["positions"])) < 1e-9
    assert abs(account["cashBalance"] + account["totalUnrealizedPnl"] - account["equity"]) < 1e-9
    shown = by_call["simulator.getAccount",]["account"]
    assert (shown["accountId"], shown["runId"], shown["equity"]) == ("default", None, 10_000)

    completed = by_call["simulator.getCompletedTradesFromDB", "limit", "modelId"]
    assert [trade["direction"] for trade in completed["trades"]] == ["LONG", "LONG"]
    assert is_sorted((trade["closedAt"] for trade in completed["trades"]), newest_first=True)
    assert completed["stats"]["tradeCount"] == 2
    assert completed["stats"]["medianLeverage"] == completed["stats"]["averageLeverage"] == 2.5
    assert sorted(completed["stats"]["confidenceValues"]) == [10, 62.5]


def check_models(by_call: dict[tuple[str, ...], Any]) -> None:
    listed = by_call["models.getModels",]
    assert [model["id"] for model in listed["models"]] == [
        "apex-rules", "trendsurfer-rules", "contrarian-rules", "sovereign-rules", "broken"
    ]  # fmt: skip
    assert "broken" in listed["warning"]
    assert [model.get("logo") for model in listed["models"]] == [None] * 4 + ["logo.svg"]

    runs = by_call["models.getInvocations",]["conversations"]
    assert is_sorted((run["timestamp"] for run in runs), newest_first=True)
    (latest,) = by_call["models.getInvocations", "limit", "variant"]["conversations"]
    assert latest["modelVariant"] == "Trendsurfer"
    assert latest["failureReason"] is None
    broken = next(run for run in runs if run["modelId"] == "broken")
    assert (broken["status"], broken["modelLogo"], broken["steps"]) == ("failed", "logo.svg", 0)
    assert "mistral" in broken["failureReason"]

    failures = by_call["analytics.getFailures",]
    assert {failure["modelId"] for failure in failures["failures"]} == {"broken"}
    assert failures["failures"][0]["failureReason"] == broken["failureReason"]
    counts = {entry["modelId"]: entry for entry in failures["modelStats"]}
    assert counts["broken"]["failureRate"] == 100
    assert counts["apex-rules"]["failedCount"] == 0

    stats = by_call["analytics.getModelStats",]["overall"]
    assert len(stats) == 5
    assert {entry["sharpeRatio"] for entry in stats} == {"N/A"}  # no run is ten days old
    assert len(by_call["analytics.getModelStats", "mode", "variant"]["advanced"]) == 5
    board = by_call["analytics.getLeaderboard",]
    assert board["window"] == "7d"
    ranks = [entry["rank"] for entry in board["entries"]]
    assert ranks == [1, 2, 3, 4, None]  # the model without a provider decides nothing
    ranked = [entry["pnlPercent"] for entry in board["entries"] if entry["rank"] is not None]
    assert is_sorted(ranked, newest_first=True)
    assert {entry["ci95"] for entry in board["entries"]} == {None}  # under 24 hours of data
    assert all("details" not in entry for entry in board["entries"])
    reasons = [entry["details"]["ci95Reason"] for entry in by_call["analytics.getLeaderboard", "details"]["entries"]]
    assert len(reasons) == 5
    assert all("24" in reason or "whole hours" in reason for reason in reasons)
    assert {
        entry["variant"] for entry in by_call["analytics.getLeaderboard", "sortBy", "variant", "window"]["entries"]
    } <= {"Contrarian"}
    about = by_call["analytics.getRunInfo",]
    assert (about["tradingMode"], about["models"]) == ("simulated", 5)
    assert about["invocations"] >= 5


def check_variants(by_call: dict[tuple[str, ...], Any]) -> None:
    expected = [
        ("Apex", "Apex (Kelly Engine)", 0.7, "#a855f7"),
        ("Trendsurfer", "Trendsurfer (Momentum)", 0.5, "#06b6d4"),
        ("Contrarian", "Contrarian (Reverter)", 0.6, "#e11d48"),
        ("Sovereign", "Sovereign (Adaptive)", 0.8, "#eab308"),
    ]
    variants = by_call["variants.getVariants",]["variants"]
    assert [
        (variant["id"], variant["label"], variant["temperature"], variant["color"]) for variant in variants
    ] == expected
    assert [variant.id.value for variant in VARIANTS.values()] == list(VARIANT)
    stats = by_call["variants.getVariantStats",]["stats"]
    assert [entry["variantId"] for entry in stats] == list(VARIANT)
    assert [entry["modelCount"] for entry in stats] == [2, 1, 1, 1]
    for window in ((), ("window",)):
        history = by_call["variants.getVariantHistory", *window]
        assert [entry["variantId"] for entry in history["variants"]] == list(VARIANT)
        assert all(is_sorted(point["timestamp"] for point in entry["history"]) for entry in history["variants"])
        times = {point["timestamp"] for entry in history["variants"] for point in entry["history"]}
        assert [point["timestamp"] for point in history["aggregate"]] == sorted(times)
        assert times
        for point in history["aggregate"]:
            values = [
                other["value"]
                for entry in history["variants"]
                for other in entry["history"]
                if other["timestamp"] == point["timestamp"]
            ]
            assert abs(point["value"] - sum(values) / len(values)) < 1e-6
    entries = by_call["trading.getPortfolioHistory",]["history"]
    assert is_sorted(entry["createdAt"] for entry in entries)
    filtered = by_call["trading.getPortfolioHistory", "maxPoints", "startDate", "variant"]
    assert {entry["model"]["variant"] for entry in filtered["history"]} == {"Sovereign"}
