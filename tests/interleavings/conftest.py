"""The database of the interleavings, and the report of the schedules tried."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from interleavings.gaps import GapDatabase

from trader.database import relay
from trader.operations import operator_commands


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def database(shared_dsn: str) -> AsyncIterator[GapDatabase]:
    """A pool with gaps; each schedule empties its database, and finds the statements planned by the earlier ones."""
    database = await GapDatabase.open(shared_dsn)
    yield database
    await database.close()


@pytest.fixture(autouse=True)
def _without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the leader write its records for followers, and try to close positions again, at once."""
    monkeypatch.setattr(relay, "EVERY_S", 0.0)
    monkeypatch.setattr(operator_commands, "RETRY_S", 0.01)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many pairs and gaps were tried; each worker of a parallel run reports to the controller."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    counts = [int(value) for report in reports for name, value in report.user_properties if name == "schedules"]
    if counts:
        terminalreporter.write_line(f"Interleavings: {len(counts)} pairs, {sum(counts)} schedules")
