"""The commands `candles make` and `candles download`: their files and their errors."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.archive import Archive, klines, packed, serving

from trader.__main__ import main
from trader.market.domain.markets import Candle
from trader.market.sources.downloads import published_files
from trader.market.sources.files import Minutes, find_files, read_market
from trader.market.sources.replay import ReplaySource
from trader.market.sources.synthetic import SyntheticSource


def candles_of(minutes: Minutes) -> list[Candle]:
    rows = (minutes[place] for place in range(len(minutes)))
    return [Candle(datetime.fromtimestamp(row.minute * 60, UTC), *row[1:]) for row in rows]


def make(folder: Path, *options: str) -> int:
    return main(["candles", "make", str(folder), *options])


def test_generated_candles_equal_the_synthetic_markets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--days", "3", "--from", "2025-01-30", "--market", "sol", "--market", "BTC", "--seed", "7")
    assert make(tmp_path / "candles", *options, "--json") == 0
    names = [f"{market}USDT-1m-2025-{month}.csv.gz" for market in ("BTC", "SOL") for month in ("01", "02")]
    assert json.loads(capsys.readouterr().out)["files"] == names
    assert [path.name for path in tmp_path.iterdir()] == ["candles"]
    start, end = datetime(2025, 1, 30, tzinfo=UTC), datetime(2025, 2, 2, tzinfo=UTC)
    source = SyntheticSource(7, ["BTC", "SOL"])
    files = find_files(tmp_path / "candles")
    assert list(files) == ["BTC", "SOL"]
    for symbol, paths in files.items():
        expected = asyncio.run(source.candles(symbol, "1m", start, end))
        assert len(expected) == 3 * 1_440
        assert candles_of(read_market(paths)) == expected


def test_the_same_seed_gives_the_same_bytes_and_another_seed_different_ones(tmp_path: Path) -> None:
    for folder, seed in (("one", "1"), ("same", "1"), ("other", "2")):
        assert make(tmp_path / folder, "--days", "1", "--market", "ETH", "--seed", seed) == 0
    one, same, other = (
        (tmp_path / folder / "ETHUSDT-1m-2025-01.csv.gz").read_bytes() for folder in ("one", "same", "other")
    )
    assert one == same
    assert one[4:8] == bytes(4), "gzip's time of writing is left out"
    assert one != other


def test_a_backtest_trades_generated_candles(tmp_path: Path) -> None:
    assert make(tmp_path / "candles", "--days", "2", "--market", "BTC") == 0
    options = ("--no-database", "--variant", "Apex", "--from", "2025-01-02T12:00:00Z", "--out", str(tmp_path / "run"))
    assert main(["backtest", "--data", str(tmp_path / "candles"), *options]) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["complete"] is True


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--days", "0"), "expected a whole number from 1 to 10000, got '0'"),
        (("--from", "2025-02-30"), "expected a day from 2000 to 2099, such as 2025-01-01, got '2025-02-30'"),
        (("--market", "XYZ"), "--market: the figures of XYZ are unknown; known are BTC, ETH, SOL"),
        (("--seed", "x"), "invalid int value: 'x'"),
    ],
)
def test_wrong_options_create_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    assert make(tmp_path / "candles", *options) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_stays_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "BTCUSDT-1m-2025-01.csv").touch()
    assert make(tmp_path) == 1
    assert f"{tmp_path} exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["BTCUSDT-1m-2025-01.csv"]


def test_an_unwritable_path_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert make(tmp_path / "file" / "candles") == 1
    assert f"{tmp_path / 'file' / 'candles'} cannot be written: " in capsys.readouterr().err


async def test_downloaded_months_are_tradable_and_missing_ones_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = Archive()
    candles, funding, later, _ = published_files(["BTC"], ["2025-01", "2025-02"])
    archive.add(str(candles), packed(candles.name, klines(2_880)))
    archive.add(str(later), packed(later.name, klines(60, 1_738_368_000_000)))
    folder = tmp_path / "candles"
    async with serving(archive) as url:
        options = ("--from", "2025-01", "--to", "2025-02", "--market", "btcusdt", "--base-url", url)
        command = ["candles", "download", str(folder), *options]
        assert await asyncio.to_thread(main, command) == 1
        shown = capsys.readouterr()
        assert f"{folder}: 2 downloaded, 2 unpublished" in shown.out
        assert f"not published at {url}: {funding.name}, BTCUSDT-fundingRate-2025-02.zip" in shown.out
        assert f"{later.name}: downloaded" in shown.err
        assert await asyncio.to_thread(main, [*command, "--to", "2025-01", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "folder": str(folder),
        "downloaded": [],
        "kept": [candles.name],
        "unpublished": [funding.name],
    }
    source = ReplaySource(folder, ("BTC",))
    await source.open()
    assert source.ends_at == datetime(2025, 2, 1, 0, 59, 59, tzinfo=UTC)
    await source.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--from", "2025-1"), "expected a month from 2000-01 to 2099-12, such as 2025-01, got '2025-1'"),
        (("--from", "2025-02", "--to", "2025-01"), "--to is 2025-01, which is before --from, 2025-02"),
        (("--from", "2025-01", "--market", "../x"), "expected a market of 1 to 20 letters and digits"),
        (("--from", "2025-01", "--base-url", "ftp://x"), "begins with https:// or http://, got 'ftp://x'"),
        ((), "the following arguments are required: --from"),
    ],
)
def test_wrong_options_download_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    assert main(["candles", "download", str(tmp_path / "candles"), *options]) == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
