"""A fresh service on an empty database, before it has models, trades or prices."""

import asyncio
from datetime import timedelta
from typing import Any

import orjson
from support.composed import composed
from support.served import Client

from trader.api.streams import ROUTES

REFUSED = "http://127.0.0.1:9 cannot be reached"
EMPTY = {
    "trades": "No trade has been completed yet.",
    "conversations": "No run of a model has been recorded yet.",
    "candles": "No market has a price yet.",
}


async def first_messages(client: Client, path: str, count: int) -> list[tuple[str, Any]]:
    """The first messages of a stream: the name, empty for an unnamed one, and the data."""
    messages: list[tuple[str, Any]] = []
    async with asyncio.timeout(30), client.get(path) as response:
        assert response.status == 200
        while len(messages) < count:
            fields: dict[str, str] = {}
            while line := (await response.content.readline()).decode().rstrip("\n"):
                name, _, value = line.partition(": ")
                fields[name] = value
            if "data" in fields:
                messages.append((fields.get("event", ""), orjson.loads(fields["data"])))
    return messages


async def test_the_first_message_of_each_stream_is_never_empty(dsn: str) -> None:
    async with composed(dsn) as (_, client):
        for name, text in EMPTY.items():
            assert await first_messages(client, f"/api/events/{name}", 2) == [
                ("empty", {"stream": name, "message": text}),
                ("", []),
            ]
        assert await first_messages(client, "/api/events/positions", 1) == [
            (
                "",
                [
                    {
                        "modelId": "default",
                        "modelName": "default",
                        "positions": [],
                        "totalUnrealizedPnl": 0,
                        "availableCash": 10000,
                    }
                ],
            )
        ]
        ((name, portfolio),) = await first_messages(client, "/api/events/portfolio", 1)
        assert (name, portfolio["modelsUpdated"], portfolio["snapshots"]) == ("", 0, [])
        ((name, greeting),) = await first_messages(client, "/api/events/workflow", 1)
        assert (name, greeting["type"]) == ("connected", "connected")


async def test_the_combined_stream_says_which_of_its_streams_are_empty(dsn: str) -> None:
    async with composed(dsn) as (_, client):
        messages = await first_messages(client, "/api/events", len(ROUTES) + len(EMPTY))
        names = [name for name, _ in messages]
        assert sorted(names) == sorted([*(set(ROUTES) - {"workflow"}), "connected", *["empty"] * len(EMPTY)])
        announced = {data["stream"]: place for place, (name, data) in enumerate(messages) if name == "empty"}
        assert announced.keys() == EMPTY.keys()
        assert all(place < names.index(stream) for stream, place in announced.items())


async def test_a_venue_that_is_unreachable_from_the_start_is_unhealthy_within_a_minute(dsn: str) -> None:
    async with composed(dsn) as (_, client), client.get("/health") as response:
        report = await response.json()
        assert response.status == 200, "a start has half a minute to see its first price"
        assert report["schedulers"]["priceTracker"]
    async with composed(dsn, started_ago=timedelta(seconds=31)) as (_, client):
        async with client.post("/api/rpc/trading.getCryptoPrices", json={}) as response:
            assert await response.json() == {"prices": []}
        async with client.get("/health") as response:
            report = await response.json()
        assert (response.status, report["status"]) == (503, "unhealthy")
        assert report["schedulers"] == {"priceTracker": False, "tradeExecutor": True, "portfolioSnapshot": True}
        (reason,) = report["reasons"]
        assert reason.startswith("no price in the 3")
        assert REFUSED in reason
        async with client.get("/health/schedulers") as response:
            detailed = await response.json()
        assert {name: job["running"] for name, job in detailed["schedulers"].items()} == report["schedulers"]
        assert REFUSED in detailed["market"]["trouble"]
        async with client.get("/health/live") as response:
            assert response.status == 200
