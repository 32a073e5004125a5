"""Anchors: the head of the chain of decisions, recorded once an hour and sent to an external sink."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from trader.core.errors import SinkUnavailable, Unavailable
from trader.database.pool import Database
from trader.record.anchor_sinks import AnchorSink
from trader.record.sql.chain import insert_anchor, select_unsent_anchors, update_anchor_sent

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
