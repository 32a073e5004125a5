"""A provider protocol, a sink of alarms and one of anchors are each a class behind a protocol and a row of a table."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace
from support.chat_server import MODEL, TURN
from support.trading_floor import Floor

from trader.agents.domain.conversation import Turn
from trader.agents.models_file import read_models
from trader.agents.providers.protocols import ProviderProtocol, completion_of
from trader.agents.providers.provider import PROTOCOLS
from trader.agents.providers.providers import make_providers
from trader.core.errors import SettingsError
from trader.operations.alarms import Alarms
from trader.operations.domain.alarms import Alarm, AlarmCause, Notice
from trader.operations.notifications import SINKS as ALARM_SINKS
from trader.operations.notifications import make_sinks
from trader.record.anchors import SINKS as ANCHOR_SINKS
from trader.record.anchors import Anchors, make_sink
from trader.record.domain.chain import Anchor
from trader.settings import forms
from trader.settings.settings import Settings

AT = datetime(2025, 1, 1, tzinfo=UTC)


class PlainWire:
    """A protocol with one sentence in each direction."""

    limit_fields = ("words",)
    charges_cache_writes = True

    def path(self, model: str) -> str:
        return f"/say/{model}"

    def headers(self, secret: str | None) -> Mapping[str, str]:
        return {"X-Key": secret or ""}

    def request(self, turn: Turn, limit_field: str, *, stream: bool) -> dict[str, Any]:
        return {"said": [message["content"] for message in turn.messages], limit_field: turn.answer_tokens_max}

    def completion(self, content: bytes) -> bytes:
        call = {"id": "1", "type": "function", "function": {"name": "holding", "arguments": content.decode()}}
        return completion_of([], "", [call], "stop", {"prompt_tokens": 3, "completion_tokens": 2}, "plain")


def models_file(folder: Path, base_url: str) -> Path:
    file = folder / "models.toml"
    file.write_text(f"""
[[providers]]
name = "lab"
base_url = "{base_url}"
protocol = "plain"
key_variable = "LAB_API_KEY"
key_host = "{urlsplit(base_url).netloc}"

[[models]]
id = "ada"
variant = "Apex"
provider = "lab"
router_model = "one"
""")
    return file


async def test_a_provider_is_a_row_of_the_models_file_and_its_protocol_a_module_and_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, str, Any]] = []

    async def say(request: web.Request) -> web.Response:
        heard.append((request.path, request.headers["X-Key"], orjson.loads(await request.read())))
        return web.Response(text='{"reason": "calm"}', content_type="application/json")

    app = web.Application()
    app.router.add_post("/say/{model}", say)
    async with TestServer(app) as server:
        file = models_file(tmp_path, str(server.make_url("/")))
        with pytest.raises(SettingsError, match="protocol: expected one of chat, gemini, messages, responses"):
            read_models(file, None)
        plain: ProviderProtocol = PlainWire()
        monkeypatch.setitem(PROTOCOLS, "plain", plain)
        (entry,) = read_models(file, None, [f"{server.host}:{server.port}"])
        model = replace(MODEL, provider="lab", router_model_name="one", configuration=entry.configuration)
        providers = make_providers(Settings.load({"LAB_API_KEY": "sk-lab-0000000000001"}, None, demo=True))
        providers.learn([model])
        answer = await providers["lab"].answer(replace(TURN, model=model))
        await providers.close()
    assert [(call.name, call.arguments) for call in answer.calls] == [("holding", '{"reason": "calm"}')]
    assert heard == [("/say/one", "sk-lab-0000000000001", {"said": ["s", "u"], "words": 1000})]


class Notebook:
    """An alarm sink that keeps the alarms."""

    kept: list[Notice] = []

    def __init__(self, number: int, url: str, sender: str, *, timeout_s: float) -> None:
        self.name = f"notebook {number}"

    async def send(self, notice: Notice) -> None:
        self.kept.append(notice)

    async def close(self) -> None:
        pass


def test_the_settings_accept_what_has_a_sink() -> None:
    assert (tuple(ALARM_SINKS), tuple(ANCHOR_SINKS)) == (forms.NOTIFY_FORMATS, forms.ANCHOR_SCHEMES)


async def test_a_sink_of_alarms_is_a_class_and_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"NOTIFY_URL": "notebook+http://127.0.0.1:9/"}
    with pytest.raises(SettingsError, match="NOTIFY_URL"):
        Settings.load(address, None, demo=True)
    monkeypatch.setitem(ALARM_SINKS, "notebook", Notebook)
    monkeypatch.setattr(forms, "NOTIFY_FORMATS", tuple(ALARM_SINKS))
    monkeypatch.setattr(Notebook, "kept", [])
    sinks = make_sinks(Settings.load(address, None, demo=True).notify_urls, "here:1")
    alarms = Alarms(sinks, now=lambda: AT)
    alarms.add(Alarm(AlarmCause("start"), "version 1"))
    await alarms.close()
    assert [(notice.cause.kind, notice.text) for notice in Notebook.kept] == [("start", "version 1")]


class Notary:
    """An anchor sink that keeps the anchors."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.kept: list[Anchor] = []

    async def send(self, anchor: Anchor) -> None:
        self.kept.append(anchor)

    async def close(self) -> None:
        pass


async def test_a_sink_of_anchors_is_a_class_and_a_row(floor: Floor, monkeypatch: pytest.MonkeyPatch) -> None:
    address = {"ANCHOR_URL": "notary://office"}
    with pytest.raises(SettingsError, match="ANCHOR_URL"):
        Settings.load(address, None, demo=True)
    monkeypatch.setitem(ANCHOR_SINKS, "notary", Notary)
    monkeypatch.setattr(forms, "ANCHOR_SCHEMES", tuple(ANCHOR_SINKS))
    sink = make_sink(Settings.load(address, None, demo=True).anchor_url)
    assert isinstance(sink, Notary)
    await floor.add("ada")
    await floor.cycle()
    await Anchors(floor.database, sink, lambda: True).update()
    (anchor,) = sink.kept
    async with floor.database.connection() as conn:
        head = await conn.fetchrow("SELECT position, digest FROM anchors WHERE sent_at IS NOT NULL")
    assert head is not None
    assert (anchor.position, anchor.digest) == (head["position"], head["digest"])
