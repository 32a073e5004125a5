"""Accidental and deliberate abuse over raw sockets: the service keeps answering others and frees all resources."""

import asyncio
import gzip
import json
import time
from contextlib import suppress

import pytest
from support.raw_socket_service import CALL, FAST, Service, registry, request_id_of, running

from trader.api.connections import ConnectionLimits


async def test_a_slow_head_gets_a_timeout_response(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    answer = await service.send(CALL)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert answer.endswith(b'\r\n\r\n{"error":"The head of the request took too long"}')
    assert request_id_of(answer)
    assert request_id_of(answer) in caplog.text


async def test_a_second_head_has_no_more_time_than_the_first(service: Service) -> None:
    answer = await service.send(CALL + b"Content-Length: 0\r\n\r\n" + CALL)
    assert answer.startswith(b"HTTP/1.1 200 ")
    await service.until(lambda count: count == 0)


async def test_a_head_in_pieces_within_its_time_is_answered(service: Service) -> None:
    reader, writer = await service.connect()
    for _ in range(3):
        for piece in (CALL[:20], CALL[20:], b"Content-Length: 0\r\n\r\n"):
            writer.write(piece)
            await asyncio.sleep(0.03)  # so that each piece is a packet of its own
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        await reader.readexactly(len(b'{"text":""}'))


async def test_a_silent_connection_is_closed(service: Service) -> None:
    assert await service.send(b"") == b""
    await service.until(lambda count: count == 0)


async def test_a_slow_body_times_out(service: Service) -> None:
    answer = await service.send(CALL + b"Content-Length: 100\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"TIMEOUT"' in answer
    await service.until(lambda count: count == 0)


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health?" + b"x" * 9000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 9000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 1_000_000,
        b"NONSENSE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        CALL + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        CALL + b"Content-Length: -1\r\n\r\n",
        CALL + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffffff\r\n",
    ],
)
async def test_bytes_that_are_not_a_request_are_refused(
    service: Service, head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with suppress(ConnectionResetError):  # closed before everything was read, so the answer may be lost
        answer = await service.send(head)
        assert b" 400 " in answer.partition(b"\r\n")[0]
        assert b"Content-Type: text/plain" in answer
    await service.until(lambda count: count == 0)
    assert await service.health_s() < 1
    assert not [record for record in caplog.records if record.exc_info or len(record.getMessage()) > 400]


@pytest.mark.parametrize(
    ("line", "status"), [(b"POST /api/rpc/demo.none", 404), (b"GET /api/rpc/demo.wait", 405), (b"POST /health", 405)]
)
async def test_a_broken_unread_body_is_not_a_bug(
    service: Service, line: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    head = line + b" HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 8\r\n\r\n"
    with suppress(ConnectionResetError):  # closed before everything was read, so the answer may be lost
        assert (await service.send(head + b"not gzip")).startswith(b"HTTP/1.1 %d " % status)
    await service.until(lambda count: count == 0)
    assert not [record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}]


@pytest.mark.parametrize("line", [b"OPTIONS * HTTP/1.1", b"CONNECT example.org:443 HTTP/1.1"])
async def test_a_request_without_a_path_is_answered_like_an_unknown_path(
    service: Service, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    answer = await service.send(line + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 404 ")
    assert b"\r\nContent-Type: application/json" in head
    assert json.loads(body) == {"error": "Not Found"}
    [logged] = [vars(record) for record in caplog.records if record.name == "trader.request"]
    assert logged["request_id"] == request_id_of(answer)


async def test_a_bug_outside_the_procedures_is_answered_with_the_logged_id(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    head, _, body = (await service.send(b"GET /broken HTTP/1.1\r\nHost: localhost\r\n\r\n")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    assert json.loads(body) == {"error": "Internal server error"}
    request_id = request_id_of(head + b"\r\n")
    (record,) = [record for record in caplog.records if record.exc_info]
    assert request_id
    assert request_id in record.getMessage()
    assert await service.health_s() < 1


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        (b"gzip", gzip.compress(b"{" + b" " * 50_000_000 + b"}"), 413),
        (b"gzip", b"no gzip at all", 400),
        (b"deflate", b"\xff\xff\xff", 400),
        (b"identity", b"[" * 60_000, 400),
        (b"identity", b'{"a":' * 13_000, 400),
        (b"snappy", b"{}", 200),
    ],
)
async def test_malicious_bodies_are_refused_at_once(
    service: Service, encoding: bytes, body: bytes, status: int
) -> None:
    head = CALL + b"Connection: close\r\nContent-Encoding: %b\r\nContent-Length: %d\r\n\r\n" % (encoding, len(body))
    started_s = time.perf_counter()
    answer = await service.send(head + body)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert time.perf_counter() - started_s < 2


async def test_pipelined_requests_are_answered_in_order_and_bounded(service: Service) -> None:
    request = CALL + b"Content-Length: 0\r\n\r\n"
    unknown = request.replace(b"demo.wait", b"demo.none")
    reader, _ = await service.connect((request + unknown) * 500)
    for number in range(1000):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404 " if number % 2 else b"HTTP/1.1 200 ")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        await reader.readexactly(size)
    await service.leave()
    await service.until(lambda count: count == 0)


async def test_half_open_sockets_are_freed(service: Service) -> None:
    for data in (b"", CALL, CALL + b"Content-Length: 10\r\n\r\n{"):
        _, writer = await service.connect(data)
        writer.write_eof()
    await service.until(lambda count: count == 0)


async def test_the_oldest_idle_connection_makes_room(service: Service) -> None:
    for _ in range(FAST.connections_max * 3):
        await service.connect()
    await service.until(lambda count: count <= FAST.connections_max)
    assert await service.health_s() < 1
    await service.leave()
    await service.until(lambda count: count == 0)


async def test_the_longest_idle_connection_makes_room_regardless_of_age() -> None:
    request = CALL + b"Content-Length: 0\r\n\r\n"
    async with running(ConnectionLimits(connections_max=8)) as service, asyncio.timeout(10):
        first = await service.connect()
        silent = [(await service.connect())[0] for _ in range(7)]
        await service.until(lambda count: count == 8)

        async def asks() -> None:
            first[1].write(request)
            assert (await first[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await first[0].readuntil(b"}")

        await asks()
        for gone in silent[:3]:
            newcomer, _ = await service.connect(request)
            assert (await newcomer.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            assert await gone.read() == b""
            await asks()
        await service.until(lambda count: count == 8)


async def test_connections_that_wait_for_strangers_make_room_before_a_newcomer() -> None:
    promised, limits = b"Content-Length: 2\r\n", ConnectionLimits(connections_max=3)
    async with running(limits, registry, 60, API_TOKEN="t" * 20) as service, asyncio.timeout(10):
        known = await service.connect(CALL + b"Authorization: Bearer " + b"t" * 20 + b"\r\n" + promised + b"\r\n{")
        strangers = [await service.connect(CALL + promised + b"\r\n{") for _ in range(2)]
        await service.until(lambda _: service.waiting_bytes == 3)
        for stranger, _ in strangers:
            newcomer, _ = await service.connect(CALL + promised + b"\r\n{}")
            assert (await newcomer.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await service.connect(CALL + promised + b"\r\n{")
            assert await stranger.read() == b""
        known[1].write(b"}")
        assert (await known[0].readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")


@pytest.mark.slow
async def test_two_thousand_idle_connections_change_nothing_for_others() -> None:
    async with running(ConnectionLimits()) as service:
        for number in range(2000):
            await service.connect(CALL if number % 2 else b"")
        await service.until(lambda count: count == 2000)
        took_s = sorted([await service.health_s() for _ in range(20)])
        assert took_s[10] < 0.1
        await service.leave()
        await service.until(lambda count: count == 0)


@pytest.mark.parametrize(
    "request_line",
    [b"\x16\x03\x01\x02\x00", b"BREW / HTTP/1.1", b"GET / HTTP/9.9", b"GET /" + b"x" * 9000 + b" HTTP/1.1"],
)  # fmt: skip
async def test_an_answer_to_a_malformed_request_names_no_versions(service: Service, request_line: bytes) -> None:
    answer = await service.send(request_line + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    head = answer.partition(b"\r\n\r\n")[0]
    assert head.startswith(b"HTTP/1.")
    assert b"Server: trader" in head
    assert b"aiohttp" not in answer
    assert b"Python" not in answer
