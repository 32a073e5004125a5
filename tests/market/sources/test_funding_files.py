"""Funding-rate files of a replay: the charges from them, and the detection of mistakes."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from trader.core.errors import MarketDataError
from trader.market.domain.markets import PLAIN_FUNDING_RATE
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


async def test_a_published_rate_is_spread_over_the_hours_after_its_publication(tmp_path: Path) -> None:
    write_candles(tmp_path, 30)
    write(tmp_path, f"{ms(8)},8,0.00010000", f"{ms(16) + 3},8,-0.00004000")
    assert list(find_files(tmp_path)) == ["BTC"], "a funding file is not a candle file"
    source = ReplaySource(tmp_path, ("BTC",))
    await source.open()
    rates = [source.funding_rate("BTC", START + hour * HOUR) for hour in (7, 8, 15, 16, 23, 24)]
    first, second = Decimal("0.0000125"), Decimal("-0.000005")
    assert rates == [PLAIN_FUNDING_RATE, first, first, second, second, PLAIN_FUNDING_RATE]
    assert sum((source.funding_rate("BTC", START + hour * HOUR) for hour in range(8, 16)), Decimal(0)) == Decimal(
        "0.0001"
    )
    await source.close()


def test_a_changed_interval_ends_the_previous_one(tmp_path: Path) -> None:
    place = write(tmp_path, f"{ms(0)},8,0.0008", f"{ms(4)},4,0.0004", header="")
    rates = read_funding([place])
    assert set(rates.values()) == {Decimal("0.0001")}
    assert len(rates) == 8


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
        (["yesterday,8,0.0001"], 2, "is not a whole number of milliseconds"),
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


def test_a_wrong_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MarketDataError, match="line 1: expected a header with the columns calc_time,"):
        read_funding([write(tmp_path, f"{ms(0)},8,0.0001", header="time,hours,rate\n")])
