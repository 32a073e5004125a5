"""Turns and answers: one step of an invocation, between the workflow and an AI provider or a rule agent."""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final, Literal

import msgspec

from trader.agents.domain.models import Model
from trader.agents.domain.view import View

NESTED_MAX: Final = 400
"""Maximum nesting depth of lists and objects in JSON from outside, so that every later reader can decode it."""

REFUSAL_CHARACTERS: Final = 200
"""Maximum characters of a refusal quoted in the reason of a failure."""

_REFUSAL: Final = re.compile(
    r"\W*(?:I(?:['’]m| am) sorry,? (?:but )?|Sorry,? (?:but )?|Unfortunately,? )?I(?:['’]m| am)? "
    r"(?:can(?:no|['’])?t|can not|won['’]t|will not|unable to|not able to|must decline to) "
    r"(?:assist|comply|continue|engage|fulfil|give|help|offer|participate|provide|support)",
    re.IGNORECASE,
)

ChatMessage = dict[str, Any]
"""A message of the chat-completions protocol."""


class ToolRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool call that a model requests. `arguments` is JSON text, which may be invalid, and `sent` is as received if
    they were written in another form. `form` is the form of a call that was read from the answer's text.
    """

    id: str
    name: str
    arguments: str
    form: str | None = None
    sent: str | None = None


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """The input of one step. `number` counts the steps of the invocation from 1.

    AI providers read `messages`, and `answer_tokens_max` limits their answer; rule agents read `view`. `wait_max_s`
    limits the wait for a key in cooldown, and `tokens_max` the tokens of all attempts together (None: no limit). The
    messages were made to fit into `context_tokens` (None: not known).
    """

    model: Model
    temperature: float
    number: int
    view: View
    messages: list[ChatMessage]
    answer_tokens_max: int
    wait_max_s: float = 0.0
    tokens_max: int | None = None
    context_tokens: int | None = None

    @property
    def symbols(self) -> tuple[str, ...]:
        """The markets that its tools may name."""
        return tuple(self.view.markets)


class ModelAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a provider. `message` is sent back to it in the next turn; `raw` is its answer as received.

    `model` is the name of the model that answered, and `key_number` the number of the provider's key, from 1 (None:
    no key). Tokens and a `cost_usd` that the provider does not report are None; `cached_tokens` of the input came
    from its cache, and `cache_write_tokens` were written to it, `cache_write_1h_tokens` of them for an hour.
    `tokens_spent` counts against the budget of the invocation and is estimated where needed. `unmetered_attempts`
    counts the attempts that may have cost unreported tokens, including failed ones before this answer; `unreported`
    is the maximum of those tokens, input and output. `duration_ms` is in real time, whatever the market clock
    (None: no provider was asked); `waited_s` is the part of it spent waiting for keys in cooldown. `calls_left_out`
    counts the calls beyond the limit of an answer.
    `cut_by` is what cut the answer off: its limit of tokens (`length`) or a filter of the provider (None: it is
    complete). `is_refusal`: the protocol reports a refusal by the model, and `text` has its words.
    """

    text: str | None
    calls: tuple[ToolRequest, ...]
    message: ChatMessage
    model: str
    raw: str = ""
    key_number: int | None = None
    input_tokens: int | None = 0
    output_tokens: int | None = 0
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None
    cache_write_1h_tokens: int | None = None
    cost_usd: Decimal | None = None
    tokens_spent: int = 0
    unmetered_attempts: int = 0
    unreported: tuple[int, int] = (0, 0)
    duration_ms: int | None = None
    waited_s: float = 0.0
    calls_left_out: int = 0
    is_refusal: bool = False
    cut_by: Literal["length", "content_filter"] | None = None


def storable(value: Any, depth: int = NESTED_MAX) -> Any:
    """Return the JSON value without NUL characters, which PostgreSQL cannot hold in any text.

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


def value_in(value: Any, *path: str) -> Any:
    """Return what JSON from outside has at the path; None if there is nothing."""
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


_THOUGHTS: Final = ("reasoning_content", "reasoning", "reasoning_details", "thinking", "summary", "text")


def reasoning_in(message: ChatMessage) -> str | None:
    """Return what a model says that it thought, in a message of any protocol; None if it says nothing."""
    listed = [part for name in ("native", "content") if isinstance(message.get(name), list) for part in message[name]]
    parts = [
        part for part in listed if isinstance(part, dict) and (part.get("type") in _THOUGHTS[1:4] or "thought" in part)
    ]
    return next(filter(None, map(_text_in, [*map(message.get, _THOUGHTS[:3]), parts])), None)


def _text_in(value: Any) -> str | None:
    if isinstance(value, dict):
        return next(filter(None, (_text_in(value.get(name)) for name in _THOUGHTS)), None)
    if isinstance(value, list):
        return "\n".join(filter(None, map(_text_in, value))) or None
    return value.strip() or None if isinstance(value, str) else None


def refusal_in(answer: ModelAnswer) -> str | None:
    """Return the beginning of a refusal that the protocol reports, or of a text that begins like one; else None."""
    words = " ".join((answer.text or "").split())[:REFUSAL_CHARACTERS]
    return words if answer.is_refusal or _REFUSAL.match(words) else None
