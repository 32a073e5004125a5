"""Operator commands: halt, resume, flatten and reset, carried out through the exchange like any other orders.

Every process follows the halts; the leader carries out the commands, and continues those that an earlier leader began.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import asyncpg

from trader.core import tasks
from trader.core.errors import TraderError, Unavailable
from trader.core.money import format_decimal
from trader.database.leadership import hold_term
from trader.database.pool import Connection, Database
from trader.exchange.domain.account import Account, Position, RestingOrder
from trader.exchange.domain.halts import (
    LIMITS,
    Cancelled,
    Closed,
    CommandOutcome,
    HaltCause,
    Left,
    OperatorCommand,
    Verb,
    opening_orders,
    scope,
)
from trader.exchange.domain.orders import CLOSING_SIDE, Cause, Order, OrderStatus
from trader.exchange.halts import Halts, HaltTaken
from trader.exchange.protocol import Exchange
from trader.exchange.service_level import Outcomes
from trader.exchange.sql import halts as store
from trader.operations.loss_limits import LossLimits
from trader.operations.sql.loss_baselines import update_baselines_reset
from trader.operations.sql.status import (
    select_alarms,
    select_costs_by_day,
    select_model_activity,
    select_past_halts,
    select_refusals,
)

log = logging.getLogger("trader.safety")

POLL_S: Final = 0.5
"""Interval at which commands and halts are read, in real time."""

_COMMAND_EXPIRY: Final = timedelta(minutes=10)
"""Age from which a person's command is no longer started, since nobody would expect it so late."""

_COMMANDS_MAX: Final = 8
_ACCOUNTS_MAX: Final = 32
"""How many commands, and accounts per command, are processed concurrently."""

FLATTEN_S: Final = 60.0
RETRY_S: Final = 1.0
"""How long to keep trying to close an account's positions, and the pause between attempts.

For a loss limit this never ends: after that time, it tries once in every such span.
"""


HISTORY_MAX: Final = 200
"""How many of the latest halts and alarms operators are shown."""


async def write_resume(conn: Connection, command: OperatorCommand) -> Sequence[HaltCause]:
    """Lift the halts of a command to resume, and return their causes; without any, the command is not written.

    Losses are measured anew after the halt of a limit. The connection must be in a transaction.
    """
    lifted = await store.update_halts_lifted(conn, command.account_id, command.asked_by)
    if LIMITS.intersection(lifted):
        await update_baselines_reset(conn, command.account_id)
    if lifted:
        await store.insert_command(conn, command)
    return lifted


class OperatorCommands:
    """Follows commands and halts within `POLL_S`, and carries them out as the leader."""

    def __init__(self, database: Database, exchange: Exchange, halts: Halts, limits: LossLimits) -> None:
        self._database = database
        self._exchange = exchange
        self._halts = halts
        self._limits = limits
        self._tasks: dict[UUID, asyncio.Task[None]] = {}
        self._progress: dict[UUID, _Progress] = {}
        self._is_open = False
        self._works = {
            Verb.FLATTEN: self._flatten,
            Verb.HALT: self._cancel_openings,
            Verb.RESET: self._reset,
            Verb.REMOVE: self._remove,
        }
        self.outcomes = Outcomes()
        """How the last looks at halts and commands ended."""

    async def run(self) -> None:
        """Follow commands and halts, forever."""
        while True:
            try:
                with self.outcomes.watch("looks at halts and commands"):
                    await self.poll()
            except (Unavailable, asyncpg.PostgresError) as error:
                log.warning("operator commands cannot be read now: %s", error)
                with suppress(Unavailable):
                    await self._sweep_as_leader()
            await asyncio.sleep(POLL_S)

    def start(self) -> None:
        """Start carrying out commands, as the leader."""
        self._is_open = True

    async def halt(self, account_id: str | None, reason: str, by: str) -> HaltTaken:
        """Halt at once, before anything is written, and return what preserves the halt.

        Without the database's tables there is no command that cancels resting orders, so they are canceled here.
        """
        taken = await self._halts.halt_at_once(account_id, reason, by)
        if taken.kept_in != "database":
            try:
                await self.sweep()
            except Unavailable as error:
                log.warning("the resting orders of %s are not canceled yet: %s", scope(account_id), error)
        return taken

    async def flatten(self, account_id: str | None, reason: str, by: str) -> OperatorCommand:
        """Halt one account or, if None, all of them, and write the command that closes their positions.

        :raises Unavailable: the database cannot answer now; nothing is closed
        """
        command = OperatorCommand(id=uuid4(), verb=Verb.FLATTEN, account_id=account_id, reason=reason, asked_by=by)
        async with self._database.transaction() as conn:
            await store.insert_halting_command(conn, command)
        return command

    async def resume(self, account_id: str | None, reason: str, by: str) -> Sequence[HaltCause]:
        """Lift the halts of one account or, if None, of all accounts together, and return their causes.

        :raises Unavailable: the database cannot answer now; they stay in force
        """
        self._limits.reset(await self._halts.load())  # one that is not in the database yet is written first
        command = OperatorCommand(id=uuid4(), verb=Verb.RESUME, account_id=account_id, reason=reason, asked_by=by)
        async with self._database.transaction() as conn:
            lifted = await write_resume(conn, command)
        try:
            self._limits.reset(await self._halts.load())
        except Unavailable as error:  # they are lifted, which the next poll reads
            log.warning("halts were lifted, but are in force here until they can be read again: %s", error)
        return lifted

    async def activity(self, since: datetime) -> dict[str, Any]:
        """Return costs, models, refusals, halts and alarms since a time, each as rows for the wire."""
        async with self._database.reading() as conn:
            return {
                "costs": await select_costs_by_day(conn, since),
                "models": await select_model_activity(conn, since),
                "refusals": await select_refusals(conn, since),
                "halts": await select_past_halts(conn, since, HISTORY_MAX),
                "alarms": (await select_alarms(conn, since))[-HISTORY_MAX:],
            }

    async def close(self) -> None:
        """Stop carrying out commands; the next leader continues them."""
        self._is_open = False
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        self._tasks.clear()

    async def poll(self) -> None:
        """Read halts and commands, start new commands and record those that have failed.

        :raises Unavailable: the database cannot answer now
        """
        if self._halts.is_ahead:  # their commands, which report what they cancel, come before any sweep
            await self._halts.load()
        async with self._database.connection() as conn:  # before the halts, which are written with their commands
            commands = await store.select_open_commands(conn, _COMMAND_EXPIRY, _COMMANDS_MAX)
        self._limits.reset(await self._halts.load())
        if not self._is_open or self._exchange.term is None:
            return
        await self._reap()
        if not self._is_open:
            return
        for command, is_expired in commands:
            if command.id in self._tasks:
                continue
            if is_expired:
                await self._finish(
                    command, CommandOutcome(note="no service carried it out in time; give the command again")
                )
            else:
                run = self._carry_out(command)
                self._tasks[command.id] = tasks.start(run, f"{command.verb} {command.id}")
        await self._sweep_as_leader()

    async def _reap(self) -> None:
        for command_id, task in list(self._tasks.items()):
            if not task.done():
                continue
            del self._tasks[command_id]
            if not task.cancelled() and (error := task.exception()) is not None:
                note = f"internal error ({type(error).__name__}); see the log"
                left = Left(account_id="", what="the command", reason=note)
                async with self._database.writing() as conn:
                    await store.update_command_finished(
                        conn, command_id, CommandOutcome(left=(left,)), self._exchange.term
                    )

    async def _sweep_as_leader(self) -> None:
        if self._is_open and self._exchange.term is not None and not self._tasks:
            await self.sweep()

    async def sweep(self) -> None:
        """Cancel the resting orders that could open positions on halted accounts.

        :raises Unavailable: an order could not be canceled now
        """

        async def sweep(account: Account) -> None:
            progress = _Progress()
            try:
                await self._cancel(account.id, opening_orders(account), progress)
            finally:
                for order in progress.cancelled:
                    log.warning("%s is halted: its resting %s order was canceled", account.id, order.symbol)

        accounts = [account for account in self._exchange.accounts.values() if account.resting]
        await _for_each((account for account in accounts if self._halts.refusal_to_open(account.id) is not None), sweep)

    async def _carry_out(self, command: OperatorCommand) -> None:
        """Carry out a command and record its outcome. If the database was unavailable, `poll` starts it again."""
        progress = self._progress.setdefault(command.id, _Progress())
        progress.begin()
        subject = scope(command.account_id)
        try:
            if command.term is not None and not self._halts.is_limited(command.account_id):
                await self._finish(command, CommandOutcome(note="trading was resumed before it was carried out"))
            elif await self._record_progress(command, "begun"):  # otherwise it was withdrawn, or the term is over
                log.warning("%s of %s, requested by %s: %s", command.verb, subject, command.asked_by, command.reason)
                if (work := self._works.get(command.verb)) is not None:
                    await work(command, progress)
                await self._finish(command, progress.outcome())
            del self._progress[command.id]
        except Unavailable as error:
            log.warning("%s of %s is interrupted: %s", command.verb, subject, error)

    async def _record_progress(self, command: OperatorCommand, progress: str) -> bool:
        async with self._database.writing() as conn:
            return await store.update_command_taken(conn, command.id, progress, self._exchange.term)

    async def _finish(self, command: OperatorCommand, outcome: CommandOutcome) -> None:
        async with self._database.writing() as conn:
            if not await store.update_command_finished(conn, command.id, outcome, self._exchange.term):
                log.warning("%s of %s is another process's now", command.verb, scope(command.account_id))
                return
        log.warning(
            "%s of %s: %s%s",
            command.verb,
            scope(command.account_id),
            outcome.counts,
            "" if outcome.note is None else f"; {outcome.note}",
        )

    async def _reset(self, command: OperatorCommand, progress: "_Progress") -> None:
        """Start a new run of the account; if a crash precedes its outcome, the next leader repeats it."""
        assert command.account_id is not None, "all accounts are never reset at once"
        with progress.leaving(command.account_id, "the account"):
            await self._exchange.reset_account(command.account_id)

    async def _remove(self, command: OperatorCommand, progress: "_Progress") -> None:
        """Remove the account and lift its halts; if a crash precedes its outcome, the next leader repeats it."""
        assert command.account_id is not None, "all accounts are never removed at once"
        with progress.leaving(command.account_id, "the account"):
            if not await self._exchange.remove_account(command.account_id):
                progress.leave(command.account_id, "the account", "it has traded or belongs to a model, and is kept")
                return
            async with self._database.transaction() as conn:
                if await hold_term(conn, self._exchange.term):
                    await store.update_halts_lifted(conn, command.account_id, command.asked_by)

    # --- canceling ----------------------------------------------------------------------------------------------------

    async def _cancel_openings(self, command: OperatorCommand, progress: "_Progress") -> None:
        async def cancel(account: Account) -> None:
            await self._cancel(account.id, opening_orders(account), progress)

        await _for_each((account for account in self._exchange.accounts.values() if command.covers(account.id)), cancel)

    async def _cancel(self, account_id: str, orders: Iterable[RestingOrder], progress: "_Progress") -> None:
        """Cancel the orders; at the end, raise `Unavailable` if one could not be canceled now."""
        undecided: Unavailable | None = None
        for order in orders:
            try:
                answer = await self._exchange.cancel_order(account_id, str(order.id))
            except Unavailable as error:
                undecided = error
                continue
            except TraderError as error:
                progress.leave(account_id, f"resting {order.symbol} order", str(error))
                continue
            if answer.status is OrderStatus.CANCELLED:
                progress.cancelled.append(
                    Cancelled(
                        account_id=account_id,
                        symbol=order.symbol,
                        side=order.side,
                        quantity=order.remaining,
                        limit_price=order.limit_price,
                    )
                )
        if undecided is not None:
            raise undecided

    # --- flattening ---------------------------------------------------------------------------------------------------

    async def _flatten(self, command: OperatorCommand, progress: "_Progress") -> None:
        accounts = [account for account in self._exchange.accounts.values() if command.covers(account.id)]
        positions = sum(len(account.positions) for account in accounts)

        async def flatten(account: Account) -> None:
            undecided: Unavailable | None = None
            try:
                await self._cancel(account.id, account.resting, progress)
            except Unavailable as error:
                undecided = error  # an order that cannot be canceled now keeps no position open
            await self._close_all(command, account.id, progress)
            if undecided is not None:
                raise undecided

        async def report() -> None:
            while True:
                open_now = sum(len(self._held(account.id)) for account in accounts)
                closed = f"{positions - open_now} of {positions} positions closed"
                with suppress(Unavailable):
                    await self._record_progress(command, f"{closed}, {len(progress.cancelled)} orders cancelled")
                await asyncio.sleep(RETRY_S)

        reporting = tasks.start(report(), f"progress of {command.verb} {command.id}")
        try:
            await _for_each(accounts, flatten)
        finally:
            await tasks.end(reporting)

    async def _close_all(self, command: OperatorCommand, account_id: str, progress: "_Progress") -> None:
        """Close every position at market, repeatedly for a minute while the order books cannot fill all of it.

        A loss limit's command continues until everything is closed. Orders in flight at the time of the halt are
        awaited, and their fills are closed too. At the end, what a venue holds beyond the books is closed.
        """
        loop = asyncio.get_running_loop()
        deadline_s, reasons = loop.time() + FLATTEN_S, dict[str, str]()
        first = attempt = progress.attempts.get(account_id, 0)
        while (positions := self._held(account_id)) or self._exchange.undecided(account_id):
            is_late = attempt > first and loop.time() >= deadline_s
            if is_late and command.term is None:
                break
            if self._halts.refusal_to_open(account_id) is None:
                reasons = {position.symbol: "trading was resumed in the meantime" for position in positions}
                break
            if attempt > first:
                await asyncio.sleep(FLATTEN_S if is_late else RETRY_S)
            attempt += 1
            tries = [self._close(command, account_id, position, attempt, progress) for position in positions]
            for position, reason in zip(positions, await asyncio.gather(*tries), strict=True):
                reasons[position.symbol] = reason or "the order book could not fill the rest in time"
            progress.attempts[account_id] = attempt
        for position in positions:
            what = f"{position.side} {format_decimal(position.quantity)} {position.symbol}"
            progress.leave(account_id, what, reasons.get(position.symbol, "it was opened in the meantime"))
        for symbol in sorted(self._exchange.undecided(account_id)):
            reason = "its outcome is not known yet; flatten again when it is"
            progress.leave(account_id, f"an order of {symbol}", reason)
        if self._halts.refusal_to_open(account_id) is not None:
            for what, reason in (await self._exchange.close_unbooked(account_id)).items():
                progress.leave(account_id, what, reason)

    def _held(self, account_id: str) -> list[Position]:
        return list(self._exchange.account(account_id).positions.values())  # it may have been removed in the meantime

    async def _close(
        self, command: OperatorCommand, account_id: str, position: Position, attempt: int, progress: "_Progress"
    ) -> str | None:
        """Try once to close a position; return the reason for a refusal. The same attempt is never placed twice."""
        order = Order(
            account_id=account_id,
            symbol=position.symbol,
            side=CLOSING_SIDE[position.side],
            quantity=position.quantity,
            reduce_only=True,
            client_order_id=f"operator:{command.id}:{position.symbol}:{attempt}",
            cause=Cause.OPERATOR,
        )
        try:
            (answer,) = await self._exchange.place_orders(order)
        except Unavailable:
            raise
        except TraderError as error:
            return str(error)
        if answer.average_price is not None:
            progress.closed[account_id, position.symbol, attempt] = Closed(
                account_id=account_id,
                symbol=position.symbol,
                side=position.side,
                quantity=answer.total_quantity,
                price=answer.average_price,
                gross_pnl=answer.realized_pnl,
            )
        return answer.reason


async def _for_each(accounts: Iterable[Account], act: Callable[[Account], Awaitable[None]]) -> None:
    """Act on the accounts, some concurrently. An error on one stops no other; the first error is raised at the end."""
    slots = asyncio.Semaphore(_ACCOUNTS_MAX)

    async def act_in_slot(account: Account) -> None:
        async with slots:
            await act(account)

    done = await asyncio.gather(*(act_in_slot(account) for account in accounts), return_exceptions=True)
    for error in filter(None, done):
        raise error


class _Progress:
    """The progress of a command, kept if the command is started again.

    `closed` has the fills by account, symbol and attempt; `attempts` counts an account's answered attempts, which would
    only get the same answers again.
    """

    def __init__(self) -> None:
        self.cancelled: list[Cancelled] = []
        self.closed: dict[tuple[str, str, int], Closed] = {}
        self.attempts: dict[str, int] = {}
        self._left: dict[tuple[str, str], Left] = {}

    def begin(self) -> None:
        """Discard the list of failed parts, since they are tried again."""
        self._left.clear()

    def leave(self, account_id: str, what: str, reason: str) -> None:
        self._left[account_id, what] = Left(account_id=account_id, what=what, reason=reason)

    @contextmanager
    def leaving(self, account_id: str, what: str) -> Iterator[None]:
        """Leave what the exchange refuses to do, with its reason; what is unavailable now is tried again."""
        try:
            yield
        except Unavailable:
            raise
        except TraderError as error:
            self.leave(account_id, what, str(error))

    def outcome(self) -> CommandOutcome:
        return CommandOutcome(
            cancelled=tuple(self.cancelled), closed=tuple(self.closed.values()), left=tuple(self._left.values())
        )
