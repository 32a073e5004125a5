"""Servers of one's own: small contexts, silent truncation, few slots, and none that reads tool calls."""

import asyncio
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.chat_server import TURN, Timer, completion, held
from support.prompts import data_of
from support.trading_floor import Floor, calling, hold, open_floor, opening
from support.trading_provider import call, trading_provider

from trader.__main__ import main
from trader.agents.conversation import Learned
from trader.agents.domain.models import ModelConfiguration, ProviderDefinition
from trader.agents.model_warnings import model_warnings
from trader.agents.models_file import read_models
from trader.agents.providers.client import AttemptTiming, ProviderAccess, ProviderClient
from trader.agents.providers.providers import make_providers
from trader.core.clock import SystemClock
from trader.core.errors import SettingsError
from trader.database.leadership import LeaderLock
from trader.database.pool import Database
from trader.exchange.sql.accounts import insert_seed
from trader.market.sources.synthetic import SyntheticSource
from trader.settings.settings import Settings

Refusal = Callable[[int, int], Any]


def of_llama(asked: int, context: int) -> Any:
    said = f"request ({asked} tokens) exceeds the available context size ({context} tokens), try increasing it"
    return {"error": {"code": 400, "message": said, "type": "exceed_context_size_error", "n_ctx": context}}


def of_vllm(asked: int, context: int) -> Any:
    said = f"This model's maximum context length is {context} tokens. However, you requested {asked} tokens"
    return {"object": "error", "message": said, "type": "BadRequestError", "code": 400}


def of_ollama(_asked: int, _context: int) -> Any:
    return {"error": {"message": "the input length exceeds the context length", "type": "api_error"}}


def with_a_wrong_number(asked: int, context: int) -> Any:
    return {"error": {"message": f"prompt is too long: maximum context length is {10 * asked} tokens, not {context}"}}


class OwnServer:
    """A server with a context of so many tokens, which it fills, refuses, or truncates silently."""

    def __init__(self, context: int, refusal: Refusal | None = None, *, tells: bool = False) -> None:
        self.context, self.refusal, self.tells = context, refusal, tells
        self.reads = ["tools"]
        self.bodies: list[dict[str, Any]] = []
        self.refused = 0
        self.message: dict[str, Any] = held()
        self.finish = "stop"
        self.warnings = ""
        self.loads = 0

    async def props(self, _request: web.Request) -> web.Response:
        return web.json_response({"default_generation_settings": {"n_ctx": self.context}} if self.tells else {})

    async def chat(self, request: web.Request) -> web.Response:
        if self.loads:
            self.loads -= 1
            return web.json_response({"error": {"code": 503, "message": "Loading model"}}, status=503)
        self.bodies.append(await request.json())
        prompt = {name: self.bodies[-1][name] for name in ("messages", *self.reads) if name in self.bodies[-1]}
        tokens = len(orjson.dumps(prompt)) * 10 // 35
        asked = tokens + self.bodies[-1]["max_tokens"]
        if self.refusal is not None and asked > self.context:
            self.refused += 1
            return web.json_response(self.refusal(asked, self.context), status=400)
        body = completion(self.message, usage={"prompt_tokens": min(tokens, self.context), "completion_tokens": 20})
        body["choices"][0]["finish_reason"] = self.finish
        return web.json_response(body)

    def shown(self, place: int = -1) -> dict[str, Any]:
        """What the view of a request leaves out, and its candles by interval."""
        view = data_of(self.bodies[place]["messages"][1]["content"])
        return {"leftOut": view.get("leftOut"), **{name: "candles" in view[name] for name in ("5m", "15m", "4h")}}


async def served(server: OwnServer) -> TestServer:
    application = web.Application()
    application.add_routes([web.get("/props", server.props), web.post("/v1/chat/completions", server.chat)])
    test_server = TestServer(application)
    await test_server.start_server()
    return test_server


async def cycles(database: Database, server: OwnServer, count: int, **fields: Any) -> list[Any]:
    """Return the records of cycles of a model at the server; `fields` are of its provider's definition."""
    test_server = await served(server)
    definition = ProviderDefinition(name="fake", base_url=str(test_server.make_url("/v1")), **fields)
    timer = Timer()
    client = ProviderClient(definition, ProviderAccess([]), AttemptTiming(5, 0.001, timer, timer.sleep))
    configuration = ModelConfiguration(provider_definition=definition)
    try:
        async with open_floor(database, provider=client, LATENCY_MS="0") as floor:
            await floor.add("ada", configuration=configuration)
            records = []
            for _ in range(count):
                records += await floor.cycle()
            server.warnings = floor.agents.warnings().summary or ""
            return records
    finally:
        await client.close()
        await test_server.close()


@pytest.mark.parametrize("refusal", [of_llama, of_vllm, of_ollama, with_a_wrong_number])
async def test_a_refused_prompt_is_shortened_until_it_fits(database: Database, refusal: Refusal) -> None:
    server = OwnServer(4_096, refusal)
    records = await cycles(database, server, 2)
    assert [record.invocation.failure_reason for record in records] == [None, None]
    first = server.refused
    assert 1 <= first <= 3
    assert server.shown(first)["leftOut"].startswith("candles")
    assert not server.shown(first)["4h"]
    assert len(server.bodies) == first + 2, "the second cycle knows the context"


@pytest.mark.parametrize("fields", [{}, {"context_tokens": 4_096}])
async def test_a_context_is_asked_for_or_stated(database: Database, fields: dict[str, Any]) -> None:
    server = OwnServer(4_096, of_llama, tells=not fields)
    (record,) = await cycles(database, server, 1, **fields)
    assert (record.invocation.status, server.refused, server.shown()["4h"]) == ("completed", 0, False)
    assert server.bodies[-1]["max_tokens"] >= 256
    names = {tool["function"]["name"] for tool in server.bodies[-1]["tools"]}
    assert "createPosition" in names
    assert not {"placeOrder", "cancelOrder"} & names, "there is no room for them"


async def test_a_context_that_nothing_fits_into_fails_with_the_figures(database: Database) -> None:
    server = OwnServer(2_048, of_llama, tells=True)
    (record,) = await cycles(database, server, 1)
    assert "its context of 2048 tokens is too small" in record.invocation.failure_reason
    assert server.bodies == []


async def test_a_prompt_that_a_server_truncates_silently_is_noticed_and_shortened(database: Database) -> None:
    server = OwnServer(2_048)
    first, second = await cycles(database, server, 2)
    assert "seems to truncate the prompt" in server.warnings
    assert first.invocation.status == "completed"
    assert "its context of 2048 tokens is too small" in second.invocation.failure_reason


async def test_a_server_that_shows_its_model_no_tools_is_noticed(database: Database) -> None:
    server = OwnServer(32_768)
    server.reads = []
    await cycles(database, server, 1)
    assert "or to leave out the tools" in server.warnings


async def test_the_limit_of_a_row_holds_and_is_named(database: Database) -> None:
    server = OwnServer(32_768)
    server.message, server.finish = {"role": "assistant", "content": "I think"}, "length"
    (record,) = await cycles(database, server, 1, request={"max_tokens": 120})
    assert server.bodies[-1]["max_tokens"] == 120
    assert "at its limit of 120 tokens (the limit of its request fields)" in record.invocation.failure_reason


@pytest.mark.parametrize("fence", ["{}", "```json\n{}\n```", "<think>hm {</think>\n{}"])
async def test_calls_as_json_are_executed(database: Database, fence: str) -> None:
    server = OwnServer(32_768)
    calls = [{"name": "createPosition", "arguments": opening()[1]}, {"name": "note", "arguments": {"text": "in"}}]
    said = msgspec.json.encode({"calls": calls}).decode()
    server.message = {"role": "assistant", "content": fence.replace("{}", said)}
    (record,) = await cycles(database, server, 1, calls="json")
    body, schema = server.bodies[0], server.bodies[0]["response_format"]["json_schema"]["schema"]
    assert not {"tools", "tool_choice"} & body.keys()
    assert len(schema["properties"]["calls"]["items"]["anyOf"]) == 9
    assert "createPosition {symbol, side, quantity" in body["messages"][0]["content"]
    assert [call.type for call in record.tool_calls[:2]] == ["CREATE_POSITION", "NOTE"]
    assert record.tool_calls[0].status == "ok"
    assert record.tool_calls[0].metadata["raw"]["form"] == "JSON"
    assert server.warnings == "", "the schema of the answer is no part of the prompt"


async def test_prose_in_place_of_json_is_corrected_and_fails(database: Database) -> None:
    server = OwnServer(32_768)
    server.message = {"role": "assistant", "content": "I would hold, since nothing moves."}
    (record,) = await cycles(database, server, 1, calls="json")
    assert record.invocation.status == "failed"
    assert "has no tool call, for the second time" in record.invocation.failure_reason


async def test_the_slots_of_a_server_are_shared_by_its_models_and_providers() -> None:
    active = most = 0

    async def chat(_request: web.Request) -> web.Response:
        nonlocal active, most
        active += 1
        most = max(most, active)
        for _ in range(20):
            await asyncio.sleep(0)
        active -= 1
        return web.json_response(completion(held()))

    application = web.Application()
    application.add_routes([web.post("/v1/chat/completions", chat)])
    server = TestServer(application)
    await server.start_server()
    turns = []
    for number, host in enumerate(["127.0.0.1", "localhost", "127.0.0.1"]):
        definition = ProviderDefinition(name=f"lab{number}", base_url=f"http://{host}:{server.port}/v1", slots=1)
        model = msgspec.structs.replace(
            TURN.model, id=f"m{number}", provider=f"lab{number}", router_model_name=f"lab/{number}",
            configuration=ModelConfiguration(provider_definition=definition),
        )  # fmt: skip
        turns.append(msgspec.structs.replace(TURN, model=model))
    providers = make_providers(Settings.load({}, None, demo=True))
    providers.learn([turn.model for turn in turns])
    answers = await asyncio.gather(*(providers[turn.model.provider].answer(turn) for turn in turns * 2))
    assert (len(answers), most) == (6, 1)
    await providers.close()
    await server.close()


async def test_models_of_other_names_wait_for_the_slot_of_their_server(floor: Floor) -> None:
    definition = ProviderDefinition(name="fake", base_url="http://127.0.0.1:1", slots=1)
    configuration = ModelConfiguration(provider_definition=definition)
    await floor.add("ada", "bob", "cyd", configuration=configuration)
    await floor.cycle()
    assert (floor.provider.active_max, len(floor.provider.turns)) == (1, 3)


def test_a_check_says_what_a_server_does_with_the_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "models.toml"
    with trading_provider() as provider:
        file.write_text(
            f'[[providers]]\nname = "own"\nbase_url = "{provider.url}"\ncontext_tokens = 8192\n'
            '[[models]]\nid = "qwen"\nvariant = "Apex"\nprovider = "own"\nrouter_model = "qwen3"\n'
        )
        provider.always = [call(1, "holding", reason="ready")]
        assert main(["models", "check", "qwen", "--file", str(file)]) == 0
        assert provider.asked[-1]["tool_choice"] == "required"
        provider.always = []
        assert main(["models", "check", "qwen", "--file", str(file)]) == 1
    printed = capsys.readouterr().out
    assert "context: 8192, prompt: 5000 tokens" in printed
    assert "call: holding\n" in printed
    assert 'call: none, so the server may not read calls: try `calls = "json"`' in printed
    assert main(["models", "check", "qwen", "--file", str(file)]) == 1
    assert "cannot be asked: own could not be reached" in capsys.readouterr().out


@pytest.mark.slow
def test_a_stored_model_is_checked_and_tried_on_the_market_of_the_service(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DATABASE_URL", dsn)
    file, lock = tmp_path / "models.toml", LeaderLock(dsn)

    async def serve() -> None:
        database = await Database.connect(dsn, size=1)
        async with database.connection() as conn:
            await insert_seed(conn, 7)
        await database.close()
        assert await lock.try_acquire()

    with trading_provider() as provider, asyncio.Runner() as service:
        file.write_text(
            f'[[providers]]\nname = "own"\nbase_url = "{provider.url}"\ncontext_tokens = 32768\n'
            '[[models]]\nid = "qwen"\nvariant = "Apex"\nprovider = "own"\nrouter_model = "qwen3"\n'
        )
        provider.always = [call(1, "holding", reason="ready")]
        assert main(["models", "add", str(file)]) == 0
        assert main(["models", "check", "qwen"]) == 0
        assert "context: 32768, prompt: 5000 tokens" in capsys.readouterr().out
        service.run(serve())
        assert main(["models", "try", "qwen", "--demo"]) == 0
        service.run(lock.release())
    printed = capsys.readouterr().out
    assert "=== call 1: holding → ok" in printed
    assert "=== completed" in printed
    now = SystemClock().now()
    past = SyntheticSource(7, ("BTC",)).candles("BTC", "4h", now - timedelta(hours=12), now)
    shown = data_of(provider.asked[-1]["messages"][1]["content"])["4h"]["close"]
    assert shown[0] == pytest.approx(asyncio.run(past)[-1].close, rel=1e-5), "the market has the service's seed"


@pytest.mark.parametrize(
    ("address", "private", "words"),
    [
        ("http://localhost:8080/v1", False, None),
        ("http://ollama:11434/v1", True, None),
        ("http://192.168.1.7:8000/v1", True, None),
        ("http://ollama:11434/v1", False, "with private = true on a private network"),
        ("http://169.254.169.254/v1", True, "not for 169.254.169.254"),
        ("http://example.org/v1", True, "not for example.org"),
    ],
)
def test_a_private_server_needs_neither_https_nor_price(
    tmp_path: Path, address: str, private: bool, words: str | None
) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        f'[[providers]]\nname = "own"\nbase_url = "{address}"\nprivate = {str(private).lower()}\n'
        '[[models]]\nid = "qwen"\nvariant = "Apex"\nprovider = "own"\nrouter_model = "qwen3"\n'
    )
    if words is None:
        (entry,) = read_models(file, None)
        assert entry.price is not None
        assert entry.price.is_free
    else:
        with pytest.raises(SettingsError, match=re.escape(words)):
            read_models(file, None)


async def test_a_server_that_loads_its_model_is_waited_for(database: Database) -> None:
    server = OwnServer(32_768)
    server.loads = 2
    (record,) = await cycles(database, server, 1)
    assert (record.invocation.status, server.loads) == ("completed", 0)


async def test_a_model_slower_than_its_cadence_has_a_warning_with_one_that_fits(floor: Floor) -> None:
    await floor.add("ada")
    await floor.cycle()
    learned, (model,) = Learned(), floor.models.by_id.values()
    for seconds, words in ((60, None), (95, 'every = "2m" would fit')):
        learned.took = timedelta(seconds=seconds)
        warning = model_warnings([model], floor.providers, floor.agents.budgets, {"ada": learned}, {}).by_model.get(
            "ada"
        )
        assert (warning is None) if words is None else words in (warning or "")


async def test_a_row_has_a_temperature_and_tools_of_its_own(floor: Floor) -> None:
    await floor.add("ada", configuration=ModelConfiguration(temperature=0.1, tools_off=("note", "createPosition")))
    floor.provider.scripts["ada"] = [calling(opening()), hold()]
    (record,) = await floor.cycle()
    assert floor.provider.turns[0].temperature == 0.1
    assert "There is no tool 'createPosition'" in record.tool_calls[0].metadata["results"][0]["error"]
