"""Season plan: what a season can detect, simulated with its rules and the verdicts of its boards.

An account's hourly returns are independent and normal, with a given volatility and the mean for a given Sharpe ratio.
Part of their variance is the account's own noise, which differs between replicates; they share the rest, from the
market and the strategy. A row of replicates is their mean.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

from trader.core.intervals import HOURS_PER_DAY, SEQUENCE_HOURS_MIN, Returns, estimate
from trader.portfolio.domain.bets import HOURLY_MOVE_MAX, HOURS_PER_YEAR, log_wealth
from trader.portfolio.domain.board import NO_SEASON, BoardRules

Question = Literal["primary", "holdNothing", "baseline", "otherModel"]
"""The primary comparison at its own level, or whether a model is better than holding nothing, a baseline, or another
model.

Baseline and other model have its volatility and no edge. There is one baseline; the other model has as many replicates
as the first.
"""


class SeasonOutline(NamedTuple):
    """The planned season. `volatility` is hourly, `own_noise` the share of its variance that replicates do not share.

    `leverage` is an account's largest, which bounds its hourly moves unless the `rules` do; they give the comparisons,
    their level, and the minimum age for comparing two models.
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
        """The number of comparisons that are corrected together."""
        return self.rules.family(self.models)

    @property
    def questions(self) -> Sequence[Question]:
        """The comparisons of its boards."""
        compared = {*self.rules.compared}
        asked: dict[Question, bool] = {
            "primary": self.rules.primary is not None,
            "holdNothing": "holdNothing" in compared,
            "baseline": bool(compared & {"ruleAgent", "buyAndHold"}),
            "otherModel": "bestOther" in compared and self.models > 1,
        }
        return [question for question, is_asked in asked.items() if is_asked]


class Power(NamedTuple):
    """The share of simulated seasons that have called a true difference by each day, and when four of five have.

    `days_needed` is None if fewer do within the season.
    """

    question: Question
    replicates: int
    called: Sequence[float]
    days_needed: int | None


def plan_season(
    outline: SeasonOutline, replicates: Sequence[int], days: Sequence[int], seasons: int
) -> Iterator[Power]:
    """Yield, for each question and number of replicates, the share of simulated seasons that call it by each day."""
    for question in outline.questions:
        for count in replicates:
            rng = np.random.default_rng(0)
            called_on = sorted(_called_on(outline, question, count, rng) for _ in range(seasons))
            needed = called_on[math.ceil(0.8 * seasons) - 1]
            shares = [sum(day <= until for day in called_on) / seasons for until in days]
            yield Power(question, count, shares, None if math.isinf(needed) else int(needed))


def _called_on(outline: SeasonOutline, question: Question, replicates: int, rng: np.random.Generator) -> float:
    """Return the day on which a simulated season calls the difference; infinity if it never does."""
    level, primary = outline.rules.level / outline.family, outline.rules.primary
    if question == "primary" and primary is not None:
        against: dict[str, Question] = dict.fromkeys(("ruleAgent", "buyAndHold"), "baseline")
        against["holdNothing"] = "holdNothing"
        level, question = primary.alpha, against.get(primary.against, "otherModel")
    hours = HOURS_PER_DAY * outline.days
    mean = outline.sharpe * outline.volatility / math.sqrt(HOURS_PER_YEAR)
    move, rules = HOURLY_MOVE_MAX * max(1.0, outline.leverage), outline.rules
    loss = min(1.0, move) if rules.loss_max is None else rules.loss_max
    gain = move if question == "baseline" or rules.gain_max is None else rules.gain_max
    returns = mean + _noise(outline, replicates, hours, rng)
    bounds = np.full(hours, loss)
    if question != "holdNothing":
        others = replicates if question == "otherModel" else 1
        returns, bounds = returns - _noise(outline, others, hours, rng), bounds + gain
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
    """Return the hourly noise of a row of replicates: their common noise plus the mean of their own noise."""
    spread = outline.volatility * math.sqrt(1 - outline.own_noise + outline.own_noise / replicates)
    return rng.normal(0.0, spread, hours)
