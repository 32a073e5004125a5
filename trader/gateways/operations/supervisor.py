"""Supervisor of the process: reports to systemd when the service is ready, alive and stopping (sd_notify)."""

import logging
import os
import socket
from collections.abc import Mapping
from typing import Final

log = logging.getLogger("trader")

READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
STOPPING: Final = "STOPPING=1"


class Supervisor:
    """Sends datagrams to the socket NOTIFY_SOCKET; without one every call does nothing.

    `watchdog_s` is how often the supervisor must hear `ALIVE`, at half of what it allows; None when it does not ask.
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
            if not self._has_failed:  # said once, not with every beat
                log.warning("the supervisor at NOTIFY_SOCKET does not take %s: %s", state, error.strerror or error)
            self._has_failed = True
