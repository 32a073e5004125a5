"""Private records of one account at Lighter: positions, standing orders, balance, trades with fees, and funding.

Fees are rates in millionths of the notional. Trades and funding arrive newest first, in pages of a hundred.
"""

from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from decimal import Decimal
from operator import attrgetter
from typing import Any, Final

import msgspec

from trader.core.clock import epoch_second, floor_time, moment_of
from trader.core.errors import MarketDataError
from trader.core.money import ZERO
from trader.exchange.domain.orders import Cause, OrderSide
from trader.exchange.domain.venue_orders import VenueFill, VenueOrderType
from trader.live.domain.orders import VenueFunding
from trader.live.domain.reconciliation import ProtectiveOrder, VenueReport
from trader.live.lighter.api import LighterApi
from trader.live.lighter.frames import AccountFrames
from trader.live.lighter.rows import ORDER_ROWS, OrderRow, TradeRow

_TRIGGERS: Final = {"stop-loss": VenueOrderType.STOP, "take-profit": VenueOrderType.TARGET}
_CAUSES: Final = {"trade": Cause.MANUAL, "market-settlement": Cause.ENDED}
_PAGE: Final = 100
_PAGES_MAX: Final = 20
_PUSHED_WITHIN_S: Final = 0.1
"""How long after its order the frame of a trade is awaited."""

_MILLION: Final = 1_000_000
_FEE_MAX: Final = _MILLION // 100
_HOUR: Final = timedelta(hours=1)
_SECONDS_MAX: Final = 100_000_000_000
"""Timestamps above this are in milliseconds: the venue uses both seconds and milliseconds."""


class _Trades(msgspec.Struct):
    rows: list[TradeRow] | None = msgspec.field(default=None, name="trades")
    next_cursor: str | None = None


class _FundingPayment(msgspec.Struct):
    timestamp: int
    market_id: int
    change: Decimal
    rate: Decimal
    position_size: Decimal


class _FundingPayments(msgspec.Struct):
    rows: list[_FundingPayment] | None = msgspec.field(default=None, name="position_fundings")
    next_cursor: str | None = None


class _Limits(msgspec.Struct):
    current_maker_fee_tick: int
    current_taker_fee_tick: int
    user_tier: str = "standard"


_TRADES: Final = msgspec.json.Decoder(_Trades)
_FUNDING_PAYMENTS: Final = msgspec.json.Decoder(_FundingPayments)
_LIMITS: Final = msgspec.json.Decoder(_Limits)


class LighterRecords:
    """The records of the signer's account. Methods raise `MarketDataError` when the venue does not provide them."""

    def __init__(self, api: LighterApi, frames: AccountFrames) -> None:
        self._api = api
        self._frames = frames
        self._signer = frames.signer

    async def report(self) -> VenueReport:
        """Return the venue's report on the account: positions, orders and balance."""
        account = await self._api.account(self._signer.account_index)
        protective_orders: dict[int, ProtectiveOrder] = {}
        others: set[int] = set()
        for order in await self._standing(account.total_order_count):
            symbol, kind = self._api.symbol_of(order.market_index), _TRIGGERS.get(order.type)
            index = order.client_order_index or order.order_index  # a group may not keep our indexes of children
            if kind is None:
                others.add(index)
            else:
                size, is_child = order.remaining_base_amount, order.parent_order_index != 0
                protective_orders[index] = ProtectiveOrder(symbol, kind, order.trigger_price, size, is_child)
        positions = {
            self._api.symbol_of(row.market_id): (row.quantity, row.avg_entry_price)
            for row in account.positions
            if row.quantity
        }
        cost = sum((quantity * price for quantity, price in positions.values()), ZERO)
        return VenueReport(
            positions={symbol: quantity for symbol, (quantity, _) in positions.items()},
            protective_orders=protective_orders,
            others=frozenset(others),
            balance=account.collateral - cost,
            rounding=sum(
                (abs(quantity) * self._unit(symbol, price) for symbol, (quantity, price) in positions.items()), ZERO
            ),
        )

    @property
    def answered_at(self) -> datetime | None:
        """The venue's clock at its latest answer."""
        return self._api.answered_at

    async def fee_rates(self) -> tuple[Decimal, Decimal]:
        """Return the taker and maker fee rates of the account's tier, as fractions of the notional."""
        signer = self._signer
        limits = await self._api.get(
            "/api/v1/accountLimits", _LIMITS, signer=signer, account_index=signer.account_index
        )
        taker, maker = limits.current_taker_fee_tick, limits.current_maker_fee_tick
        if not max(abs(taker), abs(maker)) <= _FEE_MAX:
            raise MarketDataError(f"/api/v1/accountLimits: cannot be decoded: {limits}")
        self._api.use_tier(limits.user_tier.casefold())
        return Decimal(taker) / _MILLION, Decimal(maker) / _MILLION

    async def fills_of(self, client_index: int, venue_index: int, filled: Decimal | None = None) -> list[VenueFill]:
        """Return the fills of one order in chronological order, each trade once.

        Nothing is requested if frames told trades of the quantity `filled`.
        """
        if filled is not None:
            for waits in (bool(self._frames.following), False):
                pushed = [row for row in self._frames.trades.values() if venue_index in (row.ask_id, row.bid_id)]
                if sum((row.size for row in pushed), ZERO) == filled:
                    return [self._fill(row) for row in sorted(pushed, key=attrgetter("trade_id"))]
                if waits:
                    await self._frames.change(_PUSHED_WITHIN_S)
        return await self._fills(None, order_index=venue_index)

    async def fills_since(self, since: datetime) -> list[VenueFill]:
        """Return all trades of the account since `since` in chronological order, each once."""
        return await self._fills(since)

    async def fundings_since(self, since: datetime) -> list[VenueFunding]:
        """Return the payments since `since` in the followed markets, latest first."""
        rows = self._rows(
            "/api/v1/positionFunding", _FUNDING_PAYMENTS, since, side="all", start_timestamp=epoch_second(since)
        )
        return [payment async for row in rows if (payment := self._funding(row)).boundary >= since]

    async def _fills(self, since: datetime | None, **more: int) -> list[VenueFill]:
        rows = self._rows("/api/v1/trades", _TRADES, since, sort_by="trade_id", sort_dir="desc", **more)
        fills = {row.trade_id: self._fill(row) async for row in rows}
        return [fills[trade_id] for trade_id in sorted(fills)]

    async def _rows(
        self, path: str, decoder: "msgspec.json.Decoder[Any]", since: datetime | None, **parameters: str | int
    ) -> AsyncIterator[Any]:
        """Yield the rows of all pages since `since`, newest first."""
        page = {"account_index": self._signer.account_index, "limit": _PAGE, **parameters}
        for _ in range(_PAGES_MAX):
            answer = await self._api.get(path, decoder, signer=self._signer, **page)
            rows = answer.rows or []
            for row in rows:
                if since is None or _moment(row.timestamp) >= since:
                    yield row
            if not answer.next_cursor or (since is not None and rows and _moment(rows[-1].timestamp) < since):
                return
            page["cursor"] = answer.next_cursor
        raise MarketDataError(f"{path}: more than {_PAGES_MAX * _PAGE} rows")

    async def active_orders(self) -> list[OrderRow]:
        """Request the active orders, and return their newest states."""
        signer = self._signer
        answer = await self._api.get(
            "/api/v1/accountActiveOrders", ORDER_ROWS, signer=signer, account_index=signer.account_index
        )
        return self._frames.check(answer.orders or [])

    async def _standing(self, total: int) -> list[OrderRow]:
        """Return the standing orders; without a request if frames told as many as the account has."""
        rows = self._frames.standing()
        if rows is None or len(rows) != total:
            rows = await self.active_orders()
        return [row for row in rows if row.is_standing]

    def _unit(self, symbol: str, price: Decimal) -> Decimal:
        """Return the unit to which the venue rounded an average price: of its last digit, at most a tick."""
        exponent, listing = price.as_tuple().exponent, self._api.known.get(symbol)
        shown = Decimal(1).scaleb(exponent) if isinstance(exponent, int) else ZERO
        return shown if listing is None else min(shown, listing.market.tick)

    def _fill(self, trade: TradeRow) -> VenueFill:
        ours = self._signer.account_index
        is_ask = trade.ask_account_id == ours
        if is_ask is (trade.bid_account_id == ours):
            raise MarketDataError(
                f"/api/v1/trades: trade {trade.trade_id} has this account on both sides or on neither"
            )
        maker = is_ask is trade.is_maker_ask
        fee = (trade.maker_fee if maker else trade.taker_fee) or 0
        amounts_fit = all(amount.is_finite() and amount > 0 for amount in (trade.size, trade.price))
        if not amounts_fit:
            raise MarketDataError(f"/api/v1/trades: cannot be decoded: {trade}")
        return VenueFill(
            trade_id=trade.trade_id,
            client_index=(trade.ask_client_id if is_ask else trade.bid_client_id) or None,
            kind=trade.type,
            cause=_CAUSES.get(trade.type, Cause.LIQUIDATION),
            symbol=self._api.symbol_of(trade.market_id),
            side=OrderSide.SELL if is_ask else OrderSide.BUY,
            quantity=trade.size,
            price=trade.price,
            fee_rate=Decimal(fee) / _MILLION if fee else ZERO,
            maker=maker,
            at=_moment(trade.timestamp),
            order_index=trade.ask_id if is_ask else trade.bid_id,
        )

    def _funding(self, row: _FundingPayment) -> VenueFunding:
        if not all(amount.is_finite() for amount in (row.change, row.rate, row.position_size)):
            raise MarketDataError(f"/api/v1/positionFunding: cannot be decoded: {row}")
        return VenueFunding(
            symbol=self._api.symbol_of(row.market_id),
            boundary=floor_time(_moment(row.timestamp), _HOUR),
            quantity=abs(row.position_size),
            rate=row.rate,
            amount=row.change,
        )


def _moment(timestamp: int) -> datetime:
    """Convert a venue timestamp, which is in seconds or milliseconds."""
    if timestamp <= _SECONDS_MAX:
        return moment_of(timestamp)
    return moment_of(timestamp // 1000) + timedelta(milliseconds=timestamp % 1000)
