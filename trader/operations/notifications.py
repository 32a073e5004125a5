"""Notification sinks, one per address of NOTIFY_URL: generic JSON webhooks, ntfy, and Slack's and Telegram's formats;
and pings of a dead man's switch service at HEARTBEAT_URL.

An address may contain a token, so errors and log lines never include any part of it.
"""

import html
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol
from urllib.parse import parse_qs, urlsplit

import orjson

from trader.core.clock import iso
from trader.operations.domain.alarms import Notice, NoticeKind
from trader.record.anchors import JSON_HEADERS, HttpClient
from trader.settings.forms import NOTIFY_HOSTS, Secret
from trader.settings.settings import Settings

ATTEMPT_S: Final = 10.0
"""How long a sink may take for one notice, and a dead man's switch service for one ping."""

TEXT_MAX: Final = 1000
"""Characters per message. Telegram accepts 4096 in UTF-16, ntfy 4096 bytes in UTF-8, and Slack cuts after 40,000."""

RUNBOOKS: Final[Mapping[NoticeKind, str]] = {
    "stop": "a-crash-loop",
    "takeover": "two-leaders",
    "halt": "halt-resume-flatten",
    "approval": "halt-resume-flatten",
    "loss limit": "loss-limits",
    "liquidation": "halt-resume-flatten",
    "reconciliation": "books-that-do-not-agree",
    "provider": "a-provider-or-a-model-fails",
    "model": "a-provider-or-a-model-fails",
    "price": "a-provider-or-a-model-fails",
    "scheduler": "requests-fail",
    "market": "no-prices",
    "database": "a-lock-or-another-trouble-of-the-database",
    "degraded": "a-lock-or-another-trouble-of-the-database",
    "requests": "requests-fail",
    "disk": "the-disk-is-full",
    "clock": "no-prices",
    "books": "books-that-do-not-agree",
    "maintenance": "books-that-do-not-agree",
    "access": "security",
    "notices": "alarms",
}
"""The sections of docs/operation.md that say what to do about each kind of notice."""


RequestBody = tuple[bytes, Mapping[str, str]]
"""A request body with its headers."""


class NotificationSink(Protocol):
    """Receiver of notices, one at a time. `name` contains no part of the address."""

    @property
    def name(self) -> str: ...

    async def send(self, notice: Notice) -> None:
        """Deliver a notice.

        :raises SinkUnavailable: the sink did not confirm it in time
        """
        ...

    async def close(self) -> None: ...


class HttpSink(HttpClient):
    """Posts each notice as JSON with all its fields. `sender` says which process it is from."""

    form = "json"

    def __init__(self, number: int, url: str, sender: str, *, timeout_s: float = ATTEMPT_S) -> None:
        self.name = f"{self.form} {number}"
        self._sender = sender
        super().__init__(url, timeout_s)

    async def send(self, notice: Notice) -> None:
        text = f"{self._sender}: {describe(notice)}"[:TEXT_MAX]
        await self.request("POST", *self.message(notice, text))

    def message(self, notice: Notice, text: str) -> RequestBody:
        """Return the request body of a notice; `text` is its line for people."""
        fields = {
            "text": text,
            "sender": self._sender,
            "state": notice.state,
            "cause": notice.cause.kind,
            "subject": notice.cause.subject,
            "message": notice.text[:TEXT_MAX],
            "impact": notice.impact,
            "consequences": notice.consequences,
            "count": notice.count,
            "since": iso(notice.since),
            "at": iso(notice.at),
            "runbook": runbook(notice),
        }
        return orjson.dumps(fields), JSON_HEADERS


class NtfySink(HttpSink):
    """Posts the text of each notice to a topic of ntfy."""

    form = "ntfy"

    def message(self, notice: Notice, text: str) -> RequestBody:
        is_over = notice.state == "resolved"
        headers = {
            "Content-Type": "text/plain; charset=utf-8",
            "Title": f"trader: {notice.cause}{' resolved' if is_over else ''}",
            "Priority": "default" if is_over or notice.cause.kind in ("start", "stop", "test") else "high",
        }
        return text.encode(), headers


class SlackSink(HttpSink):
    """Posts the text of each notice to an incoming webhook of Slack, where `<` begins a link or a mention."""

    form = "slack"

    def message(self, notice: Notice, text: str) -> RequestBody:
        return orjson.dumps({"text": html.escape(text, quote=False)}), JSON_HEADERS


class TelegramSink(HttpSink):
    """Sends the text of each notice as a bot of Telegram, to the chat that the address names."""

    form = "telegram"

    def __init__(self, number: int, url: str, sender: str, *, timeout_s: float = ATTEMPT_S) -> None:
        super().__init__(number, url, sender, timeout_s=timeout_s)
        self._chat = parse_qs(urlsplit(url).query).get("chat_id", [""])[0]

    def message(self, notice: Notice, text: str) -> RequestBody:
        return orjson.dumps({"chat_id": self._chat, "text": text}), JSON_HEADERS


SINKS: Final[dict[str, Callable[..., NotificationSink]]] = {
    kind.form: kind for kind in (HttpSink, NtfySink, SlackSink, TelegramSink)
}
"""The sinks by the form that an address of NOTIFY_URL begins with, or that its host implies;
`NOTIFY_FORMATS` names them. Each is made of its number, the address without the form, and this process's name.
"""


class Heartbeat(HttpClient):
    """Pings a dead man's switch service, which raises an alarm when the pings stop."""

    def __init__(self, address: Secret, *, timeout_s: float = ATTEMPT_S) -> None:
        super().__init__(address.reveal(), timeout_s)

    async def ping(self) -> None:
        """Report that the service is working.

        :raises SinkUnavailable: the ping was not confirmed in time
        """
        await self.request("GET")


def describe(notice: Notice) -> str:
    """Return a notice as one line of text."""
    state = {"firing": "firing: ", "resolved": "resolved: ", "event": ""}[notice.state]
    impact = f"; {notice.impact}" if notice.impact else ""
    lasted_s = f"{(notice.at - notice.since).total_seconds():.0f} s"
    lasted = f" [lasted {lasted_s}, from {iso(notice.since)} to {iso(notice.at)}]" if notice.state == "resolved" else ""
    after = f"; with it: {', '.join(notice.consequences)}" if notice.consequences else ""
    more = f" ({notice.count} times since {iso(notice.since)})" if notice.count > 1 else ""
    advice = "" if notice.state == "resolved" or not (place := runbook(notice)) else f"; what to do: {place}"
    return f"{state}{notice.cause}: {notice.text}{impact}{after}{lasted}{more}{advice}"


def runbook(notice: Notice) -> str:
    """Return the section of the documents that says what to do about a notice; empty if there is nothing to do."""
    section = RUNBOOKS.get(notice.cause.kind)
    return "" if section is None else f"docs/operation.md#{section}"


def sender_of(settings: Settings) -> str:
    """Return the name of this process in notices."""
    return f"trader {socket.gethostname()}:{settings.port}"


def make_sinks(addresses: Sequence[Secret], sender: str, *, timeout_s: float = ATTEMPT_S) -> list[NotificationSink]:
    """Return a sink for each address of NOTIFY_URL."""
    sinks = []
    for number, address in enumerate(addresses, 1):
        prefix, _, rest = address.reveal().rpartition("+") if "+http" in address.reveal()[:16] else ("", "", "")
        url = rest or address.reveal()
        form = prefix or NOTIFY_HOSTS.get(urlsplit(url).hostname or "", "json")
        sinks.append(SINKS[form](number, url, sender, timeout_s=timeout_s))
    return sinks
