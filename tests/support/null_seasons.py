"""Seasons of models that differ by luck alone, judged daily by the service's own functions: every verdict is false.

A season is too long to judge its boards as the service does, one comparison after the other. Transforms are linear, so
those of all differences come from those of the accounts; and a board has a false verdict exactly when the comparison
that is furthest from zero has one, so that only this one is judged, in a family of the same size.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta

from trader.domain.models import VariantId
from trader.domain.portfolio.baselines import BUY_AND_HOLD, rule_agent
from trader.domain.portfolio.board import JudgedEntrant
from trader.domain.portfolio.evidence import ReturnSeries, Statement, Verdict, judge_family, judge_neighbours
from trader.domain.portfolio.histories import WINDOWS
from trader.domain.portfolio.intervals import SEQUENCE_HOURS_MIN, Estimate, cosine_transforms

Returns = NDArray[np.float64]
"""Hourly log returns: accounts × hours."""

Noise = Callable[[np.random.Generator, int, int], Returns]

START: Final = datetime(2025, 1, 1, tzinfo=UTC)
HOUR: Final = timedelta(hours=1)
HOURLY: Final = 0.005
VARIANTS: Final = list(VariantId)
NOTHING: Final = Statement(0, None, "left out")


def normal(rng: np.random.Generator, accounts: int, hours: int) -> Returns:
    return rng.normal(0, HOURLY, (accounts, hours))


def garch(rng: np.random.Generator, accounts: int, hours: int) -> Returns:
    """Return GARCH(0.08, 0.90) returns: volatility comes in clusters."""
    shocks, variances = rng.normal(0, 1, (hours, accounts)), np.ones(accounts)
    shocked = np.empty((hours, accounts))
    for hour in range(hours):
        shocked[hour] = np.sqrt(variances) * shocks[hour]
        variances = 0.02 + 0.08 * shocked[hour] ** 2 + 0.90 * variances
    return HOURLY * shocked.T


def heavy_tailed(rng: np.random.Generator, accounts: int, hours: int) -> Returns:
    """Return returns of Student's t with 3 degrees of freedom."""
    return HOURLY / math.sqrt(3) * rng.standard_t(3, (accounts, hours))


PROCESSES: Final[dict[str, Noise]] = {"normal": normal, "garch": garch, "heavy-tailed": heavy_tailed}


class NullSeason(NamedTuple):
    """Models that follow the market more or less, the rule agents of the variants, and the market."""

    models: Returns
    agents: Returns
    market: Returns

    @classmethod
    def draw(cls, seed: int, models: int, days: int, noise: Noise) -> "NullSeason":
        rng, hours = np.random.default_rng(seed), 24 * days
        returns = noise(rng, models + len(VARIANTS) + 1, hours)
        follows, own = rng.uniform(-0.5, 1, (models, 1)), rng.uniform(0.4, 2, (models, 1))
        market = returns[-1:]
        return cls(follows * market + own * returns[:models], returns[models:-1], market)

    def entrants(self, hours: int) -> tuple[list[JudgedEntrant], dict[str, ReturnSeries | None]]:
        """Return what the service's board is judged from after so many hours: its entrants and baselines."""
        models = [
            JudgedEntrant(f"m{number}", VARIANTS[number % 4], ReturnSeries(START, returns[:hours]), 1000)
            for number, returns in enumerate(self.models)
        ]
        baselines: dict[str, ReturnSeries | None] = {
            rule_agent(variant).id: ReturnSeries(START, returns[:hours])
            for variant, returns in zip(VARIANTS, self.agents, strict=True)
        }
        return models, {**baselines, BUY_AND_HOLD.id: ReturnSeries(START, self.market[0, :hours])}


class Sums(NamedTuple):
    """Means and transforms of accounts, or of differences of accounts."""

    hours: int
    means: Returns
    transforms: Returns

    @classmethod
    def of(cls, returns: Returns) -> "Sums":
        return cls(returns.shape[1], returns.mean(axis=1), cosine_transforms(returns))

    def __sub__(self, other: "Sums") -> "Sums":
        return Sums(self.hours, self.means - other.means, self.transforms - other.transforms)

    def chosen(self, places: Sequence[int] | NDArray[np.intp]) -> "Sums":
        return Sums(self.hours, self.means[places], self.transforms[places])

    def furthest(self) -> Statement:
        """Return the statement on the one whose mean is most standard errors from zero."""
        freedom = self.transforms.shape[1]
        variances = (self.transforms**2).sum(axis=1) / freedom
        place = int(np.argmax(self.means**2 / variances))
        return Statement(self.hours, Estimate(self.hours, float(self.means[place]), float(variances[place]), freedom))


def strongest_of_board(season: NullSeason, hours: int) -> Verdict:
    """Return the verdict of the smallest p value on the board after so many hours."""
    models, agents, market = (Sums.of(returns[:, :hours]) for returns in season)
    count = len(season.models)
    own_agents = agents.chosen(np.arange(count) % len(VARIANTS))
    furthest = [pairs.furthest() for pairs in (models - own_agents, models, models - market)]
    best = int(np.argmax(models.means))
    behind = models.chosen(np.delete(np.arange(count), best)) - models.chosen([best])
    verdicts = judge_family(
        [*furthest, *[NOTHING] * (3 * count - len(furthest))], [behind.furthest(), *[NOTHING] * (count - 2)], count
    )
    return min(verdicts, key=lambda verdict: verdict.p_value)


def looks(days: int) -> Iterable[int]:
    """Return the hours of the daily looks, from the first on at which a verdict can be."""
    return range(SEQUENCE_HOURS_MIN, 24 * days + 1, 24)


def is_ever_wrong(season: NullSeason, days: int, strongest: Callable[[NullSeason, int], Verdict]) -> bool:
    """Return whether anything is called better or worse at any daily look."""
    return any(strongest(season, hours).word != "not distinguishable yet" for hours in looks(days))


def wrong_seasons(
    seeds: Iterable[int], models: int, days: int, noise: Noise, strongest: Callable[[NullSeason, int], Verdict]
) -> Iterator[bool]:
    for seed in seeds:
        yield is_ever_wrong(NullSeason.draw(seed, models, days, noise), days, strongest)


def strongest_of_leaderboards(season: NullSeason, hours: int) -> Verdict:
    """Return the verdict of the smallest p value on the leaderboards of all windows after so many hours."""
    models = Sums.of(season.models[:, :hours])
    result = []
    for window in WINDOWS.values():
        gains = season.models[:, max(0, hours - window // HOUR) : hours].sum(axis=1)
        order = np.argsort(-gains)
        pairs = models.chosen(order[:-1]) - models.chosen(order[1:])
        result += judge_neighbours([pairs.furthest(), *[NOTHING] * (len(order) - 2)])
    return min(result, key=lambda verdict: verdict.p_value)


BOARDS: Final = {"evidence": strongest_of_board, "leaderboard": strongest_of_leaderboards}


def share_interval(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % Clopper-Pearson interval of a share."""
    low = float(beta.ppf(0.025, count, total - count + 1)) if count else 0.0
    high = float(beta.ppf(0.975, count + 1, total - count)) if count < total else 1.0
    return low, high
