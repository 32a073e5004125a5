"""Access: who sends a request, by its bearer secret, and whether it may ask this often."""

import asyncio
import math
import time
from typing import Final, NamedTuple
from uuid import UUID

from trader.clock import SystemClock
from trader.domain.operations.credentials import (
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
from trader.errors import Forbidden, KeyRevoked, MissingScope, TooManyRequests, Unauthorized
from trader.setting_forms import Secret
from trader.store.database.pool import Database
from trader.store.operations.credentials import select_credentials

READ_EVERY_S: Final = 1.0
"""For how long credentials that were read hold: a change takes effect within that time, without a restart."""


class Caller(NamedTuple):
    """Who sends a request. `credential` is None for anybody whose secret is missing or unknown."""

    credential: Credential | None = None

    @property
    def is_agent(self) -> bool:
        return self.credential is not None and self.credential.account_id is not None


ANYBODY: Final = Caller()


class Access:
    """Knows the credentials of the database and of API_TOKEN. Limits hold for this process."""

    def __init__(self, database: Database, api_token: Secret | None) -> None:
        self._database = database
        self._api_token = None if api_token is None else _credential_of(api_token)
        self._by_prefix: dict[str, Credential] = {}
        self._buckets: dict[UUID, tuple[int, TokenBucket]] = {}
        self._read_at_s = -math.inf
        self._reading = asyncio.Lock()

    async def identify(self, authorization: str | None) -> Caller:
        """Return who sends a request with this `Authorization` header.

        :raises Unavailable: the credentials cannot be read
        """
        scheme, _, secret = (authorization or "").partition(" ")
        secret = secret.strip()
        if scheme.lower() != "bearer" or not secret:
            return ANYBODY
        digest = digest_of(secret)
        if self._api_token is not None and is_secret_of(self._api_token, digest):
            return Caller(self._api_token)
        if not secret.startswith((AGENT_MARK, OPERATOR_MARK)):
            return ANYBODY
        await self._read()
        credential = self._by_prefix.get(prefix_of(secret))
        return ANYBODY if credential is None or not is_secret_of(credential, digest) else Caller(credential)

    def admit(self, caller: Caller) -> None:
        """Count a request of the caller.

        :raises TooManyRequests: it has used up its requests of this minute
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
        async with self._reading:
            if time.monotonic() - self._read_at_s < READ_EVERY_S:
                return
            async with self._database.connection() as conn:
                credentials = await select_credentials(conn)
            self._by_prefix = {credential.prefix: credential for credential in credentials}
            self._read_at_s = time.monotonic()


def _credential_of(api_token: Secret) -> Credential:
    secret = api_token.reveal()
    return Credential(
        id=UUID(int=0),
        name="API_TOKEN",
        account_id=None,
        scopes=SCOPES,
        prefix="",
        digest=digest_of(secret),
        requests_per_minute=None,
        decisions_per_minute=None,
        created_at=SystemClock().now(),
    )


def require_operator(caller: Caller, scope: Scope, what: str) -> None:
    """Check that the caller is an operator who may do this.

    :raises Forbidden: it is an agent, or its token does not have the scope
    :raises Unauthorized: its secret is missing or wrong
    """
    if caller.is_agent:
        raise Forbidden(f"{what} is not for the key of an agent, which trades with agent.* alone")
    _require_scope(caller, scope, what, "API_TOKEN")


def require_agent(caller: Caller, scope: Scope, what: str) -> Credential:
    """Check that the caller is an agent whose key has the scope, and return the key.

    :raises Forbidden: it is an operator, or the key does not have the scope
    :raises Unauthorized: the key is missing, wrong or revoked
    """
    credential = _require_scope(caller, scope, what, "key")
    if credential.account_id is None:
        raise Forbidden(f"{what} needs the key of an agent; an operator's token belongs to no account")
    return credential


def _require_scope(caller: Caller, scope: Scope, what: str, secret: str) -> Credential:
    credential = caller.credential
    if credential is None:
        raise Unauthorized(f"{what} needs the header Authorization: Bearer <{secret}>")
    if credential.revoked_at is not None:
        raise KeyRevoked(f"the key {credential.prefix}… was revoked")
    if scope not in credential.scopes:
        raise MissingScope(f"{what} needs the scope {scope}; this key has {', '.join(credential.scopes)}")
    return credential
