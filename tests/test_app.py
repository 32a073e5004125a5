"""The parts of the running service that have no end: a bug in one ends the process, for a supervisor to start again."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from support.scripted import make_settings

from trader.app import serve
from trader.backtest.history import log_progress
from trader.composition import leadership
from trader.database.leadership import LeaderLock
from trader.operations.loss_limits import LossLimits
from trader.operations.operator_commands import OperatorCommands
from trader.operations.supervisor import Supervisor


async def broken(*_: object) -> None:
    raise KeyError("no such thing")


def market_feed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LossLimits, "on_tick", broken)


def operators(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OperatorCommands, "poll", broken)


def role(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LeaderLock, "lost", broken)


def heartbeat(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leadership, "HEARTBEAT_S", 0.01)
    patch.setattr(leadership, "update_heartbeat", broken)


@pytest.mark.parametrize("part", [market_feed, operators, role, heartbeat])
async def test_a_bug_in_an_endless_task_ends_the_service_with_its_trace(
    dsn: str, monkeypatch: pytest.MonkeyPatch, part: Callable[[pytest.MonkeyPatch], None]
) -> None:
    part(monkeypatch)
    async with asyncio.timeout(60):
        with pytest.raises((KeyError, ExceptionGroup)) as caught:
            await serve(make_settings(DATABASE_URL=dsn, PORT="0"), Supervisor({}))
    error = caught.value.exceptions[0] if isinstance(caught.value, ExceptionGroup) else caught.value
    assert repr(error) == "KeyError('no such thing')"


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
