"""Kline files: every accepted format reads the same, and errors name file, line and reason."""

import gzip
import zipfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trader.core.errors import MarketDataError
from trader.market.sources.files import FileRow, find_files, read_file, read_market

START = datetime(2025, 1, 6, tzinfo=UTC)
HEADER_12 = (
    "open_time,open,high,low,close,volume,close_time,quote_volume,count,taker_buy_volume,taker_buy_quote_volume,ignore"
)


def rows_of(count: int, *, first: int = 0, price: float = 95000.0, step: int = 1) -> list[FileRow]:
    """Candles that rise by 1 a minute and reach 2 in both directions."""
    minute = int(START.timestamp()) // 60 + first
    return [
        FileRow(minute + n * step, price + n, price + n + 3, price + n - 2, price + n + 1, 5.0 + n)
        for n in range(count)
    ]


def text_of(rows: Sequence[FileRow], *, unit: int = 60_000, columns: int = 6, header: str = "") -> str:
    lines = [header] if header else []
    for row in rows:
        fields = [str(row.minute * unit), *map(repr, row[1:])]
        if columns == 12:
            fields += [str((row.minute + 1) * unit - 1), "1.5", "7", "0.5", "0.25", "0"]
        lines.append(",".join(fields))
    return "\n".join(lines) + "\n"


def write(folder: Path, rows: Sequence[FileRow], name: str = "BTCUSDT-1m-2025-01.csv", **form: object) -> Path:
    place = folder / name
    text = text_of(rows, **form)  # type: ignore[arg-type]
    if name.endswith(".gz"):
        place.write_bytes(gzip.compress(text.encode()))
    elif name.endswith(".zip"):
        with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(place.with_suffix(".csv").name, text)
    else:
        place.write_text(text)
    return place


@pytest.mark.parametrize("name", [f"BTCUSDT-1m-2025-01.{form}" for form in ("csv", "csv.gz", "zip")])
@pytest.mark.parametrize("unit", [60_000, 60_000_000], ids=["ms", "us"])
@pytest.mark.parametrize("columns", [6, 12])
@pytest.mark.parametrize("has_header", [False, True])
def test_every_accepted_format_reads_the_same(
    tmp_path: Path, name: str, unit: int, columns: int, has_header: bool
) -> None:
    header = ",".join(HEADER_12.split(",")[:columns]) if has_header else ""
    rows = rows_of(30)
    minutes = read_file(write(tmp_path, rows, name, unit=unit, columns=columns, header=header))
    assert [minutes[place] for place in range(len(minutes))] == rows


@given(st.data(), st.sampled_from([60_000, 60_000_000]), st.sampled_from([6, 12]))
def test_an_edited_file_reads_as_its_text_says_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, unit: int, columns: int
) -> None:
    text = text_of(rows_of(4), unit=unit, columns=columns)
    for _ in range(data.draw(st.integers(1, 2), "edits")):
        begin = data.draw(st.integers(0, len(text)), "at")
        edit = data.draw(st.text('0159.,\n\r\x0b -+_eE"٣x', max_size=3), "edit")
        text = text[:begin] + edit + text[begin + data.draw(st.integers(0, 3), "cut") :]
    place = tmp_path_factory.mktemp("edited") / "BTCUSDT-1m-2025-01.csv"
    place.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trader.market.sources.files.PLAIN_READ", data.draw(st.sampled_from((1, 100, 10_000)), "read"))
        try:
            minutes = read_file(place)
        except MarketDataError:
            return
    lines = [line.split(",") for line in text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n ").split("\n")]
    assert {len(fields) for fields in lines} == {columns}
    assert [(row.minute * unit, *row[1:]) for row in map(minutes.__getitem__, range(len(minutes)))] == [
        (int(time.strip('" ')), *map(float, figures[:5])) for time, *figures in lines
    ]
    assert all(len(time.strip('" ')) in (13, 16) and "_" not in ",".join(figures[:5]) for time, *figures in lines)


def columns_of(rows: Sequence[FileRow], names: str, time: Callable[[int], object]) -> list[str]:
    """Return rows as lines with the columns of a header; any that is neither a time nor OHLC has the volume."""
    roles = {"o": "open", "h": "high", "l": "low", "c": "close"}
    times = ("open_time", "startTime", "start", "timestamp", "time", "ts", "date", "Datetime", "")
    return [
        ",".join(
            str(time(row.minute) if name in times else getattr(row, roles.get(name[:1].lower(), "volume")))
            for name in names.split(",")
        )
        for row in rows
    ]


def iso(minute: int, zone: timezone | None = UTC) -> str:
    return str(datetime.fromtimestamp(minute * 60, zone or UTC).replace(tzinfo=zone))


@pytest.mark.parametrize("is_newest_first", [False, True])
@pytest.mark.parametrize(
    ("names", "time"),
    [
        ("startTime,openPrice,highPrice,lowPrice,closePrice,volume,turnover", lambda minute: minute * 60_000),
        ("ts,o,h,l,c,vol,volCcy,volCcyQuote", lambda minute: minute * 60_000),
        ("instrument_name,open,high,low,close,vol,vol_ccy,vol_quote,open_time", lambda minute: minute * 60_000),
        ("time,low,high,open,close,volume", lambda minute: minute * 60),
        ("start,low,high,open,close,volume", lambda minute: minute * 60),
        (",open,high,low,close,volume", lambda minute: iso(minute, None)),
        ("date,open,high,low,close,volume", lambda minute: iso(minute).replace("+00:00", "Z")),
        ("Datetime,Open,High,Low,Close,Volume", lambda minute: iso(minute, timezone(timedelta(hours=-5)))),
        ("timestamp,close,open,high,low,volume", lambda minute: minute * 60 * 10**9),
    ],
)
def test_candles_of_other_sources_are_read_by_their_headers(
    tmp_path: Path, names: str, time: Callable[[int], object], *, is_newest_first: bool
) -> None:
    rows = rows_of(30)
    place = tmp_path / "BTCUSDT.csv"
    place.write_text("\n".join([names, *columns_of(rows[:: -1 if is_newest_first else 1], names, time)]))
    minutes = read_file(place)
    assert [minutes[number] for number in range(len(minutes))] == rows


@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize("zone", [None, UTC, timezone(timedelta(hours=9))])
def test_candles_are_read_from_parquet_with_times_as_a_column_or_an_index(
    tmp_path: Path, zone: timezone | None, *, has_index: bool
) -> None:
    rows = rows_of(30)
    frame = pd.DataFrame([row._asdict() for row in rows])
    times = pd.to_datetime(frame.pop("minute") * 60, unit="s", utc=True)
    frame.insert(0, "timestamp", times.dt.tz_convert(zone))
    (frame.set_index("timestamp") if has_index else frame).to_parquet(tmp_path / "BTCUSDT-1m.parquet")
    minutes = read_market(find_files(tmp_path)["BTC"])
    assert [minutes[place] for place in range(len(minutes))] == rows


def test_a_volume_in_contracts_gives_way_to_that_in_base_currency(tmp_path: Path) -> None:
    place = tmp_path / "BTC.csv"
    lines = (
        "ts,o,h,l,c,vol,volCcy,volCcyQuote,confirm",
        "1736121600000,9,9,9,9,500,5,45,1",
        "1736121660000,9,9,9,9,3,27,27,1",
    )
    place.write_text("\n".join(lines))
    assert list(read_file(place).volume) == [5, 3], "of a derivative, and of a spot market"
    place.write_text(place.read_text()[:-1] + "0")
    with pytest.raises(MarketDataError, match=r"line 3: confirm is '0': the candle is not complete"):
        read_file(place)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("2025-01-06T00:00:00Z", "2025-01-06T00:01:00"),
        ("2025-01-06", "1736121660000"),
        ("1736121600", "1736121660000"),
    ],
)
def test_a_file_that_mixes_forms_of_times_is_refused(tmp_path: Path, first: str, second: str) -> None:
    place = tmp_path / "BTC.csv"
    place.write_text(f"time,open,high,low,close,volume\n{first},1,1,1,1,1\n{second},1,1,1,1,1")
    with pytest.raises(MarketDataError, match=f"line 3: the time '{second}' is in .+, unlike the first row's"):
        read_file(place)


@st.composite
def candles(draw: st.DrawFn) -> FileRow:
    prices = sorted(draw(st.lists(st.floats(10, 1e6), min_size=4, max_size=4)))
    first, second = draw(st.permutations(prices[1:3]))
    return FileRow(0, first, prices[3], prices[0], second, draw(st.floats(0, 1e9)))


@settings(max_examples=60, deadline=None)
@given(st.lists(candles(), min_size=2, max_size=20), st.sets(st.integers(2, 10_000), min_size=18, max_size=18))
def test_written_candles_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[FileRow], gaps: set[int]
) -> None:
    minutes = [0, 1, *sorted(gaps)]
    rows = [row._replace(minute=29_000_000 + minute) for row, minute in zip(drawn, minutes, strict=False)]
    read = read_file(write(tmp_path_factory.mktemp("files"), rows))
    assert [read[place] for place in range(len(read))] == rows


def test_windows_line_endings_and_a_byte_order_mark_are_accepted(tmp_path: Path) -> None:
    place = tmp_path / "BTCUSDT.csv"
    place.write_bytes(
        b"\xef\xbb\xbf"
        + text_of(rows_of(3), header="Open_time,Open,High,Low,Close,Volume").replace("\n", "\r\n").encode()
        + b"\r\n"
    )
    assert len(read_file(place)) == 3


GOOD = text_of(rows_of(3)).splitlines()
T = GOOD[1].split(",")[0]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (f"{T},1,2,1,1", "5 columns instead of 6"),
        (f"{T},1,2,1,1,1,1", "7 columns instead of 6"),
        (f"{T},x,2,1,1,1", "'x' is not a number"),
        (f"{T},,2,1,1,1", "'' is not a number"),
        (f"{T},1,nan,1,1,1", "'nan' is not a number"),
        (f"{T},1,inf,1,1,1", "'inf' is not a number"),
        (f"{T},1_0,20,1,1,1", "'1_0' is not a number"),
        (f"{T},1,1,2,1,1", "high 1.0 is below low 2.0"),
        (f"{T},3,2,1,1,1", "open 3.0 is outside [1.0, 2.0]"),
        (f"{T},1,2,1,0.5,1", "close 0.5 is outside [1.0, 2.0]"),
        (f"{T},1,2,1,1,-1", "volume -1.0 is negative"),
        (f"{T},0,2,0,1,1", "a price is not above 0"),
        (f"{T},-1,2,-1,1,1", "a price is not above 0"),
        (f"{int(T) + 1},1,2,1,1,1", "is not on the minute"),
        (f"{int(T) // 1000},1,2,1,1,1", f"the time '{int(T) // 1000}' "),
        (f"{T}.0,1,2,1,1,1", "has no known form; expected "),
        (f"-{T},1,2,1,1,1", "has no known form; expected "),
        ("9" * 5000 + ",1,2,1,1,1", "has no known form; expected "),
        (GOOD[0], "its time is not after the previous row's"),
        (f"{int(T) - 120_000},1,2,1,1,1", "its time is not after the previous row's"),
        ("", "an empty line"),
    ],
)
@pytest.mark.parametrize("has_header", [False, True])
def test_an_invalid_row_is_reported_with_file_line_and_reason(
    tmp_path: Path, line: str, reason: str, has_header: bool
) -> None:
    place = tmp_path / "BTCUSDT-1m-2025-01.csv"
    lines = [GOOD[0], line, GOOD[2]]
    if has_header:
        lines.insert(0, "open_time,open,high,low,close,volume")
    place.write_text("\n".join(lines) + "\n")
    with pytest.raises(MarketDataError) as caught:
        read_file(place)
    assert str(caught.value).startswith(f"{place}, line {3 if has_header else 2}: ")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "line 1: no candles"),
        (b"open_time,open,high,low,close,volume\n", "line 1: no candles"),
        (b"time,close,open,high,volume\n", "line 1: no column is the low; expected a header with the columns"),
        (b"time,open,high,low,close,Close,volume\n", "line 1: the header has the column 'close' 2 times"),
        (b"ts,o,h,l,c,vol,volCcy\n", "line 1: volCcy may be in base or quote currency; expected a column volccyquote"),
        (b"1,2,3\n", "line 1: 3 columns instead of 6 or 12, or of a header that names them"),
        (b"1736121600,1,2,1,1,5\n", "line 1: the time '1736121600' has no known form; expected milliseconds since"),
        (b"date,open,high,low,close,volume\n2025.01.06,1,2,1,1,5\n", "line 2: the time '2025.01.06' has no known form"),
        (b"\xff\xfe\x00", "line 1: is not UTF-8 text"),
        (text_of(rows_of(5, step=5)).encode(), "no two candles are a minute apart"),
    ],
)
def test_a_file_without_candles_is_rejected(tmp_path: Path, content: bytes, reason: str) -> None:
    place = tmp_path / "BTCUSDT.csv"
    place.write_bytes(content)
    with pytest.raises(MarketDataError) as caught:
        read_file(place)
    assert reason in str(caught.value)


@pytest.mark.parametrize("name", ["BTCUSDT.csv.gz", "BTCUSDT.zip"])
@pytest.mark.parametrize(
    "damage", [lambda data: b"not packed", lambda data: data[:-20], lambda data: data[:70] + b"\0\0\0" + data[73:]]
)
def test_a_damaged_packed_file_is_rejected(tmp_path: Path, name: str, damage: Callable[[bytes], bytes]) -> None:
    place = write(tmp_path, rows_of(200), name)
    place.write_bytes(damage(place.read_bytes()))
    with pytest.raises(MarketDataError, match=rf"{name}, line \d+: "):
        read_file(place)


def test_an_archive_with_several_files_or_another_compression_is_rejected(tmp_path: Path) -> None:
    place = write(tmp_path, rows_of(3), "BTCUSDT-1m-2025-01.zip")
    with zipfile.ZipFile(place, "a") as archive:
        archive.writestr("more.csv", "")
    with pytest.raises(MarketDataError, match="line 1: 2 files in the archive instead of one"):
        read_file(place)
    with zipfile.ZipFile(place, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("BTCUSDT-1m-2025-01.csv", text_of(rows_of(3)))
    with pytest.raises(MarketDataError, match="line 1: the archive is encrypted, or not compressed with deflate"):
        read_file(place)


def test_files_of_a_market_are_joined_in_time_order(tmp_path: Path) -> None:
    later = write(tmp_path, rows_of(10, first=10), "BTCUSDT-1m-2025-01.csv")
    earlier = write(tmp_path, rows_of(10), "BTCUSDT-1m-2025-02.csv.gz")
    minutes = read_market([later, earlier])
    assert list(minutes.minute) == [row.minute for row in rows_of(20)]


def test_overlapping_files_of_a_market_are_rejected(tmp_path: Path) -> None:
    plain = write(tmp_path, rows_of(10), "BTCUSDT-1m-2025-01.csv")
    other = write(tmp_path, rows_of(10, first=9), "BTC-USDT.csv")
    with pytest.raises(MarketDataError, match=r"BTC-USDT\.csv: begins at 2025-01-06T00:09:00\+00:00, which BTCUSDT"):
        read_market([plain, other])


def test_files_are_found_by_market(tmp_path: Path) -> None:
    for name in ("BTCUSDT-1m-2025-01.csv", "BTCUSDT-1m-2025-02.csv.gz", "ethusdt.csv", "SOL-1m.zip"):
        (tmp_path / name).touch()
    for name in ("README.md", "BTCUSDT-1m-2025-01.zip.CHECKSUM", ".hidden", "ETHUSDT-1m-2025-01.zip.part"):
        (tmp_path / name).touch()
    (tmp_path / "BTCUSDT-1m-2025-01.zip").touch()  # unpacked next to it
    names = {symbol: [path.name for path in paths] for symbol, paths in find_files(tmp_path).items()}
    assert names == {
        "BTC": ["BTCUSDT-1m-2025-01.csv", "BTCUSDT-1m-2025-02.csv.gz"],
        "ETH": ["ethusdt.csv"],
        "SOL": ["SOL-1m.zip"],
    }
    assert list(find_files(tmp_path / "ethusdt.csv")) == ["ETH"]


def test_missing_files_folders_and_other_intervals_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(MarketDataError, match="no kline files"):
        find_files(tmp_path)
    with pytest.raises(MarketDataError, match=r"BTCUSDT.csv: No such file or directory"):
        find_files(tmp_path / "BTCUSDT.csv")
    (tmp_path / "BTCUSDT-5m-2025-01.csv").touch()
    with pytest.raises(MarketDataError, match="these are 5m candles; a replay needs 1m candles"):
        find_files(tmp_path)
