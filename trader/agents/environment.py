"""The environment of an invocation in a service: the market feed, the exchange, and the inputs of its calls."""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from decimal import Decimal

from msgspec.structs import replace

from trader.agents.domain.call_inputs import CallInputs
from trader.agents.domain.guard import Approved, RiskContext
from trader.agents.domain.view import Shown, VariantLimits, View
from trader.agents.execute import resting_order
from trader.agents.observer import Observer
from trader.agents.record import InvocationRecord
from trader.core.clock import Clock
from trader.core.errors import Precondition
from trader.exchange.domain.account import Account
from trader.exchange.domain.orders import ExitPlan, OrderAnswer, OrderStatus
from trader.exchange.protocol import Exchange
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import Book, Candle, Interval, Market


class ServiceEnvironment:
    """The `InvocationEnvironment` of a service.

    `restriction` says why the model may only reduce positions; None: no restriction.
    """

    def __init__(
        self,
        record: InvocationRecord,
        exchange: Exchange,
        observer: Observer,
        clock: Clock,
        limits: VariantLimits,
        restriction: str | None = None,
    ) -> None:
        self._record = record
        self._account_id = record.model.id
        self._exchange = exchange
        self._observer = observer
        self._clock = clock
        self.limits = limits
        self._restriction = restriction
        self._viewed_at = record.invocation.started_at
        self._answered: Callable[[Collection[str], datetime], CallInputs]
        self._inputs: CallInputs | None = None

    # --- clock --------------------------------------------------------------------------------------------------------

    def now(self) -> datetime:
        return self._clock.now()

    async def sleep_until(self, moment: datetime) -> None:
        await self._clock.sleep_until(moment)

    def thinking(self) -> AbstractContextManager[None]:
        return self._clock.thinking()

    # --- the agent's view ---------------------------------------------------------------------------------------------

    async def view(self, shown: Shown) -> View:
        view = await self._observer.view(self._record.model, shown, self.now())
        self._viewed_at = view.at
        return replace(view, restriction=self._restriction)

    async def wait_for_price(self) -> None:
        await self._observer.wait_for_price(self.now())

    async def indicators(self, symbol: str, interval: Interval) -> tuple[list[Candle], Indicators]:
        return await self._observer.indicators(symbol, interval, self.now())

    def order_book(self, symbol: str) -> Book | None:
        return self._exchange.order_book(self._account_id, symbol, self.now())

    async def risk_context(self) -> RiskContext:
        context = await self._observer.risk_context(self._account_id, self.now())
        context = replace(context, viewed_at=self._viewed_at, restriction=self._restriction)
        number = self._record.call.number
        self._inputs, self._answered = self._observer.record_inputs(number, self.limits, context)
        return context

    def take_inputs(self) -> CallInputs | None:
        inputs, self._inputs = self._inputs, None
        return inputs

    # --- exchange -----------------------------------------------------------------------------------------------------

    @property
    def markets(self) -> Mapping[str, Market]:
        return self._exchange.markets

    def marks(self) -> Mapping[str, Decimal]:
        return self._exchange.marks()

    def account(self) -> Account:
        return self._exchange.account(self._account_id)

    async def halt(self, reason: str) -> None:
        raise Precondition(f"a decision cannot halt an account of a service; use agent.halt or trader halt ({reason})")

    async def open_account(self) -> Account:
        return await self._exchange.open_account(self._account_id)

    async def set_exit_plan(self, symbol: str, plan: ExitPlan) -> str | None:
        if (unpriced := self._exchange.refusal_of_price(symbol, self.now())) is not None:
            return unpriced
        self._inputs = None  # an unanswered call has none
        refusal = await self._exchange.set_exit_plan(self._account_id, symbol, plan)
        self._inputs = self._answered([symbol], self.now())
        return refusal

    async def cancel_order(self, symbol: str, order_id: str) -> str | None:
        refusal, resting = resting_order(self.account(), symbol, order_id)
        if resting is not None:
            self._inputs = None
            answer = await self._exchange.cancel_order(self._account_id, order_id)
            self._inputs = self._answered([symbol], self.now())
            if answer.status is not OrderStatus.CANCELLED:
                return f"The order {order_id} is {answer.status.value}."
        return refusal

    async def place_orders(self, approved: Sequence[Approved]) -> Sequence[OrderAnswer]:
        self._inputs = None
        await self._record.before_order()
        answers = await self._exchange.place_orders(*self._record.orders(approved))
        self._inputs = self._answered([each.symbol for each in approved], answers[-1].at)
        return answers
