"""Good answers written in one piece are what the framework would have written."""

import asyncio
from email.utils import parsedate_to_datetime

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient

Client = TestClient[web.Request, web.Application]

OWN = {"server"}
"""What only the framework says: its name and version."""


async def exchange(
    client: Client, version: str, body: bytes, *headers: str, path: str = "demo.echo"
) -> tuple[str, dict[str, str], bytes]:
    """One request over a connection of its own: the first line, the headers in lower case, and the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    lines = (f"POST /api/rpc/{path} {version}", "Host: x", f"Content-Length: {len(body)}", *headers)
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
    try:
        async with asyncio.timeout(10):
            first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            told = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
            return first, told, await reader.readexactly(int(told["content-length"]))
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("length", [0, 100, 70_000, 900_000])
async def test_both_ways_say_the_same(client: Client, length: int) -> None:
    body = b'{"text":"%b"}' % (b"x" * length)
    first, ready, answer = await exchange(client, "HTTP/1.1", body)
    assert first == "HTTP/1.1 200 OK"
    assert b"x" * length in answer
    for others in (("Connection: close",), ("Origin: http://localhost:3000",)):
        line, framed, same = await exchange(client, "HTTP/1.1", body, *others)
        assert (line, same) == (first, answer)
        extra = {"connection"} if others[0].startswith("Connection") else set(framed) - set(ready) - OWN
        assert all(name.startswith("access-control-") or name == "connection" for name in extra)
        varying = {"date", "x-request-id"}
        assert {name: value for name, value in ready.items() if name not in varying}.items() <= framed.items()
        assert abs(parsedate_to_datetime(ready["date"]) - parsedate_to_datetime(framed["date"])).total_seconds() < 10
        assert ready["x-request-id"] != framed["x-request-id"]


@pytest.mark.parametrize("error", ["input", "not found", "precondition", "unavailable", "market", "bug"])
async def test_errors_are_the_same_both_ways(client: Client, error: str) -> None:
    body = b'{"error":"%b"}' % error.encode()
    first, short, answer = await exchange(client, "HTTP/1.1", body, path="demo.raise")
    line, routed, same = await exchange(client, "HTTP/1.1", body, "Origin: http://localhost:3000", path="demo.raise")
    assert (line, same) == (first, answer)
    assert short["x-request-id"] != routed["x-request-id"]
    varying = {"date", "x-request-id"}
    assert {name: value for name, value in short.items() if name not in varying} == {
        name: value for name, value in routed.items() if name not in varying and not name.startswith("access-control-")
    }


async def test_a_query_finds_the_procedure_too(client: Client) -> None:
    body = b'{"text":"x"}'
    _, _, answer = await exchange(client, "HTTP/1.1", body)
    assert (await exchange(client, "HTTP/1.1", body, path="demo.echo?batch=1"))[2] == answer


@pytest.mark.parametrize(("figures", "number"), [(0, 1), (50, 1), (100_000, 1), (100_000, 10)])
async def test_a_body_in_pieces_arrives_whole(client: Client, figures: int, number: int) -> None:
    wanted = b"[" + ",".join(f'{{"value":{value}}}' for value in range(figures)).encode() + b"]"
    body = b'{"text":"%d","number":%d}' % (figures, number)
    for others in ((), ("Connection: close",), ("Origin: http://localhost:3000",)):
        first, told, answer = await exchange(client, "HTTP/1.1", body, *others, path="demo.pieces")
        assert (first, told["content-type"], answer) == ("HTTP/1.1 200 OK", "application/json", wanted)
        enveloped = b'{"json":%b}' % body
        _, _, answer = await exchange(client, "HTTP/1.1", enveloped, *others, path="demo/pieces")
        assert answer == b'{"json":%b}' % wanted
    items = [{"url": "http://x/api/rpc/demo/pieces", "body": {"json": {"text": "3"}}}]
    async with client.post("/api/rpc/__batch__", json=items, headers={"x-orpc-batch": "buffered"}) as response:
        (reply,) = await response.json()
    assert reply["body"] == {"json": [{"value": 0}, {"value": 1}, {"value": 2}]}


async def test_an_older_protocol_gets_the_answer_it_knows(client: Client) -> None:
    first, told, answer = await exchange(client, "HTTP/1.0", b"{}")
    assert first == "HTTP/1.0 200 OK"
    assert told["content-type"] == "application/json"
    assert answer.startswith(b'{"window":"7d"')


async def test_a_connection_goes_on_after_an_answer(client: Client) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    for _ in range(5):
        writer.write(b"POST /api/rpc/demo.echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert (await reader.readexactly(size)).endswith(b"}")
    writer.close()
    await writer.wait_closed()
