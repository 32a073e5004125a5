"""Protocols of the parts that an invocation uses: its clock, its observer, and its exchange.

A service and a backtest both run the workflow, each with its own.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from decimal import Decimal
from typing import Protocol

from trader.domain.agents.guard import RiskContext
from trader.domain.agents.reproduction import CallInputs
from trader.domain.agents.view import VariantLimits, View
from trader.domain.exchange.account import Account
from trader.domain.exchange.orders import ExitPlan, Order, OrderAnswer
from trader.domain.market.indicators import Indicators
from trader.domain.market.markets import Book, Candle, Interval, Market
from trader.domain.models import Model


class AgentClock(Protocol):
    """The time of an invocation."""

    def now(self) -> datetime: ...

    async def sleep_until(self, moment: datetime) -> None: ...

    def thinking(self) -> AbstractContextManager[None]: ...


class InputsRecorder(Protocol):
    """Records the inputs of one call; None where they are not recorded."""

    def refused(self) -> CallInputs | None: ...

    def answered(self, symbol: str, at: datetime) -> CallInputs | None: ...


class AgentObserver(Protocol):
    """Source of an agent's view and of the guard's risk context."""

    async def view(self, model: Model, intervals: Sequence[Interval], now: datetime, series: int) -> View: ...

    async def wait_for_price(self, now: datetime) -> None: ...

    async def risk_context(self, account_id: str, now: datetime) -> RiskContext: ...

    async def indicators(self, symbol: str, interval: Interval) -> tuple[list[Candle], Indicators]: ...

    def order_book(self, account_id: str, symbol: str, now: datetime) -> Book | None: ...

    def call_recorder(self, number: int, limits: VariantLimits, context: RiskContext) -> InputsRecorder: ...


class AgentExchange(Protocol):
    """The part of an exchange that an agent uses."""

    @property
    def markets(self) -> Mapping[str, Market]: ...

    def marks(self) -> Mapping[str, Decimal]: ...

    def account(self, account_id: str) -> Account: ...

    async def open_account(self, account_id: str) -> Account: ...

    async def place_order(self, order: Order) -> OrderAnswer: ...

    async def set_exit_plan(self, account_id: str, symbol: str, plan: ExitPlan) -> str | None: ...
