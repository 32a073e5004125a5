"""Table of the event streams: one row for each, with what it sends, when, and where its state comes from."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from trader.api.context import Context
from trader.api.schemas.common import ENCODER, Wire
from trader.api.schemas.models import InvocationView, invocation_of
from trader.api.schemas.portfolio import PortfolioUpdate
from trader.api.schemas.positions import RunningCandle
from trader.api.schemas.streams import PositionEventData, Reset, WorkflowMessage
from trader.api.schemas.trades import TradeView
from trader.api.state_broadcast import SPACING_S, Load
from trader.domain.exchange.account import Account
from trader.domain.models import Model
from trader.services.events import (
    ConversationsChanged,
    Event,
    MarketChecked,
    PositionsChanged,
    PricesChanged,
    TradesChanged,
)
from trader.services.exchange.protocol import Exchange
from trader.store.database.pool import Page

TRADES_MAX: Final = 100
CONVERSATIONS_MAX: Final = 50

ACCOUNTS_AT_ONCE: Final = 20
"""After this many accounts other tasks of the event loop get a turn."""


async def _load_positions(context: Context) -> list[PositionEventData]:
    return await position_entries(context.exchange, context.agents.models)


async def _load_trades(context: Context) -> list[TradeView]:
    return [TradeView.of(trade) for trade in await context.portfolio.trades(page=Page(TRADES_MAX))]


async def _load_conversations(context: Context) -> list[InvocationView]:
    return [invocation_of(record) for record in await context.agents.invocations(page=Page(CONVERSATIONS_MAX))]


async def _load_portfolio(context: Context) -> PortfolioUpdate:
    return PortfolioUpdate.of(context.portfolio.live(), context.agents.models.values())


async def _load_candles(context: Context) -> list[RunningCandle]:
    return [RunningCandle.of(symbol, candle) for symbol, candle in context.market.running.items()]


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


@dataclass(frozen=True, slots=True)
class EventStream:
    """One stream. `data` is the type of an event's data, `sent` says when events are sent.

    A state stream sends what `load` returns, to newcomers and after every event of `changed_by`. A stream without
    `load` sends the events that are posted to it. `spacing_s` is the least real time between two states.
    """

    name: str
    title: str
    sent: str
    data: Any
    load: Callable[[Context], Awaitable[object]] | None = None
    changed_by: tuple[type[Event], ...] = ()
    spacing_s: float = SPACING_S


STREAMS: Final = (
    EventStream(
        "positions",
        "Open positions",
        "One entry per active model, whatever it holds. Sent about every 10 seconds and at every change of a position.",
        list[PositionEventData],
        _load_positions,
        (MarketChecked, PositionsChanged),
    ),
    EventStream(
        "trades",
        "Completed trades",
        "The latest 100, the newest first. Sent when a trade closes.",
        list[TradeView],
        _load_trades,
        (TradesChanged,),
    ),
    EventStream(
        "conversations",
        "Runs of the models",
        "The latest 50, the newest first. Sent when a run was recorded.",
        list[InvocationView],
        _load_conversations,
        (ConversationsChanged,),
    ),
    EventStream(
        "portfolio",
        "Live equity of the models",
        "Sent about every 10 seconds.",
        PortfolioUpdate,
        _load_portfolio,
        (MarketChecked,),
    ),
    EventStream(
        "candles",
        "Running candles",
        "The candle of the running minute of each market, of the marks that were seen: one message per second at most.",
        list[RunningCandle],
        _load_candles,
        (PricesChanged,),
        spacing_s=1.0,
    ),
    EventStream(
        "workflow",
        "What the models are doing",
        "Named events: the event's name is the `type` of its data. The first is `connected`. A subscriber that cannot "
        "keep up is dropped and reconnects.",
        WorkflowMessage,
    ),
)

StreamEvents: Final = msgspec.defstruct(
    "StreamEvents",
    [*((stream.name, stream.data) for stream in STREAMS), ("reset", Reset)],
    bases=(Wire,),
    namespace={
        "__doc__": "The data of each event of the one stream, by its name; `workflow` stands for the events of that "
        "stream."
    },
    kw_only=True,
)


def state_loaders(context: Context) -> dict[str, Load]:
    """Return the function that loads the state of each state stream as JSON, by the stream's name."""
    return {stream.name: partial(_load_encoded, stream.load, context) for stream in STREAMS if stream.load is not None}


async def _load_encoded(load: Callable[[Context], Awaitable[object]], context: Context) -> bytes:
    return ENCODER.encode(await load(context))
