"""Simulated decisions: the decisions of a simulated language model for an account, and a realistic record of them.

The guard, the exchange and the books are real. Only the decisions are simulated, from a signal that suits the variant,
noise, and a little foresight.
"""

import math
import zlib
from datetime import timedelta
from decimal import Decimal
from random import Random
from typing import Any, Final, NamedTuple

from trader.agents.domain.conversation import ModelAnswer, ToolRequest
from trader.agents.domain.messages import Outcome, failed
from trader.agents.domain.models import Model
from trader.agents.domain.tools import (
    ClosePosition,
    CreatePosition,
    Decision,
    FetchIndicators,
    Holding,
    PlaceOrder,
    PlannedExit,
    UpdateExitPlan,
    request_of,
)
from trader.agents.domain.view import VariantLimits
from trader.agents.execute import execute
from trader.agents.record import InvocationRecord, StartedCall
from trader.backtest.accounts import DecisionSource
from trader.backtest.market import BacktestMarket
from trader.backtest.session import AccountSession
from trader.core.clock import epoch_second, moment_of
from trader.core.money import floor_to, round_to
from trader.core.variant_id import VariantId
from trader.exchange.domain.account import equity
from trader.exchange.domain.orders import OrderType, Side

_MINUTE_S: Final = 60

WIDE_LIMITS: Final = VariantLimits(
    leverage_max=100, position_notional_max=1_000, day_loss_max_percent=100, reversal_cycles=0
)
"""A guard that leaves refusals to the exchange: some models forget their positions, and some are liquidated."""

ALL_IN_RATE: Final = 0.002
"""How often an Apex model stakes nearly all its equity with a stop too far away to prevent a liquidation."""

ALL_IN_PATIENCE: Final = 20
"""How much longer it holds such a position, without changing its exit plan."""

MINUTE_VOLATILITY: Final = 0.00055

PRICES: Final = (("0.27", "1.10"), ("0.15", "0.60"), ("0.60", "2.20"), ("1.25", "10"), ("3", "15"))
"""US dollars per million input and output tokens of typical language models."""

FAILURES: Final = (
    ("failed", "ProviderError: HTTP 429, rate limit exceeded"),
    ("failed", "ProviderError: HTTP 502 from the provider"),
    ("failed", "ProviderError: the answer is no JSON"),
    ("timeout", "the invocation took longer than 120 s"),
)
_REASONS: Final = (
    "No setup: momentum and volume disagree.",
    "The range holds; entries only at its edges.",
    "Spread and funding eat the edge of this move.",
    "Waiting for the hourly close before the next step.",
    "The exit plans in place are still right.",
)
_INVALIDATIONS: Final = (
    "a close beyond the stop's side of the range",
    "momentum turns on the 15m candles",
    "volume dries up before the target",
)


class Style(NamedTuple):
    """How a variant trades: the minutes it looks back, whether it follows (1) or fades (-1) a move, its usual leverage,
    the share of its equity in a position's notional, its stop and target, and how long it holds."""

    lookback: int
    sense: int
    leverage: int
    size: float
    stop: float
    target: float
    hold_minutes: int


STYLES: Final = {
    VariantId.APEX: Style(45, 1, 10, 0.55, 0.006, 0.011, 55),
    VariantId.TRENDSURFER: Style(240, 1, 5, 0.35, 0.010, 0.024, 110),
    VariantId.CONTRARIAN: Style(90, -1, 3, 0.30, 0.008, 0.009, 75),
    VariantId.SOVEREIGN: Style(180, 0, 4, 0.30, 0.009, 0.015, 90),
}


class InventedDecisions(DecisionSource):
    """Invents the decisions of a model, every `cycle` minutes. The characters of the models differ."""

    is_counted_by_rows = True

    def __init__(self, model: Model, market: BacktestMarket, cycle: int) -> None:
        self._model = model
        self._market = market
        self._every_s = cycle * _MINUTE_S
        self._rng = rng = Random(f"season:{model.id}")
        self._style = STYLES.get(model.variant, STYLES[VariantId.APEX])
        self._skill = rng.gauss(0.27, 0.10)
        self._noise = rng.uniform(0.5, 1.4)
        self._boldness = rng.uniform(0.5, 1.4)
        self._patience = rng.uniform(1.8, 3.7)
        self._failure_rate = rng.choice((0.003, 0.01, 0.02, 0.05)) * rng.uniform(0.5, 1.5)
        self._symbols = rng.sample(sorted(market.markets), min(len(market.markets), rng.choice((2, 3, 3))))
        self._first = market.span.start + _MINUTE_S * (1 + rng.randrange(cycle))
        self._leave_at: dict[str, int] = {}
        self._stubborn: set[str] = set()

    def next_after(self, second: int) -> int | None:
        due = self._first + max(0, (second - self._first) // self._every_s + 1) * self._every_s
        return due if due < self._market.span.stop - 1 else None

    async def run(self, session: AccountSession) -> None:
        followed, rng = session.followed, self._rng
        invocation = _Invocation(self._model, session, rng)
        followed.decisions += 1
        if rng.random() < self._failure_rate:
            invocation.fail(*rng.choice(FAILURES))
        else:
            await self._trade(session, invocation)
        assert followed.finished is not None, "only a journal of invocations wants invented ones"
        followed.finished.append(invocation.record)

    async def _trade(self, session: AccountSession, invocation: "_Invocation") -> None:
        """Make the decisions of an invocation."""
        rng, has_ordered = self._rng, False
        if rng.random() < 0.22:
            await invocation.call(
                FetchIndicators(symbol=rng.choice(self._symbols), interval=rng.choice(("5m", "15m", "1h", "4h")))
            )
        for symbol in self._symbols:
            decision = self._look_after(session, symbol) if symbol in session.account().positions else None
            if symbol not in session.account().positions and rng.random() < 0.40:
                decision = self._look_for_entry(session, symbol, invocation.next_id)
            if decision is not None:
                await invocation.call(decision)
                has_ordered |= not isinstance(decision, UpdateExitPlan)
        reason = "Orders placed; the exit plans guard them." if has_ordered else rng.choice(_REASONS)
        await invocation.call(Holding(reason=reason))
        invocation.complete(reason)

    def _move(self, symbol: str, since: int, second: int) -> float:
        """Return the relative change of the mark between two seconds, clipped to the market's span."""
        span = self._market.span
        before, after = (self._market.mark(symbol, min(max(at, span.start), span.stop - 1)) for at in (since, second))
        return float(after) / float(before) - 1

    def _signal(self, symbol: str, second: int) -> float:
        """Return the model's expected move of the market, in typical moves over its holding time."""
        style, rng = self._style, self._rng
        move = self._move(symbol, second - style.lookback * _MINUTE_S, second)
        move /= MINUTE_VOLATILITY * math.sqrt(style.lookback)
        sense = style.sense or (1 if abs(move) > 1.2 else -1)
        later = self._move(symbol, second, second + style.hold_minutes * _MINUTE_S)
        foresight = self._skill * later / (MINUTE_VOLATILITY * math.sqrt(style.hold_minutes))
        return 0.5 * sense * move + foresight + self._noise * rng.gauss()

    def _look_for_entry(self, session: AccountSession, symbol: str, order_id: str) -> Decision | None:
        """Return the order that opens a position when there is a signal, else None."""
        rng, style, market, second = self._rng, self._style, self._market.markets[symbol], epoch_second(session.now())
        signal = self._signal(symbol, second)
        is_limit = rng.random() < 0.06
        account, marks = session.account(), session.marks()
        if abs(signal) < 0.35 or (is_limit and account.resting):
            return None
        side = Side.LONG if signal > 0 else Side.SHORT
        worth = float(equity(account, marks))
        confidence = round(min(95.0, 45 + 18 * abs(signal) + rng.gauss(0, 6)))
        notional = worth * style.size * self._boldness * (0.5 + confidence / 100) * rng.uniform(0.6, 1.2)
        if rng.random() < 0.004:
            notional *= 40  # now and then a model forgets its balance
        leverage = max(1, round(style.leverage * rng.uniform(0.6, 1.4)))
        is_all_in = self._model.variant is VariantId.APEX and rng.random() < ALL_IN_RATE
        if is_all_in:
            leverage = market.leverage_max
            notional = worth * leverage * 0.8
        quantity = floor_to(Decimal(repr(notional)) / marks[symbol], market.lot)
        if quantity <= 0:
            return None
        held_s = style.hold_minutes * self._patience * rng.expovariate(1) * (ALL_IN_PATIENCE if is_all_in else 1)
        self._leave_at[symbol] = second + (int(held_s) + 5) * _MINUTE_S
        (self._stubborn.add if is_all_in else self._stubborn.discard)(symbol)
        plan = self._plan(session, symbol, side, distance=30 if is_all_in else 1)
        sized: dict[str, Any] = {"symbol": symbol, "quantity": float(quantity), "leverage": float(leverage)}
        sized["confidence"] = float(confidence)
        if not is_limit:
            return CreatePosition(side=side, **plan, **sized)
        limit = float(round_to(marks[symbol] * (1 - side.direction * Decimal("0.0006")), market.tick))
        return PlaceOrder(
            side="buy" if side is Side.LONG else "sell",
            type=OrderType.LIMIT,
            limit_price=limit,
            exit_plan=PlannedExit(**plan),
            client_order_id=order_id,
            **sized,
        )

    def _look_after(self, session: AccountSession, symbol: str) -> Decision | None:
        """Return the decision that closes a position or changes its exit plan; None leaves it."""
        rng, position = self._rng, session.account().positions[symbol]
        if epoch_second(session.now()) >= self._leave_at.get(symbol, 0):
            return ClosePosition(symbol=symbol, fraction=rng.choice((0.25, 0.5)) if rng.random() < 0.08 else None)
        if symbol not in self._stubborn and rng.random() < 0.05:
            return UpdateExitPlan(symbol=symbol, **self._plan(session, symbol, position.side))
        return None

    def _plan(self, session: AccountSession, symbol: str, side: Side, distance: int = 1) -> dict[str, Any]:
        """Return the fields of an exit plan."""
        rng, style = self._rng, self._style
        mark, tick = session.marks()[symbol], self._market.markets[symbol].tick
        away = Decimal(repr(round(style.stop * rng.uniform(0.6, 1.6), 6))) * distance
        gain = Decimal(repr(round(style.target * rng.uniform(0.6, 1.6), 6)))
        until = int(style.hold_minutes * rng.uniform(4, 9)) * _MINUTE_S
        return {
            "stop": float(round_to(mark * (1 - side.direction * away), tick)),
            "target": float(round_to(mark * (1 + side.direction * gain), tick)) if rng.random() < 0.9 else None,
            "invalidation": rng.choice(_INVALIDATIONS),
            "time_exit": moment_of(epoch_second(session.now()) + until) if rng.random() < 0.5 else None,
        }


class _Invocation:
    """One simulated invocation. It starts up to a minute before its decisions are executed."""

    def __init__(self, model: Model, session: AccountSession, rng: Random) -> None:
        self._model = model
        self._session = session
        self._rng = rng
        self._decided_at = session.now()
        self._started_at = self._decided_at - timedelta(milliseconds=rng.randrange(2_000, 58_000))
        self.record = session.record = InvocationRecord(model, self._started_at)
        self._requests_by_step: list[list[ToolRequest]] = [[]]

    @property
    def next_id(self) -> str:
        """The client order id of the next call's order."""
        return f"{self.record.id}:{self.record.call_count + 1}"

    async def call(self, decision: Decision) -> None:
        """Execute a tool call, and record it."""
        record, session, number = self.record, self._session, self.record.next_call()
        request = request_of(number, decision)
        record.call = StartedCall(number, request, decision, session.now())
        record.add_call(number, request, decision, *await self._outcome(decision), session.now())
        self._requests_by_step[-1].append(request)
        if isinstance(decision, FetchIndicators):
            self._requests_by_step.append([])

    async def _outcome(self, decision: Decision) -> Outcome:
        if not isinstance(decision, FetchIndicators):
            return await execute(decision, self._session)
        is_read = self._rng.random() > 0.03
        return ("ok", {"candles": 200}) if is_read else failed("The market data could not be read in time.")

    def complete(self, response: str) -> None:
        """Record the answers and the end."""
        model, rng = self._model, self._rng
        price_in, price_out = map(Decimal, PRICES[zlib.crc32(model.router_model_name.encode()) % len(PRICES)])
        steps = [requests for requests in self._requests_by_step if requests]
        span = (self._decided_at - self._started_at) / len(steps)
        for number, requests in enumerate(steps, 1):
            answer = ModelAnswer(text=None, calls=tuple(requests), message={}, model=model.router_model_name)
            if model.provider != "rules":
                tokens_in, tokens_out = rng.randrange(5_200, 7_600) + 700 * number, rng.randrange(120, 900)
                answer = ModelAnswer(
                    text=None,
                    calls=answer.calls,
                    message={},
                    model=answer.model,
                    key_number=1,
                    input_tokens=tokens_in,
                    output_tokens=tokens_out,
                    cost_usd=(tokens_in * price_in + tokens_out * price_out) / 1_000_000,
                    duration_ms=span // timedelta(milliseconds=1),
                )
            self.record.add_step(model.provider, answer, self._started_at + number * span)
        self._close("completed", None, response)

    def fail(self, status: Any, reason: str) -> None:
        """Record that the provider failed."""
        self._close(status, reason, None)

    def _close(self, status: Any, reason: str | None, response: str | None) -> None:
        took = timedelta(milliseconds=self._rng.randrange(20, 900))
        self.record.close(status, reason, response, self._session.now() + took)
