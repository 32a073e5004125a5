"""The streams send exactly what the OpenAPI document describes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import jsonschema_rs
import msgspec
import orjson
import pytest
from support.process import serving
from support.trading_floor import calling, open_floor, opening
from support.wire import Document, check_event, wire_document

from trader.api.schemas.health import HaltInForce
from trader.core.clock import iso
from trader.core.events import ConversationsChanged, Event, PositionsChanged, WorkflowProgress
from trader.database.pool import Database
from trader.exchange.domain.halts import HaltCause
from trader.exchange.events import HaltsChanged, TradesChanged

EVENT_WAIT_S = 15


def workflow_data(event: Event) -> Iterator[Document]:
    match event:
        case WorkflowProgress(type=kind, at=at, details=details):
            yield {**details, "type": kind, "timestamp": iso(at)}
        case PositionsChanged(at=at, account_ids=accounts):
            yield {"accountIds": list(accounts), "type": "positions:changed", "timestamp": iso(at)}
        case TradesChanged(at=at, account_ids=accounts):
            yield {"accountIds": list(accounts), "type": "trades:changed", "timestamp": iso(at)}
        case ConversationsChanged(at=at, model_id=model_id):
            yield {"modelId": model_id, "type": "conversations:changed", "timestamp": iso(at)}
        case HaltsChanged(at=at, halts=halts):
            told = [orjson.loads(msgspec.json.encode(HaltInForce.from_attributes(halt))) for halt in halts]
            yield {"halts": told, "type": "halts:changed", "timestamp": iso(at)}


async def test_workflow_events_are_as_documented(database: Database) -> None:
    async with open_floor(database) as floor:
        await floor.add("good", "bad")
        floor.provider.scripts["good"] = [calling(opening())]
        floor.provider.scripts["bad"] = [RuntimeError("the provider broke")]
        await floor.agents.start()
        await floor.cycle()
        floor.provider.scripts["good"] = [calling(("closePosition", {"symbol": "BTC"}))]
        await floor.cycle()
        await floor.halts.halt("good", HaltCause.OPERATOR, "looks wrong", "someone")
        seen = [data for event in floor.events for data in workflow_data(event)]
    for data in seen:
        check_event("workflow", data)
    assert {data["type"] for data in seen} >= {
        "workflow:started",
        "workflow:step",
        "workflow:call",
        "workflow:complete",
        "workflow:failed",
        "batch:complete",
        "positions:changed",
        "trades:changed",
        "conversations:changed",
        "halts:changed",
    }
    with pytest.raises(jsonschema_rs.ValidationError):
        check_event("workflow", seen[0] | {"surprise": 1})


@pytest.mark.processes
async def test_first_messages_and_reports_are_as_documented(tmp_path: Path, dsn: str) -> None:
    async with serving(tmp_path, DATABASE_URL=dsn, SIM_LATENCY_MS="0") as service:
        await service.call("simulator.placeOrder", symbol="BTC", side="buy", quantity=0.01, leverage=3)
        for stream in ("positions", "trades", "conversations", "portfolio", "candles", "workflow"):
            async with (
                asyncio.timeout(EVENT_WAIT_S),
                service.http.get(f"{service.url}/api/events/{stream}") as response,
            ):
                assert response.headers["Content-Type"] == "text/event-stream"
                message = await response.content.readuntil(b"\n\n")
                if message.startswith(b"event: empty\n"):
                    assert stream in ("trades", "conversations", "candles")
                    message = await response.content.readuntil(b"\n\n")
            (data,) = [line for line in message.splitlines() if line.startswith(b"data:")]
            read = orjson.loads(data.removeprefix(b"data:"))
            check_event(stream, read)
            if stream == "positions":
                assert any(entry["positions"] for entry in read)
        _, served = await service.get("/api/openapi.json")
        assert served["servers"] == [{"url": "/"}]
        assert served["paths"] == wire_document()["paths"]
