"""The error tree of the service.

    TraderError
    ├── SettingsError        the configuration is wrong; every mistake at once; exit code 2
    ├── StartError           the service cannot start (database too old, foreign, held by another); exit code 1
    ├── MarketDataError      a source gave something unusable (file, line and reason)
    ├── MarketUnavailable    there is no usable price for a market now
    ├── BooksViolated        a booking broke a constraint of the schema: a bug, and nothing of it was written
    ├── InternalError        a bug ended the work that the caller waited for; the log has its trace
    ├── ProviderError        an AI provider gave no usable answer
    └── RequestError         a caller's request cannot be served; `api/rpc.py` maps each to its HTTP status
        ├── InvalidInput     one or more fields do not fit
        ├── NotFound         the named thing does not exist
        ├── Unauthorized     the bearer token is missing or wrong
        ├── Forbidden        the caller's origin is not allowed
        ├── PayloadTooLarge  the body or the batch is over its limit
        ├── Precondition     a setting of the service rules the request out
        └── Unavailable      the database (or another part) cannot answer now; try again
            └── OrderUndecided   what became of an order at the venue is not known yet

A refusal of an order is a value of the domain (`rejected`), never an exception.
"""

from collections.abc import Sequence
from typing import NamedTuple


class TraderError(Exception):
    """Base of everything the service raises on purpose. The message is for people and never holds a secret."""


class SettingsError(TraderError):
    """The configuration is wrong. `problems` holds one sentence per mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class StartError(TraderError):
    """The service cannot start; the message says what to do."""


class MarketDataError(TraderError):
    """A market source gave something unusable."""


class MarketUnavailable(TraderError):
    """There is no usable price for a market now."""


class BooksViolated(TraderError):
    """A booking broke a constraint of the schema: a bug, and nothing of it was written."""


class InternalError(TraderError):
    """A bug ended the work that the caller waited for; the log has its trace."""


class ProviderError(TraderError):
    """An AI provider gave no usable answer. `raw` is what it sent instead, without secrets, for the record only."""

    def __init__(self, message: str, raw: str = "") -> None:
        super().__init__(message)
        self.raw = raw


class RequestError(TraderError):
    """A caller's request cannot be served."""


class Issue(NamedTuple):
    """One field that does not fit: where it is in the input, and what was expected."""

    path: tuple[str | int, ...]
    message: str


class InvalidInput(RequestError):
    """One or more fields of the input do not fit."""

    def __init__(self, *issues: Issue) -> None:
        super().__init__("; ".join(issue.message for issue in issues))
        self.issues = issues


class NotFound(RequestError):
    """The named thing does not exist."""


class Unauthorized(RequestError):
    """The bearer token is missing or wrong."""


class Forbidden(RequestError):
    """The caller's origin is not allowed."""


class PayloadTooLarge(RequestError):
    """The body or the batch is over its limit."""


class Precondition(RequestError):
    """A setting of the service rules the request out; the message says which."""


class Unavailable(RequestError):
    """The database, or another part the request needs, cannot answer now.

    `retry_after_s` is what the caller is told to wait.
    """

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OrderUndecided(Unavailable):
    """What became of an order at the venue is not known yet: it may have been filled. It is found out about."""
