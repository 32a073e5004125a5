"""Access: issues secrets, tells who sends a request by its bearer secret, and enforces the caller's rate limit."""

import asyncio
import math
import secrets
import time
from base64 import b64decode
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID, uuid4

from trader.core.clock import SystemClock
from trader.core.errors import (
    Forbidden,
    KeyRevoked,
    MissingScope,
    ReadingClosed,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from trader.database.pool import Database
from trader.operations.domain.alarms import Alarm, AlarmCause
from trader.operations.domain.credentials import (
    AGENT_MARK,
    OPERATOR_MARK,
    SCOPES,
    Credential,
    Scope,
    TokenBucket,
    digest_of,
    is_secret_of,
    prefix_of,
)
from trader.operations.sql.credentials import select_credentials
from trader.settings.forms import Secret

READ_EVERY_S: Final = 0.4
"""How long credentials stay cached: a change takes effect within this time, without a restart."""


WRONG_MAX: Final = 10
WRONG_WINDOW_S: Final = 60.0
"""An address that sends this many wrong secrets within this time is blocked until the time is over."""

ADDRESSES_MAX: Final = 10_000

READING: Final[tuple[Scope, ...]] = ("read",)


def issue(mark: str, name: str, at: datetime, scopes: tuple[Scope, ...], **limits: Any) -> tuple[str, Credential]:
    """Return a new secret with 256 random bits and its credential, which is all that is stored.

    `limits` are the fields of an agent's credential: its account, and its requests and decisions per minute.
    """
    secret = mark + secrets.token_urlsafe(32)
    return secret, Credential(
        id=uuid4(),
        name=name,
        scopes=scopes,
        prefix=prefix_of(secret),
        digest=digest_of(secret),
        created_at=at,
        **limits,
    )


def reissue(credential: Credential, at: datetime) -> tuple[str, Credential]:
    """Return a new secret for a credential's holder, with the same scopes and limits."""
    mark = OPERATOR_MARK if credential.account_id is None else AGENT_MARK
    kept = {name: getattr(credential, name) for name in ("account_id", "requests_per_minute", "decisions_per_minute")}
    return issue(mark, credential.name, at, credential.scopes, **kept)


class Caller(NamedTuple):
    """Who sends a request. `credential` is None if the secret is missing or, with `is_unknown`, unknown."""

    credential: Credential | None = None
    is_unknown: bool = False
    address: str = ""

    @property
    def is_known(self) -> bool:
        """Whether it has a key or token that is not revoked."""
        return self.credential is not None and self.credential.revoked_at is None

    @property
    def source(self) -> UUID | str:
        """What shares its part of a resource: its key or token, or else its address."""
        return self.credential.id if self.credential is not None and self.is_known else self.address

    @property
    def is_agent(self) -> bool:
        return self.credential is not None and self.credential.account_id is not None


ANYBODY: Final = Caller()


class Access:
    """Knows the credentials of the database (None: only `keys`) and of API_TOKEN. Rate limits apply per process."""

    def __init__(
        self,
        database: Database | None,
        api_token: Secret | None,
        read_token: Secret | None = None,
        keys: Iterable[Credential] = (),
    ) -> None:
        self._database = database
        self.local_token = OPERATOR_MARK + secrets.token_urlsafe(32)
        """The token of commands on this machine, which changes with every start."""
        tokens = (
            ("API_TOKEN", api_token, SCOPES),
            ("READ_TOKEN", read_token, READING),
            ("a command", Secret(self.local_token), SCOPES),
        )
        self._tokens = [_credential_of(name, token, scopes) for name, token, scopes in tokens if token is not None]
        self.closes_reading = read_token is not None
        self._wrong: dict[str, tuple[int, float]] = {}
        self._accepted: set[bytes] = set()
        self._by_prefix = {credential.prefix: credential for credential in keys}
        self._buckets: dict[UUID, tuple[int, TokenBucket]] = {}
        self._read_at_s = -math.inf
        self._reading = asyncio.Lock()

    async def identify(self, authorization: str | None, address: str = "") -> Caller:
        """Return who sends a request with this `Authorization` header from this address.

        :raises TooManyRequests: the address has sent too many wrong secrets, this one is wrong or could be guessed,
            and it was never sent while it was valid
        :raises Unavailable: the credentials cannot be read
        """
        secret = _secret_in(authorization or "")
        if not secret:
            return Caller(address=address)
        digest, now_s = digest_of(secret), time.monotonic()
        count, since_s = self._wrong.get(address, (0, now_s))
        is_blocked = count >= WRONG_MAX and now_s < since_s + WRONG_WINDOW_S and digest not in self._accepted
        is_guessable = not secret.startswith((AGENT_MARK, OPERATOR_MARK))  # people choose the tokens of the settings
        credential = None if is_blocked and is_guessable else await self._find(secret, digest)
        if credential is None and is_blocked:
            rest_s = math.ceil(since_s + WRONG_WINDOW_S - now_s)
            raise TooManyRequests("too many wrong keys or tokens came from this address", rest_s)
        if credential is None:
            self._count_wrong(address, now_s)
            return Caller(is_unknown=True, address=address)
        if len(self._accepted) >= ADDRESSES_MAX:
            self._accepted.clear()
        self._accepted.add(digest)
        return Caller(credential, address=address)

    async def _find(self, secret: str, digest: bytes) -> Credential | None:
        for token in self._tokens:
            if is_secret_of(token, digest):
                return token
        if not secret.startswith((AGENT_MARK, OPERATOR_MARK)):
            return None
        await self._read()
        credential = self._by_prefix.get(prefix_of(secret))
        return credential if credential is not None and is_secret_of(credential, digest) else None

    def _count_wrong(self, address: str, now_s: float) -> None:
        count, since_s = self._wrong.pop(address, (0, now_s))
        if now_s - since_s > WRONG_WINDOW_S:
            count, since_s = 0, now_s
        if len(self._wrong) >= ADDRESSES_MAX:
            del self._wrong[next(iter(self._wrong))]
        self._wrong[address] = (count + 1, since_s)

    async def is_valid(self, caller: Caller) -> bool:
        """Return whether the caller's key or token, if it has one, has not been revoked since.

        While the database is unavailable, the last known state counts.
        """
        credential = caller.credential
        if credential is None or credential in self._tokens:
            return True
        with suppress(Unavailable):
            await self._read()
        known = self._by_prefix.get(credential.prefix)
        return known is not None and known.id == credential.id and known.revoked_at is None

    def alarms(self) -> Iterator[Alarm]:
        """Yield an alarm while wrong keys or tokens keep arriving."""
        now_s = time.monotonic()
        recent = {address: count for address, (count, at_s) in self._wrong.items() if now_s - at_s <= WRONG_WINDOW_S}
        if (count := sum(recent.values())) >= WRONG_MAX:
            most = max(recent, key=recent.__getitem__)
            text = f"{count} wrong keys or tokens were received within a minute, most of them from {most}"
            yield Alarm(AlarmCause("access"), text)

    def admit(self, caller: Caller) -> None:
        """Count a request of the caller.

        :raises TooManyRequests: the caller has used up its requests for this minute
        """
        credential = caller.credential
        if credential is None or credential.requests_per_minute is None:
            return
        now_s, limit = time.monotonic(), credential.requests_per_minute
        known = self._buckets.get(credential.id)
        if known is None or known[0] != limit:
            known = self._buckets[credential.id] = limit, TokenBucket(limit, now_s)
        if (wait_s := known[1].take(now_s)) > 0:
            raise TooManyRequests(f"this key may send {limit} requests a minute", math.ceil(wait_s))

    async def _read(self) -> None:
        if self._database is None:
            return
        async with self._reading:
            if time.monotonic() - self._read_at_s < READ_EVERY_S:
                return
            async with self._database.connection() as conn:
                credentials = await select_credentials(conn)
            self._by_prefix = {credential.prefix: credential for credential in credentials}
            self._read_at_s = time.monotonic()


def _secret_in(authorization: str) -> str:
    """Return the secret of an `Authorization` header: a bearer token, or the password that a browser prompted for."""
    scheme, _, secret = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            secret = b64decode(secret, validate=True).decode().partition(":")[2]
        except ValueError:
            return ""
    return secret.strip() if scheme.lower() in ("bearer", "basic") else ""


def _credential_of(name: str, token: Secret, scopes: tuple[Scope, ...]) -> Credential:
    digest = digest_of(token.reveal())
    return Credential(
        id=UUID(int=0), name=name, scopes=scopes, prefix="", digest=digest, created_at=SystemClock().now()
    )


def require_reader(caller: Caller, what: str) -> None:
    """Check that the caller may read, if READ_TOKEN protects reads.

    :raises Forbidden: the caller is an agent, or its token lacks the scope
    :raises ReadingClosed: its secret is missing or wrong
    """
    if caller.is_agent:
        raise Forbidden(f"{what} is closed to the keys of agents, which read with agent.* alone")
    if caller.is_unknown:
        raise ReadingClosed(
            f"{what}: this key or token is unknown; READ_TOKEN, or a token with the scope read, is needed"
        )
    if caller.credential is None:
        raise ReadingClosed(f"{what} needs the header Authorization: Bearer <READ_TOKEN>, or the token as a password")
    _require_scope(caller, "read", what, "READ_TOKEN")


def require_operator(caller: Caller, scope: Scope, what: str) -> None:
    """Check that the caller is an operator who may do this.

    :raises Forbidden: the caller is an agent, or its token lacks the scope
    :raises Unauthorized: its secret is missing or wrong
    """
    if caller.is_agent:
        raise Forbidden(f"{what} cannot be used with an agent's key, which trades only with agent.*")
    _require_scope(caller, scope, what, "API_TOKEN")


def require_agent(caller: Caller, scope: Scope, what: str) -> Credential:
    """Check that the caller is an agent whose key has the scope, and return the key.

    :raises Forbidden: the caller is an operator, or the key lacks the scope
    :raises Unauthorized: the key is missing, wrong or revoked
    """
    credential = _require_scope(caller, scope, what, "key")
    if credential.account_id is None:
        raise Forbidden(f"{what} needs the key of an agent; an operator's token belongs to no account")
    return credential


def _require_scope(caller: Caller, scope: Scope, what: str, secret: str) -> Credential:
    credential = caller.credential
    if caller.is_unknown:
        raise Unauthorized(f"{what}: this key or token is unknown")
    if credential is None:
        raise Unauthorized(f"{what} needs the header Authorization: Bearer <{secret}>")
    if credential.revoked_at is not None:
        raise KeyRevoked(f"the key or token {credential.prefix}… was revoked")
    if scope not in credential.scopes:
        raise MissingScope(f"{what} needs the scope {scope}; this key or token has {', '.join(credential.scopes)}")
    return credential
