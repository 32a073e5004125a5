"""Simulated decisions: a model that opens, keeps and closes positions by chance, and a realistic record of it.

The guard, the exchange and the books are real.
"""

from datetime import timedelta
from decimal import Decimal
from random import Random
from typing import Final

from trader.agents.domain.conversation import ModelAnswer, ToolRequest
from trader.agents.domain.models import Model
from trader.agents.domain.tools import ClosePosition, CreatePosition, Decision, Holding, UpdateExitPlan, request_of
from trader.agents.domain.view import VariantLimits
from trader.agents.execute import execute
from trader.agents.record import InvocationRecord, StartedCall
from trader.backtest.accounts import DecisionSource
from trader.backtest.market import BacktestMarket
from trader.backtest.session import AccountSession
from trader.core.money import floor_to
from trader.exchange.domain.account import equity
from trader.exchange.domain.orders import Side

MINUTE_S: Final = 60
WIDE_LIMITS: Final = VariantLimits(
    leverage_max=100, position_notional_max=1_000, day_loss_max_percent=100, reversal_cycles=0
)
"""A guard that leaves refusals to the exchange."""

ENTERS, CLOSES, PLANS, FAILS, STAKES_ALL = 0.15, 0.14, 0.05, 0.02, 0.002
"""How often a decision opens, closes or plans, how often a model fails, and how often a position ends in a liquidation:
a model trades about 22 times a day, 200,000 times in a season of 90 days."""


class InventedDecisions(DecisionSource):
    """Invents the decisions of a model, every `cycle` minutes."""

    is_counted_by_rows = True

    def __init__(self, model: Model, market: BacktestMarket, cycle: int) -> None:
        self._model = model
        self._market = market
        self._every_s = cycle * MINUTE_S
        self._rng = Random(f"season:{model.id}")
        self._first = market.span.start + MINUTE_S * (1 + self._rng.randrange(cycle))

    def next_after(self, second: int) -> int | None:
        due = self._first + max(0, (second - self._first) // self._every_s + 1) * self._every_s
        return due if due < self._market.span.stop - 1 else None

    async def run(self, session: AccountSession) -> None:
        rng, followed = self._rng, session.followed
        began_at = session.now() - timedelta(milliseconds=rng.randrange(2_000, 58_000))
        record = session.record = InvocationRecord(self._model, began_at)
        followed.decisions += 1
        if rng.random() < FAILS:
            record.close("failed", "error", "ProviderError: HTTP 429, rate limit exceeded", None, session.now())
        else:
            requests = [await self._call(session, record, decision) for decision in self._decisions(session)]
            self._answer(record, tuple(requests))
            record.close("completed", "holding", None, "The exit plans in place are still right.", session.now())
        assert followed.finished is not None, "only a journal of invocations wants invented ones"
        followed.finished.append(record)

    def _decisions(self, session: AccountSession) -> list[Decision]:
        rng, decisions = self._rng, list[Decision]()
        for symbol in self._market.markets:
            chance, position = rng.random(), session.account().positions.get(symbol)
            if position is None and chance < ENTERS:
                decisions.append(self._entry(session, symbol))
            elif position is not None and chance < CLOSES:
                decisions.append(ClosePosition(symbol=symbol))
            elif position is not None and chance < CLOSES + PLANS:
                stop = float(session.marks()[symbol]) * (1 - 0.01 * position.side.direction)
                decisions.append(UpdateExitPlan(symbol=symbol, stop=stop))
        return [*decisions, Holding(reason="No setup: momentum and volume disagree.")]

    def _entry(self, session: AccountSession, symbol: str) -> CreatePosition:
        rng, market, mark = self._rng, self._market.markets[symbol], session.marks()[symbol]
        side, is_all = rng.choice([Side.LONG, Side.SHORT]), rng.random() < STAKES_ALL
        leverage = market.leverage_max if is_all else rng.randrange(2, 8)
        notional = equity(session.account(), session.marks()) * Decimal(leverage if is_all else 0.3) * Decimal("0.8")
        return CreatePosition(
            symbol=symbol,
            side=side,
            quantity=float(floor_to(notional / mark, market.lot)),
            leverage=float(leverage),
            stop=float(mark) * (1 - (0.3 if is_all else 0.008) * side.direction),
            target=float(mark) * (1 + 0.012 * side.direction),
            invalidation="momentum turns on the 15m candles",
            confidence=float(rng.randrange(45, 95)),
        )

    async def _call(self, session: AccountSession, record: InvocationRecord, decision: Decision) -> ToolRequest:
        """Execute a tool call, and record it."""
        number = record.next_call()
        request = request_of(number, decision)
        record.call = StartedCall(number, request, decision, session.now())
        record.add_call(number, request, decision, *await execute(decision, session), session.now())
        return request

    def _answer(self, record: InvocationRecord, requests: tuple[ToolRequest, ...]) -> None:
        rng, model = self._rng, self._model
        answer = ModelAnswer(
            text=None,
            calls=requests,
            message={},
            model=model.router_model_name,
            key_number=1,
            input_tokens=rng.randrange(5_200, 7_600),
            output_tokens=rng.randrange(120, 900),
            cost_usd=Decimal("0.004"),
            duration_ms=2_000,
        )
        record.add_step(model.provider, answer, record.invocation.started_at)
