"""Completed trades on the wire. Every amount is a JSON number in the quote currency."""

from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal
from statistics import median
from typing import Annotated, Literal
from uuid import UUID

from msgspec import Meta

from trader.api.schemas.common import (
    UNSET,
    Input,
    Timestamp,
    UnsetType,
    VariantFilter,
    VariantId,
    Wire,
    iso,
    trimmed,
)
from trader.api.schemas.paging import IsoTime
from trader.api.schemas.positions import ExitPlanView, ModelId
from trader.domain.exchange.orders import Cause, OrderSide, Side, Trade
from trader.domain.models import Model
from trader.domain.money import ZERO, divide
from trader.domain.portfolio import behaviour
from trader.services.market.candles import Extremes
from trader.store.exchange.trades import TradeRecord

Limit = Annotated[int, Meta(ge=1, le=500)]


class TradeView(Wire, kw_only=True):
    """A completed trade. `netPnl = grossPnl − fees + funding`; `modelKey` is the router name, else the model's id.

    A trade of an account that belongs to no model carries the account's id as modelId and modelName, and no variant.
    `manual` is true of a trade of a model that was opened by hand.
    """

    id: str
    model_id: str
    model_name: str
    model_variant: VariantId | UnsetType = UNSET
    model_router_name: str | None
    model_key: str
    side: Side
    symbol: str
    quantity: Decimal
    entry_price: Decimal
    exit_price: Decimal
    leverage: Decimal | UnsetType = UNSET
    gross_pnl: Decimal
    fees: Decimal
    funding: Decimal
    net_pnl: Decimal
    close_reason: str
    confidence: Decimal | UnsetType = UNSET
    opened_at: Timestamp
    closed_at: Timestamp
    holding_time: str
    timestamp: Timestamp
    manual: bool | UnsetType = UNSET

    @classmethod
    def of(cls, trade: Trade) -> "TradeView":
        return cls.from_attributes(
            trade,
            model_id=trade.account_id,
            model_name=trade.model_name or trade.account_id,
            model_key=trade.model_router_name or trade.account_id,
            holding_time=hours_and_minutes(trade.closed_at - trade.opened_at),
            timestamp=iso(trade.closed_at),
            manual=True if trade.model_name is not None and trade.invocation_id is None else UNSET,
        )


class GetTradesInput(Input, kw_only=True):
    """`symbol` takes any spelling of a market; one without trades has an empty list."""

    variant: VariantFilter = "all"
    model_id: ModelId | UnsetType = UNSET
    symbol: Annotated[str, Meta(max_length=32)] | UnsetType = UNSET
    limit: Limit = 100
    before: IsoTime | UnsetType = UNSET


class GetTradesOutput(Wire, kw_only=True):
    """A list that is cut carries `nextBefore`, for the `before` of the next call."""

    trades: list[TradeView]
    next_before: str | UnsetType = UNSET


class GetTradeInput(Input, kw_only=True):
    """The id of a completed trade or of a position, or of an order that was filled in one."""

    id: UUID


class TradeFillView(Wire, kw_only=True):
    """A fill of a trade. `fee` includes the fee of a liquidation; `cause` is what the order was placed for."""

    side: OrderSide
    quantity: Decimal
    price: Decimal
    fee: Decimal
    maker: bool
    cause: Cause
    timestamp: Timestamp


class Excursion(Wire, kw_only=True):
    """How far the price went while a trade was open: of the candles that lie wholly within it, and of its own prices.

    `adversePercent` (MAE) and `favourablePercent` (MFE) are percent of the entry price, without leverage; the first is
    0 or below, the second 0 or above. `interval` is the length of the candles, absent when there were none.
    """

    lowest: float
    highest: float
    adverse_percent: float
    favourable_percent: float
    interval: Literal["1m", "1h"] | UnsetType = UNSET

    @classmethod
    def of(cls, trade: TradeRecord, extremes: Extremes | None) -> "Excursion":
        prices = [float(fill.price) for fill in trade.fills] or [float(trade.entry_price)]
        if extremes is not None:
            prices += [extremes.low, extremes.high]
        entry = float(trade.entry_price)
        moves = behaviour.Excursion.of(entry, prices, is_long=trade.side is Side.LONG)
        return cls(
            lowest=min(prices),
            highest=max(prices),
            adverse_percent=round(100 * moves.adverse / entry, 4),
            favourable_percent=round(100 * moves.favourable / entry, 4),
            interval=UNSET if extremes is None else "1m" if extremes.span == timedelta(minutes=1) else "1h",
        )


class TradeDetails(Wire, kw_only=True):
    """One trade whole: a position (`OPEN`) has null where its close would say it. `exitPlan` is its last.

    `invocationId` is the run of the model that opened it, null for an order by hand.
    """

    id: str
    model_id: str
    model_name: str
    model_variant: VariantId | UnsetType = UNSET
    symbol: str
    side: Side
    status: Literal["OPEN", "CLOSED"]
    quantity: Decimal
    entry_price: Decimal
    exit_price: Decimal | None
    leverage: Decimal | None
    margin: Decimal
    gross_pnl: Decimal | None
    fees: Decimal
    funding: Decimal
    net_pnl: Decimal | None
    close_reason: str | None
    confidence: Decimal | None
    invocation_id: str | None
    opened_at: Timestamp
    closed_at: Timestamp | None
    exit_plan: ExitPlanView
    fills: list[TradeFillView]
    excursion: Excursion


class GetTradeOutput(Wire, kw_only=True):
    trade: TradeDetails


def trade_details_of(trade: TradeRecord, model: Model | None, extremes: Extremes | None) -> TradeDetails:
    """Return the wire record of one trade."""
    return TradeDetails.from_attributes(
        trade,
        model_id=trade.account_id,
        model_name=trade.account_id if model is None else model.name,
        model_variant=UNSET if model is None else model.variant,
        exit_plan=ExitPlanView.from_attributes(trade.exit_plan),
        fills=[TradeFillView.from_attributes(fill, timestamp=iso(fill.created_at)) for fill in trade.fills],
        excursion=Excursion.of(trade, extremes),
    )


class CompletedTrade(Wire, kw_only=True):
    """A completed trade of the simulator. `notional` is that of its entry; `realizedPnl` is net."""

    id: str
    model_id: str
    model_name: str
    symbol: str
    direction: Side
    notional: Decimal
    realized_pnl: Decimal
    leverage: Decimal | None
    confidence: Decimal | None
    closed_at: Timestamp
    invocation_id: str | None

    @classmethod
    def of(cls, trade: Trade) -> "CompletedTrade":
        return cls.from_attributes(
            trade,
            model_id=trade.account_id,
            model_name=trade.model_name or trade.account_id,
            direction=trade.side,
            notional=trimmed(trade.entry_notional),
            realized_pnl=trimmed(trade.net_pnl),
        )


class CompletedStats(Wire, kw_only=True):
    """Statistics of the listed trades. A figure without a value is null."""

    trade_count: int
    total_realized: Decimal
    expectancy: Decimal | None
    average_leverage: Decimal | None
    median_leverage: Decimal | None
    max_leverage: Decimal | None
    leverage_values: list[Decimal]
    average_confidence: Decimal | None
    median_confidence: Decimal | None
    confidence_values: list[Decimal]

    @classmethod
    def of(cls, trades: Sequence[CompletedTrade]) -> "CompletedStats":
        realized = [trade.realized_pnl for trade in trades]
        leverages = [trade.leverage for trade in trades if trade.leverage is not None]
        confidences = [trade.confidence for trade in trades if trade.confidence is not None]
        return cls(
            trade_count=len(trades),
            total_realized=trimmed(sum(realized, ZERO)),
            expectancy=_mean(realized),
            average_leverage=_mean(leverages),
            median_leverage=_median(leverages),
            max_leverage=max(leverages, default=None),
            leverage_values=leverages,
            average_confidence=_mean(confidences),
            median_confidence=_median(confidences),
            confidence_values=confidences,
        )


class GetCompletedTradesInput(Input, kw_only=True):
    model_id: ModelId | UnsetType = UNSET
    limit: Limit = 200
    before: IsoTime | UnsetType = UNSET


class GetCompletedTradesOutput(Wire, kw_only=True):
    trades: list[CompletedTrade]
    stats: CompletedStats
    next_before: str | UnsetType = UNSET


def hours_and_minutes(span: timedelta) -> str:
    """Return a duration as `26h 05m`; hours are not capped, seconds are left out."""
    hours, minutes = divmod(int(span.total_seconds()) // 60, 60)
    return f"{hours}h {minutes:02d}m"


def _mean(values: Sequence[Decimal]) -> Decimal | None:
    return trimmed(divide(sum(values, ZERO), Decimal(len(values)))) if values else None


def _median(values: Sequence[Decimal]) -> Decimal | None:
    return trimmed(median(values)) if values else None
