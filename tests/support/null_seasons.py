"""Seasons of models that differ only by luck, judged daily by the service's own functions: every verdict is false.

A season is too long to judge its boards as the service does, one comparison at a time. Transforms are linear, so the
transforms of all differences follow from the accounts'; and a board has a false verdict exactly if the comparison with
the smallest p value has one, so only this comparison is judged, in a family of the same size. An account that has lost
everything is rightly judged worse, so such verdicts do not count.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv

from trader.core.intervals import SEQUENCE_HOURS_MIN, Estimate, cosine_transforms
from trader.core.variant_id import VariantId
from trader.portfolio.domain.baselines import BUY_AND_HOLD, rule_agent
from trader.portfolio.domain.bets import HOURLY_MOVE_MAX, bet
from trader.portfolio.domain.board import NO_SEASON, BoardRules, JudgedEntrant, PrimaryComparison, judge_board
from trader.portfolio.domain.evidence import Statement, Verdict, comparisons_among, judge_family
from trader.portfolio.domain.histories import WINDOWS
from trader.portfolio.domain.returns import ReturnSeries

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


def autoregressive(rng: np.random.Generator, accounts: int, hours: int) -> Returns:
    """Return AR(0.3) returns: hours predict the next."""
    shocks: Returns = rng.normal(0, HOURLY, (accounts, hours))
    for hour in range(1, hours):
        shocks[:, hour] += 0.3 * shocks[:, hour - 1]
    return shocks


def regimes(rng: np.random.Generator, accounts: int, hours: int) -> Returns:
    """Return returns whose drift changes its sign and whose volatility changes its size every two days on average."""
    turns = np.cumsum(rng.random((2, accounts, hours)) < 1 / 48, axis=2)
    starts = rng.integers(0, 2, (2, accounts, 1))
    drift, wild = (turns + starts) % 2
    returns: Returns = HOURLY * (0.1 * (2 * drift - 1) + rng.normal(0, 1, (accounts, hours)) * np.where(wild, 1.5, 0.5))
    return returns


def disasters(percent: float) -> Noise:
    """Return the process of many small gains and a large loss in this percentage of hours, with mean zero."""
    chance = percent / 100

    def draw(rng: np.random.Generator, accounts: int, hours: int) -> Returns:
        loss = HOURLY / math.sqrt(chance)
        gain = loss * chance / (1 - chance)
        gains = rng.normal(gain, gain / 2, (accounts, hours))
        return np.log1p(np.where(rng.random((accounts, hours)) < chance, -loss, gains))

    return draw


def bankruptcies(rng: np.random.Generator, accounts: int, hours: int) -> Returns:
    """Return gains that are offset by losing everything once in 2,000 hours, with mean zero."""
    return ruin(1 / 2000, rng, accounts, hours)


def ruin(chance: float, rng: np.random.Generator, accounts: int, hours: int) -> Returns:
    values = np.log1p(rng.normal(chance / (1 - chance), HOURLY / 10, (accounts, hours)))
    values[rng.random((accounts, hours)) < chance] = -np.inf
    return values


def stopped(percent: float, bound: float, *, gains: bool = False) -> Noise:
    """Return small gains with a rare loss that the service stopped at a bound, or the reverse, with mean zero.

    The move ends between the three quarters at which the positions are closed, and the bound.
    """
    chance = percent / 100

    def draw(rng: np.random.Generator, accounts: int, hours: int) -> Returns:
        moves = bound * rng.uniform(0.75, 1, (accounts, hours))
        others = rng.normal(0.875 * bound * chance / (1 - chance), HOURLY / 10, (accounts, hours))
        simple = np.where(rng.random((accounts, hours)) < chance, -moves, others)
        return np.log1p(-simple if gains else simple)

    return draw


def months(rng: np.random.Generator, accounts: int, hours: int) -> Returns:
    """Return returns whose drift changes its sign every 30 days, and is zero over two months."""
    signs = 1 - 2 * ((np.arange(hours) // 720 + rng.integers(0, 2, (accounts, 1))) % 2)
    returns: Returns = rng.normal(0, HOURLY, (accounts, hours)) + 0.1 * HOURLY * signs
    return returns


class Process(NamedTuple):
    """The distribution of models' gains, the spread of their sizes, and their largest leverage at a size of 1."""

    models: Noise
    sizes: tuple[float, float] = (0.4, 2.0)
    leverage: float = 1.0
    others: Noise | None = None
    """The gains of the market and the rule agents, where they differ."""

    bound: float | None = None
    """The bound of an hour that the season enforces; models then do not follow the market."""


PROCESSES: Final[dict[str, Process]] = {
    "normal": Process(normal),
    "garch": Process(garch),
    "heavy-tailed": Process(heavy_tailed),
    "autoregressive": Process(autoregressive),
    "regimes": Process(regimes),
    **{f"loss in {percent} % of hours": Process(disasters(percent)) for percent in (3, 2, 1, 0.5, 0.2)},
    "bankruptcies": Process(bankruptcies, (1.0, 1.0), 5.0, normal),
    **{
        f"{kind} stopped at {100 * bound:g} % in {percent} % of hours": Process(
            stopped(percent, bound, gains=kind == "gain"), (1.0, 1.0), 1.0, normal, bound
        )
        for kind, percent, bound in (("loss", 0.2, 0.2), ("gain", 0.2, 0.2), ("loss", 0.5, 0.04))
    },
}


class NullSeason(NamedTuple):
    """Models that follow the market to varying degrees, the rule agents of the variants, and the market.

    `bounds` are the maximum losses of each model in an hour.
    """

    models: Returns
    agents: Returns
    market: Returns
    bounds: Returns

    @classmethod
    def draw(cls, seed: int, models: int, days: int, process: Process) -> "NullSeason":
        rng, hours = np.random.default_rng(seed), 24 * days
        own_returns = process.models(rng, models, hours)
        others = (process.others or process.models)(rng, len(VARIANTS) + 1, hours)
        follows, own = rng.uniform(-0.5, 1, (models, 1)), rng.uniform(*process.sizes, (models, 1))
        leverages = (np.abs(follows) + own * process.leverage)[:, 0]
        bounds = HOURLY_MOVE_MAX * np.maximum(1, leverages)
        if process.bound is not None:
            follows, bounds = np.zeros_like(follows), np.full(models, process.bound)
        return cls(follows * others[-1:] + own * own_returns, others[:-1], others[-1:], bounds)

    def entrants(self, hours: int) -> tuple[list[JudgedEntrant], dict[str, ReturnSeries | None]]:
        """Return the input of the service's board after this many hours: its entrants and baselines."""
        models = [
            JudgedEntrant(
                f"m{number}",
                VARIANTS[number % 4],
                ReturnSeries(START, returns[:hours], None, np.full(hours, bound)),
                1000,
            )
            for number, (returns, bound) in enumerate(zip(self.models, self.bounds, strict=True))
        ]
        baselines: dict[str, ReturnSeries | None] = {
            rule_agent(variant).id: ReturnSeries(START, returns[:hours])
            for variant, returns in zip(VARIANTS, self.agents, strict=True)
        }
        return models, {**baselines, BUY_AND_HOLD.id: ReturnSeries(START, self.market[0, :hours])}

    def places_alive(self, hours: int, members: Sequence[int]) -> NDArray[np.intp]:
        """Return the indices of the members that have not lost everything within this many hours."""
        places = np.asarray(members)
        return places[np.isfinite(self.models[places, :hours]).all(axis=1)]

    def alive(self, hours: int, members: Sequence[int]) -> "Sums":
        """Return the hours of the members that have not lost everything."""
        places = self.places_alive(hours, members)
        return Sums.of(self.models[places, :hours], self.bounds[places])


class Sums(NamedTuple):
    """Log returns, means and transforms of accounts, and each account's maximum loss in an hour."""

    logs: Returns
    means: Returns
    transforms: Returns
    bounds: Returns

    @classmethod
    def of(cls, logs: Returns, bounds: Returns | None = None) -> "Sums":
        transforms = cosine_transforms(logs)
        return cls(
            logs, logs.mean(axis=1), transforms, np.full(len(logs), HOURLY_MOVE_MAX) if bounds is None else bounds
        )

    @classmethod
    def nothing(cls, like: "Sums") -> "Sums":
        return cls(*(np.zeros_like(part[:1]) for part in like))

    def chosen(self, places: Sequence[int] | NDArray[np.intp]) -> "Sums":
        return Sums(*(part[places] for part in self))


def strongest(first: Sums, other: Sums) -> Statement:
    """Return the statement of the smallest p value for these accounts against the others, which may be a single one."""
    hours, freedom = first.logs.shape[1], first.transforms.shape[1]
    means = first.means - other.means
    variances = ((first.transforms - other.transforms) ** 2).sum(axis=1) / freedom
    statement = NOTHING
    for place in np.argsort(-(means**2) / variances).tolist():
        estimate = Estimate(hours, float(means[place]), float(variances[place]), freedom)
        level = estimate.p_value()
        if statement.estimate is not None and level >= statement.p_value:
            break
        reference = place % len(other.logs)
        if level < 1:
            returns = np.expm1(first.logs[place]) - np.expm1(other.logs[reference])
            own, others = first.bounds[place], other.bounds[reference]
            bound = min(1.0, own) + others if means[place] > 0 else own + min(1.0, others)
            judged = Statement(
                hours, estimate, bet=bet(math.copysign(1, means[place]) * returns, np.full(hours, bound))
            )
        else:
            judged = Statement(hours, estimate)
        if statement.estimate is None or judged.p_value < statement.p_value:
            statement = judged
    return statement


def strongest_of_all_boards(season: NullSeason, hours: int) -> Verdict:
    """Return the verdict of the smallest p value on the boards of all models, of each variant and of each window."""
    every = range(len(season.models))
    statements = statements_of(season, hours, every)
    for number in range(len(VARIANTS)):
        statements += statements_of(season, hours, every[number :: len(VARIANTS)])
    models = season.alive(hours, every)
    for window in WINDOWS.values() if len(models.logs) > 1 else ():
        order = np.argsort(-models.logs[:, max(0, hours - window // HOUR) :].sum(axis=1))
        statements.append(strongest(models.chosen(order[:-1]), models.chosen(order[1:])))
    return strongest_verdict(season, statements)


def statements_of(season: NullSeason, hours: int, members: Sequence[int]) -> list[Statement]:
    """Return the statement of the smallest p value against each reference, and against the best of these models."""
    models = season.alive(hours, members)
    if not len(models.logs):
        return [NOTHING]
    agents, market = Sums.of(season.agents[:, :hours]), Sums.of(season.market[:, :hours])
    own_agents = agents.chosen(season.places_alive(hours, members) % len(VARIANTS))
    best = int(np.argmax(models.means))
    others = np.delete(np.arange(len(models.logs)), best)
    return [
        *(strongest(models, reference) for reference in (own_agents, Sums.nothing(market), market)),
        *([strongest(models.chosen(others), models.chosen([best]))] if len(others) else []),
    ]


def strongest_verdict(season: NullSeason, statements: Sequence[Statement]) -> Verdict:
    verdicts = judge_family(statements, comparisons_among(len(season.models)))
    return min(verdicts, key=lambda verdict: verdict.p_value)


def looks(days: int) -> Iterable[int]:
    """Return the hours of the daily looks, from the first one that allows a verdict."""
    return range(SEQUENCE_HOURS_MIN, 24 * days + 1, 24)


def wrong_seasons(seeds: Iterable[int], models: int, days: int, process: Process) -> Iterator[bool]:
    """Yield for each season whether any board judges anything better or worse at any daily look."""
    for seed in seeds:
        season = NullSeason.draw(seed, models, days, process)
        yield any(strongest_of_all_boards(season, hours).word != "not distinguishable yet" for hours in looks(days))


EXPLORATORY: Final = NO_SEASON._replace(primary=PrimaryComparison(entrant="m0", against="holdNothing", alpha=0.05))
"""The rules of a board beside a primary comparison."""


def is_wrong(entrants: Sequence[JudgedEntrant], baselines: dict[str, ReturnSeries | None], rules: BoardRules) -> bool:
    """Return whether the service's board judges anything, or excludes a place, of accounts that have not lost all."""
    alive = [each for each in entrants if not each.is_ruined]
    board = judge_board(alive, baselines, None, len(entrants), rules)
    words = {each.verdict.word for comparisons in board.comparisons.values() for each in comparisons}
    ranks = {(rank.first, rank.last, rank.among) for rank in board.ranks.values()}
    return bool(words - {"not distinguishable yet"}) or bool(ranks - {(1, len(board.ranks), len(board.ranks))})


def share_interval(count: int, total: int) -> tuple[float, float]:
    """Return the 95 % Clopper-Pearson interval of a share."""
    low = float(betaincinv(count, total - count + 1, 0.025)) if count else 0.0
    high = float(betaincinv(count + 1, total - count, 0.975)) if count < total else 1.0
    return low, high
