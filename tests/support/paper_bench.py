"""Test bench for the paper exchange's rules: one account, the market it sees, and all its postings."""

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from decimal import Decimal

import msgspec
from support.books import RULES, Side, deep_quote, make_quote, moment_of, open_account, plain_rate

from trader.exchange.domain import account as figures
from trader.exchange.domain import rules as exchange
from trader.exchange.domain.account import Account, Position
from trader.exchange.domain.ledger import LimitFills, Posting
from trader.exchange.domain.orders import ExitPlan, Order, OrderAnswer, OrderSide, OrderType
from trader.exchange.domain.tick_rules import Moment, apply_tick
from trader.market.domain.markets import Quote

D = Decimal
BUY, SELL = OrderSide.BUY, OrderSide.SELL


class PaperBench:
    """An account, the market it sees, and every posting so far."""

    def __init__(self, capital: int = 10_000, *quotes: Quote, limit_fills: LimitFills = "through") -> None:
        self.account: Account = open_account(capital)
        self.moment: Moment = moment_of(*(quotes or (deep_quote("ETH", 2_000),)))
        self.rules = msgspec.structs.replace(RULES, limit_fills=limit_fills)
        self.postings: list[Posting] = []
        self.rate: Callable[[str, datetime], D] = plain_rate

    def order(
        self,
        side: OrderSide,
        quantity: str,
        *,
        limit: str | None = None,
        leverage: int | None = None,
        plan: ExitPlan | None = None,
        symbol: str = "ETH",
        reduce_only: bool = False,
        post_only: bool = False,
    ) -> OrderAnswer:
        order = Order(
            account_id="default",
            symbol=symbol,
            side=side,
            quantity=D(quantity),
            type=OrderType.MARKET if limit is None else OrderType.LIMIT,
            limit_price=None if limit is None else D(limit),
            leverage=None if leverage is None else D(leverage),
            exit_plan=plan,
            reduce_only=reduce_only,
            post_only=post_only,
        )
        posting = exchange.place(self.account, order, self.moment, self.rules, self.rate)
        self._apply(posting)
        (answer,) = posting.answers
        return answer

    def pair(self, *orders: tuple[OrderSide, str, str], **more: object) -> Sequence[OrderAnswer]:
        """Place two market orders as a pair, each given by side, quantity and symbol."""
        both = [
            Order(account_id="default", side=side, quantity=D(quantity), symbol=symbol, **more)  # type: ignore[arg-type]
            for side, quantity, symbol in orders
        ]
        self._apply(exchange.place_together(self.account, both, self.moment, self.rules, self.rate))
        return self.postings[-1].answers

    def tick(self, *quotes: Quote, after: timedelta = timedelta(seconds=1)) -> Posting | None:
        """Apply the next update, with the quotes redated to it."""
        at = self.moment.at + after
        dated = []
        for quote in quotes:
            book = quote.book
            dated.append(make_quote(book.symbol, book.bids, book.asks, at=at, mark=quote.mark))
        self.moment = moment_of(*dated, before=self.moment, at=at)
        posting = apply_tick(self.account, self.moment, self.rules, self.rate)
        if posting is not None:
            self._apply(posting)
        return posting

    def eth(self, mid: str | int, after: timedelta = timedelta(seconds=1)) -> Posting | None:
        return self.tick(deep_quote("ETH", mid), after=after)

    def set_plan(self, plan: ExitPlan) -> str | None:
        posting = exchange.set_exit_plan(self.account, "ETH", plan, self.moment, self.rules)
        if isinstance(posting, str):
            return posting
        self._apply(posting)
        return None

    def reset(self, capital: int = 5_000) -> Posting:
        posting = exchange.reset(self.account, D(capital), "USDT", self.moment, self.rules, self.rate)
        self._apply(posting)
        return posting

    def _apply(self, posting: Posting) -> None:
        self.postings.append(posting)
        self.account = posting.account

    @property
    def position(self) -> Position:
        return self.account.positions["ETH"]

    @property
    def equity(self) -> D:
        return figures.equity(self.account, self.moment.marks)

    @property
    def available(self) -> D:
        return figures.available_cash(self.account, self.moment.marks)

    @property
    def reserved(self) -> D:
        return figures.reserved(self.account)


def eth(bids: Side, asks: Side, mark: str | None = None) -> Quote:
    return make_quote("ETH", bids, asks, mark=mark)


def prices(answer: OrderAnswer) -> list[tuple[D, D]]:
    return [(fill.price, fill.quantity) for fill in answer.fills]


def leveraged() -> PaperBench:
    """10 ETH at 20× and 100 SOL at 10×, on 2,000."""
    desk = PaperBench(2_500, deep_quote("ETH", 2_000), deep_quote("SOL", 100))
    desk.order(BUY, "10", leverage=20)
    desk.order(BUY, "100", leverage=10, symbol="SOL")
    return desk
