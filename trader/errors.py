"""Errors of the service, as one tree.

    TraderError
    ├── SettingsError             ends the process with exit code 2
    ├── ArgumentsError            ends the process with exit code 2
    ├── StartError                ends the process with exit code 1
    ├── MarketDataError
    ├── MarketUnavailable
    ├── LedgerViolated            a bug
    ├── InternalError             a bug
    ├── StrategyError             of a user's file
    ├── ProviderError
    │   └── ProviderTimeout       tried once more, with a new view
    ├── WebhookError              of an external agent
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
from typing import Final, NamedTuple


class TraderError(Exception):
    """Base of all errors that the service raises on purpose. The message is for people and never holds a secret."""


class SettingsError(TraderError):
    """The settings are wrong. `problems` has one sentence for each mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class ArgumentsError(TraderError):
    """The arguments of a command are wrong. `usage` is what they may be."""

    def __init__(self, message: str, usage: str) -> None:
        super().__init__(message)
        self.usage = usage


class StartError(TraderError):
    """The service cannot start; the message says what to do."""


class MarketDataError(TraderError):
    """A market source sent or contains unusable data; the message says where."""


class MarketUnavailable(TraderError):
    """A market has no usable price now."""


class LedgerViolated(TraderError):
    """A posting broke a constraint of the schema: a bug, and nothing of it was written."""


class InternalError(TraderError):
    """A bug ended the work that the caller waited for; the log has its traceback."""


class StrategyError(TraderError):
    """A strategy failed; the message says where in its file, and why."""


class ProviderError(TraderError):
    """An AI provider gave no usable answer. `raw` is what it sent instead, without secrets, for the record only.

    `unmetered_attempts` counts the attempts that may have cost tokens which nobody reported, and `unreported` are the
    most that they may have been: input and output.
    """

    def __init__(
        self, message: str, raw: str = "", *, unmetered_attempts: int = 0, unreported: tuple[int, int] = (0, 0)
    ) -> None:
        super().__init__(message)
        self.raw = raw
        self.unmetered_attempts = unmetered_attempts
        self.unreported = unreported


class ProviderTimeout(ProviderError):
    """An AI provider did not answer in time; what it was asked about has changed since."""


class WebhookError(TraderError):
    """The webhook of an external agent gave no usable answer; the message has no secret.

    `is_temporary`: it may give one if it is asked again at once.
    """

    def __init__(self, message: str, *, is_temporary: bool = False) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary


class SinkUnavailable(TraderError):
    """A sink outside did not take what was sent to it; the message has no part of its address.

    `is_temporary`: it may take it later.
    """

    def __init__(self, message: str, *, is_temporary: bool = True) -> None:
        super().__init__(message)
        self.is_temporary = is_temporary


class RequestError(TraderError):
    """A caller's request cannot be served."""


class Issue(NamedTuple):
    """An invalid field: its path in the input, and what was expected."""

    path: tuple[str | int, ...]
    message: str


class InvalidInput(RequestError):
    """One or more fields of the input are invalid."""

    def __init__(self, *issues: Issue) -> None:
        super().__init__("; ".join(issue.message for issue in issues))
        self.issues = issues


class NotFound(RequestError):
    """What the request names does not exist."""


class Unauthorized(RequestError):
    """The bearer token is missing or wrong."""


class ReadingClosed(Unauthorized):
    """READ_TOKEN closes reading, and the request has no secret that opens it; a browser may ask for it."""


class KeyRevoked(Unauthorized):
    """The key or token was valid once; another one is needed."""


class Forbidden(RequestError):
    """The caller's origin is not allowed, the service is read-only, or this is not for such a caller."""


class MissingScope(Forbidden):
    """The key or token is valid, and may not do this."""


class ManualOrdersOff(Forbidden):
    """MANUAL_ORDERS=off refuses orders by hand on the accounts of models."""


class ForeignAccount(Forbidden):
    """The account is not the one that the key speaks for."""


class TooManyRequests(RequestError):
    """The caller has used up its requests or decisions of this minute; it may ask again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Conflict(RequestError):
    """The client order id was used for an order with other contents."""


class ViewUnknown(NotFound):
    """The key's agent has no such view."""


class ViewExpired(Conflict):
    """The deadline of the view has passed; a new view is needed."""


class ViewDecided(Conflict):
    """The decision of this view has ended; a new view is needed."""


class SeasonOver(Conflict):
    """The season that the account trades in has ended; orders that could open are refused until there is another."""


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


DATABASE_TROUBLE: Final = "The database cannot be used now: "
"""How every answer, reason of health, log line and alarm about an unusable database begins, before its cause."""


class DatabaseUnavailable(Unavailable):
    """The database cannot be used now; `cause` says why in a few words."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"{DATABASE_TROUBLE}{cause}.")
        self.cause = cause


class OrderUndecided(Unavailable):
    """The outcome of an order at the venue is not known yet: it may have been filled. The service finds it out."""
