"""The texts that a model reads, and the JSON of decisions and results as it is recorded and sent back to the model."""

from decimal import Decimal
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from trader.clock import iso
from trader.domain.agents.conversation import Message
from trader.domain.agents.guard import Refusal
from trader.domain.agents.invocations import ToolCallStatus
from trader.domain.agents.tools import Decision
from trader.domain.agents.view import ObservedMarket, VariantLimits, View
from trader.domain.exchange.account import Account, Marks, available_cash, equity
from trader.domain.exchange.orders import ExitPlan, OrderAnswer, OrderStatus
from trader.domain.market.indicators import Indicators
from trader.domain.market.markets import Candle, Interval
from trader.domain.money import format_decimal

_ENCODER: Final = msgspec.json.Encoder(decimal_format="number")
CANDLE_COLUMNS: Final = ["openTime", "open", "high", "low", "close", "volume"]

EXCHANGE: Final = "exchange"
"""The rule that a refusal by the exchange is recorded under; the guard's refusals name rules of the guard."""

Outcome = tuple[ToolCallStatus, dict[str, Any]]
"""The status of a tool call and its result, as it is recorded and sent back to the model."""


def opening_messages(prompt: str, limits: VariantLimits, view: View) -> list[Message]:
    """Return the system message of a variant and the user message of this cycle."""
    return [
        {"role": "system", "content": f"{prompt.strip()}\n\n{rules_text(limits)}"},
        {"role": "user", "content": view_text(view)},
    ]


def rules_text(limits: VariantLimits) -> str:
    """Return the guard's rules with this variant's figures."""
    return f"""## Rules that are enforced

Every order passes a guard. What breaks a rule is refused, and you are told why.
- Leverage of a position: at most {limits.leverage_max}, and never above the market's own `leverageMax`.
- A position needs a stop. Stop and invalidationPrice lie on the losing side of the mark, the target on the winning one.
- One position is worth at most {limits.position_notional_max} × equity; all positions together at most \
{limits.leverage_max} × equity.
- No new position in a market whose `stale` is true.
- No reversal of a market within {limits.reversal_cycles} cycles of the last trade in it (`lastAction`), an exit by \
stop, target, time or liquidation included. A cycle is 60 seconds.
- After a loss of {limits.day_loss_max_percent} % of `dayOpeningEquity` only reducing is allowed until 00:00 UTC.

You act through the tools only; what you write is read by people afterwards. Call `holding` last, to end the cycle."""


def view_text(view: View) -> str:
    """Return the view as JSON. Decimals have the digits of the books; an absent value is null."""
    shown = _plain(msgspec.to_builtins(replace(view, markets={}), builtin_types=(Decimal,)))
    shown["at"] = iso(view.at)
    shown["markets"] = [market_json(market) for market in view.markets.values()]
    return (
        "The market and your account now, in JSON. Amounts are in the quote currency, quantities in base units, times "
        f"in UTC; candles are closed ones, in columns {', '.join(CANDLE_COLUMNS)}.\n\n{_json(shown)}"
    )


def market_json(market: ObservedMarket) -> dict[str, Any]:
    """Return one market as JSON, its candles as rows of figures."""
    shown: dict[str, Any] = _plain(msgspec.to_builtins(replace(market, candles={}), builtin_types=(Decimal,)))
    shown["candles"] = {interval: candle_rows(candles) for interval, candles in market.candles.items()}
    return shown


def candle_rows(candles: tuple[Candle, ...] | list[Candle]) -> list[list[Any]]:
    """Return candles as rows of `CANDLE_COLUMNS`, prices and volumes to 8 significant digits."""
    return [_candle_row(candle) for candle in candles]


@lru_cache(maxsize=4096)
def _candle_row(candle: Candle) -> list[Any]:
    """Return one row; cached, since the models of a cycle share their candles, and the next cycle most of them."""
    return [iso(candle.open_time), *(float(f"{value:.8g}") for value in candle[1:])]


def indicators_json(symbol: str, interval: Interval, candles: list[Candle], computed: Indicators) -> dict[str, Any]:
    """Return the result of fetchIndicators."""
    return {
        "symbol": symbol,
        "interval": interval,
        "indicators": msgspec.to_builtins(computed),
        "candleColumns": CANDLE_COLUMNS,
        "candles": candle_rows(candles),
    }


def failed(error: str) -> Outcome:
    """Return the outcome of a call that could not be executed."""
    return "failed", {"error": error}


def refused(refusal: Refusal) -> Outcome:
    """Return the outcome of a call that the guard or the exchange refused."""
    return "rejected", {"rule": refusal.rule, "reason": refusal.reason}


def plan_outcome(plan: ExitPlan, refusal: str | None) -> Outcome:
    """Return the outcome of setting an exit plan; `refusal` is that of the exchange."""
    return ("ok", {"exitPlan": plan_json(plan)}) if refusal is None else refused(Refusal(EXCHANGE, refusal))


def order_outcome(answer: OrderAnswer | None) -> Outcome:
    """Return the outcome of an order with this answer; None: it never reached the books."""
    if answer is None:
        return failed("The run broke off before the order was placed.")
    rejected = answer.status in {OrderStatus.REJECTED, OrderStatus.CANCELLED}
    return "rejected" if rejected else "ok", answer_json(answer)


def answer_json(answer: OrderAnswer) -> dict[str, Any]:
    """Return the result of an order, for the record and the model. Amounts are decimal text, as in the books."""
    return {
        "orderId": str(answer.id),
        "status": answer.status.value,
        "reason": answer.reason,
        "side": answer.side.value,
        "requestedQuantity": format_decimal(answer.requested_quantity),
        "filledQuantity": format_decimal(answer.total_quantity),
        "averagePrice": _decimal_text(answer.average_price),
        "fees": format_decimal(answer.total_fees),
        "realizedPnl": format_decimal(answer.realized_pnl),
        "at": iso(answer.at),
    }


def plan_json(plan: ExitPlan) -> dict[str, Any]:
    """Return an exit plan, for the record and the model."""
    return {
        "stop": _decimal_text(plan.stop),
        "target": _decimal_text(plan.target),
        "invalidation": plan.invalidation,
        "invalidationPrice": _decimal_text(plan.invalidation_price),
        "timeExit": None if plan.time_exit is None else iso(plan.time_exit),
    }


def account_json(account: Account, marks: Marks) -> dict[str, Any]:
    """Return the account after a call, for the model."""
    return {
        "equity": format_decimal(equity(account, marks)),
        "availableCash": format_decimal(available_cash(account, marks)),
        "positions": [
            {"symbol": held.symbol, "side": held.side.value, "quantity": format_decimal(held.quantity)}
            for held in account.positions.values()
        ],
    }


def decision_json(decision: Decision) -> dict[str, Any]:
    """Return a decoded decision, for the record."""
    shown: dict[str, Any] = msgspec.to_builtins(decision)
    return shown


def tool_message(call_id: str, result: dict[str, Any]) -> Message:
    """Return the message that sends the result of a call back to the model."""
    return {"role": "tool", "tool_call_id": call_id, "content": _json(result)}


def _plain(value: Any) -> Any:
    """Return the value with every decimal in plain digits: 10000 for 1E+4."""
    if isinstance(value, Decimal):
        return Decimal(format_decimal(value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _decimal_text(value: Decimal | None) -> str | None:
    return None if value is None else format_decimal(value)


def _json(value: Any) -> str:
    return _ENCODER.encode(value).decode()
