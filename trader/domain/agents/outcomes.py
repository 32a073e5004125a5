"""What became of a tool call, in the form in which it is recorded and told to the model."""

from typing import Any, Final

from trader.domain.agents.guard import Refusal
from trader.domain.agents.invocations import ToolCallStatus
from trader.domain.agents.messages import answer_json, plan_json
from trader.domain.exchange.orders import ExitPlan, OrderAnswer, OrderStatus

EXCHANGE: Final = "exchange"
"""The rule of a refusal that is not the guard's."""

Outcome = tuple[ToolCallStatus, dict[str, Any]]


def failed(error: str) -> Outcome:
    """A call that could not be executed."""
    return "failed", {"error": error}


def refused(refusal: Refusal) -> Outcome:
    """A call that the guard, or the exchange, did not let through."""
    return "rejected", {"rule": refusal.rule, "reason": refusal.reason}


def of_plan(plan: ExitPlan, refusal: str | None) -> Outcome:
    """An exit plan that was set; with `refusal` one that the exchange refused."""
    return ("ok", {"exitPlan": plan_json(plan)}) if refusal is None else refused(Refusal(EXCHANGE, refusal))


def of_order(answer: OrderAnswer | None) -> Outcome:
    """An order with this answer; None: it never reached the books."""
    if answer is None:
        return failed("The run broke off before the order was placed.")
    rejected = answer.status in {OrderStatus.REJECTED, OrderStatus.CANCELLED}
    return "rejected" if rejected else "ok", answer_json(answer)
