"""A world as the past of a market: the source of the backtest in which entrants decide."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal

from trader.agents.domain.strategy import HISTORY_MAX
from trader.core.clock import epoch_second, moment_of
from trader.exam.domain.worlds import HELD_FOR, OLD_STEP, RECENT, Bars, World
from trader.market.domain.markets import INTERVALS, Candle, Interval, Market, SimulatedMarket
from trader.market.sources.books import Grid
from trader.market.sources.files import FileRow, Minutes
from trader.market.sources.recorded_minutes import PlainMinutes

_MINUTE_S = 60
_QUOTED = 240
"""The minutes before the state from which books know what is usual."""


class WorldPast:
    """The seconds of a world in which accounts exist: its state, `reach_s` seconds in which orders meet their books,
    and the hours before it in worlds where accounts hold a position. Candles go on for `shown` minutes after it."""

    def __init__(self, world: World, rows: Sequence[SimulatedMarket], reach_s: int, shown: int) -> None:
        self._world, self._shown = world, shown
        self._grids = {row.rules.symbol: Grid(row.rules) for row in rows}
        self.markets: Mapping[str, Market] = {row.rules.symbol: row.rules for row in rows}
        begin = world.state - (HELD_FOR * _MINUTE_S if world.standing else 0)
        self.span = range(begin, world.state + reach_s)
        self.recordings: Mapping[str, PlainMinutes] = {
            row.rules.symbol: PlainMinutes(row, _minutes(bars, world.state // _MINUTE_S))
            for row, bars in zip(rows, world.recent, strict=True)
        }
        self._funding = {
            symbol: Decimal(repr(round(rate, 8))) for symbol, rate in zip(world.symbols, world.funding, strict=True)
        }

    def funding_rate(self, symbol: str, boundary: datetime) -> Decimal:
        return self._funding[symbol]

    known_funding_rate = funding_rate

    async def candles(self, symbol: str, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        place, span_s = self._world.symbols.index(symbol), int(INTERVALS[interval].total_seconds())
        after = self._shown * _MINUTE_S // span_s
        count = (self._world.state - epoch_second(start)) // span_s + after
        bars = self._bars(place, span_s // _MINUTE_S, count, after)
        size, scale = len(bars.open), self._grids[symbol].halves_per_unit
        prices = ((column * scale).round() / scale for column in bars[:4])
        columns = (column.tolist() for column in (*prices, bars.volume.round(3)))
        first = self._world.state + (after - size) * span_s
        return [
            Candle(moment_of(first + number * span_s), *figures)
            for number, figures in enumerate(zip(*columns, strict=True))
        ]

    def _bars(self, place: int, width: int, count: int, after: int) -> Bars:
        """Return the last `count` candles of `width` minutes, or as many as there are, `after` of them after the state.

        Of short ones, in which patterns recur, there are all that a strategy may see.
        """
        recent = Bars(*(column[: RECENT + after * width] for column in self._world.recent[place]))
        if width < OLD_STEP:
            return recent.last(min(max(count, HISTORY_MAX + after), len(recent.open) // width) * width).joined(width)
        quarters = self._world.old[place].followed_by(recent.joined(OLD_STEP))
        width //= OLD_STEP
        return quarters.last(min(count, len(quarters.open) // width) * width).joined(width)

    async def prepare_paths(self, at: datetime) -> None:
        """Do nothing: the paths of the few minutes are drawn when they are needed."""


def _minutes(bars: Bars, state: int) -> Minutes:
    """Return the minutes around the state."""
    minutes = Minutes()
    for number, figures in enumerate(zip(*(column[RECENT - _QUOTED :].tolist() for column in bars), strict=True)):
        minutes.append(FileRow(state - _QUOTED + number, *figures))
    return minutes
