"""sd_notify over a real datagram socket."""

import os
import socket
from pathlib import Path

import pytest

from trader.operations.supervisor import READY, Supervisor


@pytest.mark.parametrize("is_abstract", [False, True])
def test_the_supervisor_receives_datagrams(tmp_path: Path, is_abstract: bool) -> None:
    name = f"@trader-test-{os.getpid()}" if is_abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("\0" + name[1:] if is_abstract else name)
        receiver.settimeout(5)
        supervisor = Supervisor({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "30000000"})
        supervisor.notify(READY)
        assert receiver.recv(100) == b"READY=1"
        assert supervisor.watchdog_s == 15


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NOTIFY_SOCKET": "/run/x"},
        {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"},
        {"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "30000000"},
    ],
)
def test_no_watchdog_is_fed_unless_requested(environ: dict[str, str]) -> None:
    assert Supervisor(environ).watchdog_s is None


def test_a_missing_or_stuck_supervisor_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    supervisor = Supervisor({"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    supervisor.notify(READY)
    supervisor.notify(READY)
    assert len(caplog.records) == 1
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "full"))
        supervisor = Supervisor({"NOTIFY_SOCKET": str(tmp_path / "full")})
        for _ in range(2000):  # more than any datagram queue holds
            supervisor.notify(READY)
    assert len(caplog.records) == 2
