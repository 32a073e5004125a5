"""Memory of an agent: what it is shown of its own last cycles, from the record of their tool calls."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

from trader.domain.agents.invocations import ToolCall, ToolCallStatus, ToolCallType
from trader.domain.agents.tools import TOOL_CALL_TYPES, TOOLS
from trader.domain.agents.view import Memory, PastDecision

DECISIONS_SHOWN: Final = 20
DECISIONS_ADDED_MAX: Final = 4
"""Decisions remembered beyond those, so that a prompt can begin with the same one for several cycles."""

CYCLES_REMEMBERED: Final = DECISIONS_SHOWN + DECISIONS_ADDED_MAX
LINE_MAX: Final = 60
"""Characters of a line about a decision."""

REFUSALS_SHOWN: Final = 2
REFUSAL_MAX: Final = 100
"""Characters of the reason of a refused call."""

DECISION_TYPES: Final[frozenset[ToolCallType]] = frozenset(
    {"CREATE_POSITION", "CLOSE_POSITION", "UPDATE_EXIT_PLAN", "HOLDING"}
)
_TOOLS: Final[Mapping[ToolCallType, str]] = {kind: name for name, kind in TOOL_CALL_TYPES.items()}
_LEFT_OUT: Final = frozenset({"invalidation", "invalidationPrice", "confidence"})
"""Arguments without which a line still says what was decided."""


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
        """Whether it decided something, or was to and could not."""
        return self.type in DECISION_TYPES or self.status != "ok"


class PastCycle(NamedTuple):
    """A finished invocation with its remembered calls, in their order."""

    at: datetime
    response: str | None
    calls: Sequence[PastCall]


def note_of(call: ToolCall) -> str | None:
    """Return the note that a call has written; None for any other call."""
    if call.type != "NOTE" or call.status != "ok":
        return None
    text: str = call.metadata["decisions"][0]["text"]
    return text


def remember(note: str | None, cycles: Sequence[PastCycle]) -> Memory:
    """Return what an agent is shown of its last cycles, which are given newest first."""
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
    """Return what was decided; the outcome, if there is one to tell, stands first, since lines are cut."""
    if call.status != "ok":
        return f"{call.status} ({call.result.get('rule') or 'error'}): {_words(call)}"
    price = call.result.get("averagePrice")
    if price is None:
        return _words(call)
    return f"filled {call.result['filledQuantity']} at {float(price):.8g}: {_words(call)}"


def _words(call: PastCall) -> str:
    """Return the tool and its arguments: words alone, figures with their names."""
    if call.type == "HOLDING" and call.decision is not None:
        return f"holding: {call.decision['reason']}"
    tool = _TOOLS[call.type]
    values = [(name, (call.decision or {}).get(name)) for name in TOOLS[tool].__struct_encode_fields__]
    parts = [
        value if isinstance(value, str) else f"{name} {value:.10g}"
        for name, value in values
        if value is not None and name not in _LEFT_OUT
    ]
    return " ".join([tool, *parts])


def _reason(call: PastCall) -> str:
    return str(call.result.get("reason") or call.result.get("error"))
