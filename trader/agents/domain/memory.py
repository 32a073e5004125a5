"""Memory of an agent: its own last cycles, from the record of their tool calls."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final, NamedTuple

from trader.agents.domain.invocations import ToolCall, ToolCallStatus, ToolCallType
from trader.agents.domain.tools import PLACE_ORDER, RECORDED_TOOLS, TOOL_CALL_TYPES, PlannedExit
from trader.agents.domain.view import Memory, PastDecision

DECISIONS_SHOWN: Final = 20
DECISIONS_ADDED_MAX: Final = 4
"""Further remembered decisions, so that several successive prompts can begin with the same one."""

CYCLES_REMEMBERED: Final = DECISIONS_SHOWN + DECISIONS_ADDED_MAX
LINE_MAX: Final = 60
"""Maximum characters of an agent's own words in a line. A decision's figures are never cut."""

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
_LEFT_OUT: Final = frozenset({"clientOrderId", "confidence", "exitPlan", "invalidation", "invalidationPrice", "type"})
"""Arguments that a line omits without losing the decision. The parts of an exit plan appear by themselves."""

_PLAN: Final = PlannedExit.__struct_encode_fields__
_CUT_FIGURE: Final = re.compile(r"[\d.,:+-]*$")


class PastCall(NamedTuple):
    """A recorded tool call. It has no decision when it could not be decoded, and two when it is a pair."""

    type: ToolCallType
    status: ToolCallStatus
    decisions: Sequence[Mapping[str, Any]]
    results: Sequence[Mapping[str, Any]]

    @classmethod
    def of(cls, call: ToolCall) -> "PastCall":
        """Return a call from its record."""
        return cls(call.type, call.status, call.metadata["decisions"], call.metadata["results"])

    @property
    def is_remembered(self) -> bool:
        """Whether the call decided something, or tried to."""
        return self.type in DECISION_TYPES or self.status != "ok"


@dataclass(frozen=True)
class PastCycle:
    """A finished invocation with its remembered calls, in order."""

    at: datetime
    response: str | None
    calls: Sequence[PastCall]

    @cached_property
    def decisions(self) -> Sequence[PastDecision]:
        """Its decisions in words, newest first, or its answer if it made none. A backtest shows them in many views."""
        lines = [_line(call) for call in reversed(self.calls) if call.type in DECISION_TYPES]
        if not lines and self.response is not None:
            lines = [shortened(self.response, LINE_MAX)]
        return [PastDecision(at=self.at, text=line) for line in lines]


def note_of(call: ToolCall) -> str | None:
    """Return the note that a call wrote for later views; None for any other call."""
    if call.type != "NOTE" or call.status != "ok":
        return None
    text: str | None = call.metadata["decisions"][0].get("text")
    return text


def remember(note: str | None, cycles: Sequence[PastCycle], last_at: datetime | None) -> Memory:
    """Return an agent's memory of its last answered cycles, which are given newest first.

    `last_at` is the time of its last cycle, answered or not: only the calls of that cycle count as refused.
    """
    decisions = [decision for cycle in cycles for decision in cycle.decisions]
    last_calls = cycles[0].calls if cycles and cycles[0].at == last_at else ()
    refused = [call for call in last_calls if call.status != "ok"]
    return Memory(
        note=note,
        decisions=tuple(decisions[: DECISIONS_SHOWN + DECISIONS_ADDED_MAX]),
        refused=tuple(f"{_words(call)}: {shortened(_reason(call), REFUSAL_MAX)}" for call in refused[:REFUSALS_SHOWN]),
        looked_at=cycles[0].at if cycles else None,
    )


def shortened(text: str, length: int) -> str:
    """Return a text on one line, cut to a length where it is longer: between words, and never within a figure."""
    line = " ".join(text.split())
    if len(line) <= length:
        return line
    whole, _, _ = line[:length].rpartition(" ")
    return f"{whole or _CUT_FIGURE.sub('', line[: length - 1])}…"


def _line(call: PastCall) -> str:
    """Describe the decision, after its outcome if that is worth mentioning."""
    if call.status != "ok":
        return f"{call.status} ({call.results[0].get('rule') or 'error'}): {_words(call)}"
    filled = " and ".join(
        f"{result['filledQuantity']} at {float(price):.8g}"
        for result in call.results
        if (price := result.get("averagePrice")) is not None
    )
    return f"filled {filled}: {_words(call)}" if filled else _words(call)


def _words(call: PastCall) -> str:
    """Return the tool and its arguments, for each decision of the call."""
    return " and ".join(_words_of(call.type, arguments) for arguments in call.decisions or [{}])


def _words_of(kind: ToolCallType, arguments: Mapping[str, Any]) -> str:
    """Return the tool and its arguments: words without names, figures with names."""
    if kind == "HOLDING" and arguments:
        return shortened(f"holding: {arguments['reason']}", LINE_MAX)
    tool = PLACE_ORDER if "clientOrderId" in arguments else _TOOLS[kind]
    values = {**arguments, **(arguments.get("exitPlan") or {})}  # its fields are in no order
    names = dict.fromkeys((*RECORDED_TOOLS[tool].__struct_encode_fields__, *_PLAN))
    return " ".join([tool, *_arguments({name: values.get(name) for name in names})])


def _arguments(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if value in (None, False) or name in _LEFT_OUT:
            continue
        if name == "targets":
            yield " ".join([name, *(f"{each['fraction']:.10g} at {each['price']:.10g}" for each in value)])
        elif isinstance(value, str):
            yield f"{name} {value}" if name == "timeExit" else shortened(value, LINE_MAX)
        else:
            yield name if value is True else f"{name} {value:.10g}"


def _reason(call: PastCall) -> str:
    return str(call.results[0].get("reason") or call.results[0].get("error"))
