"""Credentials: keys of external agents and tokens of operators, what each may do, and how often it may ask.

A secret is random text. Only its SHA-256 digest is stored, which is enough for a secret of 256 random bits, and its
first characters, by which people recognise it.
"""

import hashlib
import hmac
import secrets
from datetime import datetime
from typing import Final, Literal
from uuid import UUID, uuid4

import msgspec

Scope = Literal["read", "trade", "operate"]
"""What a credential may do: read; place and cancel orders; operate, which is to halt, flatten and reset accounts."""

SCOPES: Final[tuple[Scope, ...]] = ("read", "trade", "operate")

AGENT_MARK: Final = "tra_"
OPERATOR_MARK: Final = "tro_"
"""What the secrets of agents and of operators begin with."""

PREFIX_LENGTH: Final = 12
"""The first characters of a secret that are stored and shown: 48 random bits beside the mark."""

REQUESTS_PER_MINUTE: Final = 120
DECISIONS_PER_MINUTE: Final = 1
"""The limits of a new key of an agent."""


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """A key or token. One with an account is an agent's and speaks for that account alone; others are operators'.

    A limit of None is none. The fields are in the order of the table's columns.
    """

    id: UUID
    name: str
    account_id: str | None
    scopes: tuple[Scope, ...]
    prefix: str
    digest: bytes
    requests_per_minute: int | None
    decisions_per_minute: int | None
    created_at: datetime
    revoked_at: datetime | None = None

    @property
    def fingerprint(self) -> str:
        """The first half of its digest in hexadecimal, which tells keys apart and says nothing of the secret."""
        return self.digest[:16].hex()


def digest_of(secret: str) -> bytes:
    """Return the SHA-256 digest of a secret, as it is stored."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def prefix_of(secret: str) -> str:
    """Return the first characters of a secret, as they are stored and shown."""
    return secret[:PREFIX_LENGTH]


def issue(
    mark: str,
    name: str,
    at: datetime,
    scopes: tuple[Scope, ...],
    *,
    account_id: str | None = None,
    requests: int | None = None,
    decisions: int | None = None,
) -> tuple[str, Credential]:
    """Return a new secret with 256 random bits and its credential, which is all that is stored of it."""
    secret = mark + secrets.token_urlsafe(32)
    return secret, Credential(
        id=uuid4(),
        name=name,
        account_id=account_id,
        scopes=scopes,
        prefix=prefix_of(secret),
        digest=digest_of(secret),
        requests_per_minute=requests,
        decisions_per_minute=decisions,
        created_at=at,
    )


def reissue(credential: Credential, at: datetime) -> tuple[str, Credential]:
    """Return a new secret of a credential's holder, which may do as much as often."""
    return issue(
        OPERATOR_MARK if credential.account_id is None else AGENT_MARK,
        credential.name,
        at,
        credential.scopes,
        account_id=credential.account_id,
        requests=credential.requests_per_minute,
        decisions=credential.decisions_per_minute,
    )


def is_secret_of(credential: Credential, digest: bytes) -> bool:
    """Return whether a digest is the credential's, in a time that does not depend on where they differ."""
    return hmac.compare_digest(credential.digest, digest)


class TokenBucket:
    """Limit of events per minute: bursts of up to a minute's worth, then one after the other at the mean rate."""

    __slots__ = ("_at_s", "_per_minute", "_tokens")

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._tokens = float(per_minute)
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take a token and return 0; without one, return in how many seconds there will be one."""
        per_s = self._per_minute / 60
        self._tokens = min(float(self._per_minute), self._tokens + (now_s - self._at_s) * per_s)
        self._at_s = now_s
        if self._tokens < 1:
            return (1 - self._tokens) / per_s
        self._tokens -= 1
        return 0.0
