"""Masked agents in a backtest: they see and name a masked market, while books and records are of the real one."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from decimal import Decimal

from msgspec.structs import replace

from trader.domain.agents.guard import RiskContext
from trader.domain.agents.mask import Mask
from trader.domain.agents.strategy import Peek
from trader.domain.agents.view import Memory, VariantLimits, View
from trader.domain.exchange.account import Account
from trader.domain.exchange.orders import ExitPlan, Order, OrderAnswer
from trader.domain.market.indicators import Indicators
from trader.domain.market.markets import Book, Candle, Interval, Market
from trader.domain.models import Model
from trader.services.backtest.invocations import AccountSession, NoInputs
from trader.services.exchange.idempotent_orders import checked


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
        return self._mask.apply({"marks": self._peek.mark(real)}, real)["marks"]


class MaskedSession:
    """One account during an invocation behind a mask: clock, observer and exchange of its workflow."""

    def __init__(self, session: AccountSession, mask: Mask) -> None:
        self._session = session
        self._mask = mask
        self._inverse = mask.inverse()

    def now(self) -> datetime:
        return self._mask.apply(self._session.now())

    async def sleep_until(self, moment: datetime) -> None:
        await self._session.sleep_until(self._inverse.apply(moment))

    def thinking(self) -> AbstractContextManager[None]:
        return self._session.thinking()

    async def view(self, model: Model, intervals: Sequence[Interval], now: datetime, series: int) -> View:
        view = await self._session.view(model, intervals, self._inverse.apply(now), series)
        memory = view.memory  # of what the agent saw and said, so it is masked already
        return replace(self._mask.apply(replace(view, memory=Memory())), memory=memory)

    async def wait_for_price(self, now: datetime) -> None:
        await self._session.wait_for_price(self._inverse.apply(now))

    async def risk_context(self, account_id: str, now: datetime) -> RiskContext:
        return self._mask.apply(await self._session.risk_context(account_id, self._inverse.apply(now)))

    async def indicators(self, symbol: str, interval: Interval) -> tuple[list[Candle], Indicators]:
        real = self._inverse.names[symbol]
        return self._mask.apply(await self._session.indicators(real, interval), real)

    def order_book(self, account_id: str, symbol: str, now: datetime) -> Book | None:
        real = self._inverse.names[symbol]
        return self._mask.apply(self._session.order_book(account_id, real, self._inverse.apply(now)))

    def call_recorder(self, number: int, limits: VariantLimits, context: RiskContext) -> NoInputs:
        return self._session.call_recorder(number, limits, context)

    @property
    def markets(self) -> Mapping[str, Market]:
        return self._mask.apply(self._session.markets)

    def marks(self) -> Mapping[str, Decimal]:
        return self._mask.apply({"marks": self._session.marks()})["marks"]

    def account(self, account_id: str) -> Account:
        return self._mask.apply(self._session.account(account_id))

    async def open_account(self, account_id: str) -> Account:
        return self._mask.apply(await self._session.open_account(account_id))

    async def place_order(self, order: Order) -> OrderAnswer:
        checked(order, self.markets)  # so that its words are about the masked market
        answer = await self._session.place_order(self._inverse.apply(order))
        return replace(self._mask.apply(answer), reason=self._hidden(answer.reason))

    async def set_exit_plan(self, account_id: str, symbol: str, plan: ExitPlan) -> str | None:
        real = self._inverse.names[symbol]
        return self._hidden(await self._session.set_exit_plan(account_id, real, self._inverse.apply(plan, symbol)))

    def _hidden(self, reason: str | None) -> str | None:
        return None if reason is None else self._mask.text(reason)
