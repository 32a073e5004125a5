"""Body styles of the RPC endpoint: bare JSON, and the envelope of the oRPC client.

The path of a request decides its style; two kinds of bodies override the path (see `unwrap`).
"""

import json
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec

from trader.agents.domain.conversation import NESTED_MAX
from trader.api.schemas.common import ENCODER
from trader.core.errors import Issue
from trader.core.logs import printable

_BOM = b"\xef\xbb\xbf"
_EMPTY_OBJECT = b"{}"
_ENVELOPE_KEYS: Final = frozenset({"json", "meta"})
_SHORT_BODIES: Final = {b"": _EMPTY_OBJECT, b"{}": _EMPTY_OBJECT}

_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class BodyStyle(Enum):
    """The style of a body. PLAIN: the object itself. ORPC: `{"json": …}`."""

    PLAIN = "plain"
    ORPC = "orpc"


class Unwrapped(NamedTuple):
    """The style of the response, and the JSON text of the input, or the issue that makes the body unusable."""

    style: BodyStyle
    input: bytes | msgspec.Raw
    issue: Issue | None = None


def unwrap(body: bytes, by_path: BodyStyle) -> Unwrapped:
    """Find the input in a request body.

    An empty body and `{}` mean undefined input, which is `{}`. A body in plain style with exactly the keys of an
    envelope is an envelope; a body in oRPC style that is an object with keys but without `json` is plain.
    """
    known = _SHORT_BODIES.get(body)
    if known is not None:
        return Unwrapped(by_path, known)
    body = body.removeprefix(_BOM)
    if not body.strip():
        return Unwrapped(by_path, _EMPTY_OBJECT)
    issue = text_issue(body)
    if issue is not None:
        return Unwrapped(by_path, body, issue)
    try:
        members = _members.decode(body)
    except msgspec.ValidationError:
        return Unwrapped(by_path, body, Issue((), "expected a JSON object"))
    enveloped = "json" in members and (by_path is BodyStyle.ORPC or members.keys() <= _ENVELOPE_KEYS)
    if enveloped:
        return _opened(members)
    return Unwrapped(BodyStyle.PLAIN if members else by_path, body)


def _opened(members: dict[str, msgspec.Raw]) -> Unwrapped:
    """Return the input of an envelope. `meta` names JavaScript types that JSON lacks: only its shape is checked."""
    inner = members["json"]
    if "meta" in members and bytes(members["meta"])[:1] != b"[":
        return Unwrapped(BodyStyle.ORPC, inner, Issue(("meta",), "expected a list"))
    if bytes(inner)[:1] != b"{":
        return Unwrapped(BodyStyle.ORPC, inner, Issue((), "expected `json` to hold an object"))
    return Unwrapped(BodyStyle.ORPC, inner)


def text_issue(body: bytes) -> Issue | None:
    """Return what makes the body unusable under any schema: syntax, encoding, nesting, a duplicate field.

    Duplicates are refused because two parsers would disagree; NUL and lone surrogates because PostgreSQL cannot store
    them.
    """
    try:
        text = body.decode()
        msgspec.json.decode(body, type=msgspec.Raw)
        value = _strictly.decode(text)
        if text.count("[") + text.count("{") > NESTED_MAX:
            _check_nesting(value)
        if "\\u" in text:
            _check_text(value)
    except _Refused as error:
        return Issue(error.path, str(error))
    except UnicodeDecodeError as error:
        return Issue((), f"the body is not UTF-8 (byte {error.start})")
    except RecursionError:
        return Issue((), f"the JSON is nested more than {NESTED_MAX} deep")
    except (msgspec.DecodeError, ValueError) as error:
        return Issue((), f"the body is not JSON: {error}")
    return None


class _Refused(Exception):
    def __init__(self, message: str, *path: str) -> None:
        super().__init__(message)
        self.path = path


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                shown = key.encode("utf-8", "replace").decode()[:100]
                raise _Refused("the field is given twice", shown)
            seen.add(key)
    return members


def _refuse(constant: str) -> None:
    raise _Refused(f"{constant} is not JSON")


_strictly: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_int=float, parse_constant=_refuse)


def _check_nesting(value: Any) -> None:
    """Raise RecursionError beyond NESTED_MAX: the parsers' own limit differs between versions of Python."""
    level = [value]
    for _ in range(NESTED_MAX + 1):
        level = [value for value in level if isinstance(value, dict | list)]
        if not level:
            return
        level = [item for value in level for item in (value.values() if isinstance(value, dict) else value)]
    raise RecursionError


def _check_text(value: Any) -> None:
    if isinstance(value, str):
        if "\0" in value:
            raise _Refused("text must not contain the character NUL")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Refused("text must not contain half of a surrogate pair") from None
    elif isinstance(value, dict):
        for key, member in value.items():
            _check_text(key)
            _check_text(member)
    elif isinstance(value, list):
        for member in value:
            _check_text(member)


def success(style: BodyStyle, output: bytes) -> bytes:
    """Return the body of a response with this encoded output."""
    return output if style is BodyStyle.PLAIN else b'{"json":%b}' % output


def failure(style: BodyStyle, status: int, code: str, message: str, issues: Sequence[Issue] = ()) -> bytes:
    """Return the body of an error, in the same style as a success."""
    message = printable(message)
    listed = [{"path": issue.path, "message": issue.message} for issue in issues]
    if style is BodyStyle.PLAIN:
        plain: dict[str, object] = {"error": message, "code": code}
        if listed:
            plain["issues"] = listed
        return ENCODER.encode(plain)
    inner: dict[str, object] = {"defined": False, "code": code, "status": status, "message": message}
    if listed:
        inner["data"] = {"issues": listed}
    return ENCODER.encode({"json": inner})
