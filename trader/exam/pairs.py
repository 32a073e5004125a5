"""Same-state pairs: entrants decide in the same moments of a recording; each decision is carried out for a horizon."""

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from random import Random
from typing import Final, Literal

import msgspec
import numpy as np

from trader.backtest.market import BacktestMarket
from trader.core.clock import moment_of
from trader.core.errors import SettingsError
from trader.exam.domain.law import HORIZON
from trader.exam.domain.scores import OUTCOME_MAX
from trader.exam.sitting import DecidedAccount, Examinee, Sitting, Standing, decide
from trader.exchange.domain.account import equity
from trader.market.domain.markets import Interval, Market
from trader.market.sources.files import Minutes
from trader.market.sources.recorded_minutes import PlainMinutes
from trader.market.sources.replay import ReplaySource
from trader.settings.settings import Settings

Horizon = Literal["1h", "4h", "24h"]
HORIZONS: Final[Mapping[Horizon, int]] = {"1h": 60, "4h": HORIZON, "24h": 1440}
"""Minutes for which a decision is carried out."""

HELD_FOR: Final = 120
"""The minutes for which an account has held its standing position."""

_MEASURE: Final = "BTC"
"""The market in whose volatility outcomes are measured, where it is recorded."""

_DAY: Final = 1440
_HOUR: Final = 60
_MINUTE_S: Final = 60
_STANDING_WEIGHT: Final = 0.5
_STANDING_STOP: Final = 0.1
_SATURDAY: Final = 5


class RecordedMoment(msgspec.Struct, frozen=True):
    """A moment of a recording: its second, and the position that every account holds (None: none)."""

    at: int
    standing: Standing | None = None


class RecordedPast:
    """A span of a recording, with plain minutes instead of the paths of a replay."""

    def __init__(self, source: ReplaySource, recordings: Mapping[str, PlainMinutes], span: range) -> None:
        self.recordings = recordings
        self.span = span
        self.markets: Mapping[str, Market] = source.markets
        self.funding_rate, self.known_funding_rate = source.funding_rate, source.known_funding_rate
        self.candles = source.candles

    async def prepare_paths(self, at: datetime) -> None:
        """Do nothing: a path follows from its candle."""


class RecordedRoom:
    """The room of an exam on a recording."""

    def __init__(
        self, settings: Settings, source: ReplaySource, intervals: Collection[Interval], horizon: Horizon
    ) -> None:
        self._settings, self._source, self._intervals = settings, source, intervals
        self._minutes = HORIZONS[horizon]
        self._recordings = {
            symbol: PlainMinutes(source.rows[symbol], recording.minutes)
            for symbol, recording in source.recordings.items()
        }
        self._drifts = {symbol: _drift(each.minutes, self._minutes) for symbol, each in self._recordings.items()}
        self._taker = {
            symbol: float(market.taker_rate if market.taker_rate is not None else settings.taker_fee_bps / 10_000)
            for symbol, market in source.markets.items()
        }

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the candles and funding rates, in hexadecimal; it does not depend on how files hold them."""
        digest = hashlib.sha256()
        for symbol, recording in sorted(self._recordings.items()):
            minutes = recording.minutes
            columns = minutes.minute, minutes.open, minutes.high, minutes.low, minutes.close, minutes.volume
            digest.update(f"{symbol}:{len(minutes)}\n".encode())
            for column in columns:
                digest.update(np.array(column, dtype="<f8").tobytes())
            hours = range(minutes.minute[0] // _HOUR, minutes.minute[-1] // _HOUR + 1)
            rates = (self._source.funding_rate(symbol, moment_of(hour * _HOUR * _MINUTE_S)) for hour in hours)
            digest.update(",".join(f"{rate:f}" for rate in rates).encode())
        return digest.hexdigest()

    def draw(self, secret: str, count: int) -> list[RecordedMoment]:
        """Draw moments in equal parts from each stratum of volatility, hour and kind of day; every second one has a
        standing position. Horizons do not overlap: else one outcome would tell the next, and the test would not be
        exact.

        :raises SettingsError: the recording has too few moments whose horizon it covers
        """
        rng, strata = Random(f"{secret}:moments"), self._strata()
        for stratum in strata:
            rng.shuffle(stratum)
        grid_s, reach = HORIZON * _MINUTE_S, max(1, self._minutes // HORIZON)
        drawn: dict[int, None] = {}
        for turn in range(max(map(len, strata), default=0)):
            moments = [stratum[turn] for stratum in strata if turn < len(stratum)]
            rng.shuffle(moments)
            for at in moments:
                if not any(at + step * grid_s in drawn for step in range(1 - reach, reach)):
                    drawn[at] = None
        if len(drawn) < count:
            raise SettingsError(
                [
                    f"--states is {count}, and the recording has {len(drawn)} moments with a moving price for a day "
                    f"before them and {self._minutes} minutes of their own after them; give a longer recording, or "
                    "fewer states"
                ]
            )
        symbols = sorted(self._recordings)
        standing = [Standing(rng.choice(symbols), rng.choice((-1, 1)), _STANDING_WEIGHT, _STANDING_STOP) for _ in drawn]
        placed = enumerate(zip(drawn, standing, strict=True))
        return [RecordedMoment(at, held if place % 2 else None) for place, (at, held) in placed][:count]

    def _strata(self) -> list[list[int]]:
        """Return the moments, every four hours, by terciles of volatility, hour, and workday or weekend."""
        first, last = (self._source.span[place] // _MINUTE_S for place in (0, -1))
        grid = range(-(-first // HORIZON) * HORIZON, last - self._minutes, HORIZON)
        whole = [minute for minute in grid if all(self._is_whole(each, minute) for each in self._recordings.values())]
        whole = [minute for minute in whole if self.volatility(minute * _MINUTE_S) > 0]
        volatilities = [self.volatility(minute * _MINUTE_S) for minute in whole]
        bounds = np.quantile(volatilities, (1 / 3, 2 / 3)) if whole else ()
        strata: dict[tuple[int, int, bool], list[int]] = {}
        for minute, volatility in zip(whole, volatilities, strict=True):
            at = moment_of(minute * _MINUTE_S)
            key = int(np.searchsorted(bounds, volatility)), at.hour, at.weekday() >= _SATURDAY
            strata.setdefault(key, []).append(minute * _MINUTE_S)
        return [strata[key] for key in sorted(strata)]

    def _is_whole(self, recording: PlainMinutes, minute: int) -> bool:
        """Return whether a recording has every minute from a day before a moment to its horizon."""
        places = [recording.place(each) for each in (minute - _DAY, minute + self._minutes)]
        return None not in places and places[1] - places[0] == _DAY + self._minutes  # type: ignore[operator]

    def volatility(self, at: int, symbol: str | None = None) -> float:
        """Return the deviation over the horizon of a market, from the minutes of the day before; by default of the one
        that measures."""
        measure = _MEASURE if _MEASURE in self._recordings else next(iter(self._recordings))
        recording = self._recordings[symbol or measure]
        place = recording.place(at // _MINUTE_S)
        assert place is not None, "a moment is recorded"
        closes = np.array(recording.minutes.close[place - _DAY : place])
        return float(np.diff(np.log(closes)).std() * math.sqrt(self._minutes))

    async def sit(self, number: int, moment: RecordedMoment, entrants: Sequence[Examinee]) -> list[Sitting]:
        """Let every entrant decide in a moment, and score the outcomes. Raise like `decide`."""
        begin = moment.at - (HELD_FOR * _MINUTE_S if moment.standing is not None else 0)
        past = RecordedPast(self._source, self._recordings, range(begin, moment.at + self._minutes * _MINUTE_S + 1))
        market = await BacktestMarket.open(past, self._intervals)
        decided = await decide(market, self._settings, entrants, moment.at, moment.standing, self._minutes)
        return [self._scored(number, moment, market, each) for each in decided]

    def _scored(self, number: int, moment: RecordedMoment, market: BacktestMarket, decided: DecidedAccount) -> Sitting:
        """Return the outcome of a decision in units of the volatility, net of costs and of what the markets drift."""
        last, account = market.span.stop - 1, decided.followed.account
        began = float(equity(decided.before, market.marks(moment.at)))
        closing = sum(
            float(position.notional(market.mark(symbol, last))) * self._closing(market, symbol, last)
            for symbol, position in account.positions.items()
        )
        gained = (float(equity(account, market.marks(last))) - closing) / began - 1
        carried = _exposures(decided, market, moment.at, began)
        drifted = sum(weight * self._drifts[symbol] for symbol, weight in carried.items())
        risk = sum(abs(weight) * self.volatility(moment.at, symbol) for symbol, weight in carried.items())
        # A larger risk than one unit counts as one, so that no size gains from a clip.
        score = (gained - drifted) / max(self.volatility(moment.at), risk)
        return Sitting(
            state=number,
            entrant=decided.before.id,
            edge=None,
            kind="recorded",
            value=gained,
            risk=risk,
            score=min(max(score, -OUTCOME_MAX), OUTCOME_MAX),
            oracle=0.0,
            answer=decided.answer,
        )

    def _closing(self, market: BacktestMarket, symbol: str, second: int) -> float:
        quote = market.quote(symbol, second)
        return self._taker[symbol] + float((quote.ask - quote.bid) / (2 * quote.mark))


def _drift(minutes: Minutes, horizon: int) -> float:
    """Return the mean return over the horizon in the whole recording."""
    return (minutes.close[-1] / minutes.close[0] - 1) * horizon / max(1, minutes.minute[-1] - minutes.minute[0])


def _exposures(decided: DecidedAccount, market: BacktestMarket, at: int, began: float) -> dict[str, float]:
    """Return the signed notional of each market right after the decision, as a fraction of equity."""
    weights = {
        symbol: position.side.direction * float(position.notional(market.mark(symbol, at))) / began
        for symbol, position in decided.before.positions.items()
    }
    limit = moment_of(at + _MINUTE_S)
    for fill in decided.fills:
        if moment_of(at) <= fill.at < limit:
            sign = 1 if fill.side.value == "buy" else -1
            weights[fill.symbol] = weights.get(fill.symbol, 0.0) + sign * float(fill.quantity * fill.price) / began
    return weights
