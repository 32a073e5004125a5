"""The server of the stream benchmark: the service's event streams without the loading of their states."""

import asyncio
import time
from datetime import UTC, datetime
from typing import Final

from benchmarks.stream_readers import STREAMS, Readers
from support.served import make_stream_app
from support.sse import workflow_step

from trader.api.connections import ConnectionLimits, HttpServer, bind
from trader.api.streams import Broadcasters, Timing
from trader.core.clock import SystemClock
from trader.core.events import ConversationsChanged, EventBus, MarketChecked
from trader.exchange.events import TradesChanged

STATE_BYTES: Final = 8_000


def state(sent_ns: int) -> bytes:
    """Return a state of the size of a dashboard's, marked with the time of its publication."""
    return b'[{"sent":%d,"rest":"%b"}]' % (sent_ns, b"x" * STATE_BYTES)


class Service:
    """The real streams on real connections.

    Loading a state returns prepared bytes, so only the streams are measured.
    """

    def __init__(self, timing: Timing | None = None) -> None:
        self._timing = timing or Timing()
        self._sent_ns = 0
        self.events = EventBus()
        self.broadcasters = Broadcasters(
            dict.fromkeys((*STREAMS[:4], "candles"), self._load), self.events, SystemClock()
        )

    async def _load(self) -> bytes:
        return state(self._sent_ns)

    async def start(self) -> int:
        """Listen. Return the port."""
        self.app = make_stream_app(self.broadcasters, self._timing)
        self._server = HttpServer(self.app, ConnectionLimits())
        sockets = bind("127.0.0.1", 0)
        await self._server.start(sockets)
        return int(sockets[0].getsockname()[1])

    def publish(self) -> int:
        """Publish an event to every stream. Return the time that marks it, in nanoseconds."""
        self._sent_ns = time.time_ns()
        now = datetime.now(UTC)
        self.events.publish(MarketChecked(at=now))
        self.events.publish(TradesChanged(at=now, account_ids=()))
        self.events.publish(ConversationsChanged(at=now, model_id="apex"))
        self.events.publish(workflow_step(now, 1, sent=self._sent_ns))
        return self._sent_ns

    def connected(self) -> int:
        return sum(map(len, self.broadcasters.all.values()))

    def present(self) -> int:
        """Return the number of subscribers and connections."""
        return self.connected() + len(self._server)

    async def stop(self) -> None:
        await self._server.stop()


async def followed(server: Service, port: int, subscribers: int, ping_s: float) -> Readers:
    """Start `subscribers` well-behaved readers of every stream, and wait until all have their first state."""
    readers = Readers(port, subscribers, ping_s)
    await readers.start()
    async with asyncio.timeout(30):
        while server.connected() < subscribers * len(STREAMS):
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    return readers
