"""Client of Lighter's REST interface, and its public calls: market rules, candles, funding and accounts.

The shapes follow the venue's OpenAPI document (https://apidocs.lighter.xyz). Units differ by call: candle requests
use milliseconds, funding requests seconds; a funding rate is percent of the notional for one hour, without a
sign, paid by the side that `direction` names; margin fractions are in hundredths of a percent.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime, timedelta
from decimal import Decimal
from math import isfinite
from typing import Final, TypeVar

import msgspec

from trader.core.clock import EPOCH, Clock, epoch_second, moment_of
from trader.core.errors import MarketDataError
from trader.live.book import BookChange, LevelChange
from trader.live.budget import OrderLimits, RequestBudget
from trader.live.http import VenueHttp, excerpt
from trader.live.lighter.rows import AccountRow
from trader.live.lighter.signer import Signer
from trader.live.lighter.stream import LighterStream, open_stream
from trader.live.market import Listing, VenueMarket, candle_of
from trader.market.domain.markets import INTERVALS, Candle, Interval, Market, canonical_symbol

logger = logging.getLogger(__name__)

ADDRESS: Final = "https://mainnet.zklighter.elliot.ai"
"""Lighter's address, unless `VENUE_URL` overrides it."""

TESTNET: Final = "https://testnet.zklighter.elliot.ai"

CANDLES_PER_CALL: Final = 500
FUNDINGS_PER_CALL: Final = 500
ORDERS_PER_CALL: Final = 250
"""The venue returns at most 500 candles, 750 fundings and 250 orders of a side per call."""

_PAUSE_S: Final = 1.0
_OK: Final = 200
_WEIGHTS: Final = {
    "sendTx": 6, "nextNonce": 6, "accountOrders": 100, "accountActiveOrders": 100, "apikeys": 150, "trades": 1200,
}  # fmt: skip
_WEIGHT: Final = 300
"""The weight of any other request. Of `trades`, the venue has stated several: this is the greatest."""

_TRANSACTIONS_OF_A_KIND: Final = 40
_STANDARD_ORDERS: Final = OrderLimits(250, 30, 50, 10)
_ORDERS: Final = {"plus": OrderLimits(750, 250, 50, 10), "premium": OrderLimits(1500, 1000, 500, 16)}
_STANDARD_REQUESTS: Final = 60
_OTHER_WEIGHTS: Final = 24_000
"""What a rolling minute allows: requests to a standard account, weights to another."""
_DECIMALS_MAX: Final = 18
_FRACTION_WHOLE: Final = 10_000

_MILLISECOND: Final = timedelta(milliseconds=1)
_HOUR: Final = timedelta(hours=1)

T = TypeVar("T")


class VenueRefusal(MarketDataError):
    """The venue answered with a code of its own, or (0) with a status."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Code(msgspec.Struct):
    code: int | msgspec.UnsetType = msgspec.UNSET


class _Detail(msgspec.Struct):
    symbol: str
    market_id: int
    status: str
    min_base_amount: Decimal
    min_quote_amount: Decimal
    size_decimals: int
    price_decimals: int
    min_initial_margin_fraction: int
    maintenance_margin_fraction: int
    last_trade_price: float = 0.0
    market_type: str = "perp"


class _Details(msgspec.Struct):
    order_book_details: list[_Detail]


class _Candle(msgspec.Struct):
    """The venue omits fields that are zero."""

    t: int
    o: float = 0.0
    h: float = 0.0
    l: float = 0.0  # noqa: E741 - the venue's name
    c: float = 0.0
    v: float = 0.0


class _Candles(msgspec.Struct):
    c: list[_Candle] | None = None


class _BookOrder(msgspec.Struct):
    price: Decimal
    remaining_base_amount: Decimal


class _BookOrders(msgspec.Struct):
    asks: list[_BookOrder] | None = None
    bids: list[_BookOrder] | None = None


class _Accounts(msgspec.Struct):
    accounts: list[AccountRow]


class _FundingRate(msgspec.Struct):
    timestamp: int
    rate: Decimal
    direction: str


class _FundingRates(msgspec.Struct):
    fundings: list[_FundingRate] | None = None


def code_of(body: bytes | str | None) -> int:
    """Return the venue's code in an answer, or 0 without one."""
    try:
        return _CODE.decode(body or b"{}").code or 0  # UNSET is false
    except msgspec.DecodeError:
        return 0


class LighterApi(VenueHttp):
    """The REST interface at one address. Every call raises `MarketDataError` for a failed or invalid answer."""

    venue, streams_rates = "lighter", True

    def __init__(self, base_url: str, budget: RequestBudget | None = None, *, pause_s: float = _PAUSE_S) -> None:
        """Share `budget` with the others who ask this address. `pause_s` scales all waiting, the minute included."""
        budget = budget or RequestBudget(
            _STANDARD_REQUESTS, per_kind=_TRANSACTIONS_OF_A_KIND, minute_s=60 * pause_s / _PAUSE_S
        )
        super().__init__(base_url, budget, pause_s=pause_s)
        self.has_quota = False
        """Whether the accounts' transactions are limited by their volume."""

    def use_tier(self, name: str) -> None:
        """Adapt the budget to the tier of the accounts."""
        self.has_quota = name == "premium"
        self.budget.is_weighted = name != "standard"
        self.budget.orders = _ORDERS.get(name, _STANDARD_ORDERS)
        self.budget.per_minute = _OTHER_WEIGHTS if self.budget.is_weighted else _STANDARD_REQUESTS

    def stream(self, markets: Sequence[VenueMarket], clock: Clock) -> AbstractAsyncContextManager[LighterStream]:
        """Open a stream of the markets. Raise `StreamUnreachable` if it cannot be opened."""
        return open_stream(self, markets, clock)

    async def listings(self) -> Mapping[str, Listing]:
        """Return the perpetual markets by symbol. Omit and log a market with impossible rules."""
        details = await self.get("/api/v1/orderBookDetails", _DETAILS, filter="perp")
        listings = {}
        for detail in details.order_book_details:
            if detail.market_type != "perp":  # an id does not tell the type
                continue
            symbol = canonical_symbol(detail.symbol)
            try:
                market = _market(symbol, detail)
            except MarketDataError as error:
                logger.warning("%s", error)
                continue
            listings[symbol] = Listing(detail.market_id, market, detail.status == "active")
        return self.remember(listings)

    def symbol_of(self, market_id: int) -> str:
        """Return the symbol of a market by its number; words that name it if it was never listed."""
        symbols = (symbol for symbol, listing in self.known.items() if listing.market_id == market_id)
        return next(symbols, f"market {market_id}")

    async def book(self, market_id: int) -> BookChange:
        """Return the levels of the best 250 resting orders of each side."""
        orders = await self.get("/api/v1/orderBookOrders", _BOOK_ORDERS, market_id=market_id, limit=ORDERS_PER_CALL)
        return BookChange(nonce=0, asks=_levels(orders.asks or ()), bids=_levels(orders.bids or ()))

    async def candles(self, market_id: int, interval: Interval, start: datetime, end: datetime) -> list[Candle]:
        """Return the candles that open in [start, end), ascending, with the unclosed candle."""
        span = INTERVALS[interval]
        candles: dict[datetime, Candle] = {}
        while start < end:
            stop = min(end, start + CANDLES_PER_CALL * span)
            answer = await self.get(
                "/api/v1/candles",
                _CANDLES,
                market_id=market_id,
                resolution=interval,
                start_timestamp=(start - EPOCH) // _MILLISECOND,
                end_timestamp=(stop - EPOCH) // _MILLISECOND - 1,
                count_back=CANDLES_PER_CALL,
            )
            for candle in map(_candle, answer.c or ()):
                if candle is not None and start <= candle.open_time < stop:
                    candles[candle.open_time] = candle
            start = stop
        return [candles[open_time] for open_time in sorted(candles)]

    async def fundings(self, market_id: int, start: datetime, end: datetime) -> dict[datetime, Decimal]:
        """Return the hourly rates due at the whole hours in [start, end]; longs pay a positive one."""
        rates = {}
        while start <= end:
            stop = min(end, start + FUNDINGS_PER_CALL * _HOUR)
            answer = await self.get(
                "/api/v1/fundings",
                _FUNDING_RATES,
                market_id=market_id,
                resolution="1h",
                start_timestamp=epoch_second(start),
                end_timestamp=epoch_second(stop),
                count_back=FUNDINGS_PER_CALL,
            )
            for row in answer.fundings or ():
                rates[moment_of(row.timestamp // 3600 * 3600)] = _signed_rate(row)
            start = stop + _HOUR
        return rates

    async def account(self, index: int) -> AccountRow:
        """Return what an account holds."""
        accounts = (await self.get("/api/v1/account", _ACCOUNTS, by="index", value=index)).accounts
        if len(accounts) != 1:
            raise MarketDataError(f"the venue shows {len(accounts)} accounts instead of one")
        return accounts[0]

    async def take(self, path: str, kind: int | None = None) -> None:
        """Take a request from the budget. Raise `MarketDataError` if there is none left for it."""
        await self.budget.take(_weight(path), kind=kind)

    async def get(
        self, path: str, decoder: "msgspec.json.Decoder[T]", *, signer: Signer | None = None, **parameters: str | int
    ) -> T:
        """Send one request, authorized by `signer`, and decode its answer; retry when over the rate limit."""
        headers = {} if signer is None else {"Authorization": signer.authorization()}
        status, body = await self.read("GET", path, _weight(path), params=parameters, headers=headers)
        if status != _OK:
            raise VenueRefusal(code_of(body), f"{path}: the venue answered with status {status}: {excerpt(body)}")
        try:
            code = _CODE.decode(body).code
            if code is msgspec.UNSET or code == _OK:
                return decoder.decode(body)
        except msgspec.DecodeError as error:
            raise MarketDataError(f"{path}: the venue's answer cannot be decoded: {error}") from error
        raise VenueRefusal(code, f"{path}: the venue answered with code {code}: {excerpt(body)}")


def _weight(path: str) -> int:
    return _WEIGHTS.get(path.rpartition("/")[2], _WEIGHT)


def _market(symbol: str, detail: _Detail) -> Market:
    """Return the rules of a market. The venue's minimum quantity is valued at the last trade's price."""
    decimals_fit = all(0 <= places <= _DECIMALS_MAX for places in (detail.size_decimals, detail.price_decimals))
    initial, maintenance = detail.min_initial_margin_fraction, detail.maintenance_margin_fraction
    amounts_fit = all(
        amount.is_finite() and amount >= 0 for amount in (detail.min_base_amount, detail.min_quote_amount)
    )
    if not (decimals_fit and amounts_fit and 0 < maintenance <= initial <= _FRACTION_WHOLE):
        raise MarketDataError(f"The venue's rules of {symbol} are impossible: {detail}")
    price = Decimal(repr(detail.last_trade_price)) if isfinite(detail.last_trade_price) else Decimal(0)
    return Market(
        symbol=symbol,
        tick=Decimal(1).scaleb(-detail.price_decimals),
        lot=Decimal(1).scaleb(-detail.size_decimals),
        min_notional=max(detail.min_quote_amount, detail.min_base_amount * price),
        leverage_max=_FRACTION_WHOLE // initial,
        maintenance_rate=Decimal(maintenance) / _FRACTION_WHOLE,
    )


def _levels(orders: Iterable[_BookOrder]) -> list[LevelChange]:
    sizes: dict[Decimal, Decimal] = {}
    for order in orders:
        sizes[order.price] = sizes.get(order.price, Decimal(0)) + order.remaining_base_amount
    return [LevelChange(price, size) for price, size in sizes.items()]


def _candle(row: _Candle) -> Candle | None:
    try:
        return candle_of(EPOCH + row.t * _MILLISECOND, row.o, row.h, row.l, row.c, row.v)
    except OverflowError:
        return None


def _signed_rate(row: _FundingRate) -> Decimal:
    sign = {"long": 1, "short": -1}.get(row.direction)
    if sign is None or not row.rate.is_finite():
        raise MarketDataError(f"/api/v1/fundings: cannot be decoded: {row}")
    return sign * row.rate / 100


_CODE: Final = msgspec.json.Decoder(_Code)
_DETAILS: Final = msgspec.json.Decoder(_Details)
_BOOK_ORDERS: Final = msgspec.json.Decoder(_BookOrders)
_ACCOUNTS: Final = msgspec.json.Decoder(_Accounts)
_CANDLES: Final = msgspec.json.Decoder(_Candles)
_FUNDING_RATES: Final = msgspec.json.Decoder(_FundingRates)
