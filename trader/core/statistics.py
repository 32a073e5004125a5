"""Statistics of accounts and trades, as pure functions of equity series and net pnl.

All figures are floats: ratios are for display and never enter the books. A figure without a value is None; an unbounded
one (a profit without any loss) is `math.inf`, never minus infinity: an account that only loses has no such ratio. The
risk-free rate is 0, and a year has 365 days, since crypto trades every day. Trades are passed in the order in which
they closed; a win has a net pnl above zero, and everything else is a loss.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from operator import attrgetter
from statistics import median
from typing import Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from trader.core.intervals import TRADES_MIN, ConfidenceInterval, influence_error

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
Floats = NDArray[np.float64]

DAYS_PER_YEAR = 365
RETURNS_MIN = 10
"""Daily returns that a ratio needs: with fewer, the annual figure is noise (billions after two good days)."""
CONFIDENT_TRADES_MIN = 3
NORMAL_95 = 1.959963984540054
"""The normal quantile of a two-sided 95% interval."""

_NO_SPREAD = 1e-12
"""A standard deviation below this fraction of the largest value is rounding, not spread."""

_DAY = timedelta(days=1)
_HOURS = 24
"""The maximum number of values in a day."""


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by key, the keys and the items of each in the order of the items."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


class EquityPoint(msgspec.Struct, frozen=True, gc=False):
    """The last equity (netPortfolio) of one UTC hour. `hour` is the start of that hour.

    `leverage` is the largest ratio of notional to equity in that hour; None if unknown.
    """

    hour: datetime
    value: float
    leverage: float | None = None


class Drawdown(NamedTuple):
    """The largest falls from a running peak, in percent of the peak and in money. They may be two different falls."""

    percent: float
    money: float


class Streaks(NamedTuple):
    """Runs of consecutive wins and losses; `current` is the run that includes the last trade."""

    longest_win: int
    longest_loss: int
    current_count: int
    current_type: Literal["win", "loss", "none"]


class Summary(NamedTuple):
    """Mean, median and maximum of some values; all None if there are no values."""

    average: float | None
    median: float | None
    maximum: float | None


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation (ddof 1); exactly 0 if the values differ only by rounding."""
    if len(values) < 2:
        return None
    center = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - center) ** 2 for value in values) / (len(values) - 1))
    return spread if spread > _NO_SPREAD * max(abs(value) for value in values) else 0.0


def summary(values: Sequence[float]) -> Summary:
    """Return mean, median and maximum."""
    if not values:
        return Summary(None, None, None)
    return Summary(mean(values), float(median(values)), max(values))


def over_risk(value: float, risk: float) -> float | None:
    """Return `value / risk`. Without risk, a gain is unbounded and anything else has no value."""
    if risk > 0:
        return value / risk
    return math.inf if value > 0 else None


def percent(part: float, whole: float) -> float | None:
    """Return `part` in percent of `whole`; None if `whole` is zero."""
    return 100 * part / whole if whole else None


def return_percent(start: float, end: float) -> float | None:
    """Return the gain from `start` to `end`, in percent of `start`."""
    return 100 * (end - start) / start if start > 0 else None


def change_percent(price: Decimal, before: float | None) -> float | None:
    """Return the change from an earlier price in percent, with four decimal places; None if that price is unknown."""
    return round(100 * (float(price) / before - 1), 4) if before else None


# Figures of the equity series


def daily_closes(series: Sequence[EquityPoint], initial_capital: float) -> list[float]:
    """Return the initial capital, then the equity at each 00:00 UTC within an ascending hourly series.

    A close is the last value before midnight, so the first day counts from the capital. A day without values repeats
    the previous close, since no change is known. The current day has no close.
    """
    closes = [initial_capital]
    if not series:
        return closes
    midnight, after = series[0].hour.replace(hour=0, minute=0, second=0, microsecond=0) + _DAY, 0
    while midnight <= series[-1].hour:
        after = bisect_left(series, midnight, after, min(after + _HOURS, len(series)), key=attrgetter("hour"))
        closes.append(series[after - 1].value)
        midnight += _DAY
    return closes


def daily_returns(closes: Sequence[float]) -> list[float]:
    """Return the changes between daily closes; none if there are fewer than 10. No return follows zero equity."""
    if len(closes) - 1 < RETURNS_MIN:
        return []
    return [close / before - 1 for before, close in pairwise(closes) if before > 0]


def sharpe_ratio(closes: Sequence[float]) -> float | None:
    """Return mean / standard deviation (ddof 1) of the daily returns × √365."""
    returns = daily_returns(closes)
    average, spread = mean(returns), deviation(returns)
    if average is None or spread is None:
        return None
    ratio = over_risk(average, spread)
    return None if ratio is None else ratio * math.sqrt(DAYS_PER_YEAR)


def sharpe_interval(closes: Sequence[float]) -> ConfidenceInterval | None:
    """Return the 95% interval of the Sharpe ratio, valid for a single look; None where the ratio has no interval.

    It uses the delta method with the influence of each day, u − S·(u² − 1) / 2 with u = (r − m) / s. Lo, "The
    Statistics of Sharpe Ratios", Financial Analysts Journal 58:4 (2002).
    """
    returns = np.array(daily_returns(closes))
    if len(returns) < RETURNS_MIN or not (spread := deviation(returns.tolist())):
        return None
    units = (returns - returns.mean()) / spread
    ratio = float(returns.mean()) / spread
    half = influence_error(units - ratio * (units**2 - 1) / 2)
    year = math.sqrt(DAYS_PER_YEAR)
    return ConfidenceInterval(year * (ratio - half), year * (ratio + half))


def sortino_ratio(closes: Sequence[float]) -> float | None:
    """Return mean of the daily returns / √(Σ min(r, 0)² / n) × √365."""
    returns = daily_returns(closes)
    average = mean(returns)
    if average is None:
        return None
    downside = math.sqrt(math.fsum(min(value, 0.0) ** 2 for value in returns) / len(returns))
    ratio = over_risk(average, downside)
    return None if ratio is None else ratio * math.sqrt(DAYS_PER_YEAR)


def calmar_ratio(closes: Sequence[float], drawdown: Drawdown | None) -> float | None:
    """Return annualized return / max drawdown of the whole series, both as fractions.

    The annualized return compounds the return from the capital to the last daily close:
    (last / capital)^(365 / days) − 1.
    """
    if len(closes) - 1 < RETURNS_MIN or drawdown is None or closes[0] <= 0:
        return None
    growth = closes[-1] / closes[0]
    if growth <= 0:
        return over_risk(-1.0, drawdown.percent / 100)
    exponent = math.log(growth) * DAYS_PER_YEAR / (len(closes) - 1)
    annualised = math.expm1(exponent) if exponent < 700 else math.inf
    return over_risk(annualised, drawdown.percent / 100)


def max_drawdown(values: Sequence[float] | NDArray[np.float64]) -> Drawdown | None:
    """Return the largest fall from a running peak; None without values, zero if equity never fell.

    Equity below zero counts as zero: nobody loses more than everything.
    """
    if not len(values):
        return None
    equity = np.maximum(np.asarray(values, dtype=np.float64), 0.0)
    peaks = np.maximum.accumulate(equity)
    falls = peaks - equity
    shares = np.divide(falls, peaks, out=np.zeros_like(falls), where=peaks > 0)
    return Drawdown(100 * float(shares.max()), float(falls.max()))


# Figures of the trades


def win_rate(pnls: Sequence[float]) -> float | None:
    """Return the share of trades with a net pnl above zero, in percent."""
    return percent(sum(pnl > 0 for pnl in pnls), len(pnls))


def profit_factor(pnls: Sequence[float]) -> float | None:
    """Return Σ wins / |Σ losses|."""
    won = math.fsum(pnl for pnl in pnls if pnl > 0)
    lost = -math.fsum(pnl for pnl in pnls if pnl < 0)
    return over_risk(won, lost)


def win_rate_interval(wins: int, count: int) -> ConfidenceInterval | None:
    """Return the 95% interval of the win rate in percent, valid for a single look; None below 10 trades.

    Wilson, "Probable Inference, the Law of Succession, and Statistical Inference", Journal of the American Statistical
    Association 22 (1927), which assumes independent trades.
    """
    if count < TRADES_MIN:
        return None
    share, weight = wins / count, NORMAL_95**2 / count
    middle = (share + weight / 2) / (1 + weight)
    half = NORMAL_95 / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / count / 4)
    return ConfidenceInterval(100 * max(0.0, middle - half), 100 * min(1.0, middle + half))


def profit_factor_interval(pnls: Sequence[float]) -> ConfidenceInterval | None:
    """Return the 95% interval of the profit factor, valid for a single look.

    None below 10 trades, and with only wins or only losses. It applies the delta method to the logarithm, with the
    influence of each trade in order of closing.
    """
    values = np.array(pnls)
    wins, losses = np.maximum(values, 0), np.maximum(-values, 0)
    if len(values) < TRADES_MIN or not wins.any() or not losses.any():
        return None
    half = influence_error(wins / wins.mean() - losses / losses.mean())
    factor = float(wins.sum() / losses.sum())
    return ConfidenceInterval(factor * math.exp(-half), factor * math.exp(min(half, 700.0)))


def average_r_multiple(pnls: Sequence[float]) -> float | None:
    """Return mean win / |mean loss|; None without a win or without a loss, since no trades have no mean."""
    won, lost = mean([pnl for pnl in pnls if pnl > 0]), mean([pnl for pnl in pnls if pnl <= 0])
    return None if won is None or lost is None else over_risk(won, abs(lost))


def recovery_factor(total_pnl: float | None, drawdown: Drawdown | None) -> float | None:
    """Return total net pnl / max drawdown in money."""
    return None if drawdown is None or total_pnl is None else over_risk(total_pnl, drawdown.money)


def trade_signal_to_noise(pnls: Sequence[float]) -> float | None:
    """Return mean / standard deviation (ddof 1) of the net pnl per trade."""
    average, spread = mean(pnls), deviation(pnls)
    return None if average is None or spread is None else over_risk(average, spread)


def decision_quality(decisions: Sequence[tuple[float, float]]) -> float | None:
    """Return the Pearson correlation of (confidence, net pnl) over the trades that have a confidence.

    None with fewer than 3 of them, or if either value never varies.
    """
    if len(decisions) < CONFIDENT_TRADES_MIN:
        return None
    confidences, pnls = [list(column) for column in zip(*decisions, strict=True)]
    if not deviation(confidences) or not deviation(pnls):
        return None
    confidence_mean, pnl_mean = math.fsum(confidences) / len(decisions), math.fsum(pnls) / len(decisions)
    # Scaled to one, so that squares of tiny or huge values neither underflow nor overflow.
    sureness, outcome = _scaled(confidences, confidence_mean), _scaled(pnls, pnl_mean)
    together = math.fsum(sure * other for sure, other in zip(sureness, outcome, strict=True))
    apart = math.sqrt(math.fsum(sure * sure for sure in sureness) * math.fsum(sure * sure for sure in outcome))
    return max(-1.0, min(1.0, together / apart))


def _scaled(values: Sequence[float], center: float) -> list[float]:
    """Return the distances from the center as fractions of the largest one."""
    distances = [value - center for value in values]
    largest = max(abs(distance) for distance in distances)
    return [distance / largest for distance in distances]


def streaks(pnls: Sequence[float]) -> Streaks:
    """Return the runs of wins and losses in order of closing."""
    longest = {True: 0, False: 0}
    count = 0
    before: bool | None = None
    for pnl in pnls:
        won = pnl > 0
        count = count + 1 if won is before else 1
        longest[won] = max(longest[won], count)
        before = won
    kind: Literal["win", "loss", "none"] = "none" if before is None else "win" if before else "loss"
    return Streaks(longest[True], longest[False], count, kind)


def minutes(opened_at: datetime, closed_at: datetime) -> float:
    """Return how long a trade was held, in minutes."""
    return (closed_at - opened_at) / timedelta(minutes=1)


def average_minutes(holds: Iterable[tuple[float, float]], *, won: bool) -> float | None:
    """Return the mean holding time of the wins or of the losses in minutes, from pairs of (net pnl, minutes)."""
    return mean([held for pnl, held in holds if (pnl > 0) is won])
