"""Baselines: accounts to compare the models with, on the same ticks and by the rules of the exchange.

A model's result means little alone. Three kinds of accounts show what anybody would have had: one that holds nothing,
one that buys every market in equal parts at its start and holds it, and the rule agent of each variant.
"""

from collections.abc import Collection, Iterator, Mapping
from datetime import date, datetime
from decimal import Decimal
from typing import Final, NamedTuple

import msgspec

from trader.domain.agents.guard import Approved, Refusal, RiskContext, judge
from trader.domain.agents.observation import LastFill, observe_record
from trader.domain.agents.tools import Change
from trader.domain.agents.view import ObservedStats, ObservedTrade, VariantLimits
from trader.domain.exchange import rules as rules_of_exchange
from trader.domain.exchange.account import Account
from trader.domain.exchange.ledger import ClosedTrade, Posting, RateOfHour, Rules
from trader.domain.exchange.orders import ExitPlan, Order, OrderSide
from trader.domain.exchange.tick_rules import Moment
from trader.domain.market.markets import canonical_symbol, refusal_to_trade
from trader.domain.models import VariantId
from trader.domain.money import ONE, ZERO, divide, floor_to

TRADES_KEPT: Final = 10
"""Latest completed trades that a rule agent is shown."""

INVESTED: Final = Decimal("0.998")
"""Share of its capital that buy and hold spends: a little is left for the spread, so that no order lacks margin."""


class Baseline(NamedTuple):
    """An account to compare models with. Its id has a character that no model's id has; `variant`: of a rule agent."""

    id: str
    name: str
    variant: VariantId | None = None


HOLD_NOTHING: Final = Baseline("baseline/hold-nothing", "Hold nothing")
BUY_AND_HOLD: Final = Baseline("baseline/buy-and-hold", "Buy and hold")


def rule_agent(variant: VariantId) -> Baseline:
    """Return the baseline of a variant's rule agent."""
    return Baseline(f"baseline/{variant.value.lower()}-rules", f"{variant.value} rule agent", variant)


def baselines_beside(variants: Collection[VariantId]) -> list[Baseline]:
    """Return the baselines to follow beside models of these variants."""
    return [HOLD_NOTHING, BUY_AND_HOLD, *(rule_agent(variant) for variant in VariantId if variant in variants)]


class EquityMarks(msgspec.Struct, frozen=True):
    """What an agent needs of the recorded equity of its run, without the hours, of which a season has thousands.

    `last` is the last equity of the hour `hour`, `earlier_peak` the highest of the hours before, `before_day` the last
    one before the day of the hour, and `lowest` the lowest of all recorded on that day.
    """

    hour: datetime | None = None
    last: Decimal | None = None
    earlier_peak: Decimal | None = None
    before_day: Decimal | None = None
    lowest: Decimal | None = None

    def noted(self, at: datetime, equity: Decimal) -> "EquityMarks":
        """Return the marks with an equity recorded later than all others."""
        hour = at.replace(minute=0, second=0, microsecond=0)
        if self.hour is None or self.last is None:
            return EquityMarks(hour, equity, lowest=equity)
        is_new_day = self.hour.date() < hour.date()
        lowest = equity if is_new_day or self.lowest is None else min(self.lowest, equity)
        if self.hour == hour:
            return msgspec.structs.replace(self, last=equity, lowest=lowest)
        return EquityMarks(hour, equity, self.peak, self.last if is_new_day else self.before_day, lowest)

    @property
    def peak(self) -> Decimal | None:
        """The highest equity of all hours."""
        return max((equity for equity in (self.earlier_peak, self.last) if equity is not None), default=None)

    def before(self, day: date) -> Decimal | None:
        """Return the last equity before a day, that of the last hour or a later one."""
        return self.last if self.hour is not None and self.hour.date() < day else self.before_day

    def lowest_on(self, day: date) -> Decimal | None:
        """Return the lowest equity recorded on the day of the last hour or a later one; None when none was."""
        return self.lowest if self.hour is not None and self.hour.date() == day else None


class BaselineState(msgspec.Struct, frozen=True, kw_only=True):
    """The account of a baseline, and what its agent knows of its own trading. `trades` are the latest, newest first.

    `won` and `lost` are sums of net pnl, both positive.
    """

    account: Account
    trades: tuple[ObservedTrade, ...] = ()
    trade_count: int = 0
    wins: int = 0
    losses: int = 0
    won: Decimal = ZERO
    lost: Decimal = ZERO
    last_fills: Mapping[str, LastFill] = {}

    @property
    def stats(self) -> ObservedStats:
        """The record that the agent is shown."""
        return observe_record(trades=self.trade_count, wins=self.wins, losses=self.losses, won=self.won, lost=self.lost)

    def saved(self) -> "BaselineState":
        """Return the state as it is saved: the depth that the account took comes back."""
        return msgspec.structs.replace(self, account=msgspec.structs.replace(self.account, taken={}))

    def after(self, posting: Posting) -> "BaselineState":
        """Return the state after a change of the account."""
        closed = {trade.part.id: trade.part.side for trade in posting.trades}
        fills = {
            fill.symbol: LastFill(closed.get(fill.order_id, fill.side.opens), fill.order_id in closed, fill.at)
            for fill in posting.fills
        }
        # Trades closed at the same moment are ordered by their ids, as they are where they are read from their rows.
        trades = [_observed(trade) for trade in sorted(posting.trades, key=lambda trade: trade.part.id)]
        nets = [trade.net_pnl for trade in trades]
        return BaselineState(
            account=posting.account,
            trades=(*trades, *self.trades)[:TRADES_KEPT],
            trade_count=self.trade_count + len(trades),
            wins=self.wins + sum(net > 0 for net in nets),
            losses=self.losses + sum(net < 0 for net in nets),
            won=self.won + sum((net for net in nets if net > 0), ZERO),
            lost=self.lost - sum((net for net in nets if net < 0), ZERO),
            last_fills={**self.last_fills, **fills},
        )


def _observed(trade: ClosedTrade) -> ObservedTrade:
    part = trade.part
    return ObservedTrade(
        symbol=part.symbol,
        side=part.side,
        quantity=part.quantity,
        entry_price=part.entry_price,
        exit_price=divide(trade.exit_notional, part.quantity),
        net_pnl=trade.net_pnl,
        fees=part.fees,
        funding=part.funding,
        close_reason=trade.close_reason.value,
        confidence=part.confidence,
        opened_at=part.opened_at,
        closed_at=trade.closed_at,
    )


def carry_out(
    decision: Change,
    context: RiskContext,
    limits: VariantLimits,
    moment: Moment,
    rules: Rules,
    rate_of_hour: RateOfHour,
) -> Posting | str:
    """Return how a decision of a rule agent changes the account of the context, by guard and exchange, or why not."""
    account, symbol = context.account, canonical_symbol(decision.symbol)
    if (refusal := refusal_to_trade(moment.quotes.get(symbol), symbol, moment.at)) is not None:
        return refusal
    verdict = judge(decision, symbol, context, limits)
    match verdict:
        case Refusal():
            return verdict.reason
        case ExitPlan():
            return rules_of_exchange.set_exit_plan(account, symbol, verdict, moment, rules)
        case Approved():
            order = Order(account_id=account.id, **msgspec.structs.asdict(verdict))
            return rules_of_exchange.place(account, order, moment, rules, rate_of_hour)


def buy_every_market(account: Account, moment: Moment, rules: Rules, rate_of_hour: RateOfHour) -> Iterator[Posting]:
    """Yield the changes of the account as it buys every market with an equal part of its capital, without leverage."""
    part = divide(account.run.initial_capital * INVESTED, Decimal(len(rules.markets)))
    for symbol, market in sorted(rules.markets.items()):
        price_with_fee = moment.quotes[symbol].ask * (1 + rules.fee_rate(symbol, maker=False))
        quantity = floor_to(divide(part, price_with_fee), market.lot)
        order = Order(account_id=account.id, symbol=symbol, side=OrderSide.BUY, quantity=quantity, leverage=ONE)
        posting = rules_of_exchange.place(account, order, moment, rules, rate_of_hour)
        account = posting.account
        yield posting
