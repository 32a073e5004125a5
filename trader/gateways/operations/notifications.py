"""Sinks of notices, each at one address of NOTIFY_URL: generic JSON webhooks, ntfy, and bodies as Slack and Telegram
take them; and the ping of a dead-man service at HEARTBEAT_URL.

An address may hold a token, so no error or log line has any part of it.
"""

import html
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import parse_qs, urlsplit

import aiohttp
import orjson

from trader.clock import iso
from trader.domain.operations.alarms import Notice
from trader.errors import SinkUnavailable
from trader.setting_forms import NOTIFY_FORMATS, NOTIFY_HOSTS, Secret

ATTEMPT_S: Final = 10.0
"""How long a sink may take for one notice, and a dead-man service for one ping."""

TEXT_MAX: Final = 1000
"""Characters of a message. Telegram takes 4096 in UTF-16, ntfy 4096 bytes in UTF-8, and Slack cuts off after 40,000."""

JSON_HEADERS: Final = {"Content-Type": "application/json"}


class RequestBody(NamedTuple):
    """A request body with its headers."""

    body: bytes
    headers: dict[str, str]


class NotificationSink(Protocol):
    """Receiver of notices, one at a time. `name` contains no part of the address."""

    @property
    def name(self) -> str: ...

    async def send(self, notice: Notice) -> None:
        """Hand over a notice.

        :raises SinkUnavailable: the sink did not confirm it in time
        """
        ...

    async def close(self) -> None: ...


class _HttpClient:
    """Makes single requests to one secret address, each with a time limit and without redirects."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, message: RequestBody) -> None:
        """Make a request; any status of success is an answer.

        :raises SinkUnavailable: there was none
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        try:
            async with self._session.request(
                method, self._url, data=message.body, headers=message.headers, allow_redirects=False
            ) as response:
                status = response.status
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise SinkUnavailable(f"no answer ({type(error).__name__})") from None
        if not 200 <= status < 300:
            is_temporary = status >= 500 or status in (408, 429)
            raise SinkUnavailable(f"the answer was HTTP {status}", is_temporary=is_temporary)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


class HttpSink:
    """Posts each notice in the form of its kind of receiver. `sender` says which process it is from."""

    def __init__(self, number: int, address: Secret, sender: str, *, timeout_s: float = ATTEMPT_S) -> None:
        scheme, _, rest = address.reveal().rpartition("+") if "+http" in address.reveal()[:16] else ("", "", "")
        url = rest or address.reveal()
        self._format = scheme or NOTIFY_HOSTS.get(urlsplit(url).hostname or "", "json")
        self._chat = parse_qs(urlsplit(url).query).get("chat_id", [""])[0]
        self._sender = sender
        self._client = _HttpClient(url, timeout_s)
        self.name = f"{self._format} {number}"

    async def send(self, notice: Notice) -> None:
        await self._client.request("POST", self._message(notice))

    async def close(self) -> None:
        await self._client.close()

    def _message(self, notice: Notice) -> RequestBody:
        text, is_over = f"{self._sender}: {describe(notice)}"[:TEXT_MAX], notice.state == "resolved"
        if self._format == "ntfy":
            headers = {
                "Content-Type": "text/plain; charset=utf-8",
                "Title": f"trader: {notice.cause}{' resolved' if is_over else ''}",
                "Priority": "default" if is_over or notice.cause.kind in ("start", "stop", "test") else "high",
            }
            return RequestBody(text.encode(), headers)
        fields: dict[str, Any] = {"text": text}
        if self._format == "slack":  # `<` begins a link or a mention there
            fields = {"text": html.escape(text, quote=False)}
        elif self._format == "telegram":
            fields = {"chat_id": self._chat, "text": text}
        elif self._format == "json":
            fields |= {
                "sender": self._sender,
                "state": notice.state,
                "cause": notice.cause.kind,
                "subject": notice.cause.subject,
                "message": notice.text[:TEXT_MAX],
                "consequences": notice.consequences,
                "count": notice.count,
                "since": iso(notice.since),
                "at": iso(notice.at),
            }
        return RequestBody(orjson.dumps(fields), JSON_HEADERS)


class Heartbeat:
    """Pings a dead-man service, which raises an alarm when the pings stop."""

    def __init__(self, address: Secret, *, timeout_s: float = ATTEMPT_S) -> None:
        self._client = _HttpClient(address.reveal(), timeout_s)

    async def ping(self) -> None:
        """Report that the service works.

        :raises SinkUnavailable: the ping was not confirmed in time
        """
        await self._client.request("GET", RequestBody(b"", {}))

    async def close(self) -> None:
        await self._client.close()


def describe(notice: Notice) -> str:
    """Return a notice as one line of text."""
    state = {"firing": "firing: ", "resolved": "resolved: ", "event": ""}[notice.state]
    lasted = f" [lasted {(notice.at - notice.since).total_seconds():.0f} s]" if notice.state == "resolved" else ""
    after = f"; with it: {', '.join(notice.consequences)}" if notice.consequences else ""
    more = f" ({notice.count} times since {iso(notice.since)})" if notice.count > 1 else ""
    return f"{state}{notice.cause}: {notice.text}{after}{lasted}{more}"


def make_sinks(addresses: Sequence[Secret], sender: str) -> list[HttpSink]:
    """Return a sink for each address of NOTIFY_URL."""
    return [HttpSink(number, address, sender) for number, address in enumerate(addresses, 1)]


assert set(NOTIFY_HOSTS.values()) <= set(NOTIFY_FORMATS)
