"""Classification of provider errors: refusal of the key, its account, the model, a field, or this request alone.

Providers use the statuses 400 to 429 in different ways, so codes and, as a last resort, words decide. What is not clear
counts against the least: the request, or the key for this model alone.
"""

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any, Final, Literal

import orjson

from trader.domain.agents.conversation import storable

About = Literal["key", "credit", "size", "rate", "model", "request"]
"""What a refusal is about: the key, its account's credit, what this request may cost, the rate of requests, the model,
or the request alone."""

NOT_ABOUT_KEY: Final = frozenset({"reasons", "flagged_input", "provider_name"})
"""Metadata that a gateway adds to a 401 or 403 not about its key: a moderation or a provider behind it refused."""

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
"""In a 402: a smaller request of the same account would be accepted."""

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
"""Keys of an error under which providers put its code, and the name of a field that they refuse."""

ECHO_NAMES: Final = frozenset({"ctx", "input"})
"""Keys under which validators repeat the request."""

FIELD_REFUSED: Final = re.compile(
    r"deprecated|does(?: not|n't) (?:accept|allow|recogni[sz]e|support)|extra[_ ](?:fields?|forbidden|inputs?)"
    r"|forbidden|incompatible|invalid|must (?:be|not)|(?:is|are) not|no longer|not (?:accepted|allowed|available)"
    r"|not (?:permitted|supported)|only (?:the default|support|\d)|remove|unexpected|unknown|unrecogni[sz]ed"
    r"|unsupported",
    re.IGNORECASE,
)
NEAR: Final = 60
"""Characters between the name of a field and the words that refuse it."""

PARTS_MAX: Final = 200
"""Texts of an error that are looked at."""


def subject_of(status: int, content: bytes) -> About:
    """Return the subject of a refusal with this status (400 to 499)."""
    error = _decoded(content)
    codes = {text.lower() for name, text in _texts(error) if name in CODE_NAMES}
    said = _joined(error)
    if status in {401, 403} and _is_not_about_key(error):
        return "request"
    if status == 402:
        return "size" if SIZE_WORDS.search(said) or _is_from_upstream(error) else "credit"
    if status in {400, 403, 429} and (codes & CREDIT_CODES or CREDIT_WORDS.search(said)):
        return "credit"
    if status == 401 or (status in {400, 403} and (codes & KEY_CODES or KEY_WORDS.search(said))):
        return "key"
    if status == 403:
        return "model"
    return "rate" if status == 429 else "request"


def status_of(error: Any) -> int:
    """Return the status of an error inside a 200, which gateways put in `code`; without one, a server failure."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) and 400 <= code <= 599 else 502


def refused_field(content: bytes, fields: Collection[str]) -> str | None:
    """Return the request field that an error refuses by name, or None for any other error.

    A field that the error names as such wins over one that its text quotes, and that over one that its text mentions
    beside words of refusal. Names that are everyday words are not looked for in the last way.
    """
    error = _decoded(content)
    named = {re.split(r"[.\[]", text, maxsplit=1)[0] for name, text in _texts(error) if name in FIELD_NAMES}
    said = _joined(error)
    if not named and not FIELD_REFUSED.search(said):
        return None
    for is_refused in (lambda field: field in named, _quotes(said), _mentions(said)):
        if refused := sorted(field for field in fields if is_refused(field)):
            return refused[0]
    return None


def words_of(content: bytes) -> str:
    """Return the message of an error in one line."""
    error = _decoded(content)
    message = next((text for name, text in _texts(error) if name == "message" and text.strip()), None)
    return brief(message or content.decode(errors="replace")) if error else ""


def brief(text: str, length: int = 300) -> str:
    """Return the beginning of a text in one line, for an error message."""
    return storable(" ".join(text.split()))[:length]  # type: ignore[no-any-return]  # a string stays one


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


def _is_not_about_key(error: Any) -> bool:
    """Return whether the request was moderated, or refused by the upstream provider or by a model that had started."""
    try:
        return bool(error.get("choices")) or not NOT_ABOUT_KEY.isdisjoint(error["error"]["metadata"])
    except (AttributeError, KeyError, TypeError):
        return False


def _is_from_upstream(error: Any) -> bool:
    """Return whether the gateway reports that its upstream provider refused."""
    try:
        return bool(error["error"]["metadata"]["provider_name"])
    except (KeyError, TypeError):
        return False


def _decoded(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")


def _texts(value: Any, name: str = "", depth: int = 8) -> Iterator[tuple[str, str]]:
    """Yield (key, text) for each text of an error, without the parts that repeat the request."""
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
