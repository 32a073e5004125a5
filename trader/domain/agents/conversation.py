"""One step of a run, between the workflow and whatever decides: an AI provider or a rule agent."""

from decimal import Decimal
from typing import Any, Final, Literal

import msgspec

from trader.domain.agents.view import View
from trader.domain.models import Model

NESTED_MAX: Final = 400
"""How deep lists and objects may lie within each other in JSON of others: as deep as all who read it later go."""

Message = dict[str, Any]
"""A message of the chat-completions protocol."""


class ToolRequest(msgspec.Struct, frozen=True):
    """A tool call as it was asked for. `arguments` is the JSON text as it came, which may be anything."""

    id: str
    name: str
    arguments: str


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What is put to a provider. `number` counts the steps of the run from 1.

    AI providers read `messages`; rule agents read `view`, and `answer_tokens_max` bounds an AI's answer.
    """

    model: Model
    temperature: float
    number: int
    view: View
    messages: list[Message]
    answer_tokens_max: int


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider said. `message` is what goes back to it in the next turn, `raw` its answer as it came.

    `model` is the one that answered and `key_number` the provider's key, from 1 (None: no key). Tokens are 0 when the
    provider does not report them, `cost_usd` is None then; `tokens_spent` is what counts against the run's budget,
    estimated in that case. `duration_ms` is how long the provider took in real time, whatever the clock of the market
    says (None: it took none). `cut_by` is what ended it before all was said: its limit of tokens
    (`length`) or a filter of the provider (None: nothing did).
    """

    text: str | None
    calls: tuple[ToolRequest, ...]
    message: Message
    model: str
    raw: str = ""
    key_number: int | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: Decimal | None = None
    tokens_spent: int = 0
    duration_ms: int | None = None
    cut_by: Literal["length", "content_filter"] | None = None


def storable(value: Any, depth: int = NESTED_MAX) -> Any:
    """The JSON value without NUL characters, which PostgreSQL cannot hold in any text.

    :raises RecursionError: it is nested deeper than `depth`
    """
    if isinstance(value, str):
        return value.replace("\x00", "")
    if isinstance(value, list | dict) and not depth:
        raise RecursionError(f"nested more than {NESTED_MAX} deep")
    if isinstance(value, list):
        return [storable(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {storable(key): storable(item, depth - 1) for key, item in value.items()}
    return value
