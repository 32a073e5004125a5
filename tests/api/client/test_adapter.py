"""The documented adapter for another frontend: run on answers of the contract, with the names that it reads."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest
from support.orpc import FOLDER
from support.process import ROOT
from support.wire import check_output

AT = "2026-03-04T05:06:00.000Z"
ID = "9cbeb956-9d16-5feb-b686-da23183f830e"
PLAN = {"stop": 90.5, "target": None, "invalidation": "it breaks", "invalidationPrice": None, "timeExit": None}
POSITION = {
    "id": ID, "modelId": "m", "modelName": "M", "modelVariant": "Apex", "symbol": "BTC", "side": "SHORT",
    "quantity": "0.5", "entryPrice": "100", "leverage": "3", "exitPlan": PLAN, "openedAt": AT, "currentPrice": "99",
    "notional": "49.5", "unrealizedPnl": "0.5",
}  # fmt: skip
DECISION = {
    "symbol": "BTC", "side": "SHORT", "quantity": 0.5, "leverage": 3, "stop": 90.5, "target": 80, "invalidation": None,
    "invalidationPrice": None, "timeExit": None, "confidence": 60,
}  # fmt: skip


def call(kind: str, status: str, decision: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
    metadata = {"raw": {"name": kind, "arguments": "{}"}, "decisions": [decision], "results": [result]}
    return {"id": ID, "type": kind, "status": status, "metadata": metadata, "timestamp": AT}


CALLS = [
    call("CREATE_POSITION", "ok", DECISION, {"orderId": ID, "status": "filled"}),
    call("CREATE_POSITION", "rejected", DECISION, {"rule": "margin", "reason": "too large"}),
    call("HOLDING", "ok", {"reason": "no trend"}, {"holding": True}),
]
RUN = {
    "id": ID, "modelId": "m", "modelName": "M", "modelVariant": "Apex", "modelLogo": None, "response": None,
    "status": "completed", "failureReason": None, "endedBy": None, "steps": 1,
    "inputTokens": 1, "outputTokens": 1, "durationMs": 5,
    "timestamp": AT, "toolCalls": CALLS,
}  # fmt: skip
PRICE = {"symbol": "BTC", "price": 99, "timestamp": AT, "change24hPercent": -1.5}
CURVES: dict[str, Any] = {
    "times": [AT, "2026-03-04T05:07:00.000Z"],
    "resolution": "1m",
    "start": AT,
    "starts": {},
    "models": [{"id": "m", "name": "M", "variant": "Apex", "values": [None, 10_000.25]}],
}
ROW = {
    "id": ID, "modelId": "m", "netPortfolio": 10_000.25, "createdAt": AT, "updatedAt": AT,
    "model": {"name": "M", "variant": "Apex", "openRouterModelName": "m/m"},
}  # fmt: skip


def adapted(**answers: list[Any]) -> Any:
    document = (ROOT / "docs" / "frontends.md").read_text(encoding="utf-8")
    (adapter,) = re.findall(r"```js\n(const REJECTED.*?)```", document, re.DOTALL)
    done = subprocess.run(
        ["node", FOLDER / "adapter.mjs"],
        input=json.dumps({"adapter": adapter, "answers": answers}),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_adapter_of_the_documents_gives_the_names_that_autonome_reads() -> None:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    conversations, history = {"conversations": [RUN]}, {"history": [ROW], "resolution": "1m"}
    for name, answer in {
        "trading.getPositions": [POSITION],
        "trading.getCryptoPrices": {"prices": [PRICE]},
        "models.getInvocations": conversations,
        "trading.getPortfolioHistory": history,
        "trading.getEquityCurves": CURVES,
    }.items():
        check_output(name, answer)
    given = adapted(
        adaptPrices=[{"prices": [PRICE]}],
        adaptPositions=[[POSITION], [{"id": "m", "logo": "m.svg"}]],
        adaptConversations=[conversations],
        adaptHistory=[CURVES],
    )
    assert given["adaptPrices"] == [
        {"symbol": "BTC", "price": 99, "timestamp": AT, "change24h": -1.5, "source": "simulator"}
    ]
    (model,) = given["adaptPositions"]
    assert (model["modelId"], model["modelLogo"], model["totalUnrealizedPnl"]) == ("m", "m.svg", 0.5)
    (position,) = model["positions"]
    names = {"sign": "SHORT", "signal": "SHORT", "position": "0.5", "quantity": 0.5, "leverage": 3, "notional": "49.5"}
    texts = {"unrealizedPnl": "0.5", "realizedPnl": "", "liquidationPrice": ""}
    assert {**position, **names, **texts, "exitPlan": {**PLAN, "confidence": None}} == position
    opened, refused, held = (each["metadata"] for each in given["adaptConversations"][0]["toolCalls"])
    plan = {"signal": "SHORT", "profitTarget": 80, "stopLoss": 90.5, "invalidationCondition": None, "quantity": 0.5}
    assert {**opened["decisions"][0], **plan, "status": None} == opened["decisions"][0]
    assert {**opened["results"][0], "symbol": "BTC", "success": True} == opened["results"][0]
    assert (refused["decisions"][0]["status"], refused["results"][0]["error"]) == ("REJECTED", "too large")
    assert refused["results"][0]["success"] is False
    assert (held["reason"], held["decisions"][0]["signal"]) == ("no trend", "HOLD")
    assert given["adaptConversations"][0]["response"] == given["adaptConversations"][0]["modelLogo"] == ""
    (row,) = given["adaptHistory"]["history"]
    assert (row["netPortfolio"], row["createdAt"], row["model"]["name"]) == ("10000.25", CURVES["times"][1], "M")
    assert adapted(adaptHistory=[history])["adaptHistory"]["history"] == [{**ROW, "netPortfolio": "10000.25"}]
