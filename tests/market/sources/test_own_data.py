"""Own data: nobody sees a row before its time, and what is not understood is refused with file, line and reason."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.core.errors import MarketDataError
from trader.market.sources.own_data import OwnData

START = datetime(2025, 1, 6, tzinfo=UTC)
SPAN = range(int(START.timestamp()), int(START.timestamp()) + 86_400)


def read(folder: Path, *texts: str) -> OwnData:
    paths = [folder / f"{number}.csv" for number in range(len(texts))]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    return OwnData.read(paths, SPAN)


rows = st.lists(
    st.tuples(st.integers(0, 100), st.dictionaries(st.sampled_from("abc"), st.integers(0, 9))), min_size=1, max_size=20
)


@given(rows, st.integers(0, 100), st.randoms())
def test_what_is_seen_at_a_time_is_the_same_whatever_comes_later(
    made: list[tuple[int, dict[str, int]]], now: int, random: Random
) -> None:
    past = [row for row in made if row[0] <= now]
    times = [row[0] for row in made if row[0] > now]
    values = [row[1] for row in made if row[0] > now]
    random.shuffle(values)
    moment = datetime.fromtimestamp(now / 1e6, UTC)
    assert OwnData([*past, *zip(times, values, strict=True)]).at(moment) == OwnData(past).at(moment)
    known: dict[str, int] = {}
    for _, new in sorted(past, key=lambda row: row[0]):
        known |= new
    assert OwnData(made).at(moment) == known


def test_a_column_has_its_latest_value_from_its_time_on(tmp_path: Path) -> None:
    news = 'time,mood,headline\n2025-01-05T23:00:00Z,0.5,"Up, ""they"" say"\n2025-01-06T02:00:00+01:00,,Down\n'
    data = read(tmp_path, news, f"ts,rate\n{SPAN.start + 7200},3\n")
    before = {"mood": 0.5, "headline": 'Up, "they" say'}
    assert data.at(START - timedelta(hours=2)) == {}
    assert data.at(START + timedelta(minutes=59, seconds=59.999)) == before
    assert data.at(START + timedelta(hours=1)) == {"mood": 0.5, "headline": "Down"}
    data.at(START)["mood"] = 9  # type: ignore[index]
    assert data.at(START) == before, "a reader changes only its own copy"
    assert data.at(START + timedelta(hours=2)) == {"mood": 0.5, "headline": "Down", "rate": 3}


def test_a_candle_of_any_interval_is_known_once_it_closes(tmp_path: Path) -> None:
    day = "open_time,open,high,low,close,volume,close_time\n1736035200000,1,4,1,3,9,1736121599999\n"
    data = read(tmp_path, day, "time,close30m\n2025-01-05T23:30:00Z,2\n2025-01-06T00:00:00Z,3\n")
    assert data.at(START - timedelta(seconds=1)) == {"close30m": 2}, "the day has not closed"
    assert data.at(START) == {
        "open_time": 1736035200000, "open": 1, "high": 4, "low": 1, "close": 3, "volume": 9, "close30m": 3,
    }  # fmt: skip


def test_parquet_has_times_as_an_index_and_texts_with_commas(tmp_path: Path) -> None:
    index = pd.DatetimeIndex([START - timedelta(hours=1), START], name="time")
    pd.DataFrame({"mood": [1.5, None], "text": ["a, b", "c"]}, index=index).to_parquet(tmp_path / "news.parquet")
    data = OwnData.read([tmp_path / "news.parquet"], SPAN)
    assert [data.at(START - timedelta(minutes=1)), data.at(START)] == [
        {"mood": 1.5, "text": "a, b"}, {"mood": 1.5, "text": "c"},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["mood\n1\n"], "0.csv, line 1: it needs one column time, date or timestamp; of candles, close_time"),
        (["time,mood,mood\n2025-01-06,1,2\n"], "0.csv, line 1: the header has the column 'mood' 2 times"),
        (["time,mood\n"], "0.csv, line 1: no rows"),
        (["time,mood\n2025-01-06,1\n2025-01-06,2\n"], "line 3: its time 2025-01-06 is not after the previous row's"),
        (["time,mood\n2025-01-06T00:00,1\n2025-01-06T01:00Z,2\n"], "line 3: the time '2025-01-06T01:00Z' is in ISO"),
        (["time,mood\nyesterday,1\n"], "line 2: the time 'yesterday' has no known form; expected ISO 8601 or seconds"),
        (["time,mood\n2025-01-06,1,2\n"], "line 2: 3 columns instead of 2"),
        (["time,mood\n2025-01-08,1\n"], "its first time, 2025-01-08T00:00:00.000Z, is after the end of the run"),
        (["time,open,high,low,close\n2025-01-06,1,1,1,1\n"], "line 1: these are candles, which are known once they"),
        (["ts,o,h,l,c,vol\n2025-01-06,1,1,1,1,1\n"], "line 1: these are candles, which are known once they close"),
        (["time,a\n2025-01-06,1\n"] * 2, "0.csv has a column 'a', too; names must differ"),
    ],
)  # fmt: skip
def test_own_data_that_is_not_understood_is_refused(tmp_path: Path, texts: list[str], reason: str) -> None:
    with pytest.raises(MarketDataError) as caught:
        read(tmp_path, *texts)
    assert reason in str(caught.value)
