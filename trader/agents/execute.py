"""The decision kernel: the only path from a decision to its outcome, for every agent and every place of execution.

    decision → guard → order or exit plan → outcome

The service, a backtest, the baselines, a reproduction and a trial decision are environments of it. If an environment
never waits, `run_at_once` runs it without an event loop.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from decimal import Decimal
from typing import Any, Protocol, TypeVar

import msgspec

from trader.agents.domain.call_inputs import CallInputs
from trader.agents.domain.guard import Approved, GuardRefusal, RiskContext, judge
from trader.agents.domain.messages import (
    HALTED,
    HELD,
    NOTED,
    Outcome,
    book_json,
    cancel_outcome,
    failed,
    indicators_json,
    order_outcome,
    plan_outcome,
    refused,
)
from trader.agents.domain.tools import (
    AgentNote,
    CancelOrder,
    Change,
    Decision,
    FetchIndicators,
    FetchOrderBook,
    HaltTrading,
    Holding,
    Note,
)
from trader.agents.domain.view import Shown, VariantLimits, View
from trader.core.errors import Conflict, InvalidInput, OrderUndecided
from trader.exchange.domain.account import Account, RestingOrder
from trader.exchange.domain.orders import ExitPlan, Order, OrderAnswer
from trader.exchange.session import Session
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import Book, Candle, Interval, Market, canonical_symbol

T = TypeVar("T")


class Environment(Protocol):
    """The environment in which an account's decisions are executed: its markets, its guard, and its exchange."""

    @property
    def markets(self) -> Mapping[str, Market]: ...

    @property
    def limits(self) -> VariantLimits: ...

    async def risk_context(self) -> RiskContext:
        """Return the state by which the guard judges the next decision.

        :raises MarketUnavailable: a market in which the account has a position never had a price
        """
        ...

    async def set_exit_plan(self, symbol: str, plan: ExitPlan) -> str | None:
        """Replace the exit plan of a position. Return None, or why it was refused and the old plan kept."""
        ...

    async def cancel_order(self, symbol: str, order_id: str) -> str | None:
        """Cancel a resting order. Return None, or why there is nothing to cancel."""
        ...

    async def place_orders(self, approved: Sequence[Approved]) -> Sequence[OrderAnswer]:
        """Place an order, or a pair, and return the answers; a refusal is an answer with status `rejected`.

        :raises InvalidInput: no account could place this order, or no pair is atomic here
        :raises OrderUndecided: the outcome at the venue is not known yet
        """
        ...


class InvocationEnvironment(Environment, Protocol):
    """The environment of one invocation, which adds its clock, its view and the markets it reads."""

    def now(self) -> datetime: ...

    async def sleep_until(self, moment: datetime) -> None: ...

    def thinking(self) -> AbstractContextManager[None]: ...

    async def view(self, shown: Shown) -> View:
        """Return the current account and markets; later decisions are based on this view."""
        ...

    async def wait_for_price(self) -> None:
        """Wait for the next price as long as an order would. Raise `MarketUnavailable` if none comes in time."""
        ...

    async def indicators(self, symbol: str, interval: Interval) -> tuple[list[Candle], Indicators]:
        """Return the latest closed candles of a market, ascending, and their indicators. Both may be empty."""
        ...

    def order_book(self, symbol: str) -> Book | None:
        """Return the order book that an order from the account would meet now; None without a price."""
        ...

    def marks(self) -> Mapping[str, Decimal]: ...

    def account(self) -> Account: ...

    async def open_account(self) -> Account: ...

    async def halt(self, reason: str) -> None:
        """Refuse every later order of the account that could open.

        :raises Precondition: only an operator's command halts accounts here
        """
        ...

    def take_inputs(self) -> CallInputs | None:
        """Return the inputs of the last executed decision, once; None where inputs are not recorded."""
        ...


class RulesEnvironment(msgspec.Struct, frozen=True):
    """One account, to which a decision applies at once, without waiting, unless a port of its session waits.

    `orders` makes the orders of an approved decision.
    """

    context: RiskContext
    limits: VariantLimits
    account: Account
    session: Session
    orders: Callable[[Sequence[Approved]], list[Order]]

    @property
    def markets(self) -> Mapping[str, Market]:
        return self.session.rules.markets

    async def risk_context(self) -> RiskContext:
        return self.context

    async def set_exit_plan(self, symbol: str, plan: ExitPlan) -> str | None:
        return await self.session.set_plan(self.account.id, symbol, plan)

    async def cancel_order(self, symbol: str, order_id: str) -> str | None:
        refusal, resting = resting_order(self.account, symbol, order_id)
        if resting is not None:
            await self.session.cancel(self.account.id, resting.id)
        return refusal

    async def place_orders(self, approved: Sequence[Approved]) -> Sequence[OrderAnswer]:
        return await self.session.place(self.orders(approved))


async def execute(decision: Decision, environment: InvocationEnvironment) -> Outcome:
    """Execute a decision and return its outcome."""
    match decision:
        case Holding():
            return HELD
        case Note() | AgentNote():
            return NOTED
        case HaltTrading():
            await environment.halt(decision.reason)
            return HALTED
        case FetchIndicators() | FetchOrderBook():
            return await _read(decision, environment)
        case _:
            return await execute_change(decision, environment)


async def execute_change(decision: Change, environment: Environment) -> Outcome:
    """Pass a decision that changes the books through the guard to the exchange, and return its outcome."""
    for each in decision.orders:
        if canonical_symbol(each.symbol) not in environment.markets:
            return _no_market(each.symbol, environment)
    symbol = canonical_symbol(decision.symbol)
    verdict = judge(decision, symbol, await environment.risk_context(), environment.limits)
    try:
        match verdict:
            case GuardRefusal():
                return refused(verdict)
            case ExitPlan():
                return plan_outcome(verdict, await environment.set_exit_plan(symbol, verdict))
            case CancelOrder():
                return cancel_outcome(verdict, await environment.cancel_order(symbol, verdict.order_id))
            case Approved() | list():
                orders = [verdict] if isinstance(verdict, Approved) else verdict
                return order_outcome(await environment.place_orders(orders))
    except (Conflict, InvalidInput, OrderUndecided) as error:
        return failed(str(error))


def resting_order(account: Account, symbol: str, order_id: str) -> tuple[str, None] | tuple[None, RestingOrder]:
    """Return the resting order of a market with this id, after None; without one, why there is nothing to cancel."""
    resting = [order for order in account.resting if order.symbol == symbol]
    for order in resting:
        if str(order.id) == order_id:
            return None, order
    ids = ", ".join(str(order.id) for order in resting) or "none"
    return f"No order {order_id} rests in {symbol}; those that do: {ids}.", None


async def _read(decision: FetchIndicators | FetchOrderBook, environment: InvocationEnvironment) -> Outcome:
    """Return the outcome of a decision that only reads market data."""
    symbol = canonical_symbol(decision.symbol)
    if symbol not in environment.markets:
        return _no_market(decision.symbol, environment)
    if isinstance(decision, FetchIndicators):
        candles, computed = await environment.indicators(symbol, decision.interval)
        return "ok", indicators_json(symbol, decision.interval, candles[-24:], computed)
    book = environment.order_book(symbol)
    return failed(f"There is no price of {symbol} now.") if book is None else ("ok", book_json(book))


def _no_market(name: str, environment: Environment) -> Outcome:
    return failed(f"There is no market {name!r}; the markets are {', '.join(environment.markets)}.")


def run_at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("the environment waits, so it needs an event loop")
