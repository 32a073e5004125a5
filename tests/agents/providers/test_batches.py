"""Batches: requests are sent together, each gets its own answer, and none is paid for twice after a restart."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace
from support.chat_server import TURN, completion, held

from trader.__main__ import main
from trader.agents.domain.conversation import ModelAnswer
from trader.agents.domain.models import ProviderDefinition
from trader.agents.providers.batches import BATCH_MAX, Batches
from trader.agents.providers.client import AttemptTiming, ProviderAccess, ProviderClient
from trader.core.errors import ProviderError
from trader.settings.forms import Secret


class BatchServer:
    """Both batch interfaces. A batch ends once `finish` is set; `failing` counts requests that end with an error."""

    def __init__(self) -> None:
        self.files: dict[str, list[Any]] = {}
        self.batches: list[list[Any]] = []
        self.polls = 0
        self.failing = 0
        self.status = "completed"
        self.finish = asyncio.Event()
        self.app = web.Application()
        self.app.add_routes([
            web.post("/v1/files", self._file),
            web.post("/v1/batches", self._openai),
            web.get("/v1/batches/{id}", self._state),
            web.get("/v1/files/{id}/content", self._openai_results),
            web.post("/v1/messages/batches", self._anthropic),
            web.get("/v1/messages/batches/{id}", self._state),
            web.get("/v1/messages/batches/{id}/results", self._anthropic_results),
        ])  # fmt: skip

    async def _file(self, request: web.Request) -> web.Response:
        form = await request.post()
        assert form["purpose"] == "batch"
        file = form["file"]
        assert isinstance(file, web.FileField)
        self.files[f"file-{len(self.files)}"] = [json.loads(line) for line in file.file.read().splitlines()]
        return web.json_response({"id": f"file-{len(self.files) - 1}"})

    async def _openai(self, request: web.Request) -> web.Response:
        asked = await request.json()
        assert asked["endpoint"] == "/v1/chat/completions"
        return self._begin([(each["custom_id"], each["body"]) for each in self.files[asked["input_file_id"]]])

    async def _anthropic(self, request: web.Request) -> web.Response:
        return self._begin([(each["custom_id"], each["params"]) for each in (await request.json())["requests"]])

    def _begin(self, requests: list[Any]) -> web.Response:
        self.batches.append(requests)
        return web.json_response({"id": str(len(self.batches) - 1)})

    async def _state(self, request: web.Request) -> web.Response:
        self.polls += 1
        if self.polls == 1:
            return web.Response(status=503)  # a provider that is away for a moment
        ended, number = self.finish.is_set(), request.match_info["id"]
        state: dict[str, Any] = {"status": self.status, "processing_status": "ended", "output_file_id": number}
        if self.status == "failed":
            state = {"status": "failed", "errors": {"data": ["invalid"]}}
        return web.json_response({"id": number, **(state if ended else {"status": "in_progress"})})

    async def _openai_results(self, request: web.Request) -> web.Response:
        answered = self._answers(request, lambda said: completion(held(said)))
        lines = [
            {"custom_id": name, "response": {"status_code": 200, "body": body} if body else None, "error": None}
            for name, body in answered
        ]
        return web.Response(body="\n".join(map(json.dumps, lines)))

    async def _anthropic_results(self, request: web.Request) -> web.Response:
        answered = self._answers(request, lambda said: {"content": [{"type": "text", "text": said}], "usage": {}})
        lines = [
            {"custom_id": name, "result": {"type": "succeeded", "message": body} if body else {"type": "errored"}}
            for name, body in answered
        ]
        return web.Response(body="\n".join(map(json.dumps, lines)))

    def _answers(self, request: web.Request, made: Any) -> Any:
        for name, body in reversed(self.batches[int(request.match_info["id"])]):  # no order is promised
            self.failing -= 1
            content = body["messages"][-1]["content"]
            text = content if isinstance(content, str) else content[0]["text"]
            yield name, None if self.failing >= 0 else made(text[:100])


@pytest.fixture
async def server() -> AsyncIterator[tuple[BatchServer, str]]:
    fake = BatchServer()
    async with TestServer(fake.app) as served:
        yield fake, str(served.make_url("/v1"))


def client_at(url: str, folder: Path, protocol: Any) -> ProviderClient:
    async def soon(_: float) -> None:
        await asyncio.sleep(0.01)

    definition = ProviderDefinition(name="lab", base_url=url, protocol=protocol)
    batches, timing = Batches(folder / "batches.json", protocol, soon), AttemptTiming(sleep=soon)
    return ProviderClient(definition, ProviderAccess([Secret("sk-1")]), timing, None, batches)


async def asked(client: ProviderClient, texts: list[str], model: str = "m") -> list[ModelAnswer]:
    asking = replace(TURN.model, id=model)
    turns = [replace(TURN, model=asking, messages=[TURN.messages[0], {"role": "user", "content": t}]) for t in texts]
    return await asyncio.gather(*(client.answer(turn) for turn in turns))


def said(answer: ModelAnswer) -> str:
    return answer.text or msgspec.json.decode(answer.calls[0].arguments)["reason"]


@pytest.mark.parametrize("protocol", ["chat", "messages"])
async def test_requests_are_sent_together_and_each_gets_its_answer(
    server: tuple[BatchServer, str], tmp_path: Path, protocol: str
) -> None:
    fake, url = server
    client = client_at(url, tmp_path, protocol)
    fake.finish.set()
    texts = [f"state {number}" for number in range(20)]
    answers = await asked(client, texts)
    assert [said(answer) for answer in answers] == texts
    assert [len(batch) for batch in fake.batches] == [20]
    await client.close()


@pytest.mark.parametrize("protocol", ["chat", "messages"])
async def test_a_batch_is_not_paid_for_twice_after_a_restart(
    server: tuple[BatchServer, str], tmp_path: Path, protocol: str
) -> None:
    fake, url = server
    first = client_at(url, tmp_path, protocol)
    task = asyncio.gather(asked(first, ["a", "b"]), asked(first, ["a"], "its replicate"))
    while fake.polls < 3:
        await asyncio.sleep(0.01)
    task.cancel()
    await first.close()
    fake.finish.set()
    second = client_at(url, tmp_path, protocol)
    assert [said(each) for each in await asked(second, ["b"])] == ["b"]
    assert [said(each) for each in await asked(second, ["a"])] == ["a"]  # it came with the first one's batch
    assert [said(each) for each in await asked(second, ["a"], "its replicate")] == ["a"]
    assert len(fake.batches) == 1
    assert [said(each) for each in await asked(second, ["a"], "another model")] == ["a"]
    assert len(fake.batches) == 2
    await second.close()


@pytest.mark.parametrize("protocol", ["chat", "messages"])
async def test_a_request_without_an_answer_is_sent_again(
    server: tuple[BatchServer, str], tmp_path: Path, protocol: str
) -> None:
    fake, url = server
    fake.failing, client = 1, client_at(url, tmp_path, protocol)
    fake.finish.set()
    assert [said(each) for each in await asked(client, ["a", "b", "c"])] == ["a", "b", "c"]
    assert [len(batch) for batch in fake.batches] == [3, 1]
    await client.close()


async def test_a_refused_batch_says_why(server: tuple[BatchServer, str], tmp_path: Path) -> None:
    fake, url = server
    fake.status, client = "failed", client_at(url, tmp_path, "chat")
    fake.finish.set()
    with pytest.raises(ProviderError, match=r"has failed.*invalid"):
        await asked(client, ["a"])
    await client.close()
    fake.status, again = "completed", client_at(url, tmp_path, "chat")  # the failed batch is not asked for again
    assert [said(each) for each in await asked(again, ["a"])] == ["a"]
    await again.close()
    with pytest.raises(ProviderError, match="no batch was begun: /files answered 404"):
        await asked(lost := client_at(f"{url}/nowhere", tmp_path / "else", "chat"), ["a"])
    await lost.close()


@pytest.mark.slow
async def test_an_exam_asks_its_states_in_one_batch(
    server: tuple[BatchServer, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, url = server
    fake.finish.set()
    fake.polls = 1
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test-000000000000000001")
    (tmp_path / "models.toml").write_text(
        "[[models]]\nid = 'one'\nvariant = 'Apex'\nprovider = 'openai'\nrouter_model = 'lab/one'\n"
        "price = {input = 0.36, output = 2.0}\n"
    )
    asking = ["exam", "run", "--out", str(tmp_path / "exam"), "--states", "2", "--secret", "s", "--budget-usd", "1"]
    models = ["--models", str(tmp_path / "models.toml"), "--concurrency", "2"]
    assert await asyncio.to_thread(main, [*asking, *models, "--batch"]) == 0
    assert [len(batch) for batch in fake.batches] == [2]
    assert await asyncio.to_thread(main, [*asking, *models, "--batch"]) == 0  # the cassette has the answers
    assert main(["exam", "run", "--concurrency", str(BATCH_MAX + 1)]) == 2, "no more states than a batch has requests"
    assert len(fake.batches) == 1
