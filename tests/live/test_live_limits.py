"""The limits of live trading at n and n + 1 that refuse nothing in words; see test_refusals.py for those that do."""

from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest
from support.feed import START
from support.limits import Accepts, outcomes
from support.venue_answers import answering, lighter_records

from trader.core.clock import EPOCH
from trader.live.book import BookChange, LevelChange
from trader.live.budget import RequestBudget
from trader.live.http import VenueHttp
from trader.live.lighter.api import LighterApi
from trader.live.market import VenueMarket

MS: Final = timedelta(milliseconds=1)
D = Decimal


async def asks_again(refusals: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    """Return whether a read outlasts so many refusals for its rate."""
    http, asked = VenueHttp("http://there", RequestBudget(60, per_kind=60), pause_s=0.0), 0

    async def ask(*_: object) -> tuple[int, dict[str, str], bytes]:
        nonlocal asked
        asked += 1
        return 429 if asked <= refusals else 200, {}, b""

    patch.setattr(http, "ask", ask)
    return (await http.read("GET", "/", 1))[0] == 200


async def pauses(seconds: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    """Return whether a read waits as long as the venue says."""
    http = VenueHttp("http://there", RequestBudget(60, per_kind=60), pause_s=0.0)
    paused: list[float] = []

    async def ask(*_: object) -> tuple[int, dict[str, str], bytes]:
        return 200 if paused else 429, {"Retry-After": str(seconds)}, b""

    async def sleep(pause_s: float) -> None:
        paused.append(pause_s)

    patch.setattr(http, "ask", ask)
    patch.setattr("trader.live.http.asyncio", SimpleNamespace(sleep=sleep))
    await http.read("GET", "/", 1)
    return paused == [seconds]


async def lists(decimals: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    api, fraction = LighterApi("http://there"), {"min_initial_margin_fraction": 9, "maintenance_margin_fraction": 9}
    amounts = {"min_base_amount": 1, "min_quote_amount": 1, "size_decimals": decimals, "price_decimals": 1}
    detail = {"symbol": "BTC", "market_id": 1, "status": "active", **fraction, **amounts}
    answering(patch, api, lambda: {"order_book_details": [detail]})
    return "BTC" in await api.listings()


async def is_in_seconds(above: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    row = {"timestamp": 10**11 + above, "market_id": 1, "change": 1, "rate": 1, "position_size": 1}
    (payment,) = await lighter_records(patch, lambda: {"position_fundings": [row]}).fundings_since(EPOCH)
    return payment.boundary.year > 5000


def is_heard(ms: int, *_: object) -> bool:
    market, level = VenueMarket("BTC", 1), [LevelChange(D(1), D(1))]
    market.on_whole_book(BookChange(1, asks=[LevelChange(D(2), D(1))], bids=level), START)
    market.quote(START + ms * MS)
    return market.trouble is None


def keeps_rates(count: int, *_: object) -> bool:
    market = VenueMarket("BTC", 1)
    for hour in range(count):
        market.record_rate(START + hour * timedelta(hours=1), D(hour))
    return len(market.rates) == count


LIMITS: Final[dict[str, tuple[int, Accepts]]] = {
    "refusals of a read that is repeated": (3, asks_again),
    "seconds before it is repeated": (3, pauses),
    "decimals of Lighter": (18, lists),
    "times of Lighter in seconds": (0, is_in_seconds),
    "how long a book may be silent": (10_000, is_heard),
    "rates of a market": (20_000, keeps_rates),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_a_limit_of_live_trading_accepts_as_much_as_it_says_and_no_more(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert await outcomes(*LIMITS[name], monkeypatch, tmp_path) == [True, False]
