"""Progress of a backtest on standard error: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from datetime import datetime, timedelta
from typing import Final

_CLEAR_LINE: Final = "\r\x1b[2K"
_BAR_EVERY_S: Final = 0.2
_LINE_EVERY_S: Final = 10.0


class Progress:
    """Shows how far a backtest has come on its way from `start` to `end`, and how much real time is left."""

    def __init__(self, start: datetime, end: datetime) -> None:
        self._start = start
        self._end = end
        self._began_s = self._shown_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()

    def show(self, reached: datetime) -> None:
        """Show the time reached, unless it was shown just before."""
        now_s = time.monotonic()
        if now_s - self._shown_s < (_BAR_EVERY_S if self._is_terminal else _LINE_EVERY_S):
            return
        self._shown_s = now_s
        part = (reached - self._start) / (self._end - self._start)
        left = _left(part, now_s - self._began_s)
        if self._is_terminal:
            text = f"{_CLEAR_LINE}{'█' * round(30 * part):·<30} {100 * part:3.0f} %  {reached:%Y-%m-%d %H:%M}  {left}"
            print(text, end="", file=sys.stderr, flush=True)
        else:
            print(f"{100 * part:.0f} %, {reached:%Y-%m-%d %H:%M}, {left}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Remove the bar."""
        if self._is_terminal:
            print(_CLEAR_LINE, end="", file=sys.stderr, flush=True)


def _left(part: float, seconds: float) -> str:
    return f"{timedelta(seconds=round(seconds / part - seconds))} left" if part > 0 else "begins"
