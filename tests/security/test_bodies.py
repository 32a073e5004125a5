"""Bodies and files that are large, endless or slow to parse are refused, and delay no other callers."""

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession
from msgspec import inspect
from support.loop_lag import LoopLag
from support.raw_socket_service import CALL, FAST, Service, running
from support.waiting import turns, until

from trader.api.connections import ConnectionLimits
from trader.api.registry import REGISTRY, Registry, load_procedures
from trader.api.requests import BODY_SIZE_MAX, WAITING_BYTES_MAX
from trader.api.schemas.common import Empty
from trader.api.schemas.positions import GetCryptoPricesInput
from trader.api.schemas.simulator import PlaceOrderInput
from trader.core.errors import MarketDataError
from trader.market.sources.files import read_file, read_funding
from trader.market.sources.recorder import LINE_BYTES_MAX, read_lines

OTHERS_MS = 50
"""What nothing in this suite may cost another caller."""


def repeated(head: str, item: str, tail: str) -> str:
    """Return a body of nearly the maximum size, with as many of the items as fit."""
    count = (BODY_SIZE_MAX - len(head) - len(tail)) // len(item)
    return (head + item * count).rstrip(",") + tail


SLOW_BODIES = [
    repeated('{"symbols":[', '"a",', "]}"),
    repeated('{"symbols":[', "1.0,", "]}"),
    repeated('{"symbols":[', '{"a":0},', "]}"),
    repeated('{"a":[', "1e5,", "]}"),
    repeated('{"a":[', "{},", "]}"),
    repeated('{"quantity":', "1", "}"),
    repeated('{"quantity":0.', "1", "}"),
    repeated('{"a":"', "\\u0041", '"}'),
    repeated("", '{"a":', ""),
    "{" + ",".join(f'"{number:05}":0' for number in range(6_000)) + "}",
]


parsing = Registry()


@parsing.procedure("demo.order")
async def order(_: object, __: PlaceOrderInput) -> Empty:
    return Empty()


@parsing.procedure("demo.prices")
async def prices(_: object, __: GetCryptoPricesInput) -> Empty:
    return Empty()


def lists_of(schema: inspect.Type) -> Iterator[inspect.ListType]:
    """Yield all lists within a wire type."""
    match schema:
        case inspect.ListType():
            yield schema
            yield from lists_of(schema.item_type)
        case inspect.UnionType():
            for member in schema.types:
                yield from lists_of(member)
        case inspect.Metadata():
            yield from lists_of(schema.type)
        case inspect.StructType():
            for field in schema.fields:
                yield from lists_of(field.type)
        case inspect.DictType():
            pytest.fail("an object of any number of fields has no maximum")


def test_every_list_of_an_input_has_a_maximum() -> None:
    load_procedures()
    inputs = [declared.input_type for declared in REGISTRY.procedures.values()]
    lists = [each for kind in inputs for each in lists_of(inspect.type_info(kind))]
    assert len(lists) >= 1
    assert not [each for each in lists if each.max_length is None]


async def test_the_largest_bodies_block_the_loop_for_milliseconds() -> None:
    paths = [f"/api/rpc/demo{name}" for name in (".order", ".prices", "/__batch__")]
    async with running(ConnectionLimits(), parsing) as service, ClientSession(service.url) as session:

        async def send(path: str, body: str) -> tuple[int, list[Any]]:
            headers = {"x-orpc-batch": "buffered"} if "batch" in path else {}
            async with session.post(path, data=body, headers=headers) as response:
                return response.status, (await response.json()).get("issues", [])

        async with LoopLag() as lag:
            answers = await asyncio.gather(*(send(path, body) for path in paths for body in SLOW_BODIES))
    assert {status for status, _ in answers} == {400}
    assert max(len(issues) for _, issues in answers) == 20
    assert max(lag.cpu_ms) < OTHERS_MS


@pytest.fixture
async def patient() -> AsyncIterator[Service]:
    async with running(ConnectionLimits(), body_wait_s=60, API_TOKEN="t" * 20) as started:
        yield started


async def test_unfinished_bodies_share_a_budget_and_others_continue(patient: Service) -> None:
    part = b"{" + b" " * (BODY_SIZE_MAX - 2)
    begun = CALL + b"Content-Length: %d\r\n\r\n%b" % (BODY_SIZE_MAX, part)
    count = WAITING_BYTES_MAX // len(part) + 20
    known_head = CALL + b"Authorization: Bearer " + b"t" * 20 + b"\r\nContent-Length: 2\r\nConnection: close\r\n\r\n"
    known, known_writer = await patient.connect(known_head + b"{")
    await until(lambda: patient.waiting_bytes)
    attackers = [await patient.connect(begun) for _ in range(count)]
    async with asyncio.timeout(20):
        first = await attackers[0][0].read(12)
    assert first == b"HTTP/1.1 408", "the anonymous one that waits longest makes room"
    known_writer.write(b"}")
    assert (await known.read()).startswith(b"HTTP/1.1 200 ")
    reader, writer = await patient.connect(CALL + b"Content-Length: 2\r\nConnection: close\r\n\r\n{")
    await turns(1)
    writer.write(b"}")
    async with asyncio.timeout(5):
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
    assert patient.waiting_bytes <= WAITING_BYTES_MAX
    await patient.leave()
    await patient.until(lambda open_count: open_count == 0)
    assert patient.waiting_bytes == 0


@pytest.mark.slow
async def test_a_body_that_would_unpack_beyond_the_limit_is_not_unpacked() -> None:
    async with running(FAST) as service:
        packed = gzip.compress(b"{" + b" " * 200_000_000 + b"}", 9)
        head = CALL + b"Connection: close\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed)
        tracemalloc.start()
        try:
            with suppress(ConnectionResetError):  # closed before everything was read, so the answer may be lost
                assert (await service.send(head + packed)).startswith(b"HTTP/1.1 413 ")
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < 8 * 2**20


@pytest.mark.parametrize(
    ("name", "read", "reason"),
    [
        ("BTCUSDT-1m.csv.gz", read_file, "line 1: has over 65536 characters"),
        ("BTCUSDT-fundingRate.csv.gz", lambda path: read_funding([path]), "line 1: has over 65536 characters"),
        ("2025-06-02T23.jsonl.gz", lambda path: list(read_lines(path)), f"a line of over {LINE_BYTES_MAX:,} bytes"),
    ],
)
def test_a_packed_file_without_line_ends_is_refused_before_it_fills_the_memory(
    tmp_path: Path, name: str, read: Callable[[Path], object], reason: str
) -> None:
    with gzip.open(tmp_path / name, "wb") as file:
        for _ in range(100):
            file.write(b"1" * 2**20)
    tracemalloc.start()
    try:
        with pytest.raises(MarketDataError, match=reason):
            read(tmp_path / name)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * LINE_BYTES_MAX
