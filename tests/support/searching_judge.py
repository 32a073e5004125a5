"""A judge that searches: a boosted model learns what is left to earn within a minute, and trades other weeks.

Rules that a person lists see only what that person thought of. The model sees the state of all markets at random
seconds of each minute (moves, running ranges, the place in them, the previous minute), learns the rest of the move to
the last second, and is tried on later weeks whose paths were drawn with another seed.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import lightgbm
import numpy
from support.market_fidelity import AT, OfMinutes, Paths, log_paths

from trader.market.domain.markets import MARKETS, Calm
from trader.market.sources.books import BookModel, CandlePath, Grid, TrailingDay
from trader.market.sources.files import Minutes

Places = numpy.ndarray[tuple[int], numpy.dtype[numpy.int64]]

LATENCY_S: Final = 1
"""A decision at a second is filled at the next one."""
_LOOK_BACK_S: Final = (1, 2, 5, 10, 20, 40)
_MOMENTS: Final = 3
"""How many random seconds of each minute are tried."""
_SECONDS: Final = (1, 56)
_CLIP: Final = 4.0
"""Training moves are limited to this many usual ranges, so that a few violent minutes do not decide what is learned."""
_PARAMETERS: Final = {
    "objective": "l2",
    "num_leaves": 15,
    "learning_rate": 0.05,
    "min_data_in_leaf": 400,
    "feature_fraction": 0.5,
    "bagging_fraction": 0.7,
    "bagging_freq": 1,
    "num_threads": 1,
    "verbose": -1,
    "seed": 1,
}
_ROUNDS: Final = 120


class Motion(NamedTuple):
    """How the variance of paths is spread over time; a martingale whose seconds are alike has 1, 0 and 1."""

    variance_ratio: float
    """The variance of a second, times 59, over the variance of a minute."""
    autocorrelation: float
    """The correlation of the moves of neighboring seconds."""
    largest_share: float
    """The largest variance of the same second of all minutes over the mean; the boundary between minutes counts."""
    largest_at: int
    """The second of that variance, 0 for the boundary."""


def measure_motion(paths: Paths, usual_bp: OfMinutes) -> Motion:
    """Measure moves in units of the usual range, so that a few violent minutes do not decide the figures."""
    relative = paths / usual_bp[:, None]
    moves = numpy.diff(relative, axis=1)
    variances = (moves**2).mean(axis=0)
    boundary = (((paths[1:, 0] - paths[:-1, -1]) / usual_bp[1:]) ** 2).mean()
    shares = numpy.concatenate([[boundary], variances]) / variances.mean()
    return Motion(
        float(variances.sum() / ((relative[:, -1] - relative[:, 0]) ** 2).mean()),
        float((moves[:, 1:] * moves[:, :-1]).mean() / variances.mean()),
        float(shares.max()),
        int(shares.argmax()),
    )


class DrawnMarket(NamedTuple):
    """One market's recorded minutes and the paths that were drawn in them."""

    symbol: str
    minutes: Minutes
    marks: Sequence[Sequence[int]]
    paths: Paths
    usual_bp: OfMinutes

    @classmethod
    def of(cls, symbol: str, minutes: Minutes, marks: Sequence[Sequence[int]]) -> "DrawnMarket":
        day = TrailingDay(float(MARKETS[symbol].tick), minutes)
        usual_bp = numpy.array([day.usual_range(place) * 1e4 for place in range(len(minutes))])
        return cls(symbol, minutes, marks, log_paths(Grid(MARKETS[symbol]), marks), usual_bp)

    def spreads_bp(self, places: Places, seconds: Places, calm: Calm) -> OfMinutes:
        """Return the spread that is shown at each moment, in basis points of the mark."""
        model, spreads = BookModel(Grid(MARKETS[self.symbol]), calm), []
        for place, second in zip(places.tolist(), seconds.tolist(), strict=True):
            path = CandlePath(
                model,
                self.marks[place],
                before=self.marks[place - 1],
                usual_range=self.usual_bp[place] / 1e4,
                busyness=1.0,
            )
            quote = path.quote(second, AT)
            spreads.append(float((quote.ask - quote.bid) / quote.mark) * 1e4)
        return numpy.array(spreads)

    def moves_after(self, places: Places, seconds: Places) -> OfMinutes:
        """Return the move from the entry after each moment to the last second, in basis points."""
        moves: OfMinutes = self.paths[places, 59] - self.paths[places, seconds + LATENCY_S]
        return moves

    def state(self, places: Places, seconds: Places) -> list[OfMinutes]:
        """Return what the market shows at each moment, in usual ranges."""
        usual, series = self.usual_bp[places], self.paths.reshape(-1)
        path, before = self.paths[places], self.paths[places - 1]
        now, opened = path[numpy.arange(len(places)), seconds], path[:, 0]
        is_past = numpy.arange(60) <= seconds[:, None]
        high = numpy.where(is_past, path, -numpy.inf).max(axis=1)
        low = numpy.where(is_past, path, numpy.inf).min(axis=1)
        moves = numpy.where(is_past[:, 1:], numpy.diff(path, axis=1), 0.0)
        reach, reach_before = numpy.maximum(high - low, 1e-9), numpy.maximum(numpy.ptp(before, axis=1), 1e-9)
        at = places * 60 + seconds
        return [
            *((now - series[at - back]) / usual for back in _LOOK_BACK_S),
            *(each / usual for each in (now - opened, high - now, now - low, reach, high - opened)),
            *((now - opened) / reach, (now - low) / reach, (high - opened) / reach),
            *(numpy.sqrt((moves**2).sum(axis=1)) / usual, numpy.abs(moves).max(axis=1) / usual),
            (moves != 0).sum(axis=1).astype(float),
            *((before[:, -1] - before[:, 0]) / usual, reach_before / usual, (opened - before[:, -1]) / usual),
            (before[:, -1] - before.min(axis=1)) / reach_before,
        ]


class Searched(NamedTuple):
    """The mean gain of the boosted model in its best moments of the test weeks, in basis points."""

    gross_bp: float
    net_bp: float
    """After half the shown spread at the entry and half at the exit, and no fees."""
    t: float
    """The t statistic of the net gains, summed by minute."""


def search(
    traded: str,
    learned: Mapping[str, DrawnMarket],
    tried: Mapping[str, DrawnMarket],
    weeks: tuple[range, range],
    books: Sequence[tuple[Calm, float]],
    *,
    alone: bool = False,
) -> list[Searched]:
    """Learn one market's moves on the first range of minutes and trade on the second, drawn with another seed.

    The model sees all markets, or with `alone` only the traded one. In each of `books` it trades the fraction of the
    moments in which it expects most beyond the spread that it sees.
    """
    random = numpy.random.default_rng(1)
    model = learn(traded, learned, weeks[0], random, alone=alone)
    places, seconds = _moments(weeks[1], random)
    expected = expect(model, traded, tried, places, seconds, alone=alone)
    gains, found = numpy.sign(expected) * tried[traded].moves_after(places, seconds), []
    for calm, fraction in books:
        spreads_bp = partial(tried[traded].spreads_bp, calm=calm)
        score = numpy.abs(expected) - spreads_bp(places, seconds)
        best = score >= numpy.quantile(score, 1 - fraction)
        entries = spreads_bp(places[best], seconds[best] + LATENCY_S)
        exits = spreads_bp(places[best], numpy.full(best.sum(), 59))
        net = gains[best] - (entries + exits) / 2
        of_minutes = numpy.bincount(places[best], net)
        t = of_minutes.sum() / numpy.sqrt((of_minutes**2).sum())
        found.append(Searched(float(gains[best].mean()), float(net.mean()), float(t)))
    return found


def learn(
    traded: str,
    markets: Mapping[str, DrawnMarket],
    minutes: range,
    random: numpy.random.Generator,
    *,
    alone: bool = False,
) -> lightgbm.Booster:
    """Learn one market's moves to the last second, in usual ranges, at random moments of these minutes."""
    market, (places, seconds) = markets[traded], _moments(minutes, random)
    wanted = numpy.clip(market.moves_after(places, seconds) / market.usual_bp[places], -_CLIP, _CLIP)
    seen = _seen(traded, markets, places, seconds, alone=alone)
    return lightgbm.train(_PARAMETERS, lightgbm.Dataset(seen, wanted), _ROUNDS)


def expect(
    model: lightgbm.Booster,
    traded: str,
    markets: Mapping[str, DrawnMarket],
    places: Places,
    seconds: Places,
    *,
    alone: bool = False,
) -> OfMinutes:
    """Return the move that the model expects after each moment, in basis points."""
    seen = _seen(traded, markets, places, seconds, alone=alone)
    return numpy.asarray(model.predict(seen)) * markets[traded].usual_bp[places]


def _moments(minutes: range, random: numpy.random.Generator) -> tuple[Places, Places]:
    """Return the minutes and the seconds of random moments."""
    places = numpy.repeat(numpy.arange(minutes.start, minutes.stop), _MOMENTS)
    return places, random.integers(*_SECONDS, len(places))


def _seen(
    traded: str, markets: Mapping[str, DrawnMarket], places: Places, seconds: Places, *, alone: bool
) -> numpy.ndarray[tuple[int, int], numpy.dtype[numpy.float64]]:
    """Return what the model sees at each moment: a row each."""
    own = markets[traded].state(places, seconds)
    columns = [seconds.astype(float), *own]
    for symbol, other in markets.items():
        if symbol != traded and not alone:
            theirs = other.state(places, seconds)
            columns += [*theirs, *(mine - its for mine, its in zip(own, theirs, strict=True))]
    return numpy.column_stack(columns)
