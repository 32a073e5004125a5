"""Memory of an agent: its own last cycles, from the record of their tool calls."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from trader.agents.domain.invocations import ToolCall, ToolCallStatus, ToolCallType
from trader.agents.domain.tools import RECORDED_TOOLS, TOOL_CALL_TYPES
from trader.agents.domain.view import Memory, PastDecision

DECISIONS_SHOWN: Final = 20
DECISIONS_ADDED_MAX: Final = 4
"""Further remembered decisions, so that several successive prompts can begin with the same one."""

CYCLES_REMEMBERED: Final = DECISIONS_SHOWN + DECISIONS_ADDED_MAX
LINE_MAX: Final = 60
"""Maximum characters of a line about a decision."""

REFUSALS_SHOWN: Final = 2
REFUSAL_MAX: Final = 100
"""Maximum characters of the reason of a refused call."""

DECISION_TYPES: Final[frozenset[ToolCallType]] = frozenset(
    {"CREATE_POSITION", "CLOSE_POSITION", "UPDATE_EXIT_PLAN", "CANCEL_ORDER", "HOLDING"}
)
_TOOLS: Final[Mapping[ToolCallType, str]] = {
    **{kind: name for name, kind in TOOL_CALL_TYPES.items()},
    "CANCEL_ORDER": "cancelOrder",
}
_LEFT_OUT: Final = frozenset({"invalidation", "invalidationPrice", "confidence"})
"""Arguments that a line omits without losing the decision."""


class PastCall(NamedTuple):
    """A recorded tool call. `decision` is None when it could not be decoded."""

    type: ToolCallType
    status: ToolCallStatus
    decision: Mapping[str, Any] | None
    result: Mapping[str, Any]

    @classmethod
    def of(cls, call: ToolCall) -> "PastCall":
        """Return a call from its record."""
        decisions, results = call.metadata["decisions"], call.metadata["results"]
        return cls(call.type, call.status, decisions[0] if decisions else None, results[0])

    @property
    def is_remembered(self) -> bool:
        """Whether the call decided something, or tried to."""
        return self.type in DECISION_TYPES or self.status != "ok"


class PastCycle(NamedTuple):
    """A finished invocation with its remembered calls, in order."""

    at: datetime
    response: str | None
    calls: Sequence[PastCall]


def note_of(call: ToolCall) -> str | None:
    """Return the note that a call wrote; None for any other call."""
    if call.type != "NOTE" or call.status != "ok":
        return None
    text: str = call.metadata["decisions"][0]["text"]
    return text


def remember(note: str | None, cycles: Sequence[PastCycle]) -> Memory:
    """Return an agent's memory of its last cycles, which are given newest first."""
    decisions: list[PastDecision] = []
    for cycle in cycles:
        lines = [_line(call) for call in reversed(cycle.calls) if call.type in DECISION_TYPES]
        if not lines and cycle.response is not None:
            lines = [cycle.response]
        decisions += [PastDecision(at=cycle.at, text=line[:LINE_MAX]) for line in lines]
    refused = [call for call in (cycles[0].calls if cycles else ()) if call.status != "ok"]
    return Memory(
        note=note,
        decisions=tuple(decisions[: DECISIONS_SHOWN + DECISIONS_ADDED_MAX]),
        refused=tuple(f"{_words(call)[:LINE_MAX]}: {_reason(call)[:REFUSAL_MAX]}" for call in refused[:REFUSALS_SHOWN]),
    )


def _line(call: PastCall) -> str:
    """Describe the decision. The outcome, if worth mentioning, comes first, since long lines are truncated."""
    if call.status != "ok":
        return f"{call.status} ({call.result.get('rule') or 'error'}): {_words(call)}"
    price = call.result.get("averagePrice")
    if price is None:
        return _words(call)
    return f"filled {call.result['filledQuantity']} at {float(price):.8g}: {_words(call)}"


def _words(call: PastCall) -> str:
    """Return the tool and its arguments: words without names, figures with names."""
    if call.type == "HOLDING" and call.decision is not None:
        return f"holding: {call.decision['reason']}"
    tool = _TOOLS[call.type]
    values = [(name, (call.decision or {}).get(name)) for name in RECORDED_TOOLS[tool].__struct_encode_fields__]
    parts = [
        value if isinstance(value, str) else f"{name} {value:.10g}"
        for name, value in values
        if value is not None and name not in _LEFT_OUT
    ]
    return " ".join([tool, *parts])


def _reason(call: PastCall) -> str:
    return str(call.result.get("reason") or call.result.get("error"))
