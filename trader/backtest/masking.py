"""Masked agents in a backtest: they see and name masked markets, while books and records have the real ones."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from uuid import UUID

from msgspec.structs import replace

from trader.agents.domain.guard import Approved, RiskContext
from trader.agents.domain.mask import Mask
from trader.agents.domain.strategy import Peek
from trader.agents.domain.view import Memory, ObservedFill, Shown, View
from trader.backtest.session import AccountSession
from trader.exchange.domain.account import Account
from trader.exchange.domain.orders import ExitPlan, OrderAnswer
from trader.exchange.session import validate_order
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import Book, Candle, Interval, Market


class MaskedPeek:
    """The `Peek` of a moment behind a mask."""

    def __init__(self, peek: Peek, mask: Mask) -> None:
        self._peek = peek
        self._mask = mask
        self._real = mask.inverse().names

    @property
    def now(self) -> datetime:
        return self._mask.apply(self._peek.now)

    @property
    def account(self) -> Account:
        return self._mask.apply(self._peek.account)

    @property
    def markets(self) -> Mapping[str, Market]:
        return self._mask.apply(self._peek.markets)

    @property
    def symbols(self) -> Collection[str]:
        return [self._mask.names[symbol] for symbol in self._peek.symbols]

    def indicators(self, symbol: str, interval: Interval) -> Indicators:
        real = self._real[symbol]
        return self._mask.apply(self._peek.indicators(real, interval), real)

    def mark(self, symbol: str) -> Decimal:
        real = self._real[symbol]
        return self._mask.price(real, self._peek.mark(real))

    def fills_since(self, sequence: int) -> Sequence[ObservedFill]:
        return self._mask.apply(self._peek.fills_since(sequence))


class MaskedSession:
    """The `InvocationEnvironment` of one account behind a mask."""

    def __init__(self, session: AccountSession, mask: Mask) -> None:
        self._session = session
        self._mask = mask
        self._inverse = mask.inverse()
        self.limits = session.limits
        self.thinking, self.wait_for_price, self.halt = session.thinking, session.wait_for_price, session.halt
        self.take_inputs = session.take_inputs

    def now(self) -> datetime:
        return self._mask.apply(self._session.now())

    async def sleep_until(self, moment: datetime) -> None:
        await self._session.sleep_until(self._inverse.apply(moment))

    async def view(self, shown: Shown) -> View:
        view = await self._session.view(shown)
        memory = view.memory  # from the agent's own views and decisions, so it is already masked
        return replace(self._mask.apply(replace(view, memory=Memory())), memory=memory)

    async def indicators(self, symbol: str, interval: Interval) -> tuple[list[Candle], Indicators]:
        real = self._inverse.names[symbol]
        return self._mask.apply(await self._session.indicators(real, interval), real)

    def order_book(self, symbol: str) -> Book | None:
        real = self._inverse.names[symbol]
        return self._mask.apply(self._session.order_book(real))

    async def risk_context(self) -> RiskContext:
        return self._mask.apply(await self._session.risk_context())

    @property
    def markets(self) -> Mapping[str, Market]:
        return self._mask.apply(self._session.markets)

    def marks(self) -> Mapping[str, Decimal]:
        mask = self._mask
        return {mask.names[symbol]: mask.price(symbol, mark) for symbol, mark in self._session.marks().items()}

    def account(self) -> Account:
        return self._mask.apply(self._session.account())

    async def open_account(self) -> Account:
        return self._mask.apply(await self._session.open_account())

    def order(self, order_id: UUID) -> OrderAnswer | None:
        answer = self._session.order(order_id)
        return None if answer is None else self._answer(answer)

    async def cancel_order(self, symbol: str, order_id: str) -> str | None:
        return self._hidden(await self._session.cancel_order(self._inverse.names[symbol], order_id))

    async def place_orders(self, approved: Sequence[Approved]) -> Sequence[OrderAnswer]:
        for order in self._session.record.orders(approved):
            validate_order(order, self.markets)  # so that its words are about the masked market
        return list(map(self._answer, await self._session.place_orders(self._inverse.apply(approved))))

    def _answer(self, answer: OrderAnswer) -> OrderAnswer:
        return replace(self._mask.apply(answer), reason=self._hidden(answer.reason))

    async def set_exit_plan(self, symbol: str, plan: ExitPlan) -> str | None:
        real = self._inverse.names[symbol]
        return self._hidden(await self._session.set_exit_plan(real, self._inverse.apply(plan, symbol)))

    def _hidden(self, reason: str | None) -> str | None:
        return None if reason is None else self._mask.text(reason)
