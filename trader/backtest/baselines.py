"""Baselines of a backtest: the reference accounts that a service also keeps, on the same ticks as the models.

As in a service, they open once every market has a price, and all orders of a cycle meet the first books at or after
the latency. Their changes are not in the ledger; their values are in the snapshots.
"""

from collections.abc import Collection
from datetime import timedelta

from trader.agents.domain.strategy import Strategy
from trader.agents.domain.tools import Change
from trader.agents.variants import VARIANTS
from trader.backtest.accounts import FIRST_CYCLE, BacktestAccount, DecisionSource, next_minute
from trader.backtest.market import BacktestMarket
from trader.backtest.session import AccountSession
from trader.core.clock import moment_of
from trader.core.variant_id import VariantId
from trader.exchange.domain.account import Account
from trader.exchange.domain.ledger import unopened_account
from trader.market.domain.markets import untimely
from trader.portfolio.baselines import execute_together
from trader.portfolio.domain.baselines import (
    BUY_AND_HOLD,
    Baseline,
    baselines_beside,
    buy_every_market,
)
from trader.settings.settings import Settings


class BaselineSource(DecisionSource):
    """Decision source of a baseline from a given second on: a rule agent or, once, the purchases of buy and hold."""

    def __init__(self, baseline: Baseline, second: int) -> None:
        self._baseline = baseline
        self._second = second
        self._agent = None if baseline.variant is None else VARIANTS[baseline.variant].agent()

    def next_after(self, second: int) -> int | None:
        if second < self._second:
            return self._second
        return None if self._agent is None else next_minute(second)

    async def run(self, session: AccountSession) -> None:
        if self._baseline == BUY_AND_HOLD:
            for posting in buy_every_market(session.account(), session.moment(), session.rules, session.funding_rate):
                session.post(posting)
        if self._agent is None or not self._agent.may_act(session.peek):
            return
        decisions = [each for each in self._agent.decide(session.look()) or () if isinstance(each, Change)]
        trading = session.trading(decided_at=session.now())
        await execute_together(decisions, session.context, session.limits, trading)


class BaselineAccount(BacktestAccount):
    is_booked = False

    def __init__(self, baseline: Baseline, source: DecisionSource, account: Account) -> None:
        agent = Strategy() if baseline.variant is None else VARIANTS[baseline.variant].agent()
        limits = agent.limits if baseline.variant is None else VARIANTS[baseline.variant].limits
        super().__init__(source, agent.shown, limits, account)
        self.baseline = baseline


def open_baselines(
    market: BacktestMarket, settings: Settings, variants: Collection[VariantId]
) -> list[BaselineAccount]:
    """Return the baselines for models of these variants, about to open; none if no listed market has a price."""
    begin = second = market.span.start
    while not _is_priced(market, second):
        second = next_minute(second)
        if second >= market.span.stop:
            return []
    opened_at = moment_of(second) + (FIRST_CYCLE if second == begin else timedelta(0))
    capital, currency = settings.initial_capital, settings.quote_currency
    return [
        BaselineAccount(
            baseline, BaselineSource(baseline, second), unopened_account(baseline.id, capital, currency, opened_at)
        )
        for baseline in baselines_beside(variants)
    ]


def _is_priced(market: BacktestMarket, second: int) -> bool:
    quoted_at, now = market.quoted_at(second), moment_of(second)
    listed = [symbol for symbol, each in market.markets.items() if each.is_listed(now)]
    return bool(listed) and all(symbol in quoted_at and untimely(quoted_at[symbol], now) is None for symbol in listed)
