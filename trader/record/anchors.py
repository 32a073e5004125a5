"""Anchors: the head of the chain, recorded once an hour and sent to a webhook or a file outside the database."""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Final, Protocol
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec

from trader.core.clock import iso
from trader.core.errors import SinkUnavailable, Unavailable
from trader.core.files import append_lines
from trader.database.pool import Database
from trader.record.domain.chain import Anchor
from trader.record.sql.chain import insert_anchor, select_unsent_anchors, update_anchor_sent
from trader.settings.forms import Secret

ATTEMPT_S: Final = 10.0
"""How long a sink may take for one anchor."""

JSON_HEADERS: Final = {"Content-Type": "application/json"}


class AnchorLine(msgspec.Struct, rename="camel"):
    """JSON form of an anchor, sent to a webhook or written as a line. `digest` is hexadecimal."""

    position: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    digest: str
    anchored_at: Annotated[datetime, msgspec.Meta(tz=True)]
    register: str | None = None

    def anchor(self, source: str) -> Anchor:
        """Return the anchor. Raise ValueError if the digest is invalid."""
        digest = bytes.fromhex(self.digest)
        if len(digest) != 32:
            raise ValueError("a digest has 64 hexadecimal digits")
        return Anchor(self.position, digest, self.anchored_at, source, self.register)


def anchor_line(anchor: Anchor) -> bytes:
    """Return an anchor as one line of JSON, without its line break."""
    line = {"position": anchor.position, "digest": anchor.digest.hex(), "anchoredAt": iso(anchor.anchored_at)}
    return msgspec.json.encode(line if anchor.register is None else line | {"register": anchor.register})


class AnchorSink(Protocol):
    """Receiver of anchors, one at a time."""

    async def send(self, anchor: Anchor) -> None:
        """Deliver an anchor.

        :raises SinkUnavailable: the sink did not confirm it in time
        """
        ...

    async def close(self) -> None: ...


class HttpClient:
    """Makes single requests to one secret address, each with a timeout and without redirects."""

    def __init__(self, url: str, timeout_s: float) -> None:
        self._url = url
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def request(self, method: str, body: bytes = b"", headers: Mapping[str, str] = MappingProxyType({})) -> None:
        """Make a request; any 2xx status is an answer.

        :raises SinkUnavailable: there was no such answer
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        try:
            async with self._session.request(
                method, self._url, data=body, headers=headers, allow_redirects=False
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


class WebhookSink(HttpClient):
    """Posts each anchor as JSON; any 2xx status confirms it."""

    def __init__(self, url: str) -> None:
        super().__init__(url, ATTEMPT_S)

    async def send(self, anchor: Anchor) -> None:
        await self.request("POST", anchor_line(anchor), JSON_HEADERS)


class FileSink:
    """Appends each anchor to a file, as a line that is on disk before the anchor counts as sent."""

    def __init__(self, url: str) -> None:
        self._path = unquote(urlsplit(url).path)
        self._writing: Future[None] | None = None

    async def send(self, anchor: Anchor) -> None:
        if self._writing is not None and not self._writing.done():
            raise SinkUnavailable("the file system is still stuck on the last anchor")
        self._writing = writing = Future[None]()
        # A daemon thread, since neither a timeout nor the end of the process can stop a write to a dead network disk.
        threading.Thread(target=self._append, args=(anchor_line(anchor), writing), daemon=True).start()
        try:
            async with asyncio.timeout(ATTEMPT_S):
                await asyncio.shield(asyncio.wrap_future(writing))
        except TimeoutError:
            raise SinkUnavailable("the file system is not responding") from None
        except OSError as error:
            raise SinkUnavailable(f"the file cannot be written: {error.strerror or type(error).__name__}") from None

    def _append(self, line: bytes, writing: Future[None]) -> None:
        try:
            append_lines(Path(self._path).resolve(), line + b"\n")
            writing.set_result(None)
        except Exception as error:  # noqa: BLE001 - `send` raises it
            writing.set_exception(error)

    async def close(self) -> None:
        """Do nothing: no resource stays open between anchors."""


SINKS: Final[dict[str, Callable[[str], AnchorSink]]] = {"file": FileSink, "http": WebhookSink, "https": WebhookSink}
"""The sinks by the scheme of ANCHOR_URL; each is made of the address. `ANCHOR_SCHEMES` names them."""


def make_sink(address: Secret | None) -> AnchorSink | None:
    """Return the sink at the address of ANCHOR_URL; None if it is not set."""
    return None if address is None else SINKS[urlsplit(address.reveal()).scheme](address.reveal())


INTERVAL_S: Final = 3600.0
"""Real seconds between anchors."""

POLL_S: Final = 30.0
"""Real seconds between checks for due anchors, and thus between attempts to reach the sink."""

SENDING_S: Final = 20.0
BATCH: Final = 100
"""The most real seconds to spend on one batch, and the most anchors in it; the rest wait in their table."""

_log = logging.getLogger("trader.agents")


class Anchors:
    """Records and sends anchors while this process leads. Rejected anchors are retried, oldest first."""

    def __init__(
        self,
        database: Database,
        sink: AnchorSink | None,
        is_leader: Callable[[], bool],
        *,
        interval_s: float = INTERVAL_S,
        poll_s: float = POLL_S,
    ) -> None:
        self._database = database
        self._sink = sink
        self._is_leader = is_leader
        self._interval_s = interval_s
        self._poll_s = poll_s
        self._problem: str | None = None

    async def run(self) -> None:
        """Call `update` periodically until canceled."""
        while True:
            if self._is_leader():
                try:
                    await self.update()
                except Unavailable as error:
                    _log.warning("the head of the chain was not recorded: %s", error)
            await asyncio.sleep(self._poll_s)

    async def update(self) -> None:
        """Record the head once an hour, and send the anchors that the sink has not accepted.

        :raises Unavailable: the database is not responding
        """
        async with self._database.writing() as conn:
            await insert_anchor(conn, self._interval_s)
            unsent = [] if self._sink is None else await select_unsent_anchors(conn, BATCH)
        problem = None
        try:
            async with asyncio.timeout(SENDING_S):
                for anchor in unsent:
                    assert self._sink is not None, "without a sink, nothing is read"
                    await self._sink.send(anchor)
                    async with self._database.writing() as conn:
                        await update_anchor_sent(conn, anchor.position)
        except TimeoutError:
            problem = "the sink is slow; the rest will be sent later"
        except SinkUnavailable as error:
            problem = str(error)
        if problem != self._problem:  # logged once, not with every attempt
            self._problem = problem
            if problem is None:
                _log.info("anchors of the chain are being sent again")
            else:
                _log.warning("%d anchors of the chain are waiting for their sink: %s", len(unsent), problem)
