"""Classification of provider errors: refusals of the key, its account, the model, a field, or only this request.

Providers use the statuses 400 to 429 differently, so codes and, as a last resort, words decide. An ambiguous refusal
gets the narrowest scope: the request, or the key for this model only.
"""

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, Literal

import orjson

from trader.agents.domain.conversation import storable, value_in

About = Literal["key", "credit", "size", "rate", "model", "request"]
"""The subject of a refusal: the key, its account's credit, this request's possible cost, the request rate, the model,
or only the request."""

NOT_ABOUT_KEY: Final = frozenset({"reasons", "flagged_input", "provider_name"})
"""Metadata that a gateway adds to a 401 or 403 that comes from moderation or an upstream provider, not from its key."""

CREDIT_CODES: Final = frozenset(
    {
        "billing_hard_limit_reached",
        "billing_not_active",
        "insufficient_balance",
        "insufficient_credits",
        "insufficient_quota",
        "payment_required",
    }
)
CREDIT_WORDS: Final = re.compile(
    r"insufficient (?:account )?(?:balance|credit|fund)|credit balance is too low|key limit exceeded"
    r"|(?:out of|no|used all)[\w ]{0,20} credits",
    re.IGNORECASE,
)
SIZE_WORDS: Final = re.compile(r"\bmax_(?:completion_|output_)?tokens\b", re.IGNORECASE)
"""In a 402, indicates that a smaller request from the same account would be accepted."""

LIMIT_CODES: Final = CREDIT_CODES | {
    "429",
    "rate_limit_error",
    "rate_limit_exceeded",
    "rate_limited",
    "resource_exhausted",
    "too_many_requests",
}
"""Codes of errors inside a 200 that would have the status 429 outside of it."""

KEY_CODES: Final = frozenset(
    {"account_deactivated", "api_key_invalid", "authentication_error", "invalid_api_key", "invalid_authentication"}
)
KEY_WORDS: Final = re.compile(
    r"\b(?:invalid|incorrect|expired|revoked|disabled|missing)\s+(?:api[ _-]?key|credentials)\b"
    r"|\bapi[ _-]?key\b[^.]{0,30}\b(?:invalid|incorrect|not valid|expired|revoked|disabled)\b",
    re.IGNORECASE,
)

CODE_NAMES: Final = frozenset({"code", "reason", "status", "type"})
FIELD_NAMES: Final = frozenset({"field", "loc", "param", "parameter"})
"""Keys of an error that hold its code, and keys that hold the name of the refused field."""

ECHO_NAMES: Final = frozenset({"ctx", "input"})
"""Keys under which validators repeat the request."""

FIELD_REFUSED: Final = re.compile(
    r"deprecated|does(?: not|n't) (?:accept|allow|recogni[sz]e|support)|extra[_ ](?:fields?|forbidden|inputs?)"
    r"|forbidden|incompatible|invalid|must (?:be|not)|(?:is|are) not|no longer|not (?:accepted|allowed|available)"
    r"|not (?:permitted|supported)|only (?:the default|support|\d)|remove|unexpected|unknown|unrecogni[sz]ed"
    r"|unsupported",
    re.IGNORECASE,
)
CONTEXT_WORDS: Final = re.compile(
    r"context[ _-]?(?:length|window|size|limit)|exceed_context|too many tokens|reduce the length|`inputs` tokens"
    r"|(?:prompt|input|request|message)\w*\b[^.\n]{0,60}\btoo (?:long|large)|maximum (?:model|prompt|number of tokens)",
    re.IGNORECASE,
)
CONTEXT_LIMITS: Final = tuple(
    re.compile(form, re.IGNORECASE)
    for form in (
        r"(?:>|<=)\s*(\d{3,9})",
        r"\b(?:max(?:imum)?|context|limit)\b[^\d>\n]{0,60}?\b(\d{3,9})\b",
        r"\b(\d{3,9})\s+(?:tokens?\s+)?max",
    )
)
"""How Anthropic and TGI, OpenAI with those after it (vLLM, llama.cpp, LM Studio, Gemini), and Mistral state a limit."""

CONTEXT_FIELD: Final = re.compile(r'"n_ctx"\s*:\s*(\d{1,9})\b')

CONTEXT_MIN: Final = 256

NEAR: Final = 60
"""Maximum characters between a field's name and the words that refuse it."""

PARTS_MAX: Final = 200
"""Maximum number of texts examined per error."""


def subject_of(status: int, content: bytes) -> About:
    """Return the subject of a refusal with this status (400 to 499)."""
    error = decoded(content)
    codes = {text.lower() for name, text in _texts(error) if name in CODE_NAMES}
    said = _joined(error)
    added = value_in(error, "error", "metadata")
    has_begun = value_in(error, "choices")  # the model answered before the refusal
    if status in {401, 403} and (has_begun or (isinstance(added, dict) and NOT_ABOUT_KEY & added.keys())):
        return "request"
    if status == 402:
        return "size" if SIZE_WORDS.search(said) or value_in(added, "provider_name") else "credit"
    if status in {400, 403, 429} and (codes & CREDIT_CODES or CREDIT_WORDS.search(said)):
        return "credit"
    if status == 401 or (status in {400, 403} and (codes & KEY_CODES or KEY_WORDS.search(said))):
        return "key"
    if status == 403:
        return "model"
    return "rate" if status == 429 else "request"


def status_of(error: Any) -> int:
    """Return the status of an error inside a 200: its `code` if that is one, 429 if it names a limit, else 502."""
    code, *names = [error.get(name) for name in ("code", "type", "status")] if isinstance(error, dict) else [None]
    if isinstance(code, int) and 400 <= code <= 599:
        return code
    codes = (code, *names)
    return 429 if any(str(code).lower() in LIMIT_CODES for code in codes) else 502


def refused_field(content: bytes, fields: Collection[str]) -> str | None:
    """Return the request field that an error refuses by name; None for any other error.

    A field that the error names explicitly wins over a field quoted in its text, which wins over a field mentioned near
    words of refusal. Field names that are everyday words are not matched in the last way.
    """
    error = decoded(content)
    named = {re.split(r"[.\[]", text, maxsplit=1)[0] for name, text in _texts(error) if name in FIELD_NAMES}
    said = _joined(error)
    if named or FIELD_REFUSED.search(said):
        for is_refused in (lambda field: field in named, _quotes(said), _mentions(said)):
            if refused := sorted(field for field in fields if is_refused(field)):
                return refused[0]
    # Each server has words of its own against `required`, and every model can be asked without the field.
    return "tool_choice" if "tool_choice" in fields and re.search(r"(?i)\btool[ _]choice\b", said) else None


def context_limit(content: bytes, asked: int) -> int | None:
    """Return the tokens of the context that an error says a request of `asked` tokens exceeds; 0: it does not say how
    many, and None: the error is about something else. A limit that the request does not exceed explains nothing."""
    said = _joined(decoded(content))
    if not CONTEXT_WORDS.search(said):
        return None
    of_llama = CONTEXT_FIELD.findall(content.decode(errors="replace"))
    stated = (*of_llama, *(found for form in CONTEXT_LIMITS for found in form.findall(said)))
    return next((tokens for tokens in map(int, stated) if CONTEXT_MIN <= tokens < asked), 0)


def is_loading(content: bytes) -> bool:
    """Return whether a server says that it is loading its model, as llama.cpp, TGI and LM Studio do."""
    return re.search(r"(?i)\b(?:loading|load(?:ed)? yet|starting|warming up)\b", _joined(decoded(content))) is not None


def words_of(content: bytes) -> str:
    """Return the message of an error on one line."""
    error = decoded(content)
    message = next((text for name, text in _texts(error) if name == "message" and text.strip()), None)
    return brief(message or content.decode(errors="replace")) if error else ""


def brief(text: str, length: int = 300) -> str:
    """Return the beginning of a text on one line, for an error message."""
    return storable(" ".join(text.split()))[:length]  # type: ignore[no-any-return]  # storable preserves strings


def _quotes(said: str) -> Callable[[str], bool]:
    refusal = FIELD_REFUSED.search(said)
    label = r"(?:argument|field|input|key|option|param|parameter|property)s?"

    def is_refused(field: str) -> bool:
        name = re.escape(field)
        quoted = rf"""['"`]{name}(?:[.\[][^'"`]*)?['"`]"""
        return bool(refusal and re.search(rf"{quoted}|\b{label}:?\s+{name}\b|\b{name}\s+{label}\b", said))

    return is_refused


def _mentions(said: str) -> Callable[[str], bool]:
    def is_refused(field: str) -> bool:
        if "_" not in field and field != "temperature":
            return False
        return any(
            FIELD_REFUSED.search(said[max(0, mention.start() - NEAR) : mention.end() + NEAR])
            for mention in re.finditer(rf"\b{re.escape(field)}\b", said)
        )

    return is_refused


def decoded(content: bytes) -> Any:
    """Return the JSON value of an answer, or its text if it is not JSON."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")


def _texts(value: Any, name: str = "", depth: int = 8) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each text of an error, except the parts that echo the request."""
    if isinstance(value, str):
        yield name, value
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            if key not in ECHO_NAMES:
                yield from _texts(item, key, depth - 1)
    elif depth and isinstance(value, list):
        for item in value[:PARTS_MAX]:
            yield from _texts(item, name, depth - 1)


def _joined(error: Any) -> str:
    return "\n".join(text for _, (_, text) in zip(range(PARTS_MAX), _texts(error), strict=False))
