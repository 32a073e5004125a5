"""Bindings of models to accounts of the venue: each model keeps one account permanently."""

import logging
from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal
from typing import Final

from trader.agents.sql.models import select_models
from trader.core.errors import MarketDataError, StartError
from trader.core.money import ZERO, format_decimal
from trader.exchange.domain.account import Account
from trader.exchange.domain.ledger import unopened_account
from trader.live.ledger import LiveContext
from trader.live.sql.venue_orders import (
    Binding,
    insert_venue_account,
    select_venue_accounts,
    select_venue_indexes,
)
from trader.settings.forms import VENUE_KEY
from trader.settings.providers import name_of_keys

log = logging.getLogger("trader.live")

_ELSEWHERE_WITHIN: Final = timedelta(minutes=10)


class Bindings:
    """Maps models to venue accounts, and opens accounts that are new here."""

    def __init__(self, context: LiveContext) -> None:
        self._context = context

    async def of_active_models(self) -> dict[str, str]:
        """Return the venue account that each active model trades, and hand over the keys that rows name.

        :raises StartError: the variable that a row names has no key
        """
        venue, keys = self._context.venue, self._context.settings.providers
        async with self._context.database.connection() as conn:
            models = await select_models(conn)
        traded = {model.id: model.venue_account_index or venue.default_account for model in models}
        for model in models:
            if (variable := model.venue_key_variable) is None:
                continue
            if (given := keys.get(name_of_keys(variable))) is None:
                raise StartError(f"{model.id} trades with the key in {variable}, which is not set.")
            venue.keys[traded[model.id]] = VENUE_KEY.parse(given.keys[0].reveal())
        return {model.id: traded[model.id] for model in models if model.active}

    async def known(self) -> dict[str, Binding]:
        """Return the bindings recorded by earlier starts."""
        async with self._context.database.connection() as conn:
            return await select_venue_accounts(conn)

    async def bind(self, account_id: str, index: str | None, known: Binding | None) -> Binding:
        """Return the binding of an account, opening one that is new here. `index` is None for an inactive model.

        :raises StartError: the model is bound to another account, or its account cannot be opened
        :raises MarketDataError: the venue does not answer
        """
        at_venue = known.account_index if known is not None else index
        assert at_venue is not None
        try:
            refusal = await self._refusal(account_id, at_venue)
        except MarketDataError as error:
            if known is None:
                raise
            log.warning("%s: whether another service trades its account is not known: %s", account_id, error)
            refusal = None
        if refusal is not None:
            raise StartError(f"The venue's account {at_venue}, assigned to {account_id}, {refusal}.")
        if known is None:
            return await self._open(account_id, at_venue)
        if index is not None and known.account_index != index:
            raise StartError(
                f"The books of {account_id} belong to the venue's account {known.account_index}; its row in "
                f"`models` says {index}. A model keeps its account: set models.venue_account_index back, or use "
                "another model."
            )
        return known

    def unopened(self, account_id: str, capital: Decimal = ZERO) -> Account:
        """Return an account that was never opened, with the run that it would have."""
        return unopened_account(account_id, capital, self._context.settings.quote_currency, self._context.clock.now())

    async def _refusal(self, account_id: str, index: str) -> str | None:
        """Return why an account cannot be traded, such as a second service that trades it. Raise `MarketDataError`."""
        account = await self._context.venue.account(index)
        since = (account.records.answered_at or self._context.clock.now()) - _ELSEWHERE_WITHIN
        opened = await account.orders.opened_since(since)
        async with self._context.database.connection() as conn:
            foreign = set(opened) - await select_venue_indexes(conn, account_id, opened)
        if not foreign:
            return None
        return (
            f"was traded with this API key within the last {_ELSEWHERE_WITHIN.seconds // 60} minutes, by orders that "
            "this database does not have. Two services on one account would cancel each other's stops: stop the other"
        )

    async def _open(self, account_id: str, index: str) -> Binding:
        """Open an account with its present balance."""
        context = self._context
        report = await (await context.venue.account(index)).records.report()
        whose = f"The venue's account {index}, assigned to {account_id},"
        if report.positions or report.protective_orders or report.others:
            held = ", ".join(report.positions) or "orders"
            raise StartError(
                f"{whose} holds {held} already. Close all of it first: the books do not contain what others opened."
            )
        if report.balance <= 0:
            raise StartError(f"{whose} has no money")
        existing = context.accounts.by_id.get(account_id)
        if existing is not None and existing.run.initial_capital != report.balance:
            raise StartError(
                f"{account_id} is open in this database with {format_decimal(existing.run.initial_capital)}, and the "
                f"venue's account {index} has {format_decimal(report.balance)}. Use another database (DATABASE_URL)."
            )
        await context.accounts.open(account_id, self.unopened(account_id, report.balance).run)
        binding = Binding(index, context.clock.now())
        async with context.database.writing() as conn:
            await insert_venue_account(conn, account_id, binding)
        return binding


def refuse_shared(indexes: Mapping[str, str]) -> None:
    """Raise `StartError` when two models would trade one account: a position would have no clear owner."""
    owners: dict[str, list[str]] = {}
    for account_id, index in indexes.items():
        owners.setdefault(index, []).append(account_id)
    for index, names in owners.items():
        if len(names) > 1:
            raise StartError(
                f"{' and '.join(names)} would trade the venue's account {index} together. Give each active model an "
                "account of its own (models.venue_account_index; the default is VENUE_ACCOUNT_INDEX)."
            )
