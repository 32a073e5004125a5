"""Batches: requests that a provider answers together within a day, at half the price.

Requests that come within `COLLECT_S` of each other form a batch. Its id is in the journal before its answers are
awaited: after a restart, its requests get their answers from it, and are not paid for again.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec

from trader.agents.providers.attempts import Transient, read_bounded
from trader.agents.providers.refusals import brief
from trader.core import tasks
from trader.core.errors import ProviderError, SettingsError
from trader.core.files import BYTES_MAX, decode_json, read_regular, replace_file

COLLECT_S: Final = 3.0
POLL_S: Final = 20.0
WITHIN_S: Final = 26 * 3600.0
"""How long a batch is awaited: providers promise a day."""

BATCH_MAX: Final = 10_000
"""How many requests wait for each other at most."""

log = logging.getLogger("trader.agents")


class Answered(NamedTuple):
    """A provider's answer to one request."""

    status: int
    headers: Mapping[str, str]
    content_type: str
    content: bytes


class Sent(msgspec.Struct, frozen=True):
    """An entry of the journal: a batch that the provider has taken, and the names of its requests."""

    batch: str
    requests: list[str]


class _Batch(msgspec.Struct):
    """A batch as OpenAI (`status` and files) and Anthropic (`processing_status`) show it."""

    id: str
    status: str = ""
    processing_status: str = ""
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: Any = None


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _OpenAiLine(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


class _Result(msgspec.Struct):
    type: str
    message: msgspec.Raw = msgspec.Raw(b"null")
    error: msgspec.Raw = msgspec.Raw(b"null")


class _AnthropicLine(msgspec.Struct):
    custom_id: str
    result: _Result


SendRequest = Callable[..., Awaitable[bytes]]
"""Sends a request to a path of the provider, and returns the body of its answer."""

BatchResults = Iterable[tuple[str, int, bytes]]
"""The name, status and body of each answer of a batch."""


class OpenAiBatches:
    """OpenAI's interface: a file of requests, and files of answers and errors."""

    async def send(self, call: SendRequest, path: str, requests: Mapping[str, bytes]) -> str:
        lines = (
            {"custom_id": name, "method": "POST", "url": f"/v1{path}", "body": msgspec.Raw(body)}
            for name, body in requests.items()
        )
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"".join(msgspec.json.encode(line) + b"\n" for line in lines), filename="requests.jsonl")
        file = msgspec.json.decode(await call("POST", "/files", data=form), type=_Batch)
        asked = {"input_file_id": file.id, "endpoint": f"/v1{path}", "completion_window": "24h"}
        return msgspec.json.decode(await call("POST", "/batches", json=asked), type=_Batch).id

    async def results(self, call: SendRequest, batch_id: str) -> BatchResults | None:
        batch = msgspec.json.decode(await call("GET", f"/batches/{batch_id}"), type=_Batch)
        if batch.status not in ("completed", "failed", "expired", "cancelled"):
            return None
        files = [name for name in (batch.output_file_id, batch.error_file_id) if name is not None]
        if not files:
            raise ProviderError(f"the batch {batch_id} has {batch.status}: {brief(str(batch.errors))}")
        return _openai_results([await call("GET", f"/files/{name}/content") for name in files])


def _openai_results(contents: Sequence[bytes]) -> BatchResults:
    for line in b"\n".join(contents).split(b"\n"):
        if line.strip():
            each = msgspec.json.decode(line, type=_OpenAiLine)
            answered = each.response or _Response(500, each.error)
            yield each.custom_id, answered.status_code, bytes(answered.body)


class AnthropicBatches:
    """Anthropic's Message Batches."""

    async def send(self, call: SendRequest, path: str, requests: Mapping[str, bytes]) -> str:
        asked = [{"custom_id": name, "params": msgspec.Raw(body)} for name, body in requests.items()]
        body = msgspec.json.encode({"requests": asked})
        headers = {"Content-Type": "application/json"}
        return msgspec.json.decode(await call("POST", f"{path}/batches", data=body, headers=headers), type=_Batch).id

    async def results(self, call: SendRequest, batch_id: str) -> BatchResults | None:
        batch = msgspec.json.decode(await call("GET", f"/messages/batches/{batch_id}"), type=_Batch)
        if batch.processing_status != "ended":
            return None
        return _anthropic_results(await call("GET", f"/messages/batches/{batch_id}/results"))


def _anthropic_results(content: bytes) -> Iterator[tuple[str, int, bytes]]:
    for line in content.splitlines():
        each = msgspec.json.decode(line, type=_AnthropicLine)
        is_answer = each.result.type == "succeeded"
        yield each.custom_id, 200 if is_answer else 500, bytes(each.result.message if is_answer else each.result.error)


INTERFACES: Final[Mapping[str, OpenAiBatches | AnthropicBatches]] = {
    "chat": OpenAiBatches(),
    "responses": OpenAiBatches(),
    "messages": AnthropicBatches(),
}
"""The batch interface of each protocol that has one."""


class Batches:
    """The requests of one provider's client, in batches. `journal` is a file in the folder of the cassette."""

    def __init__(self, journal: Path, protocol: str, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._journal = journal
        self._sleep = sleep
        self._interface = INTERFACES[protocol]
        self._sent = _read(journal)
        self._collected: dict[str, bytes] = {}
        self._waiting: dict[str, asyncio.Future[Answered]] = {}
        self._kept: dict[str, Answered] = {}
        """Answers of batches from before a restart, until their requests come again."""

        self._over: set[str] = set()
        """The requests whose batch has ended: a further attempt belongs to a new one."""

        self._awaited: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def answer(self, call: SendRequest, path: str, asked_by: str, body: bytes) -> Answered:
        """Return the answer to a request, which is another one than the same request of another model.

        :raises ProviderError: the batch failed, or has no answer to this request
        """
        name = hashlib.sha256(b"\n".join((asked_by.encode(), path.encode(), body))).hexdigest()
        if (kept := self._kept.pop(name, None)) is not None:
            self._over.add(name)
            return kept
        future: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        sent = next((each for each in reversed(self._sent) if name in each.requests and name not in self._over), None)
        if sent is None:
            self._collected[name] = body
            if len(self._collected) == 1:
                self._start(self._send(call, path))
        elif sent.batch not in self._awaited:
            self._start(self._settle(call, sent))
        return await future

    async def close(self) -> None:
        """Stop waiting; the provider goes on, and its answers are taken when the same requests come again."""
        await tasks.end(*self._tasks)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = tasks.start(work, "a batch of requests")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, call: SendRequest, path: str) -> None:
        """Send the collected requests once no further one comes, and take the answers."""
        count = 0
        while count < len(self._collected):
            count = len(self._collected)
            await self._sleep(COLLECT_S)
        requests, self._collected = self._collected, {}
        try:
            sent = Sent(await self._interface.send(call, path, requests), list(requests))
        except (ProviderError, msgspec.MsgspecError) as error:
            kind = Transient if isinstance(error, Transient | msgspec.MsgspecError) else ProviderError
            self._fail(requests, kind, f"no batch was begun: {brief(str(error))}")
            return
        self._over -= requests.keys()
        self._write([*self._sent, sent])
        log.info("the batch %s has %d requests", sent.batch, len(requests))
        await self._settle(call, sent)

    async def _settle(self, call: SendRequest, sent: Sent) -> None:
        """Wait for the answers of a batch, and give each to its request."""
        self._awaited.add(sent.batch)
        kind: type[ProviderError] = Transient
        failure = f"the batch {sent.batch} has no answer to this request"
        try:
            async with asyncio.timeout(WITHIN_S):
                while (results := await self._results(call, sent.batch)) is None:
                    await self._sleep(POLL_S)
            for name, status, content in results:
                answered = Answered(status, {}, "application/json", content)
                future = self._waiting.pop(name, None)
                if future is None or future.done():  # canceled: its request comes again
                    self._kept[name] = answered
                else:
                    future.set_result(answered)
        except (ProviderError, TimeoutError, msgspec.MsgspecError) as error:
            kind, failure = ProviderError, f"the batch {sent.batch} was not answered: {brief(str(error))}"
            self._write([each for each in self._sent if each is not sent])
        self._over |= {*sent.requests} - self._kept.keys()
        self._fail(sent.requests, kind, failure)

    async def _results(self, call: SendRequest, batch_id: str) -> BatchResults | None:
        try:
            return await self._interface.results(call, batch_id)
        except Transient as error:
            log.info("%s; the batch %s is asked for again", error, batch_id)
            return None

    def _write(self, batches: list[Sent]) -> None:
        self._sent = batches
        replace_file(self._journal, msgspec.json.encode(batches))

    def _fail(self, names: Iterable[str], kind: type[ProviderError], why: str) -> None:
        for name in names:
            if (future := self._waiting.pop(name, None)) is not None and not future.done():
                future.set_exception(kind(why))


def _read(journal: Path) -> list[Sent]:
    """Return the batches of a journal. Raises `SettingsError`."""
    try:
        return decode_json(read_regular(journal), list[Sent]) if journal.exists() else []
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError([f"{journal} is not a journal of batches: {error}"]) from None


async def call_provider(
    client: aiohttp.ClientSession,
    base_url: str,
    own: Mapping[str, str],
    method: str,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    **content: Any,
) -> bytes:
    """Send a request of the batch interface, with the client's `own` headers. Return the body of the answer.

    :raises Transient: the provider cannot be reached or has failed; a further attempt may succeed
    :raises ProviderError: it refused the request
    """
    try:
        async with client.request(
            method, base_url + path, headers={**own, **(headers or {})}, allow_redirects=False, **content
        ) as response:
            body = await read_bounded(response, BYTES_MAX)
    except (aiohttp.ClientError, OSError) as error:
        raise Transient(f"{path} could not be reached ({type(error).__name__})") from None
    if response.status >= 500 or response.status == 429:
        raise Transient(f"{path} answered {response.status}")
    if response.status >= 300:
        raise ProviderError(f"{path} answered {response.status}: {brief(body.decode(errors='replace'))}")
    return body
