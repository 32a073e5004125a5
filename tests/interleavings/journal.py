"""What a process decided, committed and announced, in the order in which it happened."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Final

from interleavings.gaps import Keeper

from trader.core.events import ConversationsChanged, Event, EventBus, PositionsChanged
from trader.database.pool import Database
from trader.exchange.accounts import Accounts
from trader.exchange.domain.account import Account, AppliedTick
from trader.exchange.domain.ledger import Posting
from trader.exchange.ledger_writer import LedgerWriter

COUNT_ENDED: Final = "SELECT count(*) FROM invocations WHERE model_id = $1 AND status <> 'running'"
"""How many invocations of a model have ended, as every other connection sees it at this moment."""


class Journal:
    """The commits and the announcements of one process, and the last tick before each decision of all processes.

    `seen` names a decision by its account and a client order ID, the ID of a canceled order, or the number of a run.
    """

    def __init__(self, seen: dict[tuple[str, str], datetime], keeper: Keeper) -> None:
        self.seen = seen
        self._keeper = keeper
        self._recorded: set[tuple[str, datetime]] = set()
        """The model and the end of each invocation that was announced; one is announced again after a cancellation."""

        self.is_following = False
        self.found: list[str] = []
        self._entries: list[tuple[str, str]] = []

    def decided(self, posting: Posting, tick: AppliedTick | None) -> None:
        if tick is None:
            return
        account_id = posting.account.id
        for answer in posting.answers:
            if answer.client_order_id is not None:
                self.seen[account_id, answer.client_order_id] = tick.at
        for change in posting.resting:
            if change.status == "CANCELLED":
                self.seen[account_id, str(change.order.id)] = tick.at
        if posting.starts_run:
            self.seen[account_id, f"run {posting.run.number}"] = tick.at

    def committed(self, posting: Posting) -> None:
        if posting.positions or posting.trades or posting.resting or posting.starts_run:
            self._entries.append(("committed", posting.account.id))

    def note(self, event: Event) -> None:
        if self.is_following:
            return
        if isinstance(event, PositionsChanged):
            self._entries += [("announced", account_id) for account_id in event.account_ids]
        if isinstance(event, ConversationsChanged):
            self._recorded.add((event.model_id, event.at))
            announced = sum(model_id == event.model_id for model_id, _ in self._recorded)
            if self._keeper.fetchval(COUNT_ENDED, event.model_id) < announced:
                self.found.append(f"an invocation of {event.model_id} was announced before its commit")

    def problems(self) -> Iterator[str]:
        """Every commit is announced once, after it, and nothing else is."""
        yield from self.found
        waiting: Counter[str] = Counter()
        for kind, account_id in self._entries:
            waiting[account_id] += 1 if kind == "committed" else -1
            if waiting[account_id] < 0:
                yield f"a change of {account_id} was announced before its commit"
                waiting[account_id] = 0
        for account_id, count in waiting.items():
            if count:
                yield f"{count} commits of {account_id} were not announced"


class JournaledWriter(LedgerWriter):
    """A ledger writer that records its commits."""

    def __init__(self, database: Database, journal: Journal) -> None:
        super().__init__(database)
        self._journal = journal
        self.known: Callable[[], Mapping[str, Account]]

    async def write(self, posting: Posting) -> None:
        if self.known()[posting.account.id].sequence != posting.sequence_before:
            self._journal.found.append(f"the memory of {posting.account.id} changed before the commit")
        await super().write(posting)
        self._journal.committed(posting)


class JournaledAccounts(Accounts):
    """Accounts that note which ticks each decision came after."""

    def __init__(self, database: Database, events: EventBus, journal: Journal) -> None:
        writer = JournaledWriter(database, journal)
        super().__init__(database, writer, events)
        writer.known = lambda: self.by_id
        self._journal = journal

    def decide(
        self, account_id: str, decide: Callable[[Account], Posting | None], seen: AppliedTick | None = None
    ) -> Posting | None:
        posting = super().decide(account_id, decide, seen)
        if posting is not None:
            self._journal.decided(posting, seen or self.processed)
        return posting
