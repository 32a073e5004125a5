"""Bodies of errors in the OpenAPI document; `api/envelope.py` writes them."""

from trader.api.schemas.common import UNSET, UnsetType, Wire


class InputIssue(Wire, kw_only=True):
    """One field that does not fit: where it is in the input, and what was expected."""

    path: list[str | int]
    message: str


class ErrorBody(Wire, kw_only=True):
    """Why a call was not answered. `error` is for people, `code` for programs; `issues` comes with VALIDATION_ERROR."""

    error: str
    code: str
    issues: list[InputIssue] | UnsetType = UNSET
