"""Table of the event streams: one row each, with the data sent, the time of sending, and the source of its state."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from trader.agents.domain.models import Model
from trader.api.context import Context
from trader.api.schemas.common import ENCODER, Wire, decoder_of, encoded
from trader.api.schemas.models import InvocationView, invocation_of
from trader.api.schemas.portfolio import PortfolioUpdate
from trader.api.schemas.positions import RunningCandle
from trader.api.schemas.simulator import DEFAULT_ACCOUNT
from trader.api.schemas.streams import EmptyList, PositionEventData, Reset, WorkflowMessage
from trader.api.schemas.trades import TradeView
from trader.api.state_broadcast import DEFAULTS, Load, StateOptions
from trader.core.events import ConversationsChanged, Event, MarketChecked, PositionsChanged, PricesChanged
from trader.database.pool import Page
from trader.exchange.domain.account import Account
from trader.exchange.events import TradesChanged
from trader.exchange.protocol import Exchange

TRADES_MAX: Final = 100
CONVERSATIONS_MAX: Final = 50

ACCOUNTS_AT_ONCE: Final = 20
"""After this many accounts, other tasks of the event loop get a turn."""


async def _load_trades(context: Context) -> list[TradeView]:
    return [TradeView.of(trade) for trade in await context.portfolio.trades(page=Page(TRADES_MAX))]


async def _load_conversations(context: Context) -> list[InvocationView]:
    return [invocation_of(record) for record in await context.invocations.finished(page=Page(CONVERSATIONS_MAX))]


async def _load_portfolio(context: Context) -> PortfolioUpdate:
    return PortfolioUpdate.of(context.portfolio.live(), context.models.by_id.values())


async def _load_candles(context: Context) -> list[RunningCandle]:
    return [RunningCandle.from_attributes(candle, symbol=symbol) for symbol, candle in context.market.running.items()]


async def position_entries(exchange: Exchange, models: Mapping[str, Model]) -> list[PositionEventData]:
    """Return an entry per active model, in the order of the models, then one per other account with positions.

    Without any of these, the only entry is the account `default`, in its current state or as it would open.
    """
    marks, markets = exchange.marks(), exchange.markets
    entries = []
    for number, account in enumerate(_shown(exchange, models), start=1):
        entries.append(PositionEventData.of(account, marks, markets, models.get(account.id)))
        if number % ACCOUNTS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return entries


def _shown(exchange: Exchange, models: Mapping[str, Model]) -> list[Account]:
    active = [model.id for model in models.values() if model.active]
    listed = frozenset(active)
    others = (account for account in exchange.accounts.values() if account.positions and account.id not in listed)
    shown = [*map(exchange.account, active), *sorted(others, key=lambda account: account.id)]
    return shown or [exchange.account(DEFAULT_ACCOUNT)]


@dataclass(frozen=True, slots=True)
class EventStream:
    """One stream. `data` is the type of an event's data, `sent` says when events are sent.

    A state stream sends the result of `load` to newcomers and after every event of `changed_by`; one without `load`
    sends the events posted to it.
    """

    name: str
    title: str
    sent: str
    data: Any
    load: Callable[[Context], Awaitable[object]] | None = None
    changed_by: tuple[type[Event], ...] = ()
    options: StateOptions = DEFAULTS


def _empty(stream: str, message: str) -> bytes:
    """Return the data of the event `empty` of a stream."""
    return ENCODER.encode(EmptyList(stream=stream, message=message))


STREAMS: Final = (
    EventStream(
        "positions",
        "Open positions",
        "One entry per active model, even without positions; without active models, one for the account `default`. "
        "Sent about every 10 seconds, on every change of a position, and after every run of a model.",
        list[PositionEventData],
        lambda context: position_entries(context.exchange, context.models.by_id),
        (MarketChecked, PositionsChanged, ConversationsChanged),
    ),
    EventStream(
        "trades",
        "Completed trades",
        "The latest 100, newest first. Sent when a trade closes. While there are none, an event `empty` comes first.",
        list[TradeView],
        _load_trades,
        (TradesChanged,),
        StateOptions(empty=_empty("trades", "No trade has been completed yet."), limit=TRADES_MAX),
    ),
    EventStream(
        "conversations",
        "Runs of the models",
        "The latest 50, newest first. Sent when a run is recorded. While there are none, an event `empty` comes first.",
        list[InvocationView],
        _load_conversations,
        (ConversationsChanged,),
        StateOptions(
            empty=_empty("conversations", "No run of a model has been recorded yet."), limit=CONVERSATIONS_MAX
        ),
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
        "The candle of the current minute of each market, built from the observed marks: at most one message a second. "
        "While there are none, an event `empty` comes first.",
        list[RunningCandle],
        _load_candles,
        (PricesChanged,),
        StateOptions(spacing_s=1.0, empty=_empty("candles", "No market has a price yet.")),
    ),
    EventStream(
        "workflow",
        "Activity of the models",
        "Named events: the event's name is the `type` of its data. The first is `connected`. A subscriber that cannot "
        "keep up is dropped and reconnects.",
        WorkflowMessage,
    ),
)

StreamEvents: Final = msgspec.defstruct(
    "StreamEvents",
    [
        *((stream.name, stream.data) for stream in STREAMS),
        *(
            (f"new_{stream.name}", stream.data, msgspec.field(name=f"{stream.name}:new"))
            for stream in STREAMS
            if stream.options.limit
        ),
        ("empty", EmptyList),
        ("reset", Reset),
    ],
    bases=(Wire,),
    namespace={
        "__doc__": "The data of each event of the combined stream, by event name; `workflow` stands for all its events."
    },
    kw_only=True,
)


def state_loaders(context: Context) -> dict[str, Load]:
    """Return the function that loads the state of each state stream as JSON, by the stream's name."""
    return {
        stream.name: partial(_load_encoded, stream.load, stream.data, context)
        for stream in STREAMS
        if stream.load is not None
    }


async def _load_encoded(load: Callable[[Context], Awaitable[object]], kind: Any, context: Context) -> bytes:
    return encoded(await load(context), decoder_of(kind))
