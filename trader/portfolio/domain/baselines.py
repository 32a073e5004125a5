"""Baselines: accounts to compare the models with, on the same ticks and by the rules of the exchange.

A model's result means little on its own. Three kinds of accounts show what anyone could have had: one that holds
nothing, one that buys equal parts of every market at its start and holds them, and the rule agent of each variant.
"""

from collections.abc import Collection, Iterator
from datetime import date, datetime
from decimal import Decimal
from typing import Final, NamedTuple

import msgspec

from trader.agents.domain.observation import LastFill, TradingRecord, latest_first, observe_trade
from trader.core.money import ONE, ZERO, divide, floor_to
from trader.core.variant_id import VariantId
from trader.exchange.domain import rules as rules_of_exchange
from trader.exchange.domain.account import Account
from trader.exchange.domain.ledger import ExchangeRules, Posting, RateOfHour
from trader.exchange.domain.orders import Order, OrderSide
from trader.exchange.domain.tick_rules import Moment

TRADES_KEPT: Final = 10
"""Number of latest completed trades that a rule agent sees."""

INVESTED: Final = Decimal("0.998")
"""Share of its capital that buy and hold spends; the rest covers the spread, so that no order lacks margin."""


class Baseline(NamedTuple):
    """An account to compare models with. Its id has a character that no model id has; `variant` is a rule agent's."""

    id: str
    name: str
    variant: VariantId | None = None


HOLD_NOTHING: Final = Baseline("baseline/hold-nothing", "Hold nothing")
BUY_AND_HOLD: Final = Baseline("baseline/buy-and-hold", "Buy and hold")


def rule_agent(variant: VariantId) -> Baseline:
    """Return the baseline of a variant's rule agent."""
    return Baseline(f"baseline/{variant.value.lower()}-rules", f"{variant.value} rule agent", variant)


def baselines_beside(variants: Collection[VariantId]) -> list[Baseline]:
    """Return the baselines to follow alongside models of these variants."""
    return [HOLD_NOTHING, BUY_AND_HOLD, *(rule_agent(variant) for variant in VariantId if variant in variants)]


class EquityMarks(msgspec.Struct, frozen=True):
    """The recorded equity of a run as an agent needs it, without the hours, of which a season has thousands.

    `last` is the last equity of the hour `hour`, `earlier_peak` the highest of earlier hours, `before_day` the last one
    before that day, and `lowest` the lowest recorded on that day.
    """

    hour: datetime | None = None
    last: Decimal | None = None
    earlier_peak: Decimal | None = None
    before_day: Decimal | None = None
    lowest: Decimal | None = None

    def noted(self, at: datetime, equity: Decimal) -> "EquityMarks":
        """Return the marks after recording a later equity."""
        hour = at.replace(minute=0, second=0, microsecond=0)
        if self.hour is None or self.last is None:
            return EquityMarks(hour, equity, lowest=equity)
        is_new_day = self.hour != hour and self.hour.date() < hour.date()
        lowest = equity if is_new_day or self.lowest is None else min(self.lowest, equity)
        if self.hour == hour:
            return EquityMarks(hour, equity, self.earlier_peak, self.before_day, lowest)
        return EquityMarks(hour, equity, self.peak, self.last if is_new_day else self.before_day, lowest)

    @property
    def peak(self) -> Decimal | None:
        """The highest equity of all hours."""
        return max((equity for equity in (self.earlier_peak, self.last) if equity is not None), default=None)

    def before(self, day: date) -> Decimal | None:
        """Return the last equity before a day, which is the day of the last hour or a later one."""
        return self.last if self.hour is not None and self.hour.date() < day else self.before_day

    def lowest_on(self, day: date) -> Decimal | None:
        """Return the lowest equity recorded on a day, in the last hour or later; None if there is none."""
        return self.lowest if self.hour is not None and self.hour.date() == day else None


class BaselineState(TradingRecord, frozen=True, kw_only=True):
    """The account of a baseline, and its agent's trading record."""

    account: Account

    def saved(self) -> "BaselineState":
        """Return the state to save, without the depth that the account took, which recovers."""
        return msgspec.structs.replace(self, account=msgspec.structs.replace(self.account, taken={}))

    def after(self, posting: Posting) -> "BaselineState":
        """Return the state after a change of the account."""
        closed = {trade.id: trade.side for trade in posting.trades}
        fills = {
            fill.symbol: LastFill(closed.get(fill.order_id, fill.side.opens), fill.order_id in closed, fill.at)
            for fill in posting.fills
        }
        nets = [trade.net_pnl for trade in posting.trades]
        return BaselineState(
            account=posting.account,
            trades=latest_first((*map(observe_trade, posting.trades), *self.trades))[:TRADES_KEPT],
            trade_count=self.trade_count + len(nets),
            wins=self.wins + sum(net > 0 for net in nets),
            losses=self.losses + sum(net < 0 for net in nets),
            won=self.won + sum((net for net in nets if net > 0), ZERO),
            lost=self.lost - sum((net for net in nets if net < 0), ZERO),
            last_fills={**self.last_fills, **fills},
        )


def buy_every_market(
    account: Account, moment: Moment, rules: ExchangeRules, rate_of_hour: RateOfHour
) -> Iterator[Posting]:
    """Yield the changes of the account as it buys each listed market for an equal part of its capital, unleveraged."""
    listed = {symbol: market for symbol, market in rules.markets.items() if market.is_listed(moment.at)}
    part = divide(account.run.initial_capital * INVESTED, Decimal(len(listed)))
    for symbol, market in sorted(listed.items()):
        price_with_fee = moment.quotes[symbol].ask * (1 + rules.fee_rate(symbol, maker=False))
        quantity = floor_to(divide(part, price_with_fee), market.lot)
        order = Order(account_id=account.id, symbol=symbol, side=OrderSide.BUY, quantity=quantity, leverage=ONE)
        posting = rules_of_exchange.place(account, order, moment, rules, rate_of_hour)
        account = posting.account
        yield posting
