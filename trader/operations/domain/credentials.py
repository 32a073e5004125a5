"""Credentials: keys of external agents and tokens of operators, their scopes, and their rate limits.

A secret is random text. Only its SHA-256 digest is stored, which suffices for a secret with 256 random bits, along with
its first characters, by which people recognize it.
"""

import hashlib
import hmac
from datetime import datetime
from typing import Final, Literal
from uuid import UUID

import msgspec

Scope = Literal["read", "trade", "operate"]
"""What a credential may do: read; place and cancel orders; operate, i.e. halt, flatten and reset accounts."""

SCOPES: Final[tuple[Scope, ...]] = ("read", "trade", "operate")

AGENT_MARK: Final = "tra_"
OPERATOR_MARK: Final = "tro_"
"""Prefixes of the secrets of agents and operators."""

PREFIX_LENGTH: Final = 12
"""How many first characters of a secret are stored and shown: 48 random bits after the mark."""

REQUESTS_PER_MINUTE: Final = 120
DECISIONS_PER_MINUTE: Final = 1
"""The limits of a new agent key."""


class Credential(msgspec.Struct, frozen=True, kw_only=True):
    """A key or token. With an account, it belongs to an agent and covers only that account; others belong to operators.

    A limit of None means no limit.
    """

    id: UUID
    name: str
    account_id: str | None = None
    scopes: tuple[Scope, ...]
    prefix: str
    digest: bytes
    requests_per_minute: int | None = None
    decisions_per_minute: int | None = None
    created_at: datetime
    revoked_at: datetime | None = None

    @property
    def fingerprint(self) -> str:
        """The first half of the digest in hexadecimal, which distinguishes keys but reveals nothing of the secret."""
        return self.digest[:16].hex()


def digest_of(secret: str) -> bytes:
    """Return the SHA-256 digest of a secret, as it is stored."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def prefix_of(secret: str) -> str:
    """Return the first characters of a secret, as they are stored and shown."""
    return secret[:PREFIX_LENGTH]


def is_secret_of(credential: Credential, digest: bytes) -> bool:
    """Return whether a digest is the credential's, in constant time."""
    return hmac.compare_digest(credential.digest, digest)


class TokenBucket:
    """Rate limit of events per minute: bursts of up to a minute's worth, then one at a time at the mean rate."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._per_minute = per_minute
        self._tokens = float(per_minute)
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take a token and return 0; if there is none, return the seconds until there is one."""
        per_s = self._per_minute / 60
        self._tokens = min(float(self._per_minute), self._tokens + (now_s - self._at_s) * per_s)
        self._at_s = now_s
        if self._tokens < 1:
            return (1 - self._tokens) / per_s
        self._tokens -= 1
        return 0.0
