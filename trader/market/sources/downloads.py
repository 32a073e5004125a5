"""Downloads of Binance's published monthly files: resumable, and verified before a file gets its final name."""

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, Literal

import aiohttp

from trader.core.errors import MarketDataError
from trader.core.files import SMALL_BYTES_MAX, append, file_digest, open_appending, read_regular
from trader.market.sources.published import month_name

BASE_URL: Final = "https://data.binance.vision"

_PLACES: Final = {
    "1m": "data/futures/um/monthly/klines/{symbol}USDT/1m",
    "fundingRate": "data/futures/um/monthly/fundingRate/{symbol}USDT",
}
"""The folder of each kind of file under the base address."""
_CHECKSUM_BYTES_MAX: Final = 4096
_FILE_BYTES_MAX: Final = 1 << 30
_ATTEMPTS: Final = 4
"""A download gives up after this many failed attempts without progress."""
_SILENCE_S: Final = 30.0
_RETRIED_STATUSES: Final = frozenset({408, 429})

DownloadOutcome = Literal["downloaded", "kept", "unpublished"]
ShowProgress = Callable[[str, int, int], None]
"""Receives a file's name, the bytes received so far, and its size in bytes."""


def published_files(symbols: Sequence[str], months: Sequence[str]) -> list[PurePosixPath]:
    """Return the paths under the base address of each market's and month's (`2025-01`) candles and funding rates."""
    return [
        PurePosixPath(place.format(symbol=symbol), f"{month_name(symbol, kind, month)}.zip")
        for symbol in symbols
        for month in months
        for kind, place in _PLACES.items()
    ]


class Downloader:
    """Downloads files into a folder. An incomplete file is named `.part`, and the next call resumes it."""

    def __init__(self, folder: Path, base_url: str, show: ShowProgress, *, pause_s: float = 1.0) -> None:
        """Create a downloader. `pause_s` is the wait after a failed attempt, longer after each further failure."""
        self._folder = folder
        self._base_url = base_url.rstrip("/")
        self._show = show
        self._pause_s = pause_s

    async def fetch(self, http: aiohttp.ClientSession, file: PurePosixPath) -> DownloadOutcome:
        """Download a file unless it exists, and verify its SHA-256 against the `.CHECKSUM` published with it.

        :raises MarketDataError: no connection, a refusal, or a wrong checksum; the message says what to do
        :raises OSError: the folder is not writable
        """
        url = f"{self._base_url}/{file}"
        path, checksum = self._folder / file.name, self._folder / f"{file.name}.CHECKSUM"
        if not (path.exists() and checksum.exists()):
            unverified = checksum.with_name(f"{checksum.name}.part")
            unverified.unlink(missing_ok=True)
            if not await self._download(http, f"{url}.CHECKSUM", unverified, _CHECKSUM_BYTES_MAX):
                return "unpublished"
            unverified.rename(checksum)
        expected = _read_checksum(checksum, file.name)
        if path.exists():
            if (actual := file_digest(path)) != expected:
                raise MarketDataError(
                    f"{path}: its SHA-256 is {actual}, but its .CHECKSUM says {expected}. Remove the file and run the "
                    "command again."
                )
            return "kept"
        part = path.with_name(f"{path.name}.part")
        if not await self._download(http, url, part, _FILE_BYTES_MAX):
            return "unpublished"
        if (actual := file_digest(part)) != expected:
            part.unlink()
            raise MarketDataError(
                f"{url}: the SHA-256 of the download is {actual}, but its .CHECKSUM says {expected}. The download was "
                "removed; run the same command to start over."
            )
        part.rename(path)
        return "downloaded"

    async def _download(self, http: aiohttp.ClientSession, url: str, part: Path, bytes_max: int) -> bool:
        """Receive the missing part of a file over as many connections as it takes. Return whether it is published."""
        most = _size(part)
        failures = 0
        while True:
            try:
                return await self._receive(http, url, part, bytes_max)
            except (aiohttp.ClientError, TimeoutError) as error:
                failures = 1 if _size(part) > most else failures + 1
                most = max(most, _size(part))
                if failures == _ATTEMPTS:
                    reason = str(error) or type(error).__name__
                    raise MarketDataError(
                        f"{url} cannot be downloaded: {reason}. Run the same command to resume the download."
                    ) from None
            await asyncio.sleep(self._pause_s * failures)

    async def _receive(self, http: aiohttp.ClientSession, url: str, part: Path, bytes_max: int) -> bool:
        """Receive the rest of a file over one connection. Return False if it is not published."""
        size = _size(part)
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={size}-"} if size else {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_SILENCE_S, sock_read=_SILENCE_S)
        async with http.get(url, headers=headers, timeout=timeout) as response:
            status = response.status
            if status == 416:  # nothing is missing; the checksum decides whether the bytes are right
                return True
            if status == 404:
                return False
            if status >= 500 or status in _RETRIED_STATUSES:
                response.raise_for_status()
            if status not in (200, 206):
                raise MarketDataError(f"{url}: the server answered with HTTP {status} {response.reason}.")
            if status == 200:
                size = 0  # the whole file, despite the range request
            whole = size + (response.content_length or 0)
            with open_appending(part) as file:
                if not size:
                    file.truncate(0)
                async for chunk in response.content.iter_any():
                    size += len(chunk)
                    if size > bytes_max:
                        raise MarketDataError(f"{url} has over {bytes_max:,} bytes.")
                    append(file, chunk)
                    self._show(part.name.removesuffix(".part"), size, whole)
        return True


def _read_checksum(path: Path, name: str) -> str:
    """Return the SHA-256 that a checksum file lists for a name."""
    text = read_regular(path, SMALL_BYTES_MAX).decode("ascii", errors="replace").strip()
    line = re.fullmatch(r"([0-9a-f]{64}) [ *](\S+)", text)
    if line is None or line[2] != name:
        raise MarketDataError(f"{path}: expected a SHA-256 and the name {name}, got {text[:100]!r}. Remove the file.")
    return line[1]


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
