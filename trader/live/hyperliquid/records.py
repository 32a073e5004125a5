"""Private records of one account at Hyperliquid: positions, standing orders, balance, trades with fees, and funding.

A fee is an amount in the trade's row, negative for a rebate. A read of rows by time returns a limited number of them:
a full page is read again in halves of its time.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from hashlib import blake2b
from typing import Final, TypeVar

import msgspec

from trader.core.clock import floor_time
from trader.core.errors import MarketDataError
from trader.core.money import ZERO, divide
from trader.exchange.domain.orders import Cause, OrderSide
from trader.exchange.domain.venue_orders import VenueFill, VenueOrderType
from trader.live.domain.orders import VenueFunding, VenueOrderState
from trader.live.domain.reconciliation import ProtectiveOrder, VenueReport
from trader.live.hyperliquid.actions import client_index_of_cloid
from trader.live.hyperliquid.api import HyperliquidApi, ms_of
from trader.live.socket import time_of

_FILLS_PER_CALL: Final = 2000
_FUNDINGS_PER_CALL: Final = 500
_LATELY: Final = timedelta(hours=1)
_RATE_DECIMALS: Final = 10
_MONEY: Final = "USDC"
_FEE_MAX: Final = Decimal("0.01")
_HOUR: Final = timedelta(hours=1)
_EARLY: Final = timedelta(minutes=1)
_CLOSE_CAUSES: Final = {"Settlement": Cause.ENDED, "Auto-Deleveraging": Cause.LIQUIDATION}
_STANDING: Final = ("open", "triggered")
_ENDED_WAITING: Final = (
    "canceled", "marginCanceled", "vaultWithdrawalCanceled", "reduceOnlyCanceled", "siblingFilledCanceled",
    "delistedCanceled", "liquidatedCanceled", "scheduledCancel", "badTriggerPxRejected",
)  # fmt: skip
"""How a stop or target ends that was not triggered."""

T = TypeVar("T")


class _Position(msgspec.Struct):
    coin: str
    szi: Decimal


class _AssetPosition(msgspec.Struct):
    position: _Position


class _Margin(msgspec.Struct, rename="camel"):
    total_raw_usd: Decimal


class AccountHoldings(msgspec.Struct, rename="camel"):
    """`total_raw_usd` is the money with positions at cost: what their present value is not part of."""

    asset_positions: list[_AssetPosition]
    margin_summary: _Margin | None = None
    cross_margin_summary: _Margin | None = None

    @property
    def held(self) -> dict[str, Decimal]:
        """The signed quantities by the venue's names. Raise `MarketDataError` for an impossible one."""
        held = {each.position.coin: each.position.szi for each in self.asset_positions}
        if not all(quantity.is_finite() for quantity in held.values()):
            raise MarketDataError(f"the positions {held} are impossible")
        return {coin: quantity for coin, quantity in held.items() if quantity}


class OrderDetail(msgspec.Struct, rename="camel"):
    """An order as the venue shows it; `sz` is what is left of `orig_sz`."""

    coin: str
    oid: int
    sz: Decimal
    orig_sz: Decimal
    timestamp: int = 0
    trigger_px: Decimal = ZERO
    order_type: str = ""
    is_trigger: bool = False
    reduce_only: bool = False
    cloid: str | None = None


class StatusRow(msgspec.Struct):
    order: OrderDetail
    status: str


class _StatusAnswer(msgspec.Struct):
    status: str
    order: StatusRow | None = None


class _Liquidation(msgspec.Struct, rename="camel"):
    liquidated_user: str = ""


class _FillRow(msgspec.Struct, rename="camel"):
    coin: str
    px: Decimal
    sz: Decimal
    side: str
    time: int
    dir: str
    oid: int
    tid: int
    crossed: bool
    fee: Decimal
    fee_token: str = _MONEY
    cloid: str | None = None
    liquidation: _Liquidation | None = None


class _Delta(msgspec.Struct, rename="camel"):
    coin: str
    funding_rate: Decimal
    szi: Decimal
    usdc: Decimal


class _FundingRow(msgspec.Struct):
    time: int
    delta: _Delta


class _Fees(msgspec.Struct, rename="camel"):
    user_cross_rate: Decimal
    user_add_rate: Decimal


class _Allowed(msgspec.Struct, rename="camel"):
    n_requests_used: int
    n_requests_cap: int


class HyperliquidRecords:
    """The records of one account. Methods raise `MarketDataError` when the venue does not provide them."""

    def __init__(self, api: HyperliquidApi, account: str) -> None:
        self._api = api
        self._account = account

    @property
    def answered_at(self) -> datetime | None:
        """The venue's clock at its latest answer."""
        return self._api.answered_at

    async def report(self) -> VenueReport:
        """Return the venue's report on the account: positions, orders and balance."""
        state = await self._api.info("clearinghouseState", AccountHoldings, user=self._account)
        margin = state.margin_summary or state.cross_margin_summary
        if margin is None or not margin.total_raw_usd.is_finite():
            raise MarketDataError("clearinghouseState: the venue shows no balance")
        protective_orders: dict[int, ProtectiveOrder] = {}
        others: set[int] = set()
        for order in await self.open_orders():
            name = client_index_of_cloid(order.cloid) or -order.oid
            if order.is_trigger:
                kind = VenueOrderType.STOP if order.order_type.startswith("Stop") else VenueOrderType.TARGET
                protective_orders[name] = ProtectiveOrder(self._symbol(order.coin), kind, order.trigger_px, order.sz)
            else:
                others.add(name)
        return VenueReport(
            positions={self._symbol(coin): quantity for coin, quantity in state.held.items()},
            protective_orders=protective_orders,
            others=frozenset(others),
            balance=margin.total_raw_usd,
        )

    async def open_orders(self) -> list[OrderDetail]:
        """Return the orders that stand in the perpetual markets."""
        orders = await self._api.info("frontendOpenOrders", list[OrderDetail], user=self._account)
        return [order for order in orders if self._api.symbol_of(order.coin) is not None]

    async def find(self, name: str | int) -> StatusRow | None:
        """Return an order by our id or the venue's; None if the venue does not know it."""
        return (await self._api.info("orderStatus", _StatusAnswer, user=self._account, oid=name)).order

    async def opened_since(self, since: datetime) -> set[int]:
        """Return our ids of the orders that could open which were sent since `since`."""
        rows = await self._api.info("historicalOrders", list[StatusRow], user=self._account)
        recent = [row.order for row in rows if row.order.timestamp >= ms_of(since) and not row.order.reduce_only]
        return {index for order in recent if (index := client_index_of_cloid(order.cloid)) is not None}

    def state_of(self, order: OrderDetail, status: str, client_index: int) -> VenueOrderState:
        if not (order.orig_sz.is_finite() and order.sz.is_finite() and 0 <= order.sz <= order.orig_sz):
            raise MarketDataError(f"orderStatus: an order with {order.sz} left of {order.orig_sz} is impossible")
        is_final = status not in _STANDING
        return VenueOrderState(
            client_index=client_index,
            venue_index=order.oid,
            symbol=self._symbol(order.coin),
            filled=order.orig_sz - order.sz,
            is_final=is_final,
            status=status,
            has_fired=order.is_trigger and is_final and status not in _ENDED_WAITING,
        )

    async def fee_rates(self) -> tuple[Decimal, Decimal]:
        """Return the taker and maker fee rates of the account, and note how many actions it may still send."""
        fees = await self._api.info("userFees", _Fees, user=self._account)
        rates = fees.user_cross_rate, fees.user_add_rate
        if not all(rate.is_finite() and abs(rate) <= _FEE_MAX for rate in rates):
            raise MarketDataError(f"userFees: cannot be decoded: {fees}")
        allowed = await self._api.info("userRateLimit", _Allowed, user=self._account)
        self._api.budget.allow(self._account, allowed.n_requests_cap - allowed.n_requests_used)
        return rates

    async def fills_of(self, client_index: int, venue_index: int, filled: Decimal | None = None) -> list[VenueFill]:
        """Return the fills of one order in chronological order, each trade once; those of the last hour suffice if they
        sum up to `filled`.
        """
        if filled is not None:
            lately = (self._api.answered_at or time_of(0)) - _LATELY
            fills = [fill for fill in await self.fills_since(lately) if fill.order_index == venue_index]
            if sum((fill.quantity for fill in fills), ZERO) == filled:
                return fills
        rows = await self._api.info("userFills", list[_FillRow], user=self._account)
        return [fill for fill in self._fills(rows) if fill.order_index == venue_index]

    async def fills_since(self, since: datetime) -> list[VenueFill]:
        """Return all trades of the account since `since` in chronological order, each once."""
        return self._fills(await self._rows("userFillsByTime", list[_FillRow], since, _FILLS_PER_CALL))

    async def fundings_since(self, since: datetime) -> list[VenueFunding]:
        """Return the payments since `since`."""
        payments = []
        for row in await self._rows("userFunding", list[_FundingRow], since, _FUNDINGS_PER_CALL):
            delta, boundary = row.delta, floor_time(time_of(row.time) + _EARLY, _HOUR)
            if not all(amount.is_finite() for amount in (delta.usdc, delta.funding_rate, delta.szi)):
                raise MarketDataError(f"userFunding: cannot be decoded: {row}")
            if boundary >= since:
                symbol = self._symbol(delta.coin)
                payments.append(VenueFunding(symbol, boundary, abs(delta.szi), delta.funding_rate, delta.usdc))
        return payments

    async def _rows(
        self, kind: str, answer: type[list[T]], since: datetime, most: int, until_ms: int | None = None
    ) -> list[T]:
        """Return the rows from `since` on. Read a page that may lack some in halves of its time."""
        start_ms = ms_of(since)
        if until_ms is None:
            until_ms = ms_of(max(since, self._api.answered_at or since) + _HOUR)
        rows = await self._api.info(kind, answer, user=self._account, startTime=start_ms, endTime=until_ms)
        if len(rows) < most:
            return rows
        if until_ms - start_ms < 2:
            raise MarketDataError(f"{kind}: more than {most} rows of one moment")
        middle_ms = (start_ms + until_ms) // 2
        first = await self._rows(kind, answer, since, most, middle_ms)
        return first + await self._rows(kind, answer, time_of(middle_ms + 1), most, until_ms)

    def _fills(self, rows: Sequence[_FillRow]) -> list[VenueFill]:
        fills = {
            fill.trade_id: fill
            for row in rows
            if (symbol := self._api.symbol_of(row.coin)) is not None
            for fill in [self._fill(row, symbol)]
        }
        return sorted(fills.values(), key=lambda fill: (fill.at, fill.trade_id))

    def _fill(self, row: _FillRow, symbol: str) -> VenueFill:
        amounts_fit = all(amount.is_finite() and amount > 0 for amount in (row.sz, row.px)) and row.fee.is_finite()
        if not amounts_fit or row.side not in ("A", "B") or row.fee_token != _MONEY:
            raise MarketDataError(f"userFills: cannot be decoded: {row}")
        is_liquidated = row.liquidation is not None and row.liquidation.liquidated_user.lower() == self._account
        cause = Cause.LIQUIDATION if is_liquidated else _CLOSE_CAUSES.get(row.dir, Cause.MANUAL)
        return VenueFill(
            trade_id=_trade_id(row),
            client_index=client_index_of_cloid(row.cloid),
            kind=row.dir,
            cause=cause,
            symbol=symbol,
            side=OrderSide.SELL if row.side == "A" else OrderSide.BUY,
            quantity=row.sz,
            price=row.px,
            fee_rate=round(divide(row.fee, row.px * row.sz), _RATE_DECIMALS),
            maker=not row.crossed,
            at=time_of(row.time),
            order_index=row.oid,
        )

    def _symbol(self, coin: str) -> str:
        return self._api.symbol_of(coin) or coin


def _trade_id(row: _FillRow) -> int:
    """Return a number for a trade, which the venue names by time, market and its own number together."""
    name = f"{row.time}\n{row.coin}\n{row.tid}"
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest()) >> 1
