"""Backtests on a recording of books: what they know at each second, and decisions below a minute."""

import asyncio
import csv
import tempfile
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.books import make_quote

from trader.__main__ import main
from trader.backtest.market import BacktestMarket
from trader.core.clock import ceil_second, epoch_second, moment_of
from trader.market.domain.markets import PriceRange, Quote, Tick
from trader.market.sources.book_recording import BookRecording, RecordedSeconds
from trader.market.sources.files import Minutes
from trader.market.sources.recorder import Recorder
from trader.market.sources.synthetic import SyntheticSource

BEGIN = datetime(2025, 6, 2, 22, 59, 50, tzinfo=UTC)
"""Just before an hour, whose updates are in another file."""

LAST_S = 20
SYMBOLS = ("BTC", "ETH")
SOURCE = SyntheticSource(3, SYMBOLS)


def record(folder: Path, ticks: list[Tick]) -> None:
    recorder = Recorder(folder, SOURCE)
    recorder.open()
    for tick in ticks:
        recorder.record(tick)
    recorder.close()


@st.composite
def some_ticks(draw: st.DrawFn) -> list[Tick]:
    """Updates of one or both markets, up to four a second. A mark may be outside of bid and ask, as a venue's may."""
    quarters = draw(st.lists(st.integers(1, 4 * LAST_S - 1), unique=True))
    prices = st.integers(900, 1_100)
    ticks = []
    for quarter in sorted({0, *quarters, 4 * LAST_S}):  # the first and the last have both markets
        at = BEGIN + quarter * timedelta(milliseconds=250)
        names = draw(st.sampled_from([("BTC",), ("ETH",), SYMBOLS])) if 0 < quarter < 4 * LAST_S else SYMBOLS
        quotes = {}
        for symbol in names:
            bid, mark = (
                draw(prices),
                Decimal(draw(prices)).quantize(draw(st.sampled_from([Decimal(1), Decimal("1.0")]))),
            )
            quotes[symbol] = make_quote(symbol, [(bid, 1)], [(bid + draw(st.integers(1, 50)), 2)], at=at, mark=mark)
        ticks.append(Tick(at, quotes))
    return ticks


async def market_of(folder: Path) -> BacktestMarket:
    source = BookRecording(folder, SYMBOLS)
    await source.open()
    return await BacktestMarket.open(source, ())


def shown(quote: Quote) -> tuple[object, ...]:
    return quote.at, quote.bid, quote.ask, quote.mark, quote.book


@given(some_ticks(), st.data())
def test_each_second_has_the_last_update_up_to_it_and_no_later_one(ticks: list[Tick], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder), ticks)
        market = asyncio.run(market_of(Path(folder)))
        first = epoch_second(BEGIN)
        assert market.span == range(first, first + LAST_S + 1)
        updates = {symbol: [tick.quotes[symbol] for tick in ticks if symbol in tick.quotes] for symbol in SYMBOLS}
        seconds = {symbol: {ceil_second(quote.at) for quote in own} for symbol, own in updates.items()}
        for second in range(first, first + LAST_S + 1):
            assert market.ticking(second) == {symbol for symbol in SYMBOLS if second in seconds[symbol]}
            assert market.next_tick(second) == min(each for own in seconds.values() for each in own if each >= second)
            assert market.last_tick(second) == max(each for own in seconds.values() for each in own if each <= second)
            for symbol, own in updates.items():
                last = [quote for quote in own if quote.at <= moment_of(second)][-1]
                assert shown(market.quote(symbol, second)) == shown(last)
                assert str(market.mark(symbol, second)) == str(last.mark), "the same digits"
        start = data.draw(st.integers(first, first + LAST_S))
        stop = data.draw(st.integers(start, first + LAST_S))
        assert not market.ticking(first + LAST_S + 1)
        for symbol, reached in market.ranges(SYMBOLS, start, stop).by_symbol.items():
            within = [market.quote(symbol, second) for second in range(start, stop + 1)]
            assert (reached.lowest_mark, reached.highest_mark) == (
                min(quote.mark for quote in within), max(quote.mark for quote in within),
            )  # fmt: skip
            assert reached.lowest_ask == min(quote.ask for quote in within)
            assert reached.highest_bid == max(quote.bid for quote in within)


def test_of_two_updates_in_one_second_only_the_last_counts() -> None:
    """As of two files whose updates meet in the second of the full hour."""
    low, usual = (make_quote("BTC", [(price, 1)], [(price + 1, 1)], at=BEGIN) for price in (900, 1_000))
    prices = RecordedSeconds(Minutes(), lambda _: usual)
    for second, quote in ((1, usual), (2, low), (2, usual)):
        prices.add(second, quote)
    assert prices.extremes(1, 3) == PriceRange(usual.mark, usual.mark, usual.ask, usual.bid)


FAST = """
from trader.strategies import ClosePosition, PlaceOrder, PlannedExit, SeriesValue

class Fast:
    intervals = ("1m",)

    def decide(self, view):
        position, price = view.position("BTC"), float(view.markets["BTC"].price)
        if position is None:
            return PlaceOrder(symbol="BTC", side="buy", quantity=0.01, exit_plan=PlannedExit(stop=price * 0.99))
        return ClosePosition(symbol="BTC")

    def series(self, view):
        yield SeriesValue("BTC", "cadence", view.cadence.total_seconds())
"""


class Recorded(NamedTuple):
    """A recording of four minutes of two markets with an update a second, and a strategy that decides all the time."""

    books: Path
    strategy: str


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    record(folder / "books", [SOURCE.tick(epoch_second(BEGIN) + number) for number in range(241)])
    (folder / "fast.py").write_text(FAST)
    return Recorded(folder / "books", f"{folder / 'fast.py'}:Fast")


def backtest(recorded: Recorded, out: Path, *options: str) -> int:
    named = ("--data", str(recorded.books), "--strategy", recorded.strategy, "--out", str(out))
    return main(["backtest", *named, "--no-database", *options])


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


def test_a_strategy_decides_every_ten_seconds_on_recorded_books(recorded: Recorded, tmp_path: Path) -> None:
    assert backtest(recorded, tmp_path / "run", "--cadence", "10s", "--latency", "0") == 0
    result = orjson.loads((tmp_path / "run" / "result.json").read_bytes())
    assert (result["cadence"], result["complete"]) == ("10s", True)
    fills = rows_of(tmp_path / "run" / "fills.csv")
    times = [datetime.fromisoformat(fill["at"]) for fill in fills]
    assert times[0] == BEGIN + timedelta(milliseconds=1), "the first cycle, as in a service"
    assert {later - earlier for earlier, later in pairwise(times[1:])} == {timedelta(seconds=10)}
    during = [fill for fill, at in zip(fills, times, strict=True) if at <= BEGIN + timedelta(seconds=240)]
    assert len(during) == 25
    for fill in during:  # of the recorded book of that second
        book = SOURCE.tick(epoch_second(datetime.fromisoformat(fill["at"]))).quotes["BTC"].book
        assert Decimal(fill["price"]) == (book.asks if fill["side"] == "buy" else book.bids)[0].price
    assert {row["value"] for row in rows_of(tmp_path / "run" / "series.csv")} == {"10.0"}


def test_a_backtest_begins_once_every_market_has_a_price(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = [SOURCE.tick(epoch_second(BEGIN) + number) for number in range(60)]
    late = [Tick(tick.at, {"BTC": tick.quotes["BTC"]}) if tick.at < BEGIN + timedelta(seconds=25) else tick
            for tick in ticks]  # fmt: skip
    record(tmp_path / "late", late)
    late_books = recorded._replace(books=tmp_path / "late")
    assert backtest(late_books, tmp_path / "run", "--cadence", "10s") == 0
    assert orjson.loads((tmp_path / "run" / "result.json").read_bytes())["from"] == "2025-06-02T23:00:15.000Z"
    assert backtest(late_books, tmp_path / "early", "--to", "2025-06-02T23:00:10Z") == 1
    assert "has no prices of ETH from" in capsys.readouterr().err


CANCELS = """
from trader.strategies import CancelOrder, PlaceOrder, PlannedExit

class Cancels:
    def decide(self, view):
        if view.at.second == 10:
            return PlaceOrder(symbol="BTC", side="buy", quantity=0.01, type="limit", limit_price=50_000,
                              exit_plan=PlannedExit(stop=40_000))
        return [CancelOrder(symbol="BTC", order_id=str(order.id)) for order in view.orders if view.at.second == 20]
"""


def test_an_order_is_canceled_when_the_strategy_says_so_though_no_update_came_in_that_second(tmp_path: Path) -> None:
    silent = range(25, 31)  # seconds after the beginning; the order is canceled in the last one
    record(tmp_path / "books", [SOURCE.tick(epoch_second(BEGIN) + n) for n in range(60) if n not in silent])
    (tmp_path / "cancels.py").write_text(CANCELS)
    recorded = Recorded(tmp_path / "books", f"{tmp_path / 'cancels.py'}:Cancels")
    assert backtest(recorded, tmp_path / "run", "--cadence", "10s") == 0
    rows = [orjson.loads(line) for line in (tmp_path / "run" / "ledger.jsonl").read_bytes().splitlines()]
    closed = [row["row"] for row in rows if row["table"] == "limit_orders" and row["row"]["status"] == "CANCELLED"]
    assert [row["closed_at"] for row in closed] == ["2025-06-02T23:00:20Z"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--cadence", "90s"), "--cadence is '90s'; it must be like 10s, 5m or 1h, at most 24h"),
        (("--seed", "4"), "--seed, --seeds: not with"),
        (("--seeds", "2"), "--seed, --seeds: not with"),
        (("--funding", "0.0001"), "--funding: not with"),
        (("--markets-file", "markets.toml"), "--markets-file: not with"),
        (("--agent", "scout:Apex", "--cadence", "5s"), "--cadence is 5s, below a minute: only for --strategy"),
    ],
)
def test_what_a_recording_has_itself_is_refused(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    assert backtest(recorded, tmp_path / "run", *options) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
