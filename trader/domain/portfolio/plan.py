"""Season plan: what a season can find out, simulated with the verdicts that its boards would use, by its rules.

An account's hourly returns are independent and normal, of a given volatility and a mean that makes a given Sharpe
ratio. Part of their variance is an account's own noise, which differs between replicates; the rest is the market's and
the strategy's, which they share. A row of replicates is their mean.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple

import numpy as np

from trader.domain.portfolio.bets import HOURLY_MOVE_MAX, log_wealth
from trader.domain.portfolio.board import NO_SEASON, BoardRules
from trader.domain.portfolio.intervals import HOURS_PER_DAY, SEQUENCE_HOURS_MIN, Returns, estimate

HOURS_PER_YEAR: Final = 365 * HOURS_PER_DAY

Question = Literal["holdNothing", "baseline", "otherModel"]
"""Whether a model is better than holding nothing, than a baseline, or than another model.

Both have its volatility and no edge. Of a baseline there is one, of another model as many replicates as of the first.
"""


class SeasonOutline(NamedTuple):
    """What is planned. `volatility` is that of an hour, `own_noise` the part of its variance that replicates differ in.

    `leverage` is the largest that an account will have, from which it follows what it can lose in an hour. `rules` say
    what is compared, at which level, and from which age on two models are.
    """

    models: int
    sharpe: float
    volatility: float = 0.005
    own_noise: float = 0.3
    leverage: float = 1.0
    days: int = 365
    rules: BoardRules = NO_SEASON

    @property
    def family(self) -> int:
        """How many comparisons are corrected together."""
        return self.rules.family(self.models)

    @property
    def questions(self) -> Sequence[Question]:
        """What its boards compare."""
        compared = {*self.rules.compared}
        asked: dict[Question, bool] = {
            "holdNothing": "holdNothing" in compared,
            "baseline": bool(compared & {"ruleAgent", "buyAndHold"}),
            "otherModel": "bestOther" in compared and self.models > 1,
        }
        return [question for question, is_asked in asked.items() if is_asked]


class Power(NamedTuple):
    """The part of simulated seasons that have called a true difference until each day, and when four of five have.

    `days_needed` is None when fewer do within the season.
    """

    question: Question
    replicates: int
    called: Sequence[float]
    days_needed: int | None


def plan_season(
    outline: SeasonOutline, replicates: Sequence[int], days: Sequence[int], seasons: int, seed: int = 0
) -> Iterator[Power]:
    """Yield for each question and number of replicates what so many simulated seasons called until each day."""
    for question in outline.questions:
        for count in replicates:
            rng = np.random.default_rng(seed)
            called_on = sorted(_called_on(outline, question, count, rng) for _ in range(seasons))
            needed = called_on[math.ceil(0.8 * seasons) - 1]
            shares = [sum(day <= until for day in called_on) / seasons for until in days]
            yield Power(question, count, shares, None if math.isinf(needed) else int(needed))


def _called_on(outline: SeasonOutline, question: Question, replicates: int, rng: np.random.Generator) -> float:
    """Return the day on which a simulated season calls the difference; infinity when it does not."""
    hours = HOURS_PER_DAY * outline.days
    mean = outline.sharpe * outline.volatility / math.sqrt(HOURS_PER_YEAR)
    bound = min(1.0, HOURLY_MOVE_MAX * max(1.0, outline.leverage))
    returns = mean + _noise(outline, replicates, hours, rng)
    bounds = np.full(hours, bound)
    if question != "holdNothing":
        others = replicates if question == "otherModel" else 1
        returns, bounds = returns - _noise(outline, others, hours, rng), 2 * bounds
    level = outline.rules.level / outline.family
    wealth = np.maximum.accumulate(log_wealth(returns, bounds))
    first = np.flatnonzero(wealth >= -math.log(level))
    if not len(first):
        return math.inf
    age_min = outline.rules.age_min if question == "otherModel" else 0
    begin = max(SEQUENCE_HOURS_MIN, age_min, int(first[0]) + 1)
    for until in range(math.ceil(begin / HOURS_PER_DAY) * HOURS_PER_DAY, hours + 1, HOURS_PER_DAY):
        seen = estimate(returns[:until])
        if seen.mean > 0 and seen.p_value() <= level:
            return until / HOURS_PER_DAY
    return math.inf


def _noise(outline: SeasonOutline, replicates: int, hours: int, rng: np.random.Generator) -> Returns:
    """Return the hourly noise of a row of replicates: of what they have in common, and of the mean of their own."""
    spread = outline.volatility * math.sqrt(1 - outline.own_noise + outline.own_noise / replicates)
    return rng.normal(0.0, spread, hours)
