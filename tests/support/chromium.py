"""A real browser without a screen."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # root has none; it sees nothing but the tests' own pages
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def chromium_program() -> str:
    """The path of the browser. Skips without one."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip("Chromium is not installed, so no browser was tried (Debian: apt-get install chromium)")
    return found


@asynccontextmanager
async def browsing(folder: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A browser with an empty profile in `folder`, ended with all its processes."""
    process = await asyncio.create_subprocess_exec(
        chromium_program(),
        *_FLAGS,
        f"--user-data-dir={folder}",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()
