"""Anchors: heads of the chain are sent outside once an hour; a bad sink delays nothing and loses none."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.trading_floor import Floor
from support.waiting import becomes, until

from trader.__main__ import main
from trader.record import anchors as service
from trader.record.anchors import Anchors, make_sink
from trader.settings.forms import Secret

FIRST = 4
"""The position of a model's first invocation: after the records of the model, its entrant, and what answered."""


@asynccontextmanager
async def _webhook(*statuses: int) -> AsyncIterator[tuple[str, list[dict[str, object]]]]:
    """A webhook that answers with these statuses in turn, then with 204; 0 hangs."""
    got: list[dict[str, object]] = []
    left = list(statuses)

    async def take(request: web.Request) -> web.Response:
        got.append(await request.json())
        status = left.pop(0) if left else 204
        if not status:
            await asyncio.Event().wait()
        return web.Response(status=status)

    app = web.Application()
    app.router.add_post("/anchors", take)
    async with TestServer(app) as server:
        yield str(server.make_url("/anchors")) + "?key=secret", got


async def _sent(floor: Floor) -> list[tuple[int, bool]]:
    async with floor.database.connection() as conn:
        rows = await conn.fetch("SELECT position, sent_at IS NOT NULL AS sent FROM anchors ORDER BY position")
    return [(row["position"], row["sent"]) for row in rows]


async def _count(floor: Floor) -> int:
    return len(await _sent(floor))


async def test_the_head_is_anchored_once_an_hour_and_only_if_it_moved(floor: Floor) -> None:
    anchors = Anchors(floor.database, None, lambda: True)
    await anchors.update()
    assert await _sent(floor) == [], "there is no chain yet"
    await floor.add("ada")
    await floor.cycle()
    await anchors.update()
    await floor.cycle()
    await anchors.update()
    assert await _sent(floor) == [(FIRST, False)]
    async with floor.database.connection() as conn:
        await conn.execute("UPDATE anchors SET anchored_at = anchored_at - interval '61 minutes'")
    await anchors.update()
    await anchors.update()
    assert await _sent(floor) == [(FIRST, False), (FIRST + 1, False)]


async def test_a_webhook_gets_every_head_in_order_despite_failures(
    floor: Floor, caplog: pytest.LogCaptureFixture
) -> None:
    await floor.add("ada")
    async with _webhook(500, 302) as (url, got):
        sink = make_sink(Secret(url))
        assert sink is not None
        anchors = Anchors(floor.database, sink, lambda: True, interval_s=0)
        for _ in range(3):
            await floor.cycle()
            await anchors.update()
        await sink.close()
    assert [body["position"] for body in got] == [FIRST, FIRST, FIRST, FIRST + 1, FIRST + 2]
    assert await _sent(floor) == [(FIRST, True), (FIRST + 1, True), (FIRST + 2, True)]
    assert "HTTP 500" in caplog.text
    assert "secret" not in caplog.text
    assert [len(str(body["digest"])) for body in got] == [64] * 5


async def test_a_hanging_sink_delays_no_anchor_and_no_model(floor: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ATTEMPT_S", 0.2)
    monkeypatch.setattr(service, "SENDING_S", 0.3)
    await floor.add("ada")
    async with _webhook(0, 0, 0, 0, 0, 0) as (url, _):
        sink = make_sink(Secret(url))
        assert sink is not None
        await floor.cycle()
        running = asyncio.create_task(Anchors(floor.database, sink, lambda: True, interval_s=0, poll_s=0.01).run())
        for count in range(1, 4):
            await becomes(partial(_count, floor), count)
            if count < 3:
                await floor.cycle()
        running.cancel()
        await asyncio.wait([running])
        await sink.close()
    assert [sent for _, sent in await _sent(floor)] == [False] * 3


async def test_a_standby_anchors_nothing(floor: Floor) -> None:
    await floor.add("ada")
    await floor.cycle()
    polls = 0

    def is_leader() -> bool:
        nonlocal polls
        polls += 1
        return False

    running = asyncio.create_task(Anchors(floor.database, None, is_leader, poll_s=0.001).run())
    await until(lambda: polls > 1)  # a leader anchors at its first poll
    running.cancel()
    await asyncio.wait([running])
    assert await _sent(floor) == []


@pytest.mark.parametrize("kind", ["folder", "pipe", "missing folder"])
async def test_an_unwritable_file_is_retried(floor: Floor, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "sub" / "anchors" if kind == "missing folder" else tmp_path / "anchors"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    sink = make_sink(Secret(f"file://{path}"))
    assert sink is not None
    await floor.add("ada")
    await floor.cycle()
    began_s = time.monotonic()
    await Anchors(floor.database, sink, lambda: True).update()
    assert time.monotonic() - began_s < service.ATTEMPT_S
    assert await _sent(floor) == [(FIRST, False)]


async def test_verify_compares_a_file_of_anchors(
    floor: Floor, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", dsn)
    file = tmp_path / "anchors.jsonl"
    sink = make_sink(Secret(f"file://{file}"))
    assert sink is not None
    anchors = Anchors(floor.database, sink, lambda: True, interval_s=0)
    await floor.add("ada")
    for _ in range(3):
        await floor.cycle()
        await anchors.update()
    assert [json.loads(line)["position"] for line in file.read_text().splitlines()] == [FIRST, FIRST + 1, FIRST + 2]
    arguments = ["verify", "--anchors", str(file)]

    async def check() -> tuple[int, str]:
        code = await asyncio.to_thread(main, arguments)
        return code, capsys.readouterr().out

    code, printed = await check()
    assert code == 0
    assert printed.startswith(
        "3 invocations of the chain were checked, 3 of them with their payloads, against 6 anchors"
    )
    assert printed.endswith("\nIntact.\n")
    async with floor.database.connection() as conn:
        await conn.execute("DELETE FROM chain_links WHERE position = $1", FIRST + 2)
    code, printed = await check()
    assert code == 1
    assert f"  cut off at position {FIRST + 2}: " in printed
    assert "inserted: invocation" in printed
    file.write_text('{"position": 1}\n')
    assert await asyncio.to_thread(main, ["verify", "--anchors", str(file)]) == 2
    assert f"{file}, line 1: expected an anchor" in capsys.readouterr().err
