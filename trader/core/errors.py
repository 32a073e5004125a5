"""Errors of the service, as one tree.

    TraderError
    ├── SettingsError             ends the process with exit code 2
    ├── ArgumentsError            ends the process with exit code 2
    ├── StartError                ends the process with exit code 1
    ├── MarketDataError
    ├── MarketUnavailable
    ├── LedgerViolated            a bug
    ├── InternalError             a bug
    ├── StrategyError             raised by a user's strategy file
    ├── ProviderError
    │   └── ProviderTimeout       retried once, with a new view
    ├── WebhookError              raised for an external agent
    └── RequestError              `api/rpc.py` maps the errors below to HTTP statuses
        ├── InvalidInput
        ├── NotFound
        │   └── ViewUnknown
        ├── Unauthorized
        │   └── KeyRevoked
        ├── Forbidden
        │   └── MissingScope, ForeignAccount, ManualOrdersOff
        ├── TooManyRequests
        ├── Conflict
        │   └── ViewExpired, ViewDecided, SeasonOver
        ├── PayloadTooLarge
        ├── Precondition
        └── Unavailable           the caller may try again
            ├── DatabaseUnavailable
            └── OrderUndecided

The rejection of an order is a value of the domain, never an exception.
"""

from collections.abc import Sequence
from typing import NamedTuple


class TraderError(Exception):
    """Base of all errors that the service raises on purpose. The message is for people and never holds a secret."""


class SettingsError(TraderError):
    """The settings are wrong. `problems` has one sentence for each mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class ArgumentsError(TraderError):
    """The arguments of a command are wrong. `help_text` is the help of the command, if there is one."""

    def __init__(self, message: str, help_text: str = "") -> None:
        super().__init__(message)
        self.help_text = help_text


class StartError(TraderError):
    """The service cannot start; the message says what to do."""


class MarketDataError(TraderError):
    """A market source sent or contains unusable data; the message gives its location."""


class MarketUnavailable(TraderError):
    """A market has no usable price at the moment."""


class LedgerViolated(TraderError):
    """A posting violated a schema constraint, which is a bug; nothing was written."""


class InternalError(TraderError):
    """A bug ended the work that the caller was waiting for; the log has the traceback."""


class StrategyError(TraderError):
    """A strategy failed; the message says where in its file and why."""


class ProviderError(TraderError):
    """An AI provider gave no usable answer. `raw` is its response without secrets, for the record only.

    `unmetered_attempts` counts the attempts that may have used tokens without reporting them; `unreported` is the most
    input and output tokens that they may have used.
    """

    def __init__(
        self, message: str, raw: str = "", *, unmetered_attempts: int = 0, unreported: tuple[int, int] = (0, 0)
    ) -> None:
        super().__init__(message)
        self.raw = raw
        self.unmetered_attempts = unmetered_attempts
        self.unreported = unreported


class ProviderTimeout(ProviderError):
    """An AI provider did not answer in time, so the market it was asked about has moved on."""


class ContextExceeded(ProviderError):
    """A prompt and its answer do not fit into the model's context of about `limit` tokens."""

    def __init__(self, message: str, limit: int) -> None:
        super().__init__(message)
        self.limit = limit


class NoUsableCall(ProviderError):
    """A model answered, but made no call that can be executed."""


class WebhookError(TraderError):
    """The webhook of an external agent gave no usable answer; the message contains no secret.

    `is_temporary`: an immediate retry may succeed.
    """

    def __init__(self, message: str, *, is_temporary: bool = False) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary


class SinkUnavailable(TraderError):
    """An external sink did not accept a message; the error text contains no part of the sink's address.

    `is_temporary`: a later attempt may succeed.
    """

    def __init__(self, message: str, *, is_temporary: bool = True) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary


class RequestError(TraderError):
    """A caller's request cannot be served."""


class Issue(NamedTuple):
    """An invalid field: its path in the input and the expected value."""

    path: tuple[str | int, ...]
    message: str

    @property
    def sentence(self) -> str:
        """The message after the field's path, if it has one."""
        place = ".".join(map(str, self.path))
        return f"{place}: {self.message}" if place else self.message


class InvalidInput(RequestError):
    """One or more fields of the input are invalid."""

    def __init__(self, *issues: Issue) -> None:
        super().__init__("; ".join(issue.message for issue in issues))
        self.issues = issues


class NotFound(RequestError):
    """The resource that the request names does not exist."""


class Unauthorized(RequestError):
    """The bearer token is missing or wrong."""


class ReadingClosed(Unauthorized):
    """READ_TOKEN protects reads and the request carries no accepted secret; a browser may prompt for it."""


class KeyRevoked(Unauthorized):
    """The key or token is no longer valid; the caller needs a new one."""


class Forbidden(RequestError):
    """The caller's origin is not allowed, the service is read-only, or this caller may not do this."""


class MissingScope(Forbidden):
    """The key or token is valid but lacks the scope for this."""


class ManualOrdersOff(Forbidden):
    """MANUAL_ORDERS=off refuses manual orders on the accounts of models."""


class ForeignAccount(Forbidden):
    """The key belongs to another account."""


class TooManyRequests(RequestError):
    """The caller has used up its requests or decisions for this minute and may retry after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Conflict(RequestError):
    """The client order id was already used for an order with different contents."""


class ViewUnknown(NotFound):
    """The key's agent has no such view."""


class ViewExpired(Conflict):
    """The view's deadline has passed; the agent needs a new view."""


class ViewDecided(Conflict):
    """The view has already been decided; the agent needs a new view."""


class SeasonOver(Conflict):
    """The account's season has ended; orders that could open a position are refused until the next one starts."""


class PayloadTooLarge(RequestError):
    """The body or the batch is larger than its limit."""


class Precondition(RequestError):
    """A setting of the service excludes the request; the message says which."""


class Unavailable(RequestError):
    """The database, or another part that the request needs, cannot answer now.

    The caller may try again after `retry_after_s`.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DatabaseUnavailable(Unavailable):
    """The database cannot be used now; `cause` says why in a few words."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"The database cannot be used now: {cause}.")
        self.cause = cause


class OrderUndecided(Unavailable):
    """The outcome of an order at the venue is not yet known: it may have been filled. The service will resolve it."""
