"""Followed accounts: accounts that follow the market by the rules of the exchange, without being in the exchange.

They are the baselines of a service and every account of a backtest.
"""

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial

import msgspec

from trader.agents.domain.guard import Approved, RiskContext
from trader.agents.domain.observation import RunHistory
from trader.agents.domain.tools import Change
from trader.agents.domain.view import VariantLimits
from trader.agents.execute import RulesEnvironment, execute_change, run_at_once
from trader.agents.sql.agent_view import select_lowest_equity
from trader.core.clock import EPOCH
from trader.database.pool import Connection
from trader.exchange.domain.account import Account, Marks
from trader.exchange.domain.ledger import ExchangeRules, Posting, RateOfHour
from trader.exchange.domain.orders import Order
from trader.exchange.domain.tick_rules import Moment
from trader.exchange.session import Session
from trader.portfolio.domain.baselines import TRADES_KEPT, BaselineState, EquityMarks
from trader.portfolio.domain.histories import Snapshot, value_account
from trader.portfolio.snapshots import is_due
from trader.portfolio.sql.snapshots import LastSnapshot, select_run_hours


class FollowedAccount:
    """An account with the history visible to its agent."""

    trades_shown = TRADES_KEPT
    """How many of its latest completed trades its agent sees."""

    def __init__(self, state: BaselineState) -> None:
        self.state = state
        self.equity = EquityMarks()
        self.last_snapshot: LastSnapshot | None = None

    @property
    def account(self) -> Account:
        return self.state.account

    def apply(self, posting: Posting) -> None:
        self.state = self.state.after(posting)

    def due_snapshot(self, marks: Marks, now: datetime) -> Snapshot | None:
        """Return the snapshot of this minute; None if none is due or a position has no price yet."""
        return value_account(self.account, marks, now) if is_due(self.account, self.last_snapshot, now) else None

    def note(self, snapshot: Snapshot) -> None:
        """Record a snapshot, which must be later than all earlier ones."""
        self.equity = self.equity.noted(snapshot.created_at, snapshot.net_portfolio)
        self.last_snapshot = LastSnapshot(snapshot.run_id, snapshot.created_at)

    async def read_equity(self, conn: Connection, now: datetime) -> None:
        """Read the recorded equity of the account's run."""
        run_id, midnight = self.account.run.id, now.replace(hour=0, minute=0, second=0, microsecond=0)
        for value in await select_run_hours(conn, [(self.account.id, run_id, EPOCH)]):
            self.equity = self.equity.noted(value.hour, value.last)
        lowest = await select_lowest_equity(conn, self.account.id, run_id, midnight)
        self.equity = msgspec.structs.replace(self.equity, lowest=lowest)

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


def execute_of_rule_agent(
    decisions: Sequence[Change],
    context: Callable[[], RiskContext],
    limits: VariantLimits,
    moment: Moment,
    rules: ExchangeRules,
    rate_of_hour: RateOfHour,
) -> Iterator[Posting]:
    """Execute the decisions of a baseline's rule agent at one moment, and yield each change of its account.

    `context` returns its current risk context, with the changes so far.
    """
    session = partial(Session, rules=rules, rate_of_hour=rate_of_hour, moment=lambda: moment)
    for decision in decisions:
        current = context()

        def orders(approved: Sequence[Approved], account_id: str = current.account.id) -> list[Order]:
            return [Order(account_id=account_id, **msgspec.structs.asdict(each)) for each in approved]

        environment = RulesEnvironment(current, limits, current.account, session, orders)
        run_at_once(execute_change(decision, environment))
        if environment.posting is not None:
            yield environment.posting
