"""Progress of long commands: a bar on a terminal, occasional lines elsewhere."""

import sys
import time
from datetime import datetime, timedelta
from typing import Any, Final

from trader.commands.command import show

_CLEAR_LINE: Final = "\r\x1b[2K"
_BAR_EVERY_S: Final = 0.2
_LINE_EVERY_S: Final = 10.0


class Progress:
    """Progress from `start` to `end`, of market time or of a count of `unit`, with the estimated real time left."""

    def __init__(self, start: Any, end: Any, unit: str = "") -> None:
        self._start = start
        self._end = end
        self._unit = unit
        self._began_s = self._shown_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def show(self, reached: Any, unit: str | None = None) -> None:
        """Print the time or the count reached, at a limited rate; `unit`: a new unit of the count."""
        self._unit = unit or self._unit
        now_s = time.monotonic()
        if now_s - self._shown_s < (_BAR_EVERY_S if self._is_terminal else _LINE_EVERY_S):
            return
        self._shown_s = now_s
        part = (reached - self._start) / (self._end - self._start)
        left = _left(part, now_s - self._began_s)
        place = (
            f"{reached:%Y-%m-%d %H:%M}" if isinstance(reached, datetime) else f"{reached} of {self._end} {self._unit}"
        )
        if self._is_terminal:
            text = f"{_CLEAR_LINE}{'█' * round(30 * part):·<30} {100 * part:3.0f} %  {place}  {left}"
            sys.stderr.write(text)
            sys.stderr.flush()
        else:
            show(f"{100 * part:.0f} %, {place}, {left}", on_stderr=True)

    def end(self) -> None:
        """Clear the progress bar."""
        if self._is_terminal:
            sys.stderr.write(_CLEAR_LINE)
            sys.stderr.flush()


class ProgressListener:
    """Shows the lines of a long command on standard error, and its progress as its subclass measures it."""

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def say(self, line: str) -> None:
        show(line, on_stderr=True)

    def end(self) -> None:
        if self._progress is not None:
            self._progress.end()


def _left(part: float, seconds: float) -> str:
    return f"{timedelta(seconds=round(seconds / part - seconds))} left" if part > 0 else "begins"
