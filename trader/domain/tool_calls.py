"""Reading a tool call: from the name and the JSON text a model sent to a decision, or to words about the mistake."""

from typing import Any, NamedTuple

import msgspec

from trader.domain.conversation import ToolRequest, storable
from trader.domain.records import ToolCallType
from trader.domain.tools import TOOL_CALL_TYPES, TOOLS, Decision

ARGUMENTS_MAX = 20_000
"""Characters; what is longer is not read, and cut in the record."""


class BadCall(NamedTuple):
    """A call that cannot be executed: what was wrong and what is allowed."""

    error: str


def decode(request: ToolRequest) -> Decision | BadCall:
    """The decision of a call. Strict: unknown fields, wrong types and values out of bounds are mistakes."""
    struct = TOOLS.get(request.name)
    if struct is None:
        return BadCall(f"There is no tool {request.name[:100]!r}. The tools are: {', '.join(TOOLS)}.")
    if len(request.arguments) > ARGUMENTS_MAX:
        return BadCall(f"The arguments have more than {ARGUMENTS_MAX} characters.")
    try:
        given = msgspec.json.decode(request.arguments)
        return msgspec.convert(storable(given), struct)
    except msgspec.ValidationError as error:
        return BadCall(f"Bad arguments: {error}. {request.name} takes {_signature(struct)}.")
    except (msgspec.DecodeError, RecursionError, OverflowError, UnicodeEncodeError) as error:
        return BadCall(f"The arguments are not JSON: {error}. {request.name} takes {_signature(struct)}.")


def _signature(struct: type[Decision]) -> str:
    fields = msgspec.structs.fields(struct)
    return "{" + ", ".join(field.encode_name + ("" if field.required else "?") for field in fields) + "}"


def call_type(request: ToolRequest) -> ToolCallType:
    """What the call is recorded as. The record knows the tools only: a call of none of them did nothing (HOLDING)."""
    return TOOL_CALL_TYPES.get(request.name, "HOLDING")


def raw_of(request: ToolRequest) -> dict[str, Any]:
    """The call as it came, for the record."""
    return {"name": request.name[:200], "arguments": request.arguments[:ARGUMENTS_MAX]}
