"""Ledger writer: commits all waiting postings in one statement, so that concurrent orders share a round trip."""

import asyncio
import logging
from typing import Final

from trader.core import tasks
from trader.core.errors import InternalError, LedgerViolated, TraderError, Unavailable
from trader.database.pool import Database
from trader.exchange.domain.ledger import Posting
from trader.exchange.service_level import ServiceLevel
from trader.exchange.sql.ledger import write_postings

log = logging.getLogger("trader.exchange")

_BATCH_MAX: Final = 64
_NO_TERM: Final = -1
"""No leader ever has this term, so nothing can be written with it."""


class LedgerWriter:
    """Commits postings in order of arrival. At most one posting per account may wait at a time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._term = _NO_TERM
        self._waiting: list[tuple[Posting, asyncio.Future[None]]] = []
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.service_level = ServiceLevel()

    def start(self, term: int) -> None:
        """Start writing as the leader of this term."""
        self._term = term
        self._task = tasks.keep(self._run, "ledger writer")

    def halt(self) -> None:
        """Stop writing at once; a statement in progress may still commit."""
        self._term = _NO_TERM

    async def close(self) -> None:
        """Stop. Callers still waiting get `Unavailable`."""
        await tasks.end(self._task)
        self._task = None
        waiting, self._waiting = self._waiting, []
        for _, written in waiting:
            _fail(written, Unavailable("The service is stopping."))

    async def write(self, posting: Posting) -> None:
        """Commit a posting; return after the commit.

        :raises Unavailable: the database did not confirm it; whether it was written is unknown
        :raises LedgerViolated: it violated a constraint, and nothing was written
        :raises InternalError: a bug ended the write; whether it was written is unknown
        """
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((posting, written))
        self._work.set()
        await written

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            batch, self._waiting = self._waiting[:_BATCH_MAX], self._waiting[_BATCH_MAX:]
            if not self._waiting:
                self._work.clear()
            try:
                await self._commit(batch)
            finally:  # after a bug outside the commit; otherwise its callers would wait forever
                for _, written in batch:
                    _fail(written, InternalError("Writing the posting failed with an internal error; see the log."))

    async def _commit(self, batch: list[tuple[Posting, asyncio.Future[None]]]) -> None:
        try:
            with self.service_level.posting():
                async with self._database.writing() as conn:
                    written_ids = await write_postings(conn, [posting for posting, _ in batch], self._term)
        except LedgerViolated as error:
            await self._commit_apart(batch, error)
            return
        except Unavailable as error:
            for _, written in batch:
                _fail(written, error)
            return
        except asyncio.CancelledError:
            for _, written in batch:
                _fail(written, Unavailable("The service is stopping."))
            raise
        except Exception as error:  # otherwise all current and future callers would wait forever
            log.exception("a bug in writing the postings of %s", ", ".join(posting.account.id for posting, _ in batch))
            reason = f"Writing the posting failed with an internal error ({type(error).__name__}); see the log."
            failure = InternalError(reason)
            failure.__cause__ = error
            await self._commit_apart(batch, failure)
            return
        for posting, written in batch:
            if posting.account.id not in written_ids:
                _fail(written, Unavailable(f"The account {posting.account.id} was changed by another process."))
            elif not written.done():
                written.set_result(None)

    async def _commit_apart(self, batch: list[tuple[Posting, asyncio.Future[None]]], error: TraderError) -> None:
        """Commit each posting of a failed batch separately, so that a faulty posting does not fail the others."""
        if len(batch) == 1:
            _fail(batch[0][1], error)
            return
        for item in batch:
            await self._commit([item])


def _fail(written: asyncio.Future[None], error: Exception) -> None:
    if not written.done():
        written.set_exception(error)
