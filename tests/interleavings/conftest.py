"""The database of the interleavings, and the report of the schedules tried."""

from collections.abc import AsyncIterator

import pytest
from support.gaps import GapDatabase


@pytest.fixture
async def database(dsn: str) -> AsyncIterator[GapDatabase]:
    """A pool with gaps on a fresh database; each schedule empties it."""
    database = await GapDatabase.connect(dsn, size=12)
    assert isinstance(database, GapDatabase)
    yield database
    await database.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report how many pairs and gaps were tried; each worker of a parallel run reports to the controller."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    counts = [int(value) for report in reports for name, value in report.user_properties if name == "schedules"]
    if counts:
        terminalreporter.write_line(f"Interleavings: {len(counts)} pairs, {sum(counts)} schedules")
