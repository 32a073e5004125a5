"""Downloads of published files: what survives dropped connections, wrong checksums and a killed process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path

import aiohttp
import pytest
from support.archive import Archive, klines, packed, serving

from trader.core.errors import MarketDataError
from trader.market.sources.downloads import Downloader, DownloadOutcome, published_files
from trader.market.sources.files import find_files, find_funding_files, read_funding, read_market

CANDLES, FUNDING = published_files(["BTC"], ["2025-01"])
CONTENT = packed(CANDLES.name, klines(200))


@pytest.fixture
def archive() -> Archive:
    archive = Archive()
    archive.add(str(CANDLES), CONTENT)
    return archive


class Desk:
    """A downloader without pauses, with its session and the progress that it reported."""

    def __init__(self, http: aiohttp.ClientSession, folder: Path, url: str) -> None:
        self._http = http
        self.shown: list[tuple[str, int, int]] = []
        self.has_shown = asyncio.Event()
        self._downloader = Downloader(folder, url, self._show, pause_s=0)

    def _show(self, *progress: object) -> None:
        name, received, whole = progress
        assert isinstance(name, str)
        assert isinstance(received, int)
        assert isinstance(whole, int)
        self.shown.append((name, received, whole))
        if name == CANDLES.name:
            self.has_shown.set()

    async def fetch(self) -> DownloadOutcome:
        return await self._downloader.fetch(self._http, CANDLES)


@asynccontextmanager
async def desk(archive: Archive, folder: Path) -> AsyncIterator[Desk]:
    async with serving(archive) as url, aiohttp.ClientSession() as http:
        yield Desk(http, folder, url)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


WHOLE = [CANDLES.name, f"{CANDLES.name}.CHECKSUM"]


async def test_a_file_is_verified_read_and_not_downloaded_again(archive: Archive, tmp_path: Path) -> None:
    async with desk(archive, tmp_path) as each:
        assert await each.fetch() == "downloaded"
        assert names(tmp_path) == WHOLE
        assert (tmp_path / CANDLES.name).read_bytes() == CONTENT
        assert each.shown[-1] == (CANDLES.name, len(CONTENT), len(CONTENT))
        archive.requests.clear()
        assert await each.fetch() == "kept"
        assert archive.requests == []
    assert len(read_market(find_files(tmp_path)["BTC"])) == 200


def test_paths_match_the_public_archive() -> None:
    assert str(CANDLES) == "data/futures/um/monthly/klines/BTCUSDT/1m/BTCUSDT-1m-2025-01.zip"
    assert str(FUNDING) == "data/futures/um/monthly/fundingRate/BTCUSDT/BTCUSDT-fundingRate-2025-01.zip"


async def test_funding_rates_are_read_as_published(tmp_path: Path) -> None:
    archive = Archive()
    rows = ["calc_time,funding_interval_hours,last_funding_rate", "1735689600003,8,0.00010000"]
    archive.add(str(FUNDING), packed(FUNDING.name, rows))
    async with serving(archive) as url, aiohttp.ClientSession() as http:
        downloader = Downloader(tmp_path, url, lambda *_: None, pause_s=0)
        assert await downloader.fetch(http, FUNDING) == "downloaded"
    assert list(read_funding(find_funding_files(tmp_path)["BTC"]).values()) == [(Decimal("0.0001"), 8)]


async def test_dropped_connections_are_resumed(archive: Archive, tmp_path: Path) -> None:
    archive.bytes_a_connection = len(CONTENT) // 6  # more connections than attempts in a row without progress
    async with desk(archive, tmp_path) as each:
        assert await each.fetch() == "downloaded"
    assert (tmp_path / CANDLES.name).read_bytes() == CONTENT
    ranges = [asked for name, asked in archive.requests if name == CANDLES.name]
    assert ranges == [None, *(f"bytes={part * (len(CONTENT) // 6)}-" for part in range(1, len(ranges)))]
    assert len(ranges) >= 6


async def test_a_server_without_ranges_is_asked_for_the_whole_file_again(archive: Archive, tmp_path: Path) -> None:
    (tmp_path / f"{CANDLES.name}.part").write_bytes(CONTENT[:500])
    archive.takes_ranges = False
    async with desk(archive, tmp_path) as each:
        assert await each.fetch() == "downloaded"
    assert (tmp_path / CANDLES.name).read_bytes() == CONTENT


async def test_a_server_that_always_drops_is_abandoned_and_resumed_later(archive: Archive, tmp_path: Path) -> None:
    async with desk(archive, tmp_path) as each:
        archive.bytes_a_connection, archive.takes_ranges = 1_000, False
        with pytest.raises(MarketDataError, match=r"cannot be downloaded: .* Run the same command to resume"):
            await each.fetch()
        assert len([name for name, _ in archive.requests if name == CANDLES.name]) == 4
        assert names(tmp_path) == [f"{CANDLES.name}.CHECKSUM", f"{CANDLES.name}.part"]
        archive.bytes_a_connection, archive.takes_ranges = None, True
        assert await each.fetch() == "downloaded"
        assert archive.requests[-1] == (CANDLES.name, "bytes=1000-")
    assert (tmp_path / CANDLES.name).read_bytes() == CONTENT
    assert names(tmp_path) == WHOLE


async def test_an_interrupted_download_keeps_its_bytes(archive: Archive, tmp_path: Path) -> None:
    async with desk(archive, tmp_path) as each:
        task = asyncio.create_task(each.fetch())
        archive.hangs_after = 1_000  # more than a checksum file has
        await each.has_shown.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        archive.hangs_after = None
        assert (tmp_path / f"{CANDLES.name}.part").stat().st_size == 1_000
        assert await each.fetch() == "downloaded"
        assert archive.requests[-1] == (CANDLES.name, "bytes=1000-")


async def test_a_complete_part_is_only_verified(archive: Archive, tmp_path: Path) -> None:
    (tmp_path / f"{CANDLES.name}.part").write_bytes(CONTENT)
    async with desk(archive, tmp_path) as each:
        assert await each.fetch() == "downloaded"
        assert each.shown == [(f"{CANDLES.name}.CHECKSUM", 89, 89)]
    assert names(tmp_path) == WHOLE


@pytest.mark.parametrize("part", [b"", b"of another download"])
async def test_a_wrong_checksum_removes_the_download(archive: Archive, tmp_path: Path, part: bytes) -> None:
    (tmp_path / f"{CANDLES.name}.part").write_bytes(part)
    if not part:
        archive.files[str(CANDLES)] = b"x" + CONTENT[1:]
    async with desk(archive, tmp_path) as each:
        with pytest.raises(MarketDataError, match=r"the SHA-256 of the download is \w{64}, but its .CHECKSUM says"):
            await each.fetch()
        assert names(tmp_path) == [f"{CANDLES.name}.CHECKSUM"]
        archive.files[str(CANDLES)] = CONTENT
        assert await each.fetch() == "downloaded"


@pytest.mark.parametrize(
    ("text", "shown"), [("<html>", "<html>"), ("0" * 64 + "  ETHUSDT-1m-2025-01.zip", "0000  ETHUSDT-1m"), ("", "''")]
)
async def test_a_checksum_of_another_file_is_refused(archive: Archive, tmp_path: Path, text: str, shown: str) -> None:
    archive.files[f"{CANDLES!s}.CHECKSUM"] = text.encode()
    async with desk(archive, tmp_path) as each:
        with pytest.raises(MarketDataError, match=f"expected a SHA-256 and the name {CANDLES.name}, got .*{shown}"):
            await each.fetch()
        assert CANDLES.name not in names(tmp_path)
        archive.add(str(CANDLES), CONTENT)
        assert await each.fetch() == "downloaded"


async def test_an_endless_checksum_file_is_refused(archive: Archive, tmp_path: Path) -> None:
    archive.files[f"{CANDLES!s}.CHECKSUM"] = b"0" * 5_000
    async with desk(archive, tmp_path) as each:
        with pytest.raises(MarketDataError, match=r"CHECKSUM has over 4,096 bytes"):
            await each.fetch()


@pytest.mark.parametrize("path", [str(CANDLES), f"{CANDLES!s}.CHECKSUM"])
async def test_an_unpublished_month_is_reported_and_leaves_no_candles(
    archive: Archive, tmp_path: Path, path: str
) -> None:
    del archive.files[path]
    async with desk(archive, tmp_path) as each:
        assert await each.fetch() == "unpublished"
    assert CANDLES.name not in names(tmp_path)


async def test_a_file_that_differs_from_the_published_one_is_left_unchanged(archive: Archive, tmp_path: Path) -> None:
    (tmp_path / CANDLES.name).write_bytes(b"mine")
    async with desk(archive, tmp_path) as each:
        with pytest.raises(MarketDataError, match=r"its .CHECKSUM says \w{64}\. Remove the file"):
            await each.fetch()
    assert (tmp_path / CANDLES.name).read_bytes() == b"mine"


async def test_an_overloaded_server_is_retried(archive: Archive, tmp_path: Path) -> None:
    archive.statuses = [503, 429, 500]
    async with desk(archive, tmp_path) as each:
        assert await each.fetch() == "downloaded"


async def test_a_refusal_is_reported_at_once(archive: Archive, tmp_path: Path) -> None:
    archive.statuses = [451]
    async with desk(archive, tmp_path) as each:
        with pytest.raises(MarketDataError, match=r"the server answered with HTTP 451"):
            await each.fetch()
    assert len(archive.requests) == 1


async def test_a_missing_network_is_reported(tmp_path: Path, unused_tcp_port: int) -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(MarketDataError, match=r"cannot be downloaded: Cannot connect to host 127\.0\.0\.1"):
            await Desk(http, tmp_path, f"http://127.0.0.1:{unused_tcp_port}").fetch()
