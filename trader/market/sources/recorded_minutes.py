"""Recorded minutes of one market, with books: plain ones, whose paths follow from the candles, and what all share."""

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trader.core.clock import moment_of
from trader.market.domain.markets import Quote, SimulatedMarket
from trader.market.sources.books import BookModel, CandlePath, Grid, TrailingDay, marks_of_candle
from trader.market.sources.files import Minutes


class RecordedMinutes(ABC):
    """The candles of one market, indexed by minute since 1970, and the quotes on a path within each."""

    def __init__(self, row: SimulatedMarket, minutes: Minutes) -> None:
        self.minutes = minutes
        self.grid = Grid(row.rules)
        self._corners = self.grid.all_corners(minutes)
        self._model = BookModel(self.grid, row.calm)
        self._trailing_day = TrailingDay(float(row.rules.tick), minutes)

    @abstractmethod
    def marks_at(self, place: int) -> Sequence[int]:
        """Return the marks of the seconds of the minute with this index, in half ticks."""

    def place(self, minute: int) -> int | None:
        """Return the minute's index among the recorded ones; None within a gap."""
        place = bisect_left(self.minutes.minute, minute)
        return place if place < len(self.minutes) and self.minutes.minute[place] == minute else None

    def corners(self, minutes: range) -> NDArray[np.int64]:
        """Return the low, high, open and close of successive minutes in half ticks, a row for each; -1 within a gap."""
        corners = np.full((len(minutes), 4), -1)
        first, stop = np.searchsorted(self.minutes.minute, (minutes.start, minutes.stop))
        corners[np.array(self.minutes.minute[first:stop]) - minutes.start] = self._corners[first:stop]
        return corners

    def marks(self, minute: int) -> Sequence[int]:
        """Return the marks of the minute's seconds in half ticks; none within a gap."""
        place = self.place(minute)
        return () if place is None else self.marks_at(place)

    def minute(self, minute: int) -> CandlePath | None:
        """Return the minute's path; None within a gap."""
        place = self.place(minute)
        return None if place is None else self._path(place, self.marks_at(place))

    def quote(self, second: int, opened: int) -> Quote:
        """Return the quote at a second that has a tick. The first of a minute needs only the mark, `opened`."""
        minute, second_of_minute = divmod(second, 60)
        place = self.place(minute)
        assert place is not None, "there is a tick at this second"
        path = self._path(place, self.marks_at(place) if second_of_minute else [opened])
        return path.quote(second_of_minute, moment_of(second))

    def _path(self, place: int, marks: Sequence[int]) -> CandlePath:
        return CandlePath(
            self._model,
            marks,
            before=self.marks_at(place - 1) if place else (),  # after a gap the book is at its thinnest, whatever moved
            usual_range=self._trailing_day.usual_range(place),
            busyness=self._trailing_day.busyness(place),
        )


class PlainMinutes(RecordedMinutes):
    """Minutes for the states of an exam. A path within a minute has one of two forms.

    An entrant decides at the start of a minute and never sees a path, so that knowing the form earns nothing.
    """

    def marks_at(self, place: int) -> Sequence[int]:
        return marks_of_candle(self.grid, self.minutes[place])
