"""What operators ask of the running service, carried out through the exchange as everybody trades.

Every process sees the halts; the one that leads carries the commands out, and goes on with those that another began.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Final
from uuid import UUID

from trader.domain.exchange.account import Account, Position, RestingOrder
from trader.domain.exchange.halts import Cancelled, Closed, Command, Left, Outcome, Verb, opening_orders, scope
from trader.domain.exchange.orders import CLOSING_SIDE, Cause, Order, OrderStatus
from trader.domain.money import format_decimal
from trader.errors import TraderError, Unavailable
from trader.services.exchange.halts import Halts
from trader.services.exchange.protocol import Exchange
from trader.services.operations.loss_limits import LossLimits
from trader.store.database.pool import Database
from trader.store.operations import safety as store

log = logging.getLogger("trader.safety")

POLL_S: Final = 0.5
"""Of real time: how soon a command is seen."""

_GOOD_FOR: Final = timedelta(minutes=10)
"""How long after it was asked a command may still be carried out: later it would surprise."""

_AT_ONCE_MAX: Final = 8
_ACCOUNTS_AT_ONCE_MAX: Final = 32
_FLATTEN_S: Final = 60.0
_ROUND_S: Final = 1.0
"""How long closing a position is tried, and the pause before the next try."""


class Operations:
    """Sees commands and halts within `POLL_S`, and carries them out as the leader."""

    def __init__(self, database: Database, exchange: Exchange, halts: Halts, limits: LossLimits) -> None:
        self._database = database
        self._exchange = exchange
        self._halts = halts
        self._limits = limits
        self._tasks: dict[UUID, asyncio.Task[None]] = {}
        self._works: dict[UUID, _Work] = {}
        self._is_open = False

    async def run(self) -> None:
        """Mind the operators, for ever."""
        while True:
            try:
                await self.poll()
            except Unavailable as error:
                log.warning("commands of operators cannot be seen now: %s", error)
            await asyncio.sleep(POLL_S)

    def start(self) -> None:
        """Carry commands out from here on, as the leader."""
        self._is_open = True

    async def close(self) -> None:
        """Stop what is under way, and begin with nothing more; the next leader goes on with it."""
        self._is_open = False
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
        self._tasks.clear()

    async def poll(self) -> None:
        """See what is halted and asked; begin with what is new, and end what has ended.

        :raises Unavailable: the database cannot answer now
        """
        async with self._database.connection() as conn:  # before the halts, which are written with their commands
            commands = await store.select_open_commands(conn, _GOOD_FOR, _AT_ONCE_MAX)
        self._limits.renew(await self._halts.load())
        if not self._is_open or self._exchange.term is None:
            return
        await self._reap()
        if not self._is_open:
            return
        for command, is_expired in commands:
            if command.id in self._tasks:
                continue
            if is_expired:
                await self._finish(command, Outcome(note="no service carried it out in time; ask again"))
            else:
                run = self._carry_out(command)
                self._tasks[command.id] = asyncio.create_task(run, name=f"{command.verb} {command.id}")
        if not self._tasks:
            await self.sweep()

    async def _reap(self) -> None:
        for command_id, task in list(self._tasks.items()):
            if not task.done():
                continue
            del self._tasks[command_id]
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("command %s failed: %s", command_id, error, exc_info=error)
                async with self._database.connection() as conn:
                    note = f"internal error ({type(error).__name__}); the log has its cause"
                    left = Left(account_id="", what="the command", reason=note)
                    await store.update_command_finished(conn, command_id, Outcome(left=(left,)))

    async def sweep(self) -> None:
        """What rests and could open goes, however its halt came about.

        :raises Unavailable: something could not be cancelled now
        """

        async def sweep(account: Account) -> None:
            work = _Work()
            try:
                await self._cancel(account.id, opening_orders(account), work)
            finally:
                for order in work.cancelled:
                    log.warning("%s is halted: its resting %s order was cancelled", account.id, order.symbol)

        accounts = [account for account in self._exchange.accounts.values() if account.resting]
        await _for_each((one for one in accounts if self._halts.refusal_to_open(one.id) is not None), sweep)

    async def _carry_out(self, command: Command) -> None:
        """Do it all and record the outcome. What the database's absence has interrupted is begun again by `poll`."""
        try:
            work = self._works.setdefault(command.id, _Work())
            work.begin()
            if not await self._tell(command, "begun"):
                return  # withdrawn meanwhile
            log.warning(
                "%s of %s, asked by %s: %s", command.verb, scope(command.account_id), command.asked_by, command.reason
            )
            if command.verb is Verb.FLATTEN:
                await self._flatten(command, work)
            elif command.verb is Verb.HALT:
                await self._cancel_openings(command, work)
            await self._finish(command, work.outcome())
            del self._works[command.id]
        except Unavailable as error:
            log.warning("%s of %s is interrupted: %s", command.verb, scope(command.account_id), error)

    async def _tell(self, command: Command, progress: str) -> bool:
        async with self._database.connection() as conn:
            return await store.update_command_taken(conn, command.id, progress)

    async def _finish(self, command: Command, outcome: Outcome) -> None:
        async with self._database.connection() as conn:
            await store.update_command_finished(conn, command.id, outcome)
        log.warning(
            "%s of %s: %d orders cancelled, %d fills closed, %d left%s",
            command.verb,
            scope(command.account_id),
            len(outcome.cancelled),
            len(outcome.closed),
            len(outcome.left),
            "" if outcome.note is None else f"; {outcome.note}",
        )

    # --- cancelling ---------------------------------------------------------------------------------------------------

    async def _cancel_openings(self, command: Command, work: "_Work") -> None:
        async def cancel(account: Account) -> None:
            await self._cancel(account.id, opening_orders(account), work)

        await _for_each((one for one in self._exchange.accounts.values() if command.covers(one.id)), cancel)

    async def _cancel(self, account_id: str, orders: Iterable[RestingOrder], work: "_Work") -> None:
        """Cancel what can be cancelled now; raises `Unavailable` at the end when something could not be."""
        undecided: Unavailable | None = None
        for order in orders:
            try:
                answer = await self._exchange.cancel_order(account_id, str(order.id))
            except Unavailable as error:
                undecided = error
                continue
            except TraderError as error:
                work.leave(account_id, f"resting {order.symbol} order", str(error))
                continue
            if answer.status is OrderStatus.CANCELLED:
                work.cancelled.append(
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

    async def _flatten(self, command: Command, work: "_Work") -> None:
        accounts = [
            account
            for account in self._exchange.accounts.values()
            if command.covers(account.id) and not (account.is_idle and not self._exchange.undecided(account.id))
        ]
        positions = sum(len(account.positions) for account in accounts)

        async def flatten(account: Account) -> None:
            undecided: Unavailable | None = None
            try:
                await self._cancel(account.id, account.resting, work)
            except Unavailable as error:
                undecided = error  # an order that cannot be cancelled now keeps no position open
            await self._close_all(command, account.id, work)
            if undecided is not None:
                raise undecided

        async def report() -> None:
            while True:
                open_now = sum(len(self._exchange.accounts[account.id].positions) for account in accounts)
                told = f"{positions - open_now} of {positions} positions closed, {len(work.cancelled)} orders cancelled"
                with suppress(Unavailable):
                    await self._tell(command, told)
                await asyncio.sleep(_ROUND_S)

        reporting = asyncio.create_task(report())
        try:
            await _for_each(accounts, flatten)
        finally:
            reporting.cancel()
            await asyncio.wait([reporting])

    async def _close_all(self, command: Command, account_id: str, work: "_Work") -> None:
        """Close every position at market, again and again while the books cannot take it all, for a minute.

        What an order fills that was on its way when the halt came is waited for, and closed too.
        """
        loop = asyncio.get_running_loop()
        deadline_s, reasons = loop.time() + _FLATTEN_S, dict[str, str]()
        first = attempt = work.tried.get(account_id, 0)
        while (positions := self._held(account_id)) or self._exchange.undecided(account_id):
            if attempt > first and loop.time() >= deadline_s:
                break
            if self._halts.refusal_to_open(account_id) is None:
                reasons = {position.symbol: "trading was resumed meanwhile" for position in positions}
                break
            if attempt > first:
                await asyncio.sleep(_ROUND_S)
            attempt += 1
            tries = [self._close(command, account_id, position, attempt, work) for position in positions]
            for position, reason in zip(positions, await asyncio.gather(*tries), strict=True):
                reasons[position.symbol] = reason or "the book could not take the rest in time"
            work.tried[account_id] = attempt
        for position in positions:
            what = f"{position.side} {format_decimal(position.quantity)} {position.symbol}"
            work.leave(account_id, what, reasons.get(position.symbol, "it was opened meanwhile"))
        for symbol in sorted(self._exchange.undecided(account_id)):
            work.leave(account_id, f"an order of {symbol}", "what it fills is not known yet; ask again when it is")

    def _held(self, account_id: str) -> list[Position]:
        return list(self._exchange.accounts[account_id].positions.values())

    async def _close(
        self, command: Command, account_id: str, position: Position, attempt: int, work: "_Work"
    ) -> str | None:
        """Ask once to close a position; the reason when it was refused. The same try is never placed twice."""
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
            answer = await self._exchange.place_order(order)
        except Unavailable:
            raise
        except TraderError as error:
            return str(error)
        if answer.average_price is not None:
            work.closed[account_id, position.symbol, attempt] = Closed(
                account_id=account_id,
                symbol=position.symbol,
                side=position.side,
                quantity=answer.total_quantity,
                price=answer.average_price,
                gross_pnl=answer.realized_pnl,
            )
        return answer.reason


async def _for_each(accounts: Iterable[Account], act: Callable[[Account], Awaitable[None]]) -> None:
    """Act for accounts, some at once. What one meets keeps no other from its turn; the first error is raised."""
    seats = asyncio.Semaphore(_ACCOUNTS_AT_ONCE_MAX)

    async def take_turn(account: Account) -> None:
        async with seats:
            await act(account)

    done = await asyncio.gather(*(take_turn(account) for account in accounts), return_exceptions=True)
    for error in filter(None, done):
        raise error


class _Work:
    """What was done of a command so far, kept while it is begun again. A fill is named by the try that made it.

    `tried` is how many tries an account had that were answered: asked again, those would give the same answers.
    """

    def __init__(self) -> None:
        self.cancelled: list[Cancelled] = []
        self.closed: dict[tuple[str, str, int], Closed] = {}
        self.tried: dict[str, int] = {}
        self._left: dict[tuple[str, str], Left] = {}

    def begin(self) -> None:
        """What was left at the last try is tried again."""
        self._left.clear()

    def leave(self, account_id: str, what: str, reason: str) -> None:
        self._left[account_id, what] = Left(account_id=account_id, what=what, reason=reason)

    def outcome(self) -> Outcome:
        return Outcome(
            cancelled=tuple(self.cancelled), closed=tuple(self.closed.values()), left=tuple(self._left.values())
        )
