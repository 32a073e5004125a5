"""Webhooks of external agents: signed requests with a view, sent only to public addresses, whose answers decide.

Signatures follow Standard Webhooks (https://www.standardwebhooks.com): HMAC-SHA256 over
`<webhook-id>.<webhook-timestamp>.<body>`, keyed with the bytes of the secret, in base64.
"""

import hashlib
import hmac
import secrets
import socket
import time
from base64 import b64decode, b64encode
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final
from urllib.parse import urlsplit

import aiohttp

from trader.agents.providers.attempts import read_bounded
from trader.core.errors import WebhookError

WEBHOOK_MARK: Final = "whsec_"
SECRET_BYTES: Final = 32
ANSWER_MAX: Final = 65_536
"""Maximum bytes of an answer."""

NAT64: Final = IPv6Network("64:ff9b::/96")
"""Addresses whose last 32 bits are an IPv4 address (RFC 6052)."""

UNICAST: Final = IPv6Network("2000::/3")
"""All that IANA has allocated as global unicast addresses of IPv6."""

NOT_PUBLIC: Final = tuple(map(ip_network, ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20")))
"""Special blocks that `ipaddress` of some versions treats as public: protocols, 6to4 with its relays, documentation."""

CONNECT_S: Final = 10.0
ATTEMPTS: Final = 2


def new_secret() -> str:
    """Return a random secret that signs the requests of one webhook."""
    return WEBHOOK_MARK + b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signature(secret: str, view_id: str, timestamp: int, body: bytes) -> str:
    """Return the value of `webhook-signature`."""
    key = b64decode(secret.removeprefix(WEBHOOK_MARK))
    digest = hmac.digest(key, f"{view_id}.{timestamp}.".encode() + body, hashlib.sha256)
    return f"v1,{b64encode(digest).decode()}"


def check_address(url: str, *, loopback: bool) -> None:
    """Validate a webhook's address. `loopback` allows addresses of this machine, without TLS.

    :raises WebhookError: the address cannot be called
    """
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
        if parts.scheme == "http" and not (loopback and (host == "localhost" or ip_address(host).is_loopback)):
            raise ValueError(host)
    except ValueError:
        raise WebhookError(
            "the address of a webhook must begin with https://; http:// is only for addresses of this machine, "
            "and only with WEBHOOK_LOOPBACK=on"
        ) from None


def is_public(address: str) -> bool:
    """Return whether an IP address is public and unicast, by IANA's special-purpose registries."""
    ip = ip_address(address)
    if isinstance(ip, IPv6Address):
        ip = IPv4Address(int(ip) & 0xFFFF_FFFF) if ip in NAT64 else ip.ipv4_mapped or ip
    is_unicast = ip in UNICAST if isinstance(ip, IPv6Address) else not ip.is_multicast
    return is_unicast and ip.is_global and not any(ip in block for block in NOT_PUBLIC)


class WebhookClient:
    """Makes the requests. Checks each resolved address at connection time, not the host name."""

    def __init__(self, *, loopback: bool) -> None:
        self._loopback = loopback
        self._session: aiohttp.ClientSession | None = None

    async def call(self, url: str, secret: str, view_id: str, body: bytes, limit_s: float) -> bytes:
        """Send a view and return the body of the answer. Retry once after a temporary failure.

        :raises WebhookError: there is no HTTP 200 answer within `limit_s`
        """
        check_address(url, loopback=self._loopback)
        until_s = time.monotonic() + limit_s
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await self._attempt(url, secret, view_id, body, until_s - time.monotonic())
            except WebhookError as error:
                if not error.is_temporary or attempt == ATTEMPTS:
                    raise
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, url: str, secret: str, view_id: str, body: bytes, limit_s: float) -> bytes:
        timestamp = int(time.time())
        headers = {
            "Content-Type": "application/json",
            "Accept-Encoding": "identity",
            "Idempotency-Key": view_id,
            "webhook-id": view_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signature(secret, view_id, timestamp, body),
        }
        timeout = aiohttp.ClientTimeout(total=max(limit_s, 0.001), sock_connect=CONNECT_S)
        try:
            async with self._opened().post(
                url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                status, answer = response.status, await read_bounded(response, ANSWER_MAX)
        except aiohttp.ConnectionTimeoutError:
            raise WebhookError(f"the webhook was not reached within {CONNECT_S:g} s", is_temporary=True) from None
        except TimeoutError:
            raise WebhookError("the webhook did not answer before the deadline of the view") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            cause = str(error.os_error) if isinstance(error, aiohttp.ClientConnectorError) else type(error).__name__
            raise WebhookError(f"the webhook does not answer: {cause}", is_temporary=True) from None
        if status != HTTPStatus.OK:
            is_temporary = status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == HTTPStatus.TOO_MANY_REQUESTS
            raise WebhookError(f"the webhook answered with HTTP {status}", is_temporary=is_temporary)
        if len(answer) > ANSWER_MAX:
            raise WebhookError(f"the answer of the webhook has more than {ANSWER_MAX} bytes")
        return answer

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(socket_factory=self._socket),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,  # so that the size limit also applies to decompressed answers
            )
        return self._session

    def _socket(self, info: aiohttp.AddrInfoType) -> socket.socket:
        """Return the socket for a connection to a resolved address."""
        family, kind, protocol, _, address = info
        host = str(address[0])
        if not (is_public(host) or (self._loopback and ip_address(host).is_loopback)):
            raise OSError(f"{host} is not a public address")
        return socket.socket(family, kind, protocol)
