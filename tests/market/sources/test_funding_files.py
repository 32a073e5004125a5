"""Funding-rate files of a replay: the charges from them, and the detection of mistakes."""

import asyncio
import shutil
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.books import RULES, deep_quote, moment_of, open_account

from trader.core.errors import MarketDataError
from trader.exchange.domain.orders import Order, OrderSide
from trader.exchange.domain.rules import place
from trader.exchange.domain.tick_rules import apply_tick
from trader.market.sources.files import find_files, find_funding_files, read_funding
from trader.market.sources.replay import ReplaySource

START = datetime(2025, 3, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
HEADER = "calc_time,funding_interval_hours,last_funding_rate\n"
NAME = "BTCUSDT-fundingRate-2025-03.csv"


def ms(hours: float) -> int:
    return int((START + hours * HOUR).timestamp() * 1000)


def write(folder: Path, *rows: str, name: str = NAME, header: str = HEADER) -> Path:
    place = folder / name
    place.write_text(header + "".join(f"{row}\n" for row in rows))
    return place


def write_candles(folder: Path, hours: int) -> None:
    rows = [f"{ms(0) + minute * 60_000},95000,95010,94990,95000,10" for minute in range(hours * 60)]
    (folder / "BTCUSDT-1m-2025-03.csv").write_text("\n".join(rows) + "\n")


async def test_a_published_rate_is_due_once_and_in_force_until_the_next_one(tmp_path: Path) -> None:
    write_candles(tmp_path, 30)
    write(tmp_path, f"{ms(8)},8,0.00010000", f"{ms(16) + 3},4,-0.00004000", f"{ms(18)},8,0.0008")
    assert list(find_files(tmp_path)) == ["BTC"], "a funding file is not a candle file"
    source = ReplaySource(tmp_path, ("BTC",))
    await source.open()
    due = {hour: rate for hour in range(30) if (rate := source.funding_rate("BTC", START + hour * HOUR))}
    assert due == {8: Decimal("0.0001"), 16: Decimal("-0.00004"), 18: Decimal("0.0008")}
    shown = [source.known_funding_rate("BTC", START + hour * HOUR) for hour in (7, 8, 15, 17, 18, 25, 26)]
    first, second, third = Decimal("0.0000125"), Decimal("-0.00001"), Decimal("0.0001")
    assert shown == [None, first, first, second, third, third, None]
    await source.close()


published = st.lists(
    st.tuples(
        st.integers(0, 29),  # the hour
        st.integers(0, 999),  # how many milliseconds after it the rate was calculated
        st.sampled_from([1, 2, 4, 8, 24]),
        st.integers(-900, 900).map(lambda number: Decimal(number) / 100_000),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda row: row[0],
).map(sorted)
changes = st.dictionaries(
    st.integers(0, 1799).map(lambda minute: 60 * minute) | st.integers(0, 29).map(lambda hour: 3600 * hour),
    st.tuples(st.sampled_from(["BTC", "ETH"]), st.integers(-3, 3)),
    max_size=16,
)
"""At which seconds the position of a market gets which size."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    write_candles(folder, 30)
    shutil.copy(folder / "BTCUSDT-1m-2025-03.csv", folder / "ETHUSDT-1m-2025-03.csv")
    return folder


@given(published, published, changes, st.sets(st.integers(0, 29)), st.sampled_from([1, 4, 8]))
def test_what_is_charged_is_the_sum_of_the_rates_published_while_held(
    recorded: Path, btc: list[Any], eth: list[Any], changed: dict[int, Any], gaps: set[int], every: int
) -> None:
    """Whatever the intervals, the exchange's own one, and gaps around publications."""
    published = {"BTC": btc, "ETH": eth}
    for symbol, rows in published.items():
        lines = (f"{ms(hour) + late},{interval},{rate}" for hour, late, interval, rate in rows)
        write(recorded, *lines, name=f"{symbol}USDT-fundingRate-2025-03.csv")
    source = ReplaySource(recorded, ("BTC", "ETH"))
    asyncio.run(source.open())
    rules = msgspec.structs.replace(RULES, markets=dict(source.markets), funding_interval_h=every)
    account, moment, last_mark = open_account(10**9, at=START - HOUR), None, 0
    held, owed = {"BTC": 0, "ETH": 0}, Decimal(0)
    due = sorted((3600 * row[0], symbol, row[3]) for symbol, rows in published.items() for row in rows)
    ticking = {3600 * hour + late for hour in range(30) if hour not in gaps for late in (0, 1)}
    for second in sorted({0, 30 * 3600, *changed, *ticking}):
        at, mark = START + timedelta(seconds=second), 1000 + second // 60
        while due and due[0][0] <= second:
            when, symbol, rate = due.pop(0)
            owed -= held[symbol] * rate * (mark if when == second else last_mark)
        moment = moment_of(*(deep_quote(symbol, mark, at=at) for symbol in held), before=moment)
        posting = apply_tick(account, moment, rules, source.funding_rate)
        account = account if posting is None else posting.account
        symbol, wanted = changed.get(second, ("BTC", held["BTC"]))
        if quantity := wanted - held[symbol]:
            side = OrderSide.BUY if quantity > 0 else OrderSide.SELL
            order = Order(account_id="default", symbol=symbol, side=side, quantity=Decimal(abs(quantity)))
            account = place(account, order, moment, rules, source.funding_rate).account
        held[symbol], last_mark = wanted, mark
    assert account.funding == owed


def test_files_of_other_markets_and_single_files_are_ignored(tmp_path: Path) -> None:
    place = write(tmp_path, f"{ms(0)},8,0.0001", name="ETHUSDT-fundingRate-2025-03.csv.gz")
    assert find_funding_files(tmp_path) == {"ETH": [place]}
    assert find_funding_files(place) == {}


@pytest.mark.parametrize(
    ("rows", "line", "reason"),
    [
        (["1,2"], 2, "2 columns instead of 3"),
        ([f"{ms(0)},8,0.0001", f"{ms(8)},8,much"], 3, "'much' is not a number"),
        ([f"{ms(0)},8,nan"], 2, "'nan' is not a number"),
        ([f"{ms(0)},8,0.5"], 2, "the rate 0.5 is beyond"),
        ([f"{ms(0)},5,0.0001"], 2, "the interval '5' is not a number of hours that divides 24"),
        ([f"{ms(0.5)},8,0.0001"], 2, "is not on the hour"),
        (["yesterday,8,0.0001"], 2, "the time 'yesterday' has no known form; expected milliseconds"),
        ([f"{ms(8)},8,0.0001", f"{ms(8)},8,0.0001"], 3, "its time is not after the previous row's"),
        ([], 1, "no funding rates"),
    ],
)
def test_a_wrong_row_is_reported_with_file_line_and_reason(
    tmp_path: Path, rows: list[str], line: int, reason: str
) -> None:
    with pytest.raises(MarketDataError) as caught:
        read_funding([write(tmp_path, *rows)])
    assert f"{NAME}, line {line}: " in str(caught.value)
    assert reason in str(caught.value)


def test_two_files_with_a_rate_of_the_same_hour_are_refused(tmp_path: Path) -> None:
    places = [write(tmp_path, f"{ms(8)},8,0.0001", name=name) for name in (NAME, NAME.replace("03", "02"))]
    with pytest.raises(MarketDataError, match=r"-02\.csv, line 2: another file has a rate of 2025-03-01T08:00:00"):
        read_funding(places)


def test_a_wrong_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MarketDataError, match="line 1: expected a header with the columns calc_time,"):
        read_funding([write(tmp_path, f"{ms(0)},8,0.0001", header="time,hours,rate\n")])
