"""Baselines of a backtest: the accounts beside the models that a service follows, on the same ticks.

As in a service they open when every market has a price, and what their agents decide meets the first book at or after
the latency, all of it at once. Their changes are in no ledger, their values are snapshots.
"""

from collections.abc import Callable, Collection, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from trader.clock import moment_of
from trader.domain.agents.tools import Change, Decision
from trader.domain.agents.view import View
from trader.domain.exchange import rules as rules_of_exchange
from trader.domain.exchange.ledger import Posting, Rules, unopened_account
from trader.domain.exchange.tick_rules import Moment
from trader.domain.market.markets import canonical_symbol, untimely
from trader.domain.models import VariantId
from trader.domain.portfolio.baselines import (
    BUY_AND_HOLD,
    HOLD_NOTHING,
    TRADES_KEPT,
    Baseline,
    carry_out,
    equal_parts,
    rule_agent,
)
from trader.services.backtest.market import BacktestMarket
from trader.services.backtest.participant import FIRST_CYCLE, Follower, Glance, RuleAgentSource, next_minute
from trader.services.backtest.passage import Journal, Passage
from trader.settings import Settings
from trader.variants import VARIANTS


class _WaitingDecisions(NamedTuple):
    """Decisions of a rule agent that wait for the first book at or after `due`."""

    decisions: Sequence[Change]
    due: datetime


class _From:
    """A rule agent that decides from a second on; without a variant nobody decides anything but then."""

    def __init__(self, second: int, variant: VariantId | None) -> None:
        self._second = second
        self._agent = None if variant is None else RuleAgentSource(variant)

    def next_after(self, second: int) -> int | None:
        if second < self._second:
            return self._second
        return None if self._agent is None else self._agent.next_after(second)

    def decide(self, glance: Glance, look: Callable[[], View]) -> Sequence[Decision]:
        return () if self._agent is None else self._agent.decide(glance, look)


class BaselineFollower(Follower):
    """The account of a baseline."""

    trades_shown = TRADES_KEPT

    def __init__(self, baseline: Baseline, settings: Settings, second: int, opened_at: datetime) -> None:
        account = unopened_account(baseline.id, settings.initial_capital, settings.quote_currency, opened_at)
        intervals = () if baseline.variant is None else VARIANTS[baseline.variant].intervals
        super().__init__(_From(second, baseline.variant), intervals, account)
        self.baseline = baseline


class BaselinePassage(Passage[BaselineFollower]):
    """Takes the baselines through the market."""

    def __init__(
        self,
        market: BacktestMarket,
        rules: Rules,
        latency: timedelta,
        followers: Sequence[BaselineFollower],
        journal: Journal,
    ) -> None:
        super().__init__(market, rules, followers, journal)
        self._latency = latency

    def decide(self, one: BaselineFollower, second: int, now: datetime) -> None:
        """Let a rule agent decide, and buy and hold buy. What still waited for a book is forgotten."""
        if one.baseline == BUY_AND_HOLD:
            moment = Moment(now, *self.prices(second))
            for order in equal_parts(one.account, moment, self.rules):
                rate = self.market.funding_rate
                self.post(one, rules_of_exchange.place(one.account, order, moment, self.rules, rate), second)
        decisions = [each for each in self.ask(one, second, now) if isinstance(each, Change)]
        one.waiting = _WaitingDecisions(decisions, now + self._latency) if decisions else None

    def release(self, one: BaselineFollower, moment: Moment, second: int) -> None:
        """Pass the decisions that waited through the guard to the exchange."""
        waiting, variant = one.waiting, one.baseline.variant
        assert isinstance(waiting, _WaitingDecisions)
        assert variant is not None, "only a rule agent decides"
        one.waiting = None
        for decision in waiting.decisions:
            symbol = canonical_symbol(decision.symbol)
            quote = moment.quotes.get(symbol)
            if quote is None or quote.is_stale(moment.at):
                continue
            context, limits = self.context(one, moment, second), VARIANTS[variant].limits
            found = carry_out(decision, symbol, context, limits, moment, self.rules, self.market.funding_rate)
            self.post(one, found if isinstance(found, Posting) else None, second)


def open_baselines(
    market: BacktestMarket, settings: Settings, variants: Collection[VariantId]
) -> list[BaselineFollower]:
    """Return the baselines beside models of these variants, as they open; none when no price of a market ever comes."""
    begin = second = market.span.start
    while not _is_priced(market, second):
        second = next_minute(second)
        if second >= market.span.stop:
            return []
    opened_at = moment_of(second) + (FIRST_CYCLE if second == begin else timedelta(0))
    agents = [rule_agent(variant) for variant in VariantId if variant in variants]
    return [BaselineFollower(one, settings, second, opened_at) for one in (HOLD_NOTHING, BUY_AND_HOLD, *agents)]


def _is_priced(market: BacktestMarket, second: int) -> bool:
    quoted_at = market.quoted_at(second)
    return all(
        symbol in quoted_at and untimely(quoted_at[symbol], moment_of(second)) is None for symbol in market.markets
    )
