"""Minutes of a market with books, for states: paths within minutes follow from the candles alone."""

from bisect import bisect_left
from collections.abc import Sequence

from trader.core.clock import moment_of
from trader.market.domain.markets import Quote, SimulatedMarket
from trader.market.sources.books import BookModel, CandlePath, Grid, HalfTickCandle, TrailingDay, marks_of_candle
from trader.market.sources.files import Minutes

_MINUTE_S = 60


class PlainMinutes:
    """The minutes of one market. A path within a minute has one of two forms.

    An entrant decides at the start of a minute and never sees a path, so that knowing the form earns nothing.
    """

    def __init__(self, row: SimulatedMarket, minutes: Minutes) -> None:
        self.minutes = minutes
        self.grid = Grid(row.rules)
        self._model = BookModel(self.grid, row.calm)
        self._usual = TrailingDay(float(row.rules.tick), minutes)

    def corners(self, minute: int) -> HalfTickCandle | None:
        place = self.place(minute)
        return None if place is None else self.grid.corners(self.minutes[place])

    def marks(self, minute: int) -> Sequence[int]:
        place = self.place(minute)
        return () if place is None else marks_of_candle(self.grid, self.minutes[place])

    def quote(self, second: int, opened: int) -> Quote:
        minute, second_of_minute = divmod(second, _MINUTE_S)
        place = self.place(minute)
        assert place is not None, "there is a tick at this second"
        path = CandlePath(
            self._model,
            self.marks(minute),
            before=self.marks(minute - 1),
            usual_range=self._usual.usual_range(place),
            busyness=self._usual.busyness(place) if place else 1.0,
        )
        return path.quote(second_of_minute, moment_of(second))

    def place(self, minute: int) -> int | None:
        """Return the index of a minute since 1970; None within a gap."""
        place = bisect_left(self.minutes.minute, minute)
        return place if place < len(self.minutes) and self.minutes.minute[place] == minute else None
