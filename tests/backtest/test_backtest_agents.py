"""The `backtest` command with external agents: they call, or are called, in lockstep; a second run needs no agent."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from support.candles import write_walk
from support.records import make_model

from trader.__main__ import main
from trader.agents.domain.models import EXTERNAL
from trader.agents.domain.tools import Hold
from trader.agents.providers.webhook import signature
from trader.backtest import agents
from trader.backtest.agents import CallingAgent, ServedView
from trader.core.errors import ProviderError, SeasonOver, Unavailable, ViewExpired, ViewUnknown
from trader.settings.settings import Settings

START = datetime(2025, 3, 1, tzinfo=UTC)
KEY, SECRET = "tra_of-a-test", "whsec_dGVzdA=="
PERIOD = ("--from", "2025-03-01T12:00:00Z", "--to", "2025-03-01T12:30:00Z", "--cadence", "5m", "--no-database")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_walk(folder / "BTCUSDT-1m-2025-03.csv", START, 780, price=90_000, seed=1)
    return folder


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRADER_KEY", KEY)
    monkeypatch.setenv("TRADER_SECRET", SECRET)


def backtest(data: Path, out: Path, *options: str) -> int:
    return main(["backtest", "--data", str(data), "--out", str(out), *PERIOD, *options])


def result(out: Path) -> dict[str, Any]:
    results: dict[str, Any] = orjson.loads((out / "result.json").read_bytes())
    return results


def order_for(view: dict[str, Any]) -> dict[str, Any]:
    mark = view["view"]["now"]["BTC"]["price"]
    return {
        "clientOrderId": view["viewId"], "symbol": "BTC", "side": "buy", "quantity": 0.01, "leverage": 2,
        "exitPlan": {"stop": round(mark * 0.97), "target": round(mark * 1.03)},
    }  # fmt: skip


class Agent:
    """An agent that polls, as the examples do: in the first view it buys, reads and holds, later it only holds."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.views: list[dict[str, Any]] = []
        self.said: dict[str, Any] = {}
        self.end = ""
        self.thread = threading.Thread(target=self.run)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        while True:
            connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
            try:
                connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {KEY}"})
                response = connection.getresponse()
                answer = json.loads(response.read())
            except ConnectionRefusedError:
                time.sleep(0.02)  # the backtest has not begun to listen
                continue
            finally:
                connection.close()
            if response.status != 503:
                return response.status, answer

    def call(self, name: str, status: int = 200, **fields: Any) -> Any:
        got, answer = self.post(f"/api/rpc/agent.{name}", fields)
        assert got == status, answer
        return answer if status == 200 else answer["code"]

    def tool(self, name: str, **arguments: Any) -> Any:
        asked = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name, "arguments": arguments}}
        return self.post("/mcp", asked)[1]["result"]

    def run(self) -> None:
        try:
            while True:
                status, view = self.post("/api/rpc/agent.getView", {})
                if status != 200:
                    self.end = view["code"]
                    return
                self.decide(view)
        except Exception as error:  # noqa: BLE001 - the test reads it
            self.end = repr(error)

    def decide(self, view: dict[str, Any]) -> None:
        self.views.append(view)
        if len(self.views) == 1:
            placed = self.call("placeOrder", viewId=view["viewId"], **order_for(view))
            assert self.call("placeOrder", viewId=view["viewId"], **order_for(view)) == placed
            self.said = {
                "placed": placed,
                "who": self.call("whoami"),
                "other": self.call("placeOrder", 409, viewId=view["viewId"], **order_for(view) | {"quantity": 1}),
                "candles": self.tool("getCandles", symbol="BTC", interval="15m")["structuredContent"],
                "account": self.call("getAccount")["account"],
                "wrong": self.tool("placeOrder", viewId=view["viewId"], symbol="BTC", quantity="0.001"),
                "moved": self.call("setExitPlan", viewId=view["viewId"], symbol="BTC", stop=80_000),
                "unknown": self.call("hold", 404, viewId="x", reason="x"),
                "board": self.post("/api/rpc/agent.getBoard", {})[0],
            }
        usage = {"model": "lab/graph", "steps": 3, "inputTokens": 900, "outputTokens": 50, "costUsd": 0.002}
        self.call("hold", viewId=view["viewId"], reason="seen", usage=usage)


@pytest.fixture
def agent() -> Agent:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return Agent(free.getsockname()[1])


def test_an_agent_is_replayed_without_a_request(data: Path, tmp_path: Path, agent: Agent) -> None:
    options = "--agent", "scout:Apex", "--listen", str(agent.port), "--cassette", str(tmp_path / "cassette")
    agent.thread.start()
    assert backtest(data, tmp_path / "first", *options) == 0
    agent.thread.join(30)
    assert agent.end == "SEASON_OVER"
    openings = [view["openedAt"][:17] for view in agent.views]
    assert openings == [f"2025-03-01T12:{5 * n:02}:" for n in range(7)]
    said = agent.said
    assert (said["placed"]["result"], said["placed"]["filledQuantity"]) == ("ok", "0.01")
    assert (said["who"]["agentId"], said["who"]["variant"]) == ("scout", "Apex")
    assert (said["other"], said["unknown"], said["board"]) == ("CONFLICT", "VIEW_UNKNOWN", 404)
    assert (said["candles"]["symbol"], len(said["candles"]["candles"]) > 10) == ("BTC", True)
    assert said["account"]["positions"][0]["quantity"] == 0.01
    assert said["moved"]["exitPlan"]["stop"] == 80_000
    assert said["wrong"]["isError"]
    issues = {issue["path"][-1]: issue["message"] for issue in said["wrong"]["structuredContent"]["issues"]}
    assert issues["quantity"] == 'expected a number above 0 up to 1e+12, got "0.001"'
    assert issues["side"] == "required: expected one of buy, long, sell, short"
    (account,) = result(tmp_path / "first")["accounts"]
    assert (account["decisions"], account["modelCostUsd"]) == (len(agent.views), 0.002 * len(agent.views))

    assert backtest(data, tmp_path / "again", *options) == 0  # nobody calls any more
    replay = "--models-from", str(tmp_path / "cassette")
    assert backtest(data, tmp_path / "replayed", *replay) == 0
    for name in ("ledger.jsonl", "decisions.jsonl", "trades.csv", "equity.csv"):
        kept = (tmp_path / "first" / name).read_bytes()
        assert kept
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "replayed" / name).read_bytes() == kept


@contextmanager
def webhook(decide: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> Iterator[tuple[str, list[str]]]:
    """Serve an agent that is called, and yield its address and the ids of the views that it was sent."""
    sent: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            timestamp = int(self.headers["webhook-timestamp"])
            assert self.headers["webhook-signature"] == signature(SECRET, self.headers["webhook-id"], timestamp, body)
            sent.append(self.headers["webhook-id"])
            answer = json.dumps({"decisions": decide(json.loads(body))}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/decide", sent
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_agent_that_is_called_is_replayed_without_a_request(data: Path, tmp_path: Path) -> None:
    def decide(view: dict[str, Any]) -> list[dict[str, Any]]:
        if view["view"]["positions"]:
            return [{"name": "closePosition", "arguments": {"symbol": "BTC"}}]
        return [{"name": "placeOrder", "arguments": order_for(view)}, {"name": "hold", "arguments": {"reason": "in"}}]

    with webhook(decide) as (url, sent):
        options = "--agent", f"scout:Contrarian={url}", "--cassette", str(tmp_path / "cassette")
        assert backtest(data, tmp_path / "first", *options) == 0
        asked = len(sent)
        assert len(set(sent)) == asked >= 6
        assert backtest(data, tmp_path / "again", *options) == 0
        assert len(sent) == asked
    assert result(tmp_path / "first")["accounts"][0]["trades"] >= 2
    assert (tmp_path / "first" / "ledger.jsonl").read_bytes() == (tmp_path / "again" / "ledger.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--agent", "scout"), "--agent is 'scout'; it must be NAME:VARIANT or NAME:VARIANT=URL"),
        (("--agent", "scout:Apex=http://example.org"), "such as scout:Apex or scout:Apex=http://127.0.0.1:9000"),
        (("--agent", "scout:Apex", "--mask", "dates"), "--agent: not with --models, --models-from or --mask"),
        (("--listen", "9"), "--listen: only with --agent"),
    ],
)
def test_wrong_agents_are_refused(
    data: Path, tmp_path: Path, options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert backtest(data, tmp_path / "out", *options) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


async def test_an_agent_that_is_late_or_silent_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "IDLE_S", 0.01)
    monkeypatch.setattr(agents, "NEXT_VIEW_S", 0.01)
    model = msgspec.structs.replace(make_model("scout"), provider=EXTERNAL)
    agent = CallingAgent(model, Settings.load({}, None, demo=True))
    agent.deadline_s = 0

    class Shown:
        number = 1
        messages: tuple[Any, ...] = ()

    shown = ServedView("one", START, START, [])
    monkeypatch.setattr(ServedView, "of", lambda *_: shown)
    turn: Any = Shown()
    with pytest.raises(Unavailable, match="not due yet"):
        await agent.view()
    with pytest.raises(ProviderError, match="has not asked for its view"):
        await agent.answer(turn)
    assert await agent.view() is shown
    answer = await agent.answer(turn)
    assert (answer.calls, answer.is_refusal, answer.text) == (
        (),
        True,
        "the agent did not decide before the deadline of its view",
    )
    for view_id, error in (("one", ViewExpired), ("two", ViewUnknown)):
        with pytest.raises(error):
            await agent.decide(view_id, Hold(reason="late"))
    monkeypatch.setattr(agents, "NEXT_VIEW_S", 10)
    waiting = asyncio.create_task(agent.view())
    await asyncio.sleep(0)
    await agent.close()
    with pytest.raises(SeasonOver):
        await waiting
