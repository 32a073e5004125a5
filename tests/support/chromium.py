"""A headless browser, driven over its debugging protocol."""

import asyncio
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.waiting import until

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_FLAGS = (
    "--headless",
    "--no-sandbox",  # root has no sandbox; the browser sees only the tests' own pages
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

_LISTENING = re.compile(rb"DevTools listening on ws://([\d.:]+)/")
_START_S = 30
_ANSWER_S = 20


def is_installed() -> bool:
    return any(map(shutil.which, _NAMES))


def chromium_program() -> str:
    """The path of the browser. Skips without one."""
    program = next(filter(None, map(shutil.which, _NAMES)), None)
    if program is None:
        pytest.skip("Chromium is not installed, so no browser was tried (Debian: apt-get install chromium)")
    return program


@asynccontextmanager
async def browsing(folder: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a browser with an empty profile in `folder`, and end it with all its processes."""
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


class Tab:
    """One page in a browser, driven over its debugging protocol. `problems` holds the messages of its console.

    It leaves out those about the health of the service: on a busy machine it may say for a moment that it is slow.
    """

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, http: aiohttp.ClientSession, browser: str, target: str
    ) -> None:
        self._socket = socket
        self._http = http
        self._browser = browser
        self._target = target
        self._number = 0
        self.problems: list[Any] = []

    @classmethod
    async def attach(cls, http: aiohttp.ClientSession, browser: str, target: dict[str, Any], address: str) -> "Tab":
        """Attach to a page of the browser, and load an address in it."""
        socket = await http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
        tab = cls(socket, http, browser, target["id"])
        for domain in ("Page", "Runtime", "Log"):
            await tab.command(f"{domain}.enable")
        await tab.command("Page.navigate", url=address)
        loaded = "document.readyState === 'complete' && location.href !== 'about:blank'"
        await tab.until(loaded)
        return tab

    async def open_another(self, address: str) -> "Tab":
        """Open another page in the same browser."""
        async with self._http.put(f"{self._browser}/json/new?about:blank") as response:
            return await self.attach(self._http, self._browser, await response.json(), address)

    async def close(self) -> None:
        async with self._http.get(f"{self._browser}/json/close/{self._target}"):
            await self._socket.close()

    async def until(self, expression: str, *, within_s: float = _START_S) -> None:
        """Wait until a JavaScript expression is true in the page."""
        await until(lambda: self.evaluate(expression), within_s=within_s)

    async def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=_ANSWER_S)
            if message.get("method") in {"Log.entryAdded", "Runtime.exceptionThrown"}:
                self._note(message["params"])
            elif message.get("id") == self._number:
                assert "result" in message, message
                result: dict[str, Any] = message["result"]
                return result

    def _note(self, problem: dict[str, Any]) -> None:
        if not problem.get("entry", {}).get("url", "").endswith("/health"):
            self.problems.append(problem)

    async def event(self, method: str) -> dict[str, Any]:
        """Wait for an event of the protocol; earlier ones are discarded."""
        while (message := await self._socket.receive_json(timeout=_ANSWER_S)).get("method") != method:
            pass
        params: dict[str, Any] = message["params"]
        return params

    async def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page; promises are awaited."""
        answer = await self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")


@asynccontextmanager
async def open_tab(folder: Path, address: str, *arguments: str) -> AsyncIterator[Tab]:
    """Run a browser with one loaded page."""
    flags = ("--remote-debugging-port=0", *arguments, "about:blank")
    async with browsing(folder, *flags) as browser, aiohttp.ClientSession() as http:
        assert browser.stderr is not None
        async with asyncio.timeout(_START_S):
            while (match := _LISTENING.search(await browser.stderr.readline())) is None:
                pass
        address_of_browser = f"http://{match[1].decode()}"
        async with http.get(f"{address_of_browser}/json") as response:
            (page,) = [target for target in await response.json() if target["type"] == "page"]
        tab = await Tab.attach(http, address_of_browser, page, address)
        try:
            yield tab
        finally:
            await tab.close()
