"""What the order gateways of all venues share: present rules before an order, and outcomes shown only by trades."""

from contextlib import nullcontext
from datetime import datetime

import msgspec

from trader.core.errors import MarketDataError, StartError
from trader.core.money import ZERO, ceil_to, format_decimal, round_to
from trader.exchange.domain.venue_orders import VenueOrder
from trader.live.budget import Priority, spending_as
from trader.live.domain.orders import VenueOrderState
from trader.live.market import Listing
from trader.live.source import MarketApi
from trader.live.venue import AccountRecords
from trader.market.domain.markets import Market
from trader.settings.forms import Secret
from trader.settings.settings import Settings


def credentials(settings: Settings) -> tuple[str, Secret]:
    """Return the account of the settings, and the key that signs for it. Raise `StartError` without them."""
    if settings.venue_account_index is None or settings.venue_api_key is None:
        raise StartError("TRADING_MODE=live and shadow sign orders: they need VENUE_ACCOUNT_INDEX and VENUE_API_KEY")
    return settings.venue_account_index, settings.venue_api_key


async def present_listing(api: MarketApi, order: VenueOrder) -> Listing:
    """Read the venue's rules, which may change at any time; an order that reduces does without a new reading.

    :raises ValueError: the venue does not list the market
    :raises MarketDataError: the venue does not answer
    """
    is_known = order.reduce_only and order.symbol in api.known
    try:
        with spending_as(Priority.READ, 0) if is_known else nullcontext():
            await api.listings()
    except MarketDataError:
        if not is_known:
            raise
    if (listing := api.known.get(order.symbol)) is None:
        raise ValueError(f"it does not list {order.symbol}")
    return listing


def by_present_rules(order: VenueOrder, listing: Listing, decided: Market) -> VenueOrder:
    """Return an order in lots and prices that the venue accepts now.

    :raises ValueError: it cannot be expressed there, or would open by other rules than those it was decided by
    """
    now = listing.market
    if not (listing.is_active or order.reduce_only):
        raise ValueError(f"it does not trade {order.symbol} now")
    if (now.tick, now.lot, now.figures) != (decided.tick, decided.lot, decided.figures):
        if not order.reduce_only:
            raise ValueError(f"its tick {now.tick} and lot {now.lot} were {decided.tick} and {decided.lot} until now")
        prices = {name: getattr(order, name) for name in ("price", "trigger")}
        rounded = {name: max(now.tick, round_to(each, now.tick_at(each))) for name, each in prices.items() if each}
        quantity = ceil_to(order.quantity, now.lot)  # it closes no more than there is
        order = msgspec.structs.replace(order, quantity=quantity, **rounded)
    for amount, unit in (
        (order.quantity, now.lot), *((price, now.tick_at(price)) for price in (order.price, order.trigger) if price),
    ):  # fmt: skip
        if amount % unit or amount <= 0:
            raise ValueError(f"{format_decimal(amount)} is not a whole number of {format_decimal(unit)}")
    return order


async def state_by_trades(records: AccountRecords, order: VenueOrder, since: datetime) -> VenueOrderState | None:
    """Return the final state of an order that the venue shows only by its trades, or None without any."""
    fills = [fill for fill in await records.fills_since(since) if fill.client_index == order.client_index]
    if not fills:
        return None
    return VenueOrderState(
        client_index=order.client_index,
        venue_index=fills[0].order_index,
        symbol=order.symbol,
        filled=sum((fill.quantity for fill in fills), ZERO),
        is_final=True,
        status="shown by its trades",
    )
