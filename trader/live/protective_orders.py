"""Protective orders of one live account: the stops and targets of its exit plans, kept at the venue.

The venue accepts a new protective order before the old one is canceled, so a position is never without its stop.
"""

import logging
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Final

from trader.core.clock import interval_elapsed
from trader.core.money import ZERO
from trader.exchange.domain import rules as rules_of_exchange
from trader.exchange.domain.account import Account
from trader.exchange.domain.account_update import AccountUpdate
from trader.exchange.domain.ledger import Posting
from trader.exchange.domain.orders import ExitPlan
from trader.exchange.domain.tick_rules import Moment, trailed
from trader.exchange.domain.venue_orders import SentOrder, SentStatus, VenueOrderType
from trader.live.domain.protective_orders import (
    CAUSES,
    ProtectiveTerms,
    protective_order,
    terms_of_account,
    terms_of_plan,
    terms_of_sent,
)
from trader.live.ledger import AccountLedger, LiveContext, run_each
from trader.live.outbox import Outbox

log = logging.getLogger("trader.live")

_STEP: Final = Decimal("0.1")

_RETRY_AFTER: Final = timedelta(seconds=4)
"""Delay before a protective order that the venue refused is sent again; until then, its trigger is watched here."""


class ProtectiveOrders:
    """The protective orders of one account. Used only under the lock of its live account."""

    def __init__(self, context: LiveContext, ledger: AccountLedger, outbox: Outbox) -> None:
        self._context = context
        self._ledger = ledger
        self._outbox = outbox
        self._refused: dict[ProtectiveTerms, datetime] = {}
        self.missing: dict[str, datetime] = {}
        """Since when stops and targets have been missing at the venue."""

    def wanted(self) -> list[ProtectiveTerms]:
        """Return the terms of the exit plans, except in markets with an undecided stop or target."""
        return terms_of_account(self._ledger.account, self._context.rules.markets, self._outbox.protecting)

    def standing(self) -> dict[ProtectiveTerms, SentOrder]:
        orders = self._outbox.protective_orders()
        return {terms_of_sent(sent): sent for sent in orders if sent.client_index not in self._outbox.lost}

    async def sync(self) -> None:
        """Place missing protective orders, then cancel superfluous ones. Raise as `Outbox.refresh` does.

        An error of one order stops no other.
        """
        now = self._context.clock.now()
        if self.are_behind():
            await self._ledger.commit(self._follow)
        limits = [sent for sent in self._outbox.protective_orders() if not sent.is_protective]
        superseded = [sent for sent in limits if terms_of_sent(sent) not in self.wanted()]
        await run_each(self._cancel_unwanted(sent, set()) for sent in superseded)  # others need their share
        self._refused = {key: at for key, at in self._refused.items() if not interval_elapsed(at, _RETRY_AFTER, now)}
        missing = [terms for terms in self.wanted() if terms not in self.standing()]
        names = [f"{terms.type} of {terms.symbol}" for terms in missing]
        self.missing = {name: self.missing.get(name, now) for name in names}
        await run_each(self._place(terms) for terms in missing if terms not in self._refused)
        wanted = set(self.wanted())
        await run_each(self._cancel_unwanted(sent, wanted) for sent in self._outbox.protective_orders())

    async def _cancel_unwanted(self, sent: SentOrder, wanted: set[ProtectiveTerms]) -> None:
        """Cancel an order, unless it is the first with wanted terms, which are then met."""
        terms, position = terms_of_sent(sent), self._ledger.account.positions.get(sent.symbol)
        outbox, is_shown = self._outbox, self._outbox.lost.get(sent.client_index)
        if is_shown is None and terms in wanted:
            wanted.discard(terms)
            return
        is_closing = position is not None and position.closing is not None
        # Keep an order that is being replaced until its successor is open.
        waits = sent.is_protective and any(
            (other.symbol, other.type) == (terms.symbol, terms.type) and other not in self.standing()
            for other in self.wanted()
        )
        if is_shown is False:  # it may have ended long ago
            if terms.symbol not in outbox.protecting:
                await outbox.cancel(sent)
        elif not (terms.symbol in outbox.unsettled or is_closing or waits):
            await outbox.cancel(sent, "its position is gone or its plan has changed")

    async def set_plan(self, symbol: str, plan: ExitPlan) -> str | None:
        """Replace the exit plan of a position. Return None when it is set, else why the old one stays.

        :raises Unavailable: the database did not confirm the change
        :raises MarketDataError: the venue does not answer
        """
        outbox, context = self._outbox, self._context
        position = self._ledger.account.positions.get(symbol)
        if position is None:
            return rules_of_exchange.no_position(symbol)
        if symbol in outbox.unsettled:
            return f"an order of {symbol} is not decided yet; its exit plan cannot be changed until it is"
        now = context.clock.now()
        trial = self._planned(self._ledger.account, symbol, plan, now)
        if isinstance(trial, str):
            return trial
        placed: list[SentOrder] = []
        for terms in terms_of_plan(position, trial.account.positions[symbol].exit_plan, context.rules.markets[symbol]):
            if terms in self.standing() or terms.type is VenueOrderType.LIMIT:
                continue
            sent = await self._place(terms)
            if sent.status is SentStatus.STANDING:
                placed.append(sent)
                continue
            for order in placed:
                await outbox.cancel(order, "the rest of its plan was refused")
            if sent.status is SentStatus.REFUSED:
                return f"the venue refused the {terms.type}: {sent.reason}"
            return f"whether the venue accepted the {terms.type} is not known yet; the plan stays unchanged"
        refusal: str | None = await self._book_plan(symbol, plan, now)
        await self.sync()
        return refusal

    async def _book_plan(self, symbol: str, plan: ExitPlan, now: datetime) -> str | None:
        refusal: str | None = None

        def decide(account: Account) -> Posting | None:
            nonlocal refusal
            result = self._planned(account, symbol, plan, now)
            if isinstance(result, str):
                refusal = result
                return None
            return result

        await self._ledger.commit(decide)
        return refusal

    def _planned(self, account: Account, symbol: str, plan: ExitPlan, now: datetime) -> Posting | str:
        market, rules = self._context.market, self._context.rules
        return rules_of_exchange.set_exit_plan(account, symbol, plan, Moment(now, market.quotes(), market.marks), rules)

    def are_behind(self) -> bool:
        """Return whether a stop is so far behind its trailing distance that its order at the venue is replaced."""
        return self._follow(self._ledger.account) is not None

    def _follow(self, account: Account) -> Posting | None:
        """Draw the stops after the marks, in steps of a tenth of the trailing distance: each step is an order."""
        context, marks = self._context, self._context.market.marks
        update = AccountUpdate(account, context.rules, marks, context.clock.now())
        for position in (held for symbol, held in account.positions.items() if symbol in marks):
            plan, ahead = position.exit_plan, trailed(position, marks[position.symbol])
            step = (plan.trailing_distance or ZERO) * _STEP
            if ahead.stop is not None and (plan.stop is None or abs(ahead.stop - plan.stop) >= step):
                update.replan(position, ahead)
        return update.posting() if update.has_changes else None

    async def _place(self, terms: ProtectiveTerms) -> SentOrder:
        order = protective_order(terms, self._context.rules.markets[terms.symbol])
        sent = (await self._outbox.send(order, CAUSES[terms.type])).sent
        if sent.status is SentStatus.REFUSED:
            self._refused[terms] = self._context.clock.now() + _RETRY_AFTER
            log.warning("%s: the venue refused a %s of %s: %s", sent.account_id, terms.type, terms.symbol, sent.reason)
        return sent
