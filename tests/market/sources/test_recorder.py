"""Recordings on disk: crashes, full disks, broken files, and what a replay of them serves."""

import gzip
import logging
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from support.full_disk import files_no_larger_than

from trader.composition.external import make_source
from trader.core.clock import LockstepClock, epoch_second
from trader.core.errors import MarketDataError, MarketUnavailable, StartError
from trader.market.domain.markets import MARKETS, PLAIN_FUNDING_RATE, Candle, Tick
from trader.market.sources.recorded import RecordedSource
from trader.market.sources.recorder import Recorder, find_recording, read_hour, read_lines
from trader.market.sources.synthetic import SyntheticSource
from trader.settings.settings import Settings

BEGIN = datetime(2025, 6, 2, 22, 50, tzinfo=UTC)
SECOND = timedelta(seconds=1)
SOURCE = SyntheticSource(3, ("BTC", "ETH"))


def ticks_of(count: int, first: int = 0) -> list[Tick]:
    return [SOURCE.tick(epoch_second(BEGIN) + first + number) for number in range(count)]


def record(folder: Path, ticks: list[Tick], *, close: bool = True) -> Recorder:
    recorder = Recorder(folder, SOURCE)
    recorder.open()
    for tick in ticks:
        recorder.record(tick)
    if close:
        recorder.close()
    return recorder


async def replayed(folder: Path, **options: object) -> RecordedSource:
    source = RecordedSource(folder, ("BTC", "ETH"), **options)  # type: ignore[arg-type]
    await source.open()
    return source


def values(tick: Tick) -> object:
    return tick.at, {
        symbol: (quote.at, quote.mark, quote.bid, quote.ask, quote.book.bids[:10], quote.book.asks[:10])
        for symbol, quote in tick.quotes.items()
    }


async def heard(source: RecordedSource, begin: datetime, until: datetime) -> list[object]:
    return [values(tick) async for tick in source.history(begin, until)]


async def test_a_replay_has_the_recorded_updates_across_an_hour(tmp_path: Path) -> None:
    ticks = ticks_of(700)
    record(tmp_path, ticks)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["2025-06-02T22.jsonl.gz", "2025-06-02T23.jsonl.gz"]
    source = await replayed(tmp_path, speed=0)
    assert await heard(source, BEGIN - SECOND, BEGIN + 700 * SECOND) == [values(tick) for tick in ticks]
    clock = source.clock(None)
    assert isinstance(clock, LockstepClock)
    played = []
    async for tick in source.ticks(clock, clock.now()):
        played.append(values(tick))
        assert clock.now() == tick.at
        if len(played) == len(ticks):
            break
    assert played == [values(tick) for tick in ticks]
    assert source.ends_at == ticks[-1].at
    assert await heard(source, BEGIN + 599 * SECOND, BEGIN + 601 * SECOND) == [values(tick) for tick in ticks[600:602]]


def test_a_truncated_file_keeps_its_complete_lines(tmp_path: Path) -> None:
    """As left by a killed process or a power failure."""
    record(tmp_path, ticks_of(20))
    (path,) = tmp_path.iterdir()
    whole, content = list(read_lines(path)), path.read_bytes()
    assert len(whole) == 20
    counts = []
    for end in range(0, len(content), 97):
        path.write_bytes(content[:end])
        lines = list(read_lines(path))
        assert [line.at for line in lines] == [line.at for line in whole[: len(lines)]]
        counts.append(len(lines))
    assert counts == sorted(counts)
    assert (counts[0], counts[-1] >= 19) == (0, True)


async def test_every_line_is_written_before_the_next_and_each_start_has_its_own_file(
    tmp_path: Path,
) -> None:
    ticks = ticks_of(40)
    killed = record(tmp_path, ticks[:20], close=False)
    record(tmp_path, ticks[18:])  # two of them once more, as when a restart catches up
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "2025-06-02T22.0001.jsonl.gz", "2025-06-02T22.jsonl.gz",
    ]  # fmt: skip
    source = await replayed(tmp_path)
    assert await heard(source, BEGIN - SECOND, BEGIN + 40 * SECOND) == [values(tick) for tick in ticks]
    killed.close()


async def test_a_full_disk_ends_the_recording_with_one_error_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, ticks = Recorder(tmp_path, SOURCE), ticks_of(60)
    with files_no_larger_than(8_000):
        passed = [recorder.record(tick) for tick in ticks]
        recorder.record_candles("BTC", "1m", [Candle(BEGIN, 1.0, 2.0, 0.5, 1.5, 3.0)], BEGIN)
        assert passed[-1].quotes["BTC"].book == ticks[-1].quotes["BTC"].book
        assert passed[0].quotes["BTC"].book == ticks[0].quotes["BTC"].book
        recorder.close()
    assert passed[-1] is ticks[-1], "an unrecorded update is passed on unchanged"
    errors = [entry for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert [entry.levelno for entry in errors] == [logging.ERROR]
    assert "has ended: File too large; trading continues" in errors[0].getMessage()
    source = await replayed(tmp_path)
    told = await heard(source, BEGIN - SECOND, BEGIN + 60 * SECOND)
    assert 3 < len(told) < 60
    assert told == [values(tick) for tick in ticks[: len(told)]]


def test_an_unwritable_folder_stops_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match=r"RECORD: .*file/folder cannot be written to: Not a directory"):
        Recorder(tmp_path / "file" / "folder", SOURCE).open()


def test_a_broken_line_is_reported(tmp_path: Path) -> None:
    record(tmp_path, ticks_of(3))
    (path,) = tmp_path.iterdir()
    lines = gzip.decompress(path.read_bytes()).split(b"\n")
    path.write_bytes(gzip.compress(b"\n".join([lines[0], lines[1].replace(b'"quotes"', b'"prices"'), lines[2], b""])))
    with pytest.raises(MarketDataError, match=r"T22\.jsonl\.gz, line 2: .*`prices`"):
        read_hour([path])
    path.write_bytes(b"no gzip at all, and long enough for a header")
    with pytest.raises(MarketDataError, match="cannot be unpacked"):
        read_hour([path])


async def test_deeper_levels_are_recorded_when_the_book_is_read(tmp_path: Path) -> None:
    ticks = ticks_of(2)
    recorder = Recorder(tmp_path, SOURCE)
    first, second = (recorder.record(tick) for tick in ticks)
    assert first.quotes["ETH"].book == first.quotes["ETH"].book == ticks[0].quotes["ETH"].book  # after the second read
    recorder.close()
    source = await replayed(tmp_path)
    again = [tick async for tick in source.history(BEGIN - SECOND, BEGIN + SECOND)]
    assert again[0].quotes["ETH"].book == ticks[0].quotes["ETH"].book
    assert len(ticks[0].quotes["ETH"].book.bids) > 10
    assert [len(tick.quotes["BTC"].book.bids) for tick in again] == [10, 10]
    assert again[1].quotes["ETH"].book.asks == second.quotes["ETH"].book.asks[:10]


async def test_candles_are_the_recorded_ones_or_come_from_the_marks(tmp_path: Path) -> None:
    recorder = record(tmp_path, ticks_of(240), close=False)
    read = [Candle(BEGIN + n * timedelta(minutes=1), 1.0, 2.0, 0.5, 1.5, 3.0) for n in (-1, 2)]
    recorder.record_candles("BTC", "1m", read, BEGIN + 240 * SECOND)
    recorder.close()
    source = await replayed(tmp_path)
    candles = await source.candles("BTC", "1m", BEGIN - timedelta(minutes=9), BEGIN + timedelta(minutes=9))
    assert [candle.open_time for candle in candles] == [BEGIN + n * timedelta(minutes=1) for n in (-1, 1, 2)]
    assert (candles[0], candles[2]) == (read[0], read[1])
    marks = [float(tick.quotes["BTC"].mark) for tick in ticks_of(60, first=60)]
    assert candles[1][1:] == (marks[0], max(marks), min(marks), marks[-1], 0.0)
    with pytest.raises(MarketUnavailable, match="SOL is not traded here"):
        await source.candles("SOL", "1m", BEGIN, BEGIN)


async def test_rates_apply_to_their_hour(tmp_path: Path) -> None:
    class Rated(SyntheticSource):
        def funding_rate(self, symbol: str, boundary: datetime) -> Decimal:
            return Decimal(boundary.hour) / 1000

    recorder = Recorder(tmp_path, Rated(3, ("BTC", "ETH")))
    for tick in ticks_of(700):
        recorder.record(tick)
    recorder.close()
    source = await replayed(tmp_path)
    hour = BEGIN.replace(minute=0)
    rates = [source.funding_rate("ETH", hour + n * timedelta(hours=1)) for n in (0, 1, 2)]
    assert rates == [Decimal("0.022"), Decimal("0.023"), PLAIN_FUNDING_RATE]
    assert source.markets["BTC"] == MARKETS["BTC"]


async def test_a_folder_with_a_recording_is_played_as_one_recording(tmp_path: Path) -> None:
    record(tmp_path, ticks_of(100))
    environ = {
        "MARKET_SOURCE": f"replay:{tmp_path}", "MARKETS": "ETH", "REPLAY_SPEED": "60",
        "REPLAY_START": "2025-06-02T22:50:30Z", "REPLAY_END": "2025-06-02T22:51:00Z",
    }  # fmt: skip
    source = make_source(Settings.load(environ, None, demo=True))
    assert isinstance(source, RecordedSource)
    await source.open()
    assert source.identity == "replay:2025-06-02T22:50:00.000Z:recorded"
    assert source.clock(None).now() == BEGIN + 30 * SECOND
    assert source.ends_at == BEGIN + 60 * SECOND
    assert set(source.markets) == {"ETH"}
    assert len([tick async for tick in source.history(BEGIN, BEGIN + timedelta(days=1))]) == 60
    for symbols, options, words in (
        (("BTC", "SOL"), {}, "has prices of BTC but not of SOL"),
        (("BTC",), {"start": BEGIN + timedelta(hours=1)}, "leave nothing to play"),
    ):
        with pytest.raises(StartError, match=words):
            await RecordedSource(tmp_path, symbols, **options).open()  # type: ignore[arg-type]


async def test_a_recording_without_updates_is_refused(tmp_path: Path) -> None:
    record(tmp_path, ticks_of(1))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(StartError, match="the recording has no updates of BTC"):
        await RecordedSource(tmp_path, ("BTC",)).open()


def test_other_files_in_a_recordings_folder_are_ignored(tmp_path: Path) -> None:
    for name in ("2025-06-02Tab.jsonl.gz", "notes.txt", "2025-13-02T01.jsonl.gz"):
        (tmp_path / name).touch()
    assert find_recording(tmp_path) == {}
    assert find_recording(tmp_path / "absent") == {}
