"""Baselines of a backtest: the accounts beside the models that a service follows, on the same ticks.

As in a service they open when every market has a price, and what their agents decide meets the first book at or after
the latency, all of it at once. Their changes are in no ledger, their values are snapshots.
"""

from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta

from trader.clock import moment_of
from trader.domain.agents.strategy import Peek
from trader.domain.agents.tools import Change, Decision
from trader.domain.agents.view import View
from trader.domain.exchange.ledger import Posting, unopened_account
from trader.domain.exchange.tick_rules import Moment
from trader.domain.market.markets import untimely
from trader.domain.models import VariantId
from trader.domain.portfolio.baselines import (
    BUY_AND_HOLD,
    Baseline,
    baselines_beside,
    buy_every_market,
    carry_out,
)
from trader.services.backtest.accounts import FIRST_CYCLE, BacktestAccount, StrategySource, next_minute
from trader.services.backtest.market import BacktestMarket
from trader.services.backtest.runner import EventTimeRunner
from trader.services.portfolio.followed_account import WaitingDecisions
from trader.settings import Settings
from trader.variants import VARIANTS


class _DelayedRuleAgent:
    """Decision source of a rule agent from a second on; without a variant it is due once, at that second."""

    def __init__(self, second: int, variant: VariantId | None) -> None:
        self._second = second
        self._agent = None if variant is None else StrategySource(VARIANTS[variant].agent())

    def next_after(self, second: int) -> int | None:
        if second < self._second:
            return self._second
        return None if self._agent is None else self._agent.next_after(second)

    def decide(self, peek: Peek, look: Callable[[], View]) -> Sequence[Decision]:
        return () if self._agent is None else self._agent.decide(peek, look)


class BaselineAccount(BacktestAccount):
    def __init__(self, baseline: Baseline, settings: Settings, second: int, opened_at: datetime) -> None:
        account = unopened_account(baseline.id, settings.initial_capital, settings.quote_currency, opened_at)
        intervals = () if baseline.variant is None else VARIANTS[baseline.variant].agent.intervals
        super().__init__(_DelayedRuleAgent(second, baseline.variant), intervals, account)
        self.baseline = baseline


class BaselineRunner(EventTimeRunner[BaselineAccount]):
    """Advances the baselines through market time."""

    def decide(self, followed: BaselineAccount, second: int, now: datetime) -> None:
        """Ask a rule agent for decisions, or let buy and hold buy. Decisions that still wait are dropped."""
        if followed.baseline == BUY_AND_HOLD:
            moment = Moment(now, *self.prices(second))
            for posting in buy_every_market(followed.account, moment, self.rules, self.market.funding_rate):
                self.post(followed, posting, second)
        decisions = [each for each in self.ask(followed, second, now) if isinstance(each, Change)]
        followed.waiting = WaitingDecisions(decisions, now + self._latency) if decisions else None

    def release(self, followed: BaselineAccount, moment: Moment, second: int) -> None:
        """Execute the waiting decisions through the guard and the exchange."""
        waiting, variant = followed.waiting, followed.baseline.variant
        assert isinstance(waiting, WaitingDecisions)
        assert variant is not None, "only a rule agent decides"
        followed.waiting = None
        for decision in waiting.decisions:
            context, limits = self.context(followed, moment, second), VARIANTS[variant].limits
            outcome = carry_out(decision, context, limits, moment, self.rules, self.market.funding_rate)
            self.post(followed, outcome if isinstance(outcome, Posting) else None, second)


def open_baselines(
    market: BacktestMarket, settings: Settings, variants: Collection[VariantId]
) -> list[BaselineAccount]:
    """Return the opening baselines for models of these variants; none when a market never has a price."""
    begin = second = market.span.start
    while not _is_priced(market, second):
        second = next_minute(second)
        if second >= market.span.stop:
            return []
    opened_at = moment_of(second) + (FIRST_CYCLE if second == begin else timedelta(0))
    return [BaselineAccount(baseline, settings, second, opened_at) for baseline in baselines_beside(variants)]


def _is_priced(market: BacktestMarket, second: int) -> bool:
    quoted_at = market.quoted_at(second)
    return all(
        symbol in quoted_at and untimely(quoted_at[symbol], moment_of(second)) is None for symbol in market.markets
    )
