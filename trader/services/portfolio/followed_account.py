"""Followed accounts: accounts that follow the market by the rules of the exchange, without being in the exchange.

They are the baselines of a service and every account of a backtest.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

from trader.domain.agents.observation import RunHistory
from trader.domain.agents.tools import Change
from trader.domain.exchange.account import Account, Marks
from trader.domain.exchange.ledger import Posting
from trader.domain.portfolio.baselines import TRADES_KEPT, BaselineState, EquityMarks
from trader.domain.portfolio.histories import Snapshot, value_account
from trader.services.portfolio.snapshots import is_due
from trader.store.portfolio.snapshots import LastSnapshot


class Waiting(Protocol):
    """Pending orders or decisions that wait for the first tick at or after `due`."""

    @property
    def due(self) -> datetime: ...


class WaitingDecisions(NamedTuple):
    """Decisions of a rule agent that wait for the first tick at or after `due`."""

    decisions: Sequence[Change]
    due: datetime


class FollowedAccount:
    """An account with the history that its agent sees."""

    trades_shown = TRADES_KEPT
    """How many of its latest completed trades its agent is shown."""

    def __init__(self, state: BaselineState) -> None:
        self.state = state
        self.equity = EquityMarks()
        self.last_snapshot: LastSnapshot | None = None
        self.waiting: Waiting | None = None

    @property
    def account(self) -> Account:
        return self.state.account

    def apply(self, posting: Posting) -> None:
        self.state = self.state.after(posting)

    def due_snapshot(self, marks: Marks, now: datetime) -> Snapshot | None:
        """Return the snapshot of this minute; None when none is due, or a position has no price yet."""
        return value_account(self.account, marks, now) if is_due(self.account, self.last_snapshot, now) else None

    def note(self, snapshot: Snapshot) -> None:
        """Record a snapshot, which must be later than all before it."""
        self.equity = self.equity.noted(snapshot.created_at, snapshot.net_portfolio)
        self.last_snapshot = LastSnapshot(snapshot.run_id, snapshot.created_at)

    def history(self, now: datetime) -> RunHistory:
        """Return the run history that the agent sees."""
        state, account = self.state, self.account
        return RunHistory(
            run_id=account.run.id,
            sequence=account.sequence,
            hour=now.replace(minute=0, second=0, microsecond=0),
            trades=state.trades[: self.trades_shown],
            stats=state.stats,
            actions=state.last_fills,
            peak=self.equity.peak,
            day_opening=self.equity.before(now.date()),
        )
