"""FailedStarts of one process after another, as their file keeps them, and the notices of a crash loop."""

import asyncio
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from support.scripted import make_settings
from support.sinks import sinks

from trader import app
from trader.core.errors import StartError
from trader.operations.alarms import Alarms
from trader.operations.notifications import make_sinks
from trader.operations.supervisor import PAUSES_S, Restarts, Supervisor

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def begun(at: datetime = NOW) -> Restarts:
    restarts = Restarts(8081)
    restarts.begin(at)
    restarts.run()
    return restarts


def test_starts_back_off_until_one_lasts_or_the_last_failure_is_long_ago() -> None:
    pauses = []
    for _ in range(9):
        restarts = begun()
        pauses.append(restarts.failures.pause_s)
        restarts.fail("no database", NOW)
    assert tuple(pauses[:8]) == PAUSES_S
    assert pauses[8] == PAUSES_S[-1]
    since = "; before, it failed 9 times in a row since 2026-01-01T00:00:00.000Z: no database"
    assert restarts.failures.summary == since
    assert begun(NOW + timedelta(minutes=11)).failures.count == 0
    restarts = begun()
    restarts.steady()
    restarts.end()
    assert begun().failures.count == 0


def test_a_killed_process_counts_and_one_that_runs_does_not() -> None:
    begun()
    Path(".trader/failures-8081.json").write_text('{"pid": 4194305}')  # above the greatest pid
    restarts = begun()
    assert (restarts.failures.count, restarts.failures.is_first_kill) == (1, True)
    Path(".trader/failures-8081.json").write_text(f'{{"pid": {os.getppid()}}}')
    assert begun().failures.count == 0
    for wrong in ("", "[]", '{"count": "x"}'):
        Path(".trader/failures-8081.json").write_text(wrong)
        assert begun().failures.count == 0


async def test_a_crash_loop_is_one_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trader.operations.supervisor.PAUSES_S", (0.0,))
    async with sinks() as here:
        settings = make_settings(
            NOTIFY_URL=f"{here.url}/n", DATABASE_URL="postgresql://nobody@127.0.0.1:9/x", PORT="8081"
        )
        for _ in range(4):
            with pytest.raises(StartError):
                await app.serve(settings, Supervisor({}))
        (notice,) = here.of("/n")
        assert b"ended by an error: " in notice.body
        monkeypatch.setattr(app, "STEADY_S", 0.05)
        restarts = begun(datetime.now(UTC))
        alarms = Alarms(make_sinks(settings.notify_urls, "here"))
        announcing = asyncio.create_task(app.announce_start(restarts, alarms, "started"))
        _, end = await here.wait_for("/n", 2)
        assert b"started; before, it failed 4 times in a row since" in end.body
        announcing.cancel()
        await alarms.close()
