"""No matter how the bytes of many requests arrive on one connection, each request is answered, in order."""

import asyncio
import gzip
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from support.served import AppClient, Client
from support.waiting import turns

ServiceFactory = Callable[..., Awaitable[AppClient]]
Reply = tuple[str, dict[str, str], bytes]

CHUNKS_HELD = 2**14
"""Number of unread chunks of a body beyond which the framework's parser stops."""

PATHS = (
    *["demo.echo", "demo/echo"] * 5,
    *("demo.echo/", "demo/echo?x=1", "demo.static", "demo/raise", "demo.none", "demo%2Eecho", "/demo.echo"),
)


def call(body: bytes, *headers: str, path: str = "demo.echo", method: str = "POST", version: str = "HTTP/1.1") -> bytes:
    lines = (f"{method} /api/rpc/{path} {version}", "Host: localhost", *headers)
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def sized(body: bytes, *headers: str, path: str = "demo.echo", method: str = "POST") -> bytes:
    return call(body, f"Content-Length: {len(body)}", *headers, path=path, method=method)


def in_chunks(body: bytes, size: int) -> bytes:
    pieces = (body[start : start + size] for start in range(0, len(body), size))
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


async def reply_of(reader: asyncio.StreamReader) -> Reply:
    """The next answer, without the parts that always differ."""
    async with asyncio.timeout(10):
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        told = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(told.get("content-length", 0)))
    return first, {name: told[name] for name in sorted(told.keys() - {"date", "server", "x-request-id"})}, body


@asynccontextmanager
async def connected(client: AppClient | Client) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        await writer.wait_closed()


async def replies_of(client: AppClient | Client, pieces: Sequence[bytes], number: int) -> list[Reply]:
    """The answers to this many requests, sent in these pieces."""
    async with connected(client) as (reader, writer), asyncio.TaskGroup() as group:

        async def send() -> None:
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await turns(1)

        group.create_task(send())
        return [await reply_of(reader) for _ in range(number)]


async def test_an_answer_over_http_1_0_ends_the_connection(limited_client: Client) -> None:
    async with connected(limited_client) as (reader, writer):
        writer.write(call(b"", version="HTTP/1.0"))
        first, headers, body = await reply_of(reader)
        assert (first, headers["content-type"]) == ("HTTP/1.0 200 OK", "application/json")
        assert body.startswith(b'{"window":"7d"')
        assert await reader.read() == b""


@pytest.mark.parametrize("body", [b"", b'{"text":"b"}'])
async def test_requests_that_wait_behind_a_late_body_are_all_answered(limited_client: Client, body: bytes) -> None:
    late = b'{"text":"a"}'
    async with connected(limited_client) as (reader, writer):
        writer.write(call(b"", "Expect: 100-continue", f"Content-Length: {len(late)}"))
        assert (await reply_of(reader))[0] == "HTTP/1.1 100 Continue"
        writer.write(late)
        assert b'"text":"a"' in (await reply_of(reader))[2]
        writer.write(sized(body) * 30)
        for _ in range(30):
            assert (await reply_of(reader))[0] == "HTTP/1.1 200 OK"


@pytest.mark.parametrize("chunks", range(CHUNKS_HELD - 1, CHUNKS_HELD + 4))
async def test_nothing_waits_behind_a_body_of_many_small_chunks(limited_client: Client, chunks: int) -> None:
    body = b'{"text":"%b"}' % (b"x" * (chunks - 11))
    asked = call(in_chunks(body, 1), "Transfer-Encoding: chunked") + sized(b'{"text":"b"}') * 3
    first, *others = await replies_of(limited_client, [asked], 4)
    assert b"x" * (chunks - 11) in first[2]
    assert all(b'"text":"b"' in other[2] for other in others)


async def test_a_broken_body_behind_others_is_refused_after_their_responses(
    make_service: ServiceFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trader.api.requests.BODY_WAIT_S", 1)
    client = await make_service()
    async with connected(client) as (reader, writer):
        writer.write(sized(b"", path="demo.wait") + sized(b"") + call(b"", "Transfer-Encoding: chunked"))
        await replies_of(client, [sized(b"")], 1)  # so the service has read everything sent before
        writer.write(b"2\r\n{}\r\nzz\r\n")
        await replies_of(client, [sized(b"") + sized(b"", path="demo.open")], 2)
        assert [(await reply_of(reader))[0] for _ in range(2)] == ["HTTP/1.1 200 OK"] * 2
        await assert_given_up(reader)


async def assert_given_up(reader: asyncio.StreamReader) -> None:
    """The body never ends: aiohttp's parser has stopped without notifying the reader of the body."""
    first, headers, body = await reply_of(reader)
    assert (first, headers["connection"]) == ("HTTP/1.1 408 Request Timeout", "close")
    assert b"the body did not arrive within 1 s" in body
    assert await reader.read() == b""


def any_request(rnd: random.Random) -> bytes:
    length = rnd.choice([0, 0, 2, 20, 3_000, 70_000, 2**19 + rnd.randrange(-20, 20)])
    body = rnd.choice([b"", b"{}", b'{"bad', b'{"error":"bug"}', *[b'{"text":"%b"}' % (b"x" * length)] * 4])
    path, method = rnd.choice(PATHS), rnd.choice(["POST"] * 8 + ["GET", "PUT", "OPTIONS"])
    headers = rnd.choice([(), (), ("Origin: http://localhost:3000",), ("Connection: keep-alive",)])
    if body and rnd.random() < 0.2:
        body, headers = gzip.compress(body), (*headers, "Content-Encoding: gzip")
    if rnd.random() < 0.7:
        return sized(body, *headers, path=path, method=method)
    size = max(rnd.choice([1, 7, 1_000, 10**7]), len(body) // 20_000)
    return call(in_chunks(body, size), "Transfer-Encoding: chunked", *headers, path=path, method=method)


@pytest.mark.parametrize("seed", range(8))
async def test_pieces_of_any_size_are_served_as_sequential_requests(
    limited_client: Client, client: AppClient, seed: int
) -> None:
    rnd = random.Random(seed)
    asked = [any_request(rnd) for _ in range(40)]
    expected = [(await replies_of(client, [request], 1))[0] for request in asked]
    stream = b"".join(asked)
    cuts = sorted({0, len(stream), *(rnd.randrange(len(stream)) for _ in range(rnd.choice([0, 4, 60, 400])))})
    pieces = [stream[start:end] for start, end in pairwise(cuts)]
    assert await replies_of(limited_client, pieces, len(asked)) == expected
