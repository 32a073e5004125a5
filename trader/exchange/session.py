"""Trading session: the one path of orders, exit plans and cancellations to the accounts, wherever they trade.

    validate → the first answer again → wait for the books → halts, gaps, prices → place or refuse → post

The service, a backtest, its baselines and a reproduction are sessions with other ports. Where no port waits, neither
does the session.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from uuid import UUID

import msgspec

from trader.core.errors import Conflict, InvalidInput, Issue, Unavailable
from trader.core.money import format_decimal
from trader.exchange.domain import rules as rules_of_exchange
from trader.exchange.domain.account import Account
from trader.exchange.domain.halts import may_open
from trader.exchange.domain.ledger import ExchangeRules, Posting, RateOfHour
from trader.exchange.domain.orders import ExitPlan, Order, OrderAnswer, OrderType
from trader.exchange.domain.tick_rules import Moment
from trader.market.domain.markets import Market, refusal_to_trade, traded_symbol

Decide = Callable[[Account], Posting | None]
Place = Callable[[Sequence[Order]], Awaitable[Sequence[OrderAnswer]]]
Once = Callable[[Sequence[Order], Place], Awaitable[Sequence[OrderAnswer]]]


async def _at_once(_symbols: Sequence[str]) -> None:
    """Meet the books of the moment."""


async def place_directly(orders: Sequence[Order], place: Place) -> Sequence[OrderAnswer]:
    """Place orders whose client order ids are new."""
    return await place(orders)


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Trades for accounts through its ports; by default nothing waits, is halted, is missed or is repeated."""

    rules: ExchangeRules
    rate_of_hour: RateOfHour
    moment: Callable[[], Moment]
    """Returns the markets for a decision now."""

    change: Callable[[str, Decide], Awaitable[Posting | None]]
    """Decides on an account and posts the result; None: nothing was decided, or the account is gone."""

    wait: Callable[[Sequence[str]], Awaitable[str | None]] = _at_once
    """Waits for the books that orders placed now will meet. Returns None, or why there is none."""

    refusal_of_price: Callable[[str, Moment], str | None] = lambda symbol, moment: refusal_to_trade(
        moment.quotes.get(symbol), symbol, moment.at
    )
    """Returns why nothing can be decided in a market now, or None."""

    halted: Callable[[str], str | None] = lambda _account_id: None
    """Returns why an account may not open or add now, or None."""

    seen_until: Callable[[], datetime] | None = None
    """Returns the time up to which the accounts have seen the market; None: that of the moment."""

    once: Once = place_directly
    """Returns the first answers to the orders' client order ids; if there are none, places the orders."""

    async def place(self, orders: Sequence[Order]) -> Sequence[OrderAnswer]:
        """Place an order, or a pair, of one account. Return the answers; a refusal has the status `rejected`.

        :raises InvalidInput: no account could place such an order
        :raises Conflict: a client order id was used for an order of other contents
        :raises Unavailable: the account was removed meanwhile
        """
        return await self.once([validate_order(order, self.rules.markets) for order in orders], self._place)

    async def _place(self, orders: Sequence[Order]) -> Sequence[OrderAnswer]:
        account_id, symbols = orders[0].account_id, [order.symbol for order in orders]
        unmet = await self.wait(symbols)

        def decide(account: Account) -> Posting:
            moment = self.moment()
            halted = self.halted(account_id) if may_open(account, *orders) else None
            unpriced = (self.refusal_of_price(symbol, moment) for symbol in symbols)
            if (reason := halted or unmet or next(filter(None, unpriced), None)) is not None:
                return rules_of_exchange.refuse_together(account, orders, reason, moment.at)
            return rules_of_exchange.place_together(account, orders, moment, self.rules, self.rate_of_hour)

        posting = await self.change(account_id, decide)
        if posting is None:
            raise Unavailable(f"The account {account_id} was just removed by an operator; try again.", 1)
        return posting.answers

    async def set_plan(self, account_id: str, symbol: str, plan: ExitPlan) -> str | None:
        """Replace the exit plan of a position. Return None, or why the old plan stays."""
        refusal: str | None = None

        def decide(account: Account) -> Posting | None:
            nonlocal refusal
            moment = self.moment()
            # Without a price, no side can be checked, and the old plan applies to missed ticks.
            unpriced = self.refusal_of_price(symbol, moment) if symbol in account.positions else None
            result = unpriced or rules_of_exchange.set_exit_plan(account, symbol, plan, moment, self.rules)
            refusal = result if isinstance(result, str) else None
            return None if isinstance(result, str) else result

        await self.change(account_id, decide)
        return refusal

    async def cancel(self, account_id: str, order_id: UUID) -> None:
        """Cancel an order if it rests."""
        at = self.seen_until or (lambda: self.moment().at)
        await self.change(account_id, lambda account: rules_of_exchange.cancel(account, order_id, at()))


def validate_order(order: Order, markets: Mapping[str, Market]) -> Order:
    """Return the order with its canonical symbol. Raise `InvalidInput` for an order that no account could place."""
    symbol = traded_symbol(order.symbol, markets)
    market = markets[symbol]
    if order.leverage is not None and not 1 <= order.leverage <= market.leverage_max:
        raise InvalidInput(
            Issue(("leverage",), f"{order.leverage} is not within 1 to {market.leverage_max}, the range of {symbol}")
        )
    if order.type is OrderType.LIMIT and order.limit_price is None:
        raise InvalidInput(Issue(("limitPrice",), "a limit order needs a limit price"))
    if order.post_only and order.type is not OrderType.LIMIT:
        raise InvalidInput(Issue(("postOnly",), "a market order always takes; postOnly is for limit orders"))
    return msgspec.structs.replace(order, symbol=symbol)


def same_contents(order: Order, answer: OrderAnswer) -> OrderAnswer:
    """Return the first answer to a client order id that is used again.

    :raises Conflict: the order that it answered had other contents
    """
    if answer.contents_digest != order.contents_digest():
        raise Conflict(
            f"the clientOrderId {order.client_order_id!r} was used for another order of {order.account_id}: "
            f"{answer.side.value} {format_decimal(answer.requested_quantity)} {answer.symbol}; use a new one"
        )
    return answer
