import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.served import AppClient, Client
from support.waiting import until

from trader.api import batch

ServiceFactory = Callable[..., Awaitable[AppClient]]

BATCH = "/api/rpc/demo/echo/__batch__"
OUTPUT: dict[str, object] = {"window": "7d", "text": None, "items": [], "maxValue": 1.5}
NOT_FOUND = {"error": "Not Found"}


def item(path: str, body: object = None, **rest: object) -> dict[str, object]:
    url = f"http://somewhere.example/api/rpc/{path}"
    return {"url": url, "body": {} if body is None else body, **rest}


async def send(client: AppClient, items: object, mode: str = "buffered", path: str = BATCH) -> tuple[int, Any]:
    data = items if isinstance(items, str) else json.dumps(items)
    async with client.post(path, data=data, headers={batch.HEADER: mode}) as response:
        assert response.headers["X-Request-Id"]
        assert response.headers["Content-Type"] == "application/json"
        return response.status, await response.json()


async def replies(client: AppClient, *items: dict[str, object]) -> list[Any]:
    status, answer = await send(client, list(items))
    assert status == 207
    assert sorted(reply["index"] for reply in answer) == list(range(len(items)))
    return sorted(answer, key=lambda reply: int(reply["index"]))


async def test_each_item_gets_the_clients_style_regardless_of_its_path(client: AppClient) -> None:
    assert await replies(
        client,
        item("demo/echo"),
        item("demo.echo"),
        item("demo/echo", {"json": {"window": "24h"}}),
        {"url": "https://x/api/rpc/demo/echo/"},
    ) == [
        {"index": 0, "status": 200, "body": {"json": OUTPUT}},
        {"index": 1, "status": 200, "body": {"json": OUTPUT}},
        {"index": 2, "status": 200, "body": {"json": OUTPUT | {"window": "24h"}}},
        {"index": 3, "status": 200, "body": {"json": OUTPUT}},
    ]


async def test_errors_stay_within_their_item(client: AppClient) -> None:
    answers = await replies(
        client,
        item("demo/none"),
        item("demo/echo/__batch__"),
        item("demo/raise", {"json": {"error": "bug"}}),
        item("demo/raise", {"json": {"error": "unavailable"}}),
        item("demo/echo", {"json": {"window": "x"}}),
        item("demo/echo", {"json": None}),
        item("demo/echo", method="GET"),
        item("demo/echo", "text"),
        {"url": "http://x/api/rpc/demo%2Fecho"},
    )
    assert [reply["status"] for reply in answers] == [404, 404, 500, 503, 400, 400, 405, 400, 404]
    assert answers[0]["body"] == answers[1]["body"] == NOT_FOUND
    assert answers[2]["body"]["json"]["message"] == "Internal server error"
    assert answers[3]["headers"] == {"retry-after": "7"}
    assert answers[4]["body"]["json"]["data"]["issues"][0]["path"] == ["window"]
    assert "headers" not in answers[4]


async def test_calls_run_concurrently_and_respond_as_they_end(client: AppClient) -> None:
    status, answer = await send(client, [item("demo/wait"), item("demo/open")])
    assert status == 207
    assert [reply["index"] for reply in answer] == [1, 0]


async def test_a_streamed_batch_sends_each_response_as_soon_as_it_is_ready(client: AppClient) -> None:
    body = json.dumps([item("demo/wait"), item("demo/echo"), item("demo/none")])
    async with client.post(BATCH, data=body, headers={batch.HEADER: "streaming"}) as response:
        assert response.status == 207
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["X-Request-Id"]
        first = await response.content.readuntil(b"\n\n")
        seen = [await response.content.readuntil(b"\n\n") for _ in range(2)]
        await client.post("/api/rpc/demo/open")
        last = await response.content.read()
    echoed = b'{"json":{"window":"7d","text":null,"items":[],"maxValue":1.50}}'
    assert first == b": \n\n"
    assert sorted(seen) == [
        b'event: message\ndata: {"index":1,"status":200,"body":' + echoed + b"}\n\n",
        b'event: message\ndata: {"index":2,"status":404,"body":{"error":"Not Found"}}\n\n',
    ]
    assert last == b'event: message\ndata: {"index":0,"status":200,"body":{"json":{"value":4}}}\n\n'


async def test_a_streamed_batch_is_kept_alive_while_it_waits(
    client: AppClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "KEEP_ALIVE_S", 0.01)
    body = json.dumps([item("demo/wait")])
    async with client.post(BATCH, data=body, headers={batch.HEADER: "streaming"}) as response:
        assert [await response.content.readuntil(b"\n\n") for _ in range(3)] == [b": \n\n"] * 3
        await client.post("/api/rpc/demo/open")
        assert (await response.content.read()).endswith(b'"value":4}}}\n\n')


async def test_a_disconnect_does_not_undo_a_call_in_progress(limited_client: Client, context: Any) -> None:
    body = json.dumps([item("demo/wait"), item("demo/change")])
    response = await limited_client.post(BATCH, data=body, headers={batch.HEADER: "streaming"})
    response.close()
    await limited_client.post("/api/rpc/demo/open")
    await until(lambda: context.calls == ["demo.change", "demo.wait"])


@pytest.mark.parametrize(
    "items",
    [
        "{",
        "{}",
        "",
        "[]",
        "[null]",
        '[{"url":1}]',
        '[{"url":"/api/rpc/demo/echo"}]',
        '[{"url":"http://[/api/rpc/demo/echo"}]',
        '[{"body":{}}]',
        '[{"url":"http://x/api/rpc/demo/echo","url":"http://x/y"}]',
        '[{"url":"http://x/y","headers":[]}]',
        "[" * 60_000,
    ],
)
async def test_a_malformed_batch_is_a_bad_request(client: AppClient, items: str) -> None:
    status, answer = await send(client, items)
    assert status == 400
    assert answer["json"]["code"] == "VALIDATION_ERROR"


async def test_a_batch_needs_its_header(client: AppClient) -> None:
    async with client.post(BATCH, json=[item("demo/echo")]) as response:
        assert (response.status, await response.json()) == (404, NOT_FOUND)


async def test_a_foreign_origin_places_no_batch(client: AppClient, context: Any) -> None:
    headers = {batch.HEADER: "buffered", "Origin": "https://evil.example"}
    items = [item("demo/change", headers={"origin": "http://localhost:3000"})]
    async with client.post(BATCH, json=items, headers=headers) as response:
        assert response.status == 403
        assert (await response.json())["json"]["code"] == "FORBIDDEN"
    assert context.calls == []


@pytest.mark.parametrize("within", ["batch", "item"])
async def test_the_token_may_be_the_batchs_or_the_items(make_service: ServiceFactory, within: str) -> None:
    client = await make_service(API_TOKEN="open-sesame-0123456789")
    token = {"Authorization": "Bearer open-sesame-0123456789"}
    items = [item("demo/change", headers={"authorization": token["Authorization"]} if within == "item" else {})]
    headers = {batch.HEADER: "buffered", **(token if within == "batch" else {})}
    async with client.post(BATCH, json=items, headers=headers) as response:
        assert [reply["status"] for reply in await response.json()] == [200]
    async with client.post(BATCH, json=[item("demo/change")], headers={batch.HEADER: "buffered"}) as response:
        assert [reply["status"] for reply in await response.json()] == [401]
