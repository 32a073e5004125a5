"""Report of the interleavings: how many schedules were tried."""

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many pairs and gaps were tried; each worker of a parallel run reports its own to the controller."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.getreports(kind)]
    counts = [int(value) for report in reports for name, value in report.user_properties if name == "schedules"]
    if counts:
        terminalreporter.write_line(f"Interleavings: {len(counts)} pairs, {sum(counts)} schedules")
