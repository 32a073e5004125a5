"""The tools of an agent: one struct per tool, the JSON Schemas shown to models, and the decoder of their calls.

The schemas are strict in the sense of the providers: every property is required, optional ones are nullable, and only
keywords that every provider supports are used. The descriptions state the bounds, and the decoder enforces them; it
treats null and absence the same. Numbers are JSON numbers; `domain.money.from_number` converts them to Decimal.
"""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from trader.agents.domain.conversation import ModelAnswer, ToolRequest, storable
from trader.agents.domain.invocations import ToolCallType
from trader.agents.domain.models import DeclaredUsage
from trader.core.clock import input_time
from trader.core.inputs import issues_of, without_nulls
from trader.core.money import from_number
from trader.exchange.domain.orders import OrderType, Side
from trader.market.domain.markets import Interval

NOTE_MAX: Final = 600
"""Maximum characters of the note that an agent keeps for itself."""

PARTS_MAX: Final = 10
PART_MAX: Final = 1_000
"""Maximum parts of a note of an external agent, and characters of a part."""

Symbol = Annotated[str, Meta(min_length=1, max_length=32, description="A market.")]
Price = Annotated[float, Meta(gt=0, le=1e12)]
InvalidationPrice = Annotated[
    Price | None, Meta(description="Mark price that closes the position as a wrong idea, on the stop's side.")
]


Tag = Annotated[
    Annotated[str, Meta(min_length=1, max_length=100)] | None,
    Meta(description="Your own word for the order, which a backtest shows with the trade that it opens or closes."),
]


class Tool(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """Arguments of a tool call.

    Numbers must be finite, and times within the range of inputs.
    """

    def __post_init__(self) -> None:
        for field, name in zip(self.__struct_fields__, self.__struct_encode_fields__, strict=True):
            value = getattr(self, field)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"`{name}` must be a finite number")
            if isinstance(value, datetime):
                try:
                    input_time(value)
                except ValueError as error:
                    raise ValueError(f"`{name}`: {error}") from None

    @property
    def orders(self) -> tuple[Any, ...]:
        """The calls that it consists of: itself, or the two orders of a pair."""
        return (self,)


class PlannedTarget(Tool, frozen=True, kw_only=True):
    """A limit on the winning side that closes a fraction of the position, as a maker."""

    price: Price
    fraction: Annotated[float, Meta(gt=0, le=1)]


Targets = Annotated[list[PlannedTarget], Meta(max_length=3)] | None


class CreatePosition(Tool, frozen=True, kw_only=True):
    """Open a position at market, or add to one on the same side; on the other side it closes what you hold and opens
    `quantity` the new way. Its exit plan replaces the one before."""

    symbol: Symbol
    side: Annotated[Side, Meta(description="LONG gains as the price rises.")]
    quantity: Annotated[
        float,
        Meta(gt=0, le=1e12, description="In base units; rounded down to the lot."),
    ]
    leverage: Annotated[float, Meta(ge=1, le=100, description="Notional / margin of this order.")]
    stop: Annotated[
        Price,
        Meta(description="Mark price that closes the position at a loss: below the mark for LONG, above for SHORT."),
    ]
    target: Annotated[Price | None, Meta(description="Mark price that takes the profit; null for none.")] = None
    invalidation: Annotated[
        str, Meta(min_length=1, max_length=1000, description="In words: what would prove this trade wrong.")
    ]
    invalidation_price: InvalidationPrice = None
    time_exit: Annotated[
        Annotated[datetime, Meta(tz=True)] | None,
        Meta(description="ISO 8601 UTC time that closes it at any price; null for none."),
    ] = None
    trailing_distance: Annotated[
        Price | None, Meta(description="How far behind the mark the stop follows it; null for a fixed stop.")
    ] = None
    targets: Annotated[Targets, Meta(description="Up to 3 limits that rest and each close a fraction.")] = None
    confidence: Annotated[float, Meta(ge=0, le=100, description="How sure you are, in percent. You are scored on it.")]
    tag: Tag = None


class ClosePosition(Tool, frozen=True, kw_only=True):
    """Close a position at market, or a part of it."""

    symbol: Symbol
    fraction: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None,
        Meta(description="Part of the position to close; null closes all of it."),
    ] = None
    tag: Tag = None


class UpdateExitPlan(Tool, frozen=True, kw_only=True):
    """Change the exit plan of a position. What is null stays as it is."""

    symbol: Symbol
    stop: Annotated[Price | None, Meta(description="New stop, on the losing side of the present mark.")] = None
    target: Annotated[Price | None, Meta(description="New target, on the winning side of the present mark.")] = None
    invalidation: Annotated[
        Annotated[str, Meta(min_length=1, max_length=1000)] | None,
        Meta(description="In words: what would prove this trade wrong."),
    ] = None
    invalidation_price: InvalidationPrice = None
    time_exit: Annotated[
        Annotated[datetime, Meta(tz=True)] | None,
        Meta(description="ISO 8601 UTC time that closes it at any price."),
    ] = None
    trailing_distance: Annotated[
        Price | None, Meta(description="How far behind the mark the stop follows it from now on.")
    ] = None
    targets: Annotated[Targets, Meta(description="In place of all targets; an empty list removes them.")] = None


class FetchIndicators(Tool, frozen=True, kw_only=True):
    """Read the candles and indicators of a market at an interval that is not in the data yet."""

    symbol: Symbol
    interval: Annotated[Interval, Meta(description="Candle length.")]


class FetchOrderBook(Tool, frozen=True, kw_only=True):
    """Read the ten best levels of either side of a market's order book, as an order of yours would meet it."""

    symbol: Symbol


class Note(Tool, frozen=True, kw_only=True):
    """Write a note to yourself. It replaces the one before, and you see it in every later cycle as `note`."""

    text: Annotated[str, Meta(min_length=1, max_length=NOTE_MAX, description="What you want to remember.")]


class NotePart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A part of what an agent does or thinks while it decides."""

    kind: Annotated[Literal["rationale", "step", "call", "result"], Meta(description="What the text is.")] = "rationale"
    title: Annotated[Annotated[str, Meta(min_length=1, max_length=100)] | None, Meta(description="A short name.")] = (
        None
    )
    text: Annotated[str, Meta(min_length=1, max_length=PART_MAX, description="The step, reason, call or result.")]


class AgentNote(Tool, frozen=True, kw_only=True, omit_defaults=True):
    """Show people your steps and reasons while you decide, as `parts`, or write a note to yourself, as `text`. The note
    replaces the one before, and you see it in later views."""

    text: Annotated[
        Annotated[str, Meta(min_length=1, max_length=NOTE_MAX)] | None, Meta(description="What you want to remember.")
    ] = None
    parts: Annotated[
        Annotated[list[NotePart], Meta(min_length=1, max_length=PARTS_MAX)] | None,
        Meta(description="Your steps and reasons, in order; each call adds to those before."),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text is None and self.parts is None:
            raise ValueError("`text` or `parts` is required")


class Holding(Tool, frozen=True, kw_only=True):
    """End this cycle, with what you did or why you do nothing, in an answer of its own."""

    reason: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=4000,
            pattern=r"\w",  # some models repeat the "..." of an example
            description="why, in words and with the figures that decided it, in 300 characters",
        ),
    ]


class Hold(Holding, frozen=True, kw_only=True, omit_defaults=True):
    """End this decision, with what you did or why you do nothing. `usage` declares what the decision cost you: it is
    shown as declared, and not verified."""

    usage: Annotated[DeclaredUsage | None, Meta(description="Your model, steps, tokens and cost in USD.")] = None


AgentOrderId = Annotated[
    str,
    Meta(pattern=r"^[ -~]{1,128}$(?!\n)", description="your own id of this order, 1 to 128 printable ASCII characters"),
]


class PlannedExit(Tool, frozen=True, kw_only=True):
    """When to close the position that an order opens. A stop is mandatory for orders that may open."""

    stop: Price | None = None
    target: Price | None = None
    invalidation: Annotated[str, Meta(min_length=1, max_length=1000)] | None = None
    invalidation_price: Price | None = None
    time_exit: Annotated[datetime, Meta(tz=True)] | None = None
    trailing_distance: Price | None = None
    targets: Targets = None


class PlaceOrder(Tool, frozen=True, kw_only=True):
    """Place a market or limit order. One that may open a position needs a stop in `exitPlan`. A limit order rests until
    it fills or is canceled."""

    symbol: Symbol
    side: Annotated[
        Literal["buy", "sell", "long", "short"],
        Meta(description="`long` is the same as `buy`, and `short` the same as `sell`."),
    ]
    quantity: Annotated[float, Meta(gt=0, le=1e12, description="Size in base units; rounded down to the lot.")]
    client_order_id: Annotated[
        AgentOrderId | None,
        Meta(
            description="Your own id of this order; null for none. The same id gets the first answer again and trades "
            "once; with other contents it is refused."
        ),
    ] = None
    type: Annotated[OrderType, Meta(description="A limit order has a `limitPrice`.")] = OrderType.MARKET
    limit_price: Annotated[Price | None, Meta(description="For limit orders only.")] = None
    leverage: Annotated[
        Annotated[float, Meta(ge=1, le=100)] | None, Meta(description="Notional / margin of this order; null for 1.")
    ] = None
    reduce_only: Annotated[bool, Meta(description="Only reduce the position; cut to its size.")] = False
    post_only: Annotated[bool, Meta(description="Refuse a limit order that would take from the book.")] = False
    exit_plan: Annotated[PlannedExit | None, Meta(description="When to close what this order opens.")] = None
    confidence: Annotated[
        Annotated[float, Meta(ge=0, le=100)] | None, Meta(description="How sure you are, in percent.")
    ] = None
    tag: Tag = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.type == OrderType.LIMIT) != (self.limit_price is not None):  # strategies may give it as text
            raise ValueError("`limitPrice` is required for a limit order, and has no use for a market order")
        if self.post_only and self.limit_price is None:
            raise ValueError("`postOnly` is for limit orders: a market order always takes")

    @property
    def opens(self) -> Side:
        """The side of the position that it opens or adds to."""
        return Side.LONG if self.side in ("buy", "long") else Side.SHORT


class PlacePair(Tool, frozen=True, kw_only=True):
    """Place two market orders at the same moment, the second after the first. Both fill completely, or neither is
    placed."""

    first: PlaceOrder
    second: PlaceOrder

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, order in (("first", self.first), ("second", self.second)):
            if not isinstance(order, PlaceOrder):  # a strategy may have given anything
                raise ValueError(f"`{name}` is {order!r:.200}; expected a PlaceOrder")
            if order.type != OrderType.MARKET:
                raise ValueError(f"`{name}` is a {order.type} order; a pair has market orders, as none of it may rest")
            if order.client_order_id is not None:
                given = f"the clientOrderId {order.client_order_id!r:.200}"
                raise ValueError(f"`{name}` has {given}; the orders of a pair have none: they are one call")

    @property
    def orders(self) -> tuple[PlaceOrder, PlaceOrder]:
        return self.first, self.second

    @property
    def symbol(self) -> str:
        """The first order's market, under which the call is listed."""
        return self.first.symbol

    @property
    def reduce_only(self) -> bool:
        return self.first.reduce_only and self.second.reduce_only


class CancelOrder(Tool, frozen=True, kw_only=True):
    """Cancel a resting order of a market."""

    symbol: Symbol
    order_id: Annotated[str, Meta(min_length=1, max_length=64, description="The `id` of a resting order.")]


class HaltTrading(Tool, frozen=True, kw_only=True):
    """Open nothing from now on: `agent.halt` in a backtest. In a service that is a command, not a call."""

    reason: Annotated[str, Meta(min_length=1, max_length=500, description="Why.")]


Change = CreatePosition | ClosePosition | UpdateExitPlan | PlaceOrder | PlacePair | CancelOrder
"""The decisions that change the books."""

Decision = Change | FetchIndicators | FetchOrderBook | Note | AgentNote | Holding | HaltTrading

TOOLS: Final[Mapping[str, type[Decision]]] = {
    struct.__name__[0].lower() + struct.__name__[1:]: struct
    for struct in (
        CreatePosition, ClosePosition, UpdateExitPlan, PlaceOrder, CancelOrder, FetchIndicators, FetchOrderBook, Note,
        Holding,
    )
}  # fmt: skip
"""The tools by the name that models call, which is the struct's name in camel case."""

PLACE_ORDER: Final = "placeOrder"
"""The simulator's order, placed through the guard."""

ORDER_TOOLS: Final = frozenset({"createPosition", "closePosition", PLACE_ORDER})
"""The tools that place an order; `holding` is refused in the same answer."""

RESTING_TOOLS: Final = (PLACE_ORDER, "cancelOrder")
"""The tools of orders that rest."""

TOOL_CALL_TYPES: Final[Mapping[str, ToolCallType]] = {
    name: msgspec.convert(re.sub("([A-Z])", r"_\1", name).upper(), ToolCallType)
    for name in TOOLS
    if name != PLACE_ORDER
}
"""The type recorded for a call of each tool: its name in uppercase. That of an order depends on what it may do."""

AGENT_TOOLS: Final[Mapping[str, type[Decision]]] = {
    PLACE_ORDER: PlaceOrder,
    "closePosition": ClosePosition,
    "setExitPlan": UpdateExitPlan,
    "getCandles": FetchIndicators,
    "getOrderBook": FetchOrderBook,
    "note": AgentNote,
    "hold": Hold,
}
"""The tools of external agents by procedure name, which equals the simulator's if it has the procedure."""

RECORDED_TOOLS: Final[Mapping[str, type[Decision]]] = {
    **TOOLS, "placePair": PlacePair, "note": AgentNote, "hold": Hold, "halt": HaltTrading,
}  # fmt: skip
"""The tools by the names under which the calls of all agents are recorded. Strategies may use all that change books."""

TOOL_NAMES: Final[Mapping[type[Decision], str]] = {
    struct: name for name, struct in (*TOOLS.items(), *RECORDED_TOOLS.items())
}

CALLS_MAX: Final = 100
"""Maximum calls of one decision of an external agent."""

ARGUMENTS_MAX = 20_000
"""Maximum characters of arguments; longer ones are not decoded, and are truncated in the record."""


class BadCall(NamedTuple):
    """A call that cannot be executed, with what is wrong and what is allowed."""

    error: str


def decode(request: ToolRequest, tools: Mapping[str, type[Decision]] = TOOLS) -> Decision | BadCall:
    """Return the decision of a call. Unknown fields, wrong types and values out of bounds are errors."""
    struct = tools.get(request.name)
    if struct is None:
        return BadCall(f"There is no tool {request.name[:100]!r}. The tools are: {', '.join(tools)}.")
    if len(request.arguments) > ARGUMENTS_MAX:
        return BadCall(f"The arguments have more than {ARGUMENTS_MAX} characters.")
    try:
        arguments = without_nulls(struct, storable(msgspec.json.decode(request.arguments)))
    except (msgspec.DecodeError, RecursionError, OverflowError, UnicodeEncodeError) as error:
        return BadCall(f"The arguments are not JSON: {error}. {request.name} takes {_signature(struct)}.")
    try:
        return msgspec.convert(arguments, struct)
    except msgspec.ValidationError as error:
        issues = "; ".join(issue.sentence for issue in issues_of(struct, arguments, error))
        return BadCall(f"Bad arguments: {issues}. {request.name} takes {_signature(struct)}.")
    except OverflowError as error:
        return BadCall(f"Bad arguments: {error}. {request.name} takes {_signature(struct)}.")


def _signature(struct: type[Decision], hidden: Collection[str] = ()) -> str:
    fields = (field for field in msgspec.structs.fields(struct) if field.encode_name not in hidden)
    return "{" + ", ".join(field.encode_name + ("" if field.required else "?") for field in fields) + "}"


def call_type(request: ToolRequest, decision: Decision | None) -> ToolCallType:
    """Return the recorded type of the call. A call of an unknown tool does nothing, so its type is HOLDING.

    A halt trades nothing and is not remembered as a decision, like a note.
    """
    if isinstance(decision, PlaceOrder | PlacePair):
        return "CLOSE_POSITION" if decision.reduce_only else "CREATE_POSITION"
    if isinstance(decision, CancelOrder):
        return "CANCEL_ORDER"
    if isinstance(decision, HaltTrading):
        return "NOTE"
    return TOOL_CALL_TYPES.get(request.name, "HOLDING")


def request_of(number: int, decision: Decision) -> ToolRequest:
    """Return a decision made by code as a tool call with this number, from 1, in an answer."""
    return ToolRequest(f"call_{number}", TOOL_NAMES[type(decision)], msgspec.json.encode(decision).decode())


def answer_of(request: ToolRequest, decision: Decision, model: str) -> ModelAnswer:
    """Return a call of an external agent as an answer of its model, with the tokens and cost that it declares."""
    usage = (decision.usage if isinstance(decision, Hold) else None) or DeclaredUsage()
    return ModelAnswer(
        text=None,
        calls=(request,),
        message={},
        model=model,
        input_tokens=usage.input_tokens or 0,
        output_tokens=usage.output_tokens or 0,
        cost_usd=None if usage.cost_usd is None else from_number(usage.cost_usd),
    )


def raw_of(request: ToolRequest) -> dict[str, Any]:
    """Return the call for the record: as decoded, with the form that it had in a text and the arguments as received."""
    kept = {"name": request.name[:200], "arguments": request.arguments[:ARGUMENTS_MAX]}
    sent = None if request.sent is None else request.sent[:ARGUMENTS_MAX]
    return kept | {name: value for name, value in (("form", request.form), ("sent", sent)) if value is not None}


_NOT_OF_MODELS: Final = ("clientOrderId", "tag")
"""Fields that models are not shown: their calls have ids of their own, and say why."""

_KEPT = ("type", "enum", "description", "anyOf", "items")
_BOUNDS: Final[Mapping[str, str]] = {
    "minimum": "at least {:g}",
    "maximum": "at most {:g}",
    "maxLength": "at most {:g} characters",
}
_UNSTATED = 1e12
"""A bound that only keeps arithmetic finite is not shown to models."""


def _strict(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    if "$ref" in schema:
        target = definitions[schema["$ref"].rpartition("/")[2]]
        return _strict({**target, **{key: value for key, value in schema.items() if key != "$ref"}}, definitions)
    result = {key: schema[key] for key in _KEPT if key in schema}
    if "properties" in schema:
        return _closed(_fields(schema, definitions))  # the field that has it describes it
    if "items" in schema:
        result["items"] = _strict(schema["items"], definitions)
    if "anyOf" in schema:
        result["anyOf"] = [_strict(option, definitions) for option in schema["anyOf"]]
    if "enum" in schema and "type" not in schema:
        result["type"] = "string"
    bounds = [words.format(schema[key]) for key, words in _BOUNDS.items() if schema.get(key, _UNSTATED) < _UNSTATED]
    if bounds:
        result["description"] = " ".join(part for part in (schema.get("description"), f"({', '.join(bounds)})") if part)
    return result


def _fields(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    return {field: _strict(value, definitions) for field, value in schema["properties"].items()}


def _closed(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _tool(name: str, struct: type[Decision]) -> dict[str, Any]:
    (_,), definitions = msgspec.json.schema_components((struct,), ref_template="#/$defs/{name}")
    properties = _fields(definitions[struct.__name__], definitions)
    for name_of_field in _NOT_OF_MODELS:
        properties.pop(name_of_field, None)
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": " ".join((struct.__doc__ or "").split()),
            "strict": True,
            "parameters": _closed(properties),
        },
    }


def calls_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON Schema of an answer that has its calls of these tools as JSON."""
    each = [tool["function"] for tool in tools]
    calls = [
        _closed({"name": {"type": "string", "enum": [tool["name"]]}, "arguments": tool["parameters"]}) for tool in each
    ]
    return _closed({"calls": {"type": "array", "items": {"anyOf": calls}}})


def calls_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Describe the tools to a model that calls them by a JSON answer."""
    lines = [
        f"- {name} {_signature(TOOLS[name], _NOT_OF_MODELS)}: {tool['function']['description']}"
        for tool in tools
        for name in (tool["function"]["name"],)
    ]
    form = '{"calls": [{"name": "holding", "arguments": {"reason": "..."}}]}'
    return "\n".join(["## The tools", "", f"Answer with your calls as JSON and nothing else, such as {form}", *lines])


@lru_cache(maxsize=64)
def tool_schemas(symbols: tuple[str, ...], off: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the `tools` of a chat-completions request, whose calls may name these markets, without those in `off`."""
    tools = [_tool(name, struct) for name, struct in TOOLS.items() if name not in off]
    for tool in tools:
        properties = tool["function"]["parameters"]["properties"]
        if "symbol" in properties:
            properties["symbol"] = {"type": "string", "enum": list(symbols)}
    return tools
