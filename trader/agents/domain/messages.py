"""The results of tool calls, as recorded and as sent back to the model."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

import msgspec

from trader.agents.domain.conversation import ChatMessage
from trader.agents.domain.guard import GuardRefusal
from trader.agents.domain.invocations import ToolCallStatus
from trader.agents.domain.prompt import CANDLE_COLUMNS, candle_rows, indicator_values, json_text
from trader.agents.domain.tools import CancelOrder, Decision
from trader.core.clock import iso
from trader.core.money import format_decimal
from trader.exchange.domain.account import Account, Marks, available_cash, equity
from trader.exchange.domain.orders import ExitPlan, OrderAnswer, OrderStatus
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import INTERVALS, Book, Candle, Interval

EXCHANGE: Final = "exchange"
"""The rule recorded for refusals by the exchange; the guard's refusals name the guard's rules."""

LEVELS_SHOWN: Final = 10
"""Number of levels shown to a model on each side of an order book."""

Outcome = tuple[ToolCallStatus, dict[str, Any]]
"""The status of a tool call and its result, as recorded and as sent back to the model."""

HELD: Final[Outcome] = ("ok", {"holding": True})
NOTED: Final[Outcome] = ("ok", {"noted": True})
HALTED: Final[Outcome] = ("ok", {"halted": True})


def indicators_json(symbol: str, interval: Interval, candles: list[Candle], computed: Indicators) -> dict[str, Any]:
    """Return the result of fetchIndicators."""
    shown: dict[str, Any] = {
        "symbol": symbol,
        "interval": interval,
        "indicators": indicator_values(computed),
        "columns": CANDLE_COLUMNS,
        "candles": [],
    }
    if candles:
        shown |= candle_rows([candles], candles[0].open_time, INTERVALS[interval])
        shown["candles"] = [candle for (candle,) in shown["candles"]]
    return shown


def book_json(book: Book) -> dict[str, Any]:
    """Return the result of fetchOrderBook: the best levels of each side, with price and quantity."""
    levels = {
        side: [[format_decimal(price), format_decimal(quantity)] for price, quantity in side_levels[:LEVELS_SHOWN]]
        for side, side_levels in (("bids", book.bids), ("asks", book.asks))
    }
    return {"symbol": book.symbol, "at": iso(book.at), **levels}


def failed(error: str) -> Outcome:
    """Return the outcome of a call that could not be executed."""
    return "failed", {"error": error}


def refused(refusal: GuardRefusal) -> Outcome:
    """Return the outcome of a call that the guard or the exchange refused."""
    return "rejected", {"rule": refusal.rule, "reason": refusal.reason}


def plan_outcome(plan: ExitPlan, refusal: str | None) -> Outcome:
    """Return the outcome of setting an exit plan; `refusal` is the refusal by the exchange."""
    return ("ok", {"exitPlan": plan_json(plan)}) if refusal is None else refused(GuardRefusal(EXCHANGE, refusal))


def cancel_outcome(decision: CancelOrder, refusal: str | None) -> Outcome:
    """Return the outcome of a cancellation; `refusal` says why there was nothing to cancel."""
    return ("ok", {"cancelled": decision.order_id}) if refusal is None else refused(GuardRefusal(EXCHANGE, refusal))


def order_outcome(answers: Sequence[OrderAnswer]) -> Outcome:
    """Return the outcome of an order or a pair with these answers; without one, it never reached the books."""
    if not answers:
        return failed("The run broke off before the order was placed.")
    rejected = answers[0].status in {OrderStatus.REJECTED, OrderStatus.CANCELLED}
    results = list(map(answer_json, answers))
    result = results[0] if len(results) == 1 else {"reason": answers[0].reason, "orders": results}
    return "rejected" if rejected else "ok", result


def results_json(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of a call for the record: one per order."""
    orders: list[dict[str, Any]] = result.get("orders", [result])
    return orders


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
    """Return an exit plan, for the record and the model; a trailing distance and targets only where there are some."""
    shown: dict[str, Any] = {
        "stop": _decimal_text(plan.stop),
        "target": _decimal_text(plan.target),
        "invalidation": plan.invalidation,
        "invalidationPrice": _decimal_text(plan.invalidation_price),
        "timeExit": None if plan.time_exit is None else iso(plan.time_exit),
    }
    if plan.trailing_distance is not None:
        shown["trailingDistance"] = format_decimal(plan.trailing_distance)
    if plan.targets:
        shown["targets"] = [
            {"price": format_decimal(each.price), "fraction": format_decimal(each.fraction)} for each in plan.targets
        ]
    return shown


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


def decisions_json(decision: Decision) -> list[dict[str, Any]]:
    """Return the decoded decisions of a call, for the record: a pair is two."""
    return list(map(msgspec.to_builtins, decision.orders))


def tool_message(call_id: str, result: dict[str, Any]) -> ChatMessage:
    """Return the message that sends the result of a call back to the model."""
    return {"role": "tool", "tool_call_id": call_id, "content": json_text(result)}


def _decimal_text(value: Decimal | None) -> str | None:
    return None if value is None else format_decimal(value)
