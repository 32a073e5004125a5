"""Supervisor of the process: tells systemd when the service is ready, alive and stopping (sd_notify)."""

import logging
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from typing import Final

log = logging.getLogger("trader")

READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
STOPPING: Final = "STOPPING=1"


def end_signals() -> Sequence[signal.Signals]:
    """Return the signals that end a process in an orderly way: SIGTERM, and SIGHUP unless `nohup` ignores it."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM,) if is_ignored else (signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Sends datagrams to the socket NOTIFY_SOCKET; without one, every call does nothing.

    `watchdog_s` is how often to send `ALIVE`, half of what the supervisor allows; None if it does not require it.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + path[1:] if path.startswith("@") else path
        is_asked = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        allowed_us = environ.get("WATCHDOG_USEC", "")
        asks = bool(self._address) and is_asked and allowed_us.isdecimal() and int(allowed_us) > 0
        self.watchdog_s = int(allowed_us) / 2_000_000 if asks else None
        self._has_failed = False

    def notify(self, state: str) -> None:
        """Send one state, without waiting for its receiver."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(state.encode(), self._address)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:  # logged once, not with every beat
                log.warning("the supervisor at NOTIFY_SOCKET does not accept %s: %s", state, error.strerror or error)
            self._has_failed = True
