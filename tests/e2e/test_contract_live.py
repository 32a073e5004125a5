"""The contract: every procedure of the running service, through the real oRPC client and through plain HTTP."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from support.orpc import run_client
from support.process import ServiceProcess, serving
from support.waiting import until
from support.wire import check_output

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
    ("operations.getLadder", {}),
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


async def test_every_procedure_keeps_the_contract_for_both_callers(tmp_path: Path, dsn: str, orpc_client: Path) -> None:
    await add_models(dsn)
    async with serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0") as service:
        resting_id = await trade_by_hand(service)
        await until(lambda: ran(service))

        plain = [await service.call(name, **request) for name, request in READ_CALLS]
        for (name, _), answer in zip(READ_CALLS, plain, strict=True):
            check_output(name, answer)
        check_run(plain)
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


def check_run(answers: Sequence[Any]) -> None:
    """The models ran, and the one without a provider failed: everywhere, the same is told about it."""
    by_call = {(name, *sorted(request)): answer for (name, request), answer in zip(READ_CALLS, answers, strict=True)}
    listed = by_call["models.getModels",]
    assert [model["id"] for model in listed["models"]] == [
        "apex-rules", "trendsurfer-rules", "contrarian-rules", "sovereign-rules", "broken"
    ]  # fmt: skip
    assert "broken" in listed["warning"]
    assert [model.get("logo") for model in listed["models"]] == [None] * 4 + ["logo.svg"]
    broken = next(run for run in by_call["models.getInvocations",]["conversations"] if run["modelId"] == "broken")
    assert (broken["status"], broken["modelLogo"], broken["steps"]) == ("failed", "logo.svg", 0)
    assert "mistral" in broken["failureReason"]
    failures = by_call["analytics.getFailures",]
    assert {failure["modelId"] for failure in failures["failures"]} == {"broken"}
    assert failures["failures"][0]["failureReason"] == broken["failureReason"]
    rates = {entry["modelId"]: entry["failureRate"] for entry in failures["modelStats"]}
    assert (rates["broken"], rates["apex-rules"]) == (100, 0)
    ranks = [entry["rank"] for entry in by_call["analytics.getLeaderboard",]["entries"]]
    assert ranks == [1, 2, 3, 4, None], "the model without a provider decides nothing"
    btc, eth = [held for held in by_call["trading.getPositions",] if held["modelId"] == "by-hand"]
    assert (btc["symbol"], btc["exitPlan"]["timeExit"]) == ("BTC", "2098-12-31T23:00:00.000Z")
    assert (eth["symbol"], eth["side"], set(eth["exitPlan"].values())) == ("ETH", "SHORT", {None})
