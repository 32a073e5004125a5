"""Completed trades on the wire. Every amount is a JSON number in the quote currency."""

from collections.abc import Collection, Sequence
from datetime import timedelta
from decimal import Decimal
from statistics import median
from typing import Annotated, Final, Literal
from uuid import UUID

from msgspec import Meta

from trader.agents.domain.models import Model
from trader.api.schemas.common import (
    UNSET,
    From,
    Input,
    OfModel,
    Timestamp,
    UnsetType,
    VariantFilter,
    VariantId,
    Wire,
    or_none,
    trimmed,
)
from trader.api.schemas.paging import IsoTime, PageInput, PageOutput, Skip
from trader.api.schemas.positions import ExitPlanView
from trader.core.money import ZERO, divide
from trader.exchange.domain.account import Trade
from trader.exchange.domain.orders import Cause, Fill, OrderSide, Side
from trader.exchange.sql.trades import ModelTrade, TradeFilter, WholeTrade
from trader.market.candles import Extremes
from trader.market.domain.markets import canonical_symbol, traded_symbol
from trader.portfolio.domain.behaviour import PriceExcursion

Limit = Annotated[int, Meta(ge=1, le=500)]


class TradeView(OfModel, kw_only=True):
    """A completed trade. `netPnl = grossPnl − fees + funding`; `modelKey` is the router name, or else the model's id.

    A trade of an account without a model has the account's id as modelId and modelName, and no variant. `manual` is
    true for a model's trade that was opened manually.
    """

    model_variant: VariantId | UnsetType = UNSET
    model_router_name: str | None
    model_key: str
    side: Side
    symbol: str
    quantity: Decimal
    entry_price: Decimal
    exit_price: Decimal
    leverage: Annotated[Decimal | UnsetType, From("given_leverage")] = UNSET
    gross_pnl: Decimal
    fees: Decimal
    funding: Decimal
    net_pnl: Decimal
    close_reason: str
    confidence: Decimal | UnsetType = UNSET
    opened_at: Timestamp
    closed_at: Timestamp
    holding_time: str
    timestamp: Annotated[Timestamp, From("closed_at")]
    manual: bool | UnsetType = UNSET

    @classmethod
    def of(cls, trade: ModelTrade) -> "TradeView":
        return cls.from_attributes(
            trade,
            model_id=trade.account_id,
            model_name=trade.model_name or trade.account_id,
            model_key=trade.model_router_name or trade.account_id,
            holding_time=hours_and_minutes(trade.closed_at - trade.opened_at),
            manual=trade.model_name is not None and trade.invocation_id is None,
        )


class TradeFilterInput(Input, kw_only=True):
    """Which completed trades are meant. `symbol` accepts any spelling of a market."""

    variant: VariantFilter = "all"
    model_id: str | UnsetType = UNSET
    symbol: Annotated[str, Meta(max_length=32)] | UnsetType = UNSET
    side: Side | UnsetType = UNSET
    result: Literal["won", "lost"] | UnsetType = UNSET
    close_reason: Cause | UnsetType = UNSET

    def filter(self) -> TradeFilter:
        """Return the filter of the trades, without model and variant."""
        return TradeFilter(
            symbol=None if self.symbol is UNSET else canonical_symbol(self.symbol),
            side=or_none(self.side),
            has_won=None if self.result is UNSET else self.result == "won",
            close_reason=or_none(self.close_reason),
        )

    def require_market(self, markets: Collection[str]) -> None:
        """Refuse a market that is not traded here; one of earlier trades needs no check."""
        if self.symbol is not UNSET:
            traded_symbol(self.symbol, markets)


class GetTradesInput(TradeFilterInput, kw_only=True):
    """A market without trades returns an empty list; a trade without a profit is `lost`."""

    before: IsoTime | UnsetType = UNSET
    skip: Skip = 0
    limit: Limit = 100


class GetTradesOutput(PageOutput, kw_only=True):
    """Trades, newest first. A truncated list includes `nextBefore`, for the `before` of the next call."""

    trades: list[TradeView]


class GetTradeInput(Input, kw_only=True):
    """The id of a completed trade or of a position, or of an order that was filled in one."""

    id: UUID


class TradeFillView(Wire, kw_only=True):
    """A fill of a trade. `fee` includes the liquidation fee; `cause` is the reason for the order."""

    side: OrderSide
    quantity: Decimal
    price: Decimal
    fee: Decimal
    maker: bool
    cause: Cause
    timestamp: Annotated[Timestamp, From("at")]

    @classmethod
    def of(cls, fill: Fill) -> "TradeFillView":
        return cls.from_attributes(fill, fee=fill.fee + fill.liquidation_fee)


class Excursion(Wire, kw_only=True):
    """Price excursions while a trade was open, from the candles entirely within it and from its own prices.

    `adversePercent` (MAE) and `favourablePercent` (MFE) are percent of the entry price, without leverage; the first is
    0 or below, the second 0 or above. `interval` is the length of the candles, absent if there were none.
    """

    lowest: float
    highest: float
    adverse_percent: float
    favourable_percent: float
    interval: Literal["1m", "1h"] | UnsetType = UNSET

    @classmethod
    def of(cls, whole: WholeTrade, extremes: Extremes | None) -> "Excursion":
        """Return the excursion of a trade, from its own fills and the extremes of the candles within it, if any."""
        entry = float(whole.trade.entry_price)
        prices = [float(fill.price) for fill in whole.fills] or [entry]
        if extremes is not None:
            prices += [extremes.low, extremes.high]
        moves = PriceExcursion.of(entry, prices, is_long=whole.trade.is_long)
        return cls(
            lowest=min(prices),
            highest=max(prices),
            adverse_percent=round(100 * moves.adverse / entry, 4),
            favourable_percent=round(100 * moves.favourable / entry, 4),
            interval=UNSET if extremes is None else "1m" if extremes.span == timedelta(minutes=1) else "1h",
        )


class TradeDetails(OfModel, kw_only=True):
    """One trade in full: for a position (`OPEN`), fields of the close are null. `exitPlan` is its last one.

    `invocationId` is the model's run that opened it, null for a manual order. `previousId` and `nextId` are the
    account's trades completed before and after it.
    """

    model_variant: VariantId | UnsetType = UNSET
    symbol: str
    side: Side
    status: Literal["OPEN", "CLOSED"]
    quantity: Decimal
    entry_price: Decimal
    exit_price: Decimal | None
    leverage: Annotated[Decimal | None, From("given_leverage")]
    margin: Decimal
    gross_pnl: Decimal | None
    fees: Decimal
    funding: Decimal
    net_pnl: Decimal | None
    close_reason: str | None
    confidence: Decimal | None
    invocation_id: str | None
    previous_id: str | None
    next_id: str | None
    opened_at: Timestamp
    closed_at: Timestamp | None
    exit_plan: ExitPlanView
    fills: list[TradeFillView]
    excursion: Excursion


class GetTradeOutput(Wire, kw_only=True):
    trade: TradeDetails


_CLOSING: Final = ("exit_price", "gross_pnl", "net_pnl", "close_reason", "closed_at")


def trade_details_of(whole: WholeTrade, model: Model | None, extremes: Extremes | None) -> TradeDetails:
    """Return the wire record of one trade."""
    trade = whole.trade
    is_closed = isinstance(trade, Trade)
    return TradeDetails.from_attributes(
        trade,
        whole,
        model_id=whole.account_id,
        model_name=whole.account_id if model is None else model.name,
        model_variant=None if model is None else model.variant,
        status="CLOSED" if is_closed else "OPEN",
        fills=[TradeFillView.of(fill) for fill in whole.fills],
        excursion=Excursion.of(whole, extremes),
        **({} if is_closed else dict.fromkeys(_CLOSING)),
    )


class CompletedTrade(OfModel, kw_only=True):
    """A completed trade of the simulator. `notional` is the entry notional; `realizedPnl` is net."""

    symbol: str
    direction: Annotated[Side, From("side")]
    notional: Annotated[Decimal, From("entry_notional")]
    realized_pnl: Annotated[Decimal, From("net_pnl")]
    leverage: Annotated[Decimal | None, From("given_leverage")]
    confidence: Decimal | None
    closed_at: Timestamp
    invocation_id: str | None

    @classmethod
    def of(cls, trade: ModelTrade) -> "CompletedTrade":
        name = trade.model_name or trade.account_id
        return cls.from_attributes(trade, model_id=trade.account_id, model_name=name)


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
    def of(cls, trades: Sequence[ModelTrade]) -> "CompletedStats":
        realized = [trade.net_pnl for trade in trades]
        leverages = [trade.given_leverage for trade in trades if trade.given_leverage is not None]
        confidences = [trade.confidence for trade in trades if trade.confidence is not None]
        return cls.from_attributes(
            trade_count=len(trades),
            total_realized=sum(realized, ZERO),
            expectancy=_mean(realized),
            average_leverage=_mean(leverages),
            median_leverage=median(leverages) if leverages else None,
            max_leverage=max(leverages, default=None),
            leverage_values=list(map(trimmed, leverages)),
            average_confidence=_mean(confidences),
            median_confidence=median(confidences) if confidences else None,
            confidence_values=list(map(trimmed, confidences)),
        )


class GetCompletedTradesInput(PageInput, kw_only=True):
    model_id: str | UnsetType = UNSET
    limit: Limit = 200


class GetCompletedTradesOutput(PageOutput, kw_only=True):
    trades: list[CompletedTrade]
    stats: CompletedStats


def _mean(values: Sequence[Decimal]) -> Decimal | None:
    return divide(sum(values, ZERO), Decimal(len(values))) if values else None


def hours_and_minutes(span: timedelta) -> str:
    """Return a duration as `26h 05m`; hours are not capped, seconds are omitted."""
    hours, minutes = divmod(int(span.total_seconds()) // 60, 60)
    return f"{hours}h {minutes:02d}m"
