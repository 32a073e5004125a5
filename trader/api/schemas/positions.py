"""Positions, prices and candles on the wire. `getPositions` and the positions stream show the same records, made here.

Amounts of a position are decimal text, except the prices of its exit plan. A figure that depends on an unknown price
(no source was reached since the start) is null, never zero.
"""

from collections.abc import Iterable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Annotated

import msgspec
from msgspec import Meta

from trader.agents.domain.models import Model
from trader.api.schemas.common import (
    UNSET,
    DecimalText,
    From,
    Input,
    OfModel,
    Timestamp,
    UnsetType,
    VariantFilter,
    VariantId,
    Wire,
    iso,
)
from trader.api.schemas.paging import IsoTime
from trader.core.money import ceil_to, floor_to
from trader.core.statistics import change_percent
from trader.exchange.domain.account import Account, Marks, Position, liquidation_price
from trader.exchange.domain.orders import Side
from trader.market.domain.markets import Market, Quote
from trader.portfolio.domain.histories import Resolution

Markets = Mapping[str, Market]

SYMBOLS_MAX = 100


class TargetView(Wire, kw_only=True):
    """A limit that closes a `fraction` of the position that the plan was set for; `quantity` of it is left."""

    price: Decimal
    fraction: Decimal
    quantity: Decimal | UnsetType = UNSET


class ExitPlanView(Wire, kw_only=True):
    """When to close a position; a key is null if it is not set, the last two are then absent."""

    stop: Decimal | None
    target: Decimal | None
    invalidation: str | None
    invalidation_price: Decimal | None
    time_exit: Timestamp | None
    trailing_distance: Decimal | UnsetType = UNSET
    targets: Annotated[
        list[TargetView] | UnsetType,
        From("targets", lambda targets: list(map(TargetView.from_attributes, targets)) or None),
    ] = UNSET


class PositionView(OfModel, kw_only=True):
    """An open position, valued at the current mark price.

    A position of an account without a model has the account's id as modelId and modelName, and no variant. `manual` is
    true for a model's position that was opened manually.
    """

    model_variant: VariantId | UnsetType = UNSET
    symbol: str
    side: Side
    quantity: DecimalText
    entry_price: DecimalText
    leverage: Annotated[DecimalText | UnsetType, From("given_leverage")] = UNSET
    exit_plan: ExitPlanView
    confidence: Decimal | UnsetType = UNSET
    opened_at: Timestamp
    current_price: DecimalText | None
    notional: DecimalText | None
    unrealized_pnl: DecimalText | None
    liquidation_price: DecimalText | UnsetType = UNSET
    manual: bool | UnsetType = UNSET


class GetPositionsInput(Input, kw_only=True):
    model_id: str | UnsetType = UNSET
    variant: VariantFilter = "all"


class GetCryptoPricesInput(Input, kw_only=True):
    symbols: Annotated[list[str], Meta(max_length=SYMBOLS_MAX)] | UnsetType = UNSET


class CryptoPrice(Wire, kw_only=True):
    """The mark price of a market and its time. `message` is present if it is stale.

    `change24hPercent` compares it with the price at the full hour 24 hours before the last full hour; it is absent if
    that is unknown.
    """

    symbol: str
    price: Annotated[Decimal, From("mark")]
    timestamp: Annotated[Timestamp, From("at")]
    change_24h_percent: float | UnsetType = msgspec.field(default=UNSET, name="change24hPercent")
    message: str | UnsetType = UNSET


class GetCryptoPricesOutput(Wire, kw_only=True):
    prices: list[CryptoPrice]


def position_of(
    account: Account, position: Position, marks: Marks, markets: Markets, model: Model | None
) -> PositionView:
    """Return the wire record of one position."""
    mark = marks.get(position.symbol)
    return PositionView.from_attributes(
        position,
        model_id=account.id,
        model_name=account.id if model is None else model.name,
        model_variant=None if model is None else model.variant,
        current_price=mark,
        notional=None if mark is None else position.notional(mark),
        unrealized_pnl=None if mark is None else position.unrealized(mark),
        liquidation_price=_liquidation_price(account, position, marks, markets),
        manual=model is not None and position.invocation_id is None,
    )


def _liquidation_price(account: Account, position: Position, marks: Marks, markets: Markets) -> Decimal | None:
    """Return the tick at which the position is liquidated: the computed price has more digits than any mark."""
    price = liquidation_price(account, position.symbol, marks, markets)
    to_tick = ceil_to if position.is_long else floor_to
    return None if price is None else to_tick(price, markets[position.symbol].tick_at(price))


def positions_of_account(account: Account, marks: Marks, markets: Markets, model: Model | None) -> list[PositionView]:
    """Return the wire records of an account's positions, oldest first."""
    ordered = sorted(account.positions.values(), key=_age)
    return [position_of(account, position, marks, markets, model) for position in ordered]


def positions_of(
    accounts: Iterable[Account], marks: Marks, markets: Markets, models: Mapping[str, Model]
) -> list[PositionView]:
    """Return the wire records of all positions of the accounts, oldest first."""
    held = [(account, position) for account in accounts for position in account.positions.values()]
    held.sort(key=lambda pair: _age(pair[1]))
    return [position_of(account, position, marks, markets, models.get(account.id)) for account, position in held]


def _age(position: Position) -> tuple[datetime, str]:
    return position.opened_at, str(position.id)


def price_of(quote: Quote, now: datetime, trouble: str | None, day_before: float | None) -> CryptoPrice:
    """Return the wire record of a market's price. `trouble` is why orders at this price are refused, if they are."""
    changed = change_percent(quote.mark, day_before)
    message = None if trouble is None else f"cannot be traded now: {trouble}"
    if quote.is_stale(now):
        age_s = int((now - quote.at).total_seconds())
        age = f"{age_s} s ago" if age_s > 0 else f"{-age_s} s in the future: the clock was set back"
        message = f"stale: the last update was at {iso(quote.at)}, {age}"
    return CryptoPrice.from_attributes(quote, change_24h_percent=changed, message=message)


class GetCandlesInput(Input, kw_only=True):
    """The candles that open at `from` or later, and before `to` and `before`; a time without a zone is UTC.

    `symbol` accepts any spelling of a market.
    """

    symbol: Annotated[str, Meta(max_length=32)]
    interval: Resolution
    start: IsoTime | UnsetType = msgspec.field(default=UNSET, name="from")
    to: IsoTime | UnsetType = UNSET
    before: IsoTime | UnsetType = UNSET


class GetCandlesOutput(Wire, kw_only=True):
    """Candles in columns, ascending; `times` are their opening times, and the last may still be running.

    `volume` is in base units, null if the source has none. A response has the latest 1,000 of its range, and
    `nextBefore` if there are earlier ones. Candles under an hour are kept for CANDLE_RETENTION_DAYS, others
    permanently.
    """

    symbol: str
    interval: Resolution
    times: list[Timestamp]
    open: list[float]
    high: list[float]
    low: list[float]
    close: list[float]
    volume: list[float | None]
    next_before: Timestamp | UnsetType = UNSET


class RunningCandle(Wire, kw_only=True):
    """A market's candle of the current minute. `time` is its opening time."""

    symbol: str
    time: Annotated[Timestamp, From("open_time")]
    open: float
    high: float
    low: float
    close: float
