"""Stream states: the current state of each state stream as JSON, in the records of the procedures."""

import asyncio
from collections.abc import Iterator, Mapping

from trader.api.context import Context
from trader.api.schemas.common import ENCODER
from trader.api.schemas.models import invocation_of
from trader.api.schemas.portfolio import PortfolioUpdate
from trader.api.schemas.streams import PositionEventData
from trader.api.schemas.trades import TradeView
from trader.api.state_broadcast import Load
from trader.domain.exchange.account import Account
from trader.domain.models import Model
from trader.services.exchange.protocol import Exchange
from trader.store.database.paging import Page

TRADES_MAX = 100
CONVERSATIONS_MAX = 50

ACCOUNTS_AT_ONCE = 20
"""After this many accounts other tasks of the event loop get a turn."""


def state_loaders(context: Context) -> dict[str, Load]:
    """Return the function that loads the state of each stream, by the stream's name."""

    async def positions() -> bytes:
        return ENCODER.encode(await position_entries(context.exchange, context.agents.models))

    async def trades() -> bytes:
        return ENCODER.encode([TradeView.of(trade) for trade in await context.portfolio.trades(page=Page(TRADES_MAX))])

    async def conversations() -> bytes:
        records = await context.agents.invocations(page=Page(CONVERSATIONS_MAX))
        return ENCODER.encode([invocation_of(record) for record in records])

    async def portfolio() -> bytes:
        return ENCODER.encode(PortfolioUpdate.of(context.portfolio.live(), context.agents.models.values()))

    return {"positions": positions, "trades": trades, "conversations": conversations, "portfolio": portfolio}


async def position_entries(exchange: Exchange, models: Mapping[str, Model]) -> list[PositionEventData]:
    """Return an entry per active model, in the order of the models, then one of each other account with positions."""
    marks, markets = exchange.marks(), exchange.markets
    entries = []
    for number, account in enumerate(list(_shown(exchange, models)), start=1):
        entries.append(PositionEventData.of(account, marks, markets, models.get(account.id)))
        if number % ACCOUNTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return entries


def _shown(exchange: Exchange, models: Mapping[str, Model]) -> Iterator[Account]:
    active = [model.id for model in models.values() if model.active]
    yield from map(exchange.account, active)
    listed = frozenset(active)
    others = (account for account in exchange.accounts.values() if account.positions and account.id not in listed)
    yield from sorted(others, key=lambda account: account.id)
