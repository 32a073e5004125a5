"""The running service: none of its tasks can end unnoticed."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from support.scripted import make_settings
from support.waiting import until

import trader
from trader.app import serve
from trader.backtest.history import log_progress
from trader.core import tasks
from trader.operations import supervisor
from trader.operations.supervisor import Supervisor

PACKAGE = str(Path(trader.__file__).parent)


class Planted:
    """A coroutine with a bug, which it meets where it first waits in a task of these names, but for the database.

    Each name is met once: what begins again has no bug.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], names: set[str]) -> None:
        self._work = work
        self._names = names

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[], Any] = partial(self._work.send, None)
        try:
            while True:
                waits = resume()
                if (name := self._due()) is not None:
                    self._names.remove(name)
                    waits = self._work.throw(KeyError(f"planted in {name}"))
                try:
                    sent = yield waits
                    resume = partial(self._work.send, sent)
                except BaseException as error:  # noqa: BLE001 - whatever it is, the work gets it
                    resume = partial(self._work.throw, error)
        except StopIteration as end:
            return end.value

    def _due(self) -> str | None:
        """Return the task whose bug is due: never in the middle of a statement, whose connection would be of no use."""
        task, innermost = asyncio.current_task(), self._work
        if task is None or task.get_name() not in self._names:
            return None
        while (awaited := getattr(innermost, "cr_await", None)) is not None:
            innermost = awaited
            if "asyncpg" in getattr(getattr(awaited, "cr_code", None), "co_filename", ""):
                return None
        return task.get_name()


def plant(*names: str) -> None:
    """Plant a bug in each of the tasks of these names that begin from now on."""
    left = set(names)

    async def run(work: Coroutine[Any, Any, Any]) -> Any:
        return await Planted(work, left)

    loop = asyncio.get_running_loop()
    loop.set_task_factory(lambda loop, work, **how: asyncio.Task(run(work), loop=loop, **how))


@asynccontextmanager
async def serving(dsn: str, folder: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[asyncio.Task[None]]:
    """A service with every part that has a task of its own."""
    urls = {"NOTIFY_URL": "ntfy+http://127.0.0.1:9/x", "HEARTBEAT_URL": "http://127.0.0.1:9/"}
    settings = make_settings(DATABASE_URL=dsn, PORT="0", ANCHOR_URL=f"file://{folder}/anchors", **urls)
    supervisor = Supervisor({"NOTIFY_SOCKET": str(folder / "none"), "WATCHDOG_USEC": "60000000"})
    caplog.clear()
    service = asyncio.create_task(serve(settings, supervisor), name="the service")
    try:
        async with asyncio.timeout(60):
            await until(lambda: service.done() or "listening on" in caplog.text)
        yield service
    finally:
        service.cancel()
        await asyncio.wait([service])


ENDING: Final = {
    "anchors of the chain", "heartbeat", "leader lock", "market feed", "operators", "role", "stop signal", "watchdog",
}  # fmt: skip
"""The tasks whose bugs end the service."""

CALLING: Final = {"notifications ntfy 1", "dead-man pings"}
"""The tasks whose bugs tear a connection that is being opened, which others of the loop may notice: one at a time."""


@pytest.mark.slow
async def test_a_bug_in_a_task_is_logged_and_the_task_continues_or_ends_the_service(
    dsn: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that runs as long as the service does; what runs is asked of the service."""
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tasks, "RESTART_S", 0.0)
    monkeypatch.setattr(supervisor, "PAUSES_S", (0.0,))
    async with serving(dsn, tmp_path, caplog):
        await until(lambda: not any(name.startswith("invocation of ") for name in our_tasks()))
        names = our_tasks()
    assert len(names) >= 20
    assert names > ENDING | CALLING
    for each in (names - ENDING - CALLING, *({name} for name in CALLING)):
        plant(*each)
        async with serving(dsn, tmp_path, caplog) as service, asyncio.timeout(60):
            await until(lambda: service.done() or all(f"planted in {name}" in caplog.text for name in each))  # noqa: B023
            await until(lambda: service.done() or names <= {task.get_name() for task in asyncio.all_tasks()})
            assert not service.done(), repr(service.exception())
    for name in ENDING:
        plant(name)
        async with serving(dsn, tmp_path, caplog) as service, asyncio.timeout(60):
            await until(service.done)
            assert f"planted in {name}" in repr(service.exception())


def our_tasks() -> set[str]:
    """Return the names of the service's tasks, except those of connections."""
    codes = ((task.get_name(), getattr(task.get_coro(), "cr_code", None)) for task in asyncio.all_tasks())
    ours = {name for name, code in codes if code is not None and code.co_filename.startswith(PACKAGE)}
    return ours - {"the service"}


def test_a_first_start_says_how_far_the_history_is(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    now_s = iter([0.0, 1.0, 9.0, 10.0, 11.0, 40.0])
    start = datetime(2026, 1, 1, tzinfo=UTC)
    progress = log_progress(start, start + timedelta(days=4), lambda: next(now_s))
    for days in (0.5, 0.001, 1, 1.5, 4):
        progress(start + timedelta(days=days))
    assert [record.getMessage() for record in caplog.records] == [
        "[#####               ]  25 % of the history, about 30 s left",
        "[####################] 100 % of the history, about 0 s left",
    ]
