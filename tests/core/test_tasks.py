"""Tasks: how they end, and what is known of it."""

import asyncio
from contextvars import ContextVar

import pytest
from support.waiting import until

from trader.core import tasks
from trader.core.errors import Unavailable


@pytest.mark.parametrize("error", [KeyError("BTC"), asyncio.CancelledError(), None])
async def test_work_that_should_not_end_begins_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    """After a bug, when something that it awaits is canceled, and when it just returns; until it is canceled."""
    monkeypatch.setattr(tasks, "RESTART_S", 0.0)
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 3:
            await asyncio.Event().wait()
        if error is not None:
            raise error

    task = tasks.keep(work, "the work")
    await until(lambda: runs == 3)
    assert caplog.text.count("the work ended by a bug; it begins again") == 2
    await tasks.end(task, None)
    assert task.cancelled()
    assert runs == 3


@pytest.mark.parametrize("error", [KeyError("BTC"), None])
async def test_work_that_answers_its_end_with_a_bug_ends_all_the_same(error: Exception | None) -> None:
    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if error is not None:
                raise error from None

    task = tasks.keep(work, "the work")
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await tasks.end(task)
    assert task.exception() is error


async def test_work_that_continues_does_not_inherit_the_patience_of_what_starts_it() -> None:
    patience: ContextVar[int] = ContextVar("patience", default=3)
    known: list[int] = []

    async def work() -> None:
        known.append(patience.get())
        await asyncio.Event().wait()

    patience.set(65)
    task = tasks.keep(work, "the work")
    await until(lambda: known)
    await tasks.end(task)
    assert known == [3]


async def test_the_failure_of_work_is_logged_with_the_trace_of_a_bug(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(error: Exception) -> None:
        raise error

    await asyncio.wait([tasks.start(fail(KeyError("BTC")), "one"), tasks.start(fail(Unavailable("away")), "two")])
    logged = {record.getMessage(): record.exc_info is not None for record in caplog.records}
    assert logged == {"one ended by a bug": True, "two failed: away": False}
