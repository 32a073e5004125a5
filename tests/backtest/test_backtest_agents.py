"""The `backtest` command with external agents: they call, or are called, in lockstep; a second run needs no agent."""

import asyncio
import json
import multiprocessing
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
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
from trader.agents.record import InvocationRecord
from trader.api.connections import ConnectionLimits
from trader.backtest import agents
from trader.backtest.agents import BacktestDesk, CallingAgent, serving_agents
from trader.core.errors import ProviderError, SeasonOver, Unavailable, ViewExpired, ViewUnknown
from trader.settings.settings import Settings

pytestmark = pytest.mark.slow

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

    def __init__(self, port: int, key: str = KEY) -> None:
        self.port = port
        self.key = key
        self.received: list[str] = []
        self.views: list[dict[str, Any]] = []
        self.said: dict[str, Any] = {}
        self.end = ""
        self.thread = threading.Thread(target=self.run)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        while True:
            connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
            try:
                connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {self.key}"})
                response = connection.getresponse()
                text = response.read().decode()
                self.received.append(f"{response.getheaders()}{text}")
                answer = json.loads(text)
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
                "no market": self.call("getOrderBook", 400, symbol="XYZ"),
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
    assert (said["other"], said["unknown"], said["no market"]) == ("CONFLICT", "VIEW_UNKNOWN", "VALIDATION_ERROR")
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


class Operator(Agent):
    """An agent that reads, cancels, flattens and then asks for more: in the views 1 to 4, over HTTP and MCP."""

    def decide(self, view: dict[str, Any]) -> None:
        self.views.append(view)
        number, view_id, said = len(self.views), view["viewId"], self.said
        if number in (1, 4):
            limit = {"type": "limit", "limitPrice": round(view["view"]["now"]["BTC"]["price"] * 0.98)}
            plan = {"stop": round(limit["limitPrice"] * 0.97)}
            order = order_for(view) | limit | {"exitPlan": plan}
            said[f"limit {number}"] = self.call("placeOrder", viewId=view_id, **order | {"clientOrderId": f"l{number}"})
            said[f"market {number}"] = self.call("placeOrder", viewId=view_id, **order_for(view))
        if number == 1:
            order_id = said["limit 1"]["orderId"]
            said["cancelled"] = self.call("cancelOrder", orderId=order_id)["order"]
            assert self.call("cancelOrder", orderId=order_id)["order"] == said["cancelled"]
            said["no order"] = self.call("cancelOrder", 404, orderId=view_id)
        if number == 2:
            said["history"] = self.call("getHistory")["conversations"]
            said["board"] = self.tool("getBoard", window="run")["structuredContent"]
            low = {"type": "limit", "limitPrice": 70_000, "exitPlan": {"stop": 69_000}}
            resting = self.call("placeOrder", viewId=view_id, **order_for(view) | low)
            said["resting"] = resting.get("reason") or resting["status"]
        if number == 3:
            said["flattened"] = self.call("flatten", reason="done")
            said["account"] = self.call("getAccount")["account"]
        if number == 5:
            said["halted"] = self.tool("halt", reason="again")["structuredContent"]
            said["page"] = self.call("getHistory", limit=2)
            said["next"] = self.call("getHistory", limit=2, before=said["page"]["nextBefore"])["conversations"]
        self.call("hold", viewId=view_id, reason=f"seen {number}")


def test_what_an_agent_reads_and_operates_is_of_the_run(data: Path, tmp_path: Path, agent: Agent) -> None:
    operator = Operator(agent.port)
    options = "--agent", "scout:Apex", "--listen", str(agent.port), "--cassette", str(tmp_path / "cassette")
    late = "--from", "2025-03-01T11:55:00Z", "--variant", "Trendsurfer"
    operator.thread.start()
    assert backtest(data, tmp_path / "first", *options, *late) == 0
    operator.thread.join(30)
    assert operator.end == "SEASON_OVER"
    said = operator.said
    assert (said["limit 1"]["status"], said["market 1"]["status"], said["no order"]) == (
        "resting",
        "filled",
        "NOT_FOUND",
    )
    cancelled = said["cancelled"]
    assert (cancelled["id"], cancelled["status"]) == (said["limit 1"]["orderId"], "cancelled")
    assert (cancelled["reason"], cancelled["fills"]) == ("cancelled by the caller", [])
    (decided,) = said["history"]
    types = ["CREATE_POSITION", "CREATE_POSITION", "CANCEL_ORDER", "HOLDING"]
    assert ([call["type"] for call in decided["toolCalls"]], decided["status"]) == (types, "completed")
    assert (decided["timestamp"][:16], decided["response"]) == ("2025-03-01T11:55", "seen 1")
    assert decided["toolCalls"][0]["metadata"]["results"][0]["status"] == "resting"
    rows = {row["modelId"]: row for row in said["board"]["entries"]}
    assert set(rows) == {"scout", "trendsurfer-rules"}
    assert (rows["scout"]["startValue"], rows["scout"]["tradesCount"], rows["scout"]["ci95"]) == (10_000, 0, None)
    assert 9_900 < rows["scout"]["endValue"] < 10_000  # at 12:00 it had paid a fee
    assert (rows["scout"]["details"]["coverage"], rows["scout"]["details"]["costUsd"]) == (100, None)
    assert said["resting"] == "resting"
    assert (said["flattened"]["verb"], said["flattened"]["by"]) == ("flatten", "the agent scout")
    assert (said["account"]["positions"], said["account"]["openOrders"]) == ([], [])
    for order in ("limit 4", "market 4"):
        assert (said[order]["result"], said[order]["status"]) == ("rejected", "rejected")
        assert said[order]["reason"].startswith("trading is halted for account scout (operator: done)")
    assert said["halted"]["verb"] == "halt"
    assert [each["response"] for each in said["page"]["conversations"]] == ["seen 4", "seen 3"]
    assert [each["response"] for each in said["next"]] == ["seen 2", "seen 1"]

    assert backtest(data, tmp_path / "again", *options, *late) == 0
    for name in ("ledger.jsonl", "decisions.jsonl", "trades.csv", "fills.csv", "equity.csv"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    assert main(["backtest", "--run", str(tmp_path / "first"), "--taker-fee", "9", "--json"]) == 0  # refuses others


class Trader(Agent):
    """An agent that opens and closes in turn, over MCP, and decides by its view alone. It may kill the backtest."""

    victim: BaseProcess | None = None

    def decide(self, view: dict[str, Any]) -> None:
        self.views.append(view)
        if view["view"]["positions"]:
            self.tool("closePosition", viewId=view["viewId"], symbol="BTC")
        else:
            placed = self.tool("placeOrder", viewId=view["viewId"], **order_for(view))["structuredContent"]
            if self.victim is not None and view["openedAt"][14:16] == "10":
                self.victim.kill()  # the test waits for its end: of two that wait, one learns no exit code
                raise ConnectionAbortedError
            self.said[view["openedAt"]] = placed
            self.tool("getCandles", symbol="BTC", interval="15m")
        self.tool("hold", viewId=view["viewId"], reason="done")


class Curious(Agent):
    """An agent behind a mask that asks for everything and provokes errors, in its first three views."""

    def decide(self, view: dict[str, Any]) -> None:
        self.views.append(view)
        number, view_id = len(self.views), view["viewId"]
        (symbol,) = view["view"]["now"]
        price = view["view"]["now"][symbol]["price"]
        order = {
            "viewId": view_id, "clientOrderId": view_id, "symbol": symbol, "side": "buy", "quantity": 10, "leverage": 2,
            "exitPlan": {"stop": price * 0.97, "target": price * 1.03, "timeExit": view["deadline"]},
        }  # fmt: skip
        if number == 1:
            self.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {}})
            self.post("/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
            self.said["placed"] = self.call("placeOrder", **order)
            self.said["account"] = self.call("getAccount")["account"]
            wrongs: list[dict[str, Any]] = [
                {"symbol": "XYZ"}, {"quantity": 1e9}, {"exitPlan": {}}, {"leverage": 99}, {"quantity": 1e-9},
                {"exitPlan": {"stop": price * 2}}, {"type": "limit", "limitPrice": price * 3}, {"side": "sell"},
            ]  # fmt: skip
            for wrong in wrongs:
                self.tool("placeOrder", **order | wrong | {"clientOrderId": f"{wrong}"})
            self.tool("setExitPlan", viewId=view_id, symbol=symbol, stop=price * 5)
            self.tool("placeOrder", **order | {"side": "up"})
        if number == 2:
            low = {
                "type": "limit",
                "limitPrice": price * 0.8,
                "exitPlan": {"stop": price * 0.7},
                "clientOrderId": "low",
            }
            resting = self.call("placeOrder", **order | low)
            self.said["cancelled"] = self.call("cancelOrder", orderId=resting["orderId"])["order"]["status"]
            for name in ("getCandles", "getOrderBook"):
                self.tool(name, symbol=symbol, interval="15m") if name == "getCandles" else self.tool(
                    name, symbol=symbol
                )
                self.post(f"/api/rpc/agent.{name}", {"symbol": "XYZ", "interval": "15m"})
            self.tool("getAccount")
        if number == 3:
            self.said["flattened"] = self.call("flatten", reason="enough")["verb"]
            self.said["held"] = self.call("getAccount")["account"]["positions"]
            self.tool("placeOrder", **order | {"clientOrderId": "late"})
            for name in ("whoami", "getHistory", "getBoard"):
                self.tool(name)
        self.call("hold", viewId=view_id, reason=f"{symbol} at {price}")
        self.call("hold", 409, viewId=view_id, reason="again")


def test_an_agent_behind_a_mask_receives_nothing_of_the_real_market(
    data: Path, tmp_path: Path, agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRADER_KEY", f"{KEY},tra_masked")
    plain, masked = Trader(agent.port), Curious(agent.port, "tra_masked")
    cassette, mask = tmp_path / "cassette", ("--mask", "symbols,dates,scale", "--thinking", "off")
    options = "--agent", "scout:Apex", "--listen", str(agent.port), "--cassette", str(cassette), *mask
    for each in (plain, masked):
        each.thread.start()
    assert backtest(data, tmp_path / "first", *options) == 0
    for each in (plain, masked):
        each.thread.join(30)
        assert (each.end, len(each.views)) == ("SEASON_OVER", 7)
    said = masked.said
    assert (said["placed"]["result"], said["cancelled"], said["flattened"]) == ("ok", "cancelled", "flatten")
    assert said["held"] == []
    assert masked.views[0]["openedAt"].startswith("2001-01-06T12:00")  # a Saturday, too

    received = "".join(masked.received)
    assert "M01" in received
    assert [word for word in ("BTC", "2025-02", "2025-03", "17408") if word in received] == []
    with next(data.glob("*.csv")).open() as file:
        prices = [float(price) for line in [*file][1:] for price in line.split(",")[1:5]]

    def real(answers: list[str]) -> list[float]:
        """Return the figures that could be real prices; volumes have three digits, and ids are left out."""
        figures = map(float, re.findall(r"(?<![\w.-])\d+(?:\.\d+)?(?![\w-])", "".join(answers)))
        return [figure for figure in figures if min(prices) <= figure <= max(prices) and figure % 100]

    assert real(plain.received)
    assert real(masked.received) == []
    for account in (said["placed"]["account"], said["account"]):
        assert 9_990 < float(account["equity"]) < 10_010

    assert backtest(data, tmp_path / "again", "--models-from", str(cassette), *mask) == 0
    for name in ("ledger.jsonl", "decisions.jsonl", "trades.csv", "equity.csv"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()


@pytest.mark.processes
def test_an_agent_whose_backtest_was_killed_resumes_where_it_was(data: Path, tmp_path: Path, agent: Agent) -> None:
    def options(cassette: str) -> list[str]:
        serving = ["--agent", "scout:Apex", "--listen", str(agent.port), "--thinking", "off"]
        return [*serving, "--cassette", str(tmp_path / cassette)]

    killing, whole, resumed = (Trader(agent.port) for _ in range(3))
    victim = multiprocessing.get_context("fork").Process(
        target=backtest, args=(data, tmp_path / "killed", *options("cut"))
    )
    victim.start()
    killing.victim = victim
    killing.thread.start()
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    killing.thread.join(30)
    for trader, out, cassette in ((whole, "whole", "kept"), (resumed, "resumed", "cut")):
        trader.thread.start()
        assert backtest(data, tmp_path / out, *options(cassette)) == 0
        trader.thread.join(30)
        assert trader.end == "SEASON_OVER"
    assert [len(each.views) for each in (killing, whole, resumed)] == [3, 7, 5]
    assert resumed.views == whole.views[2:]
    assert {**killing.said, **resumed.said} == whole.said
    assert backtest(data, tmp_path / "again", *options("cut")) == 0
    for name in ("ledger.jsonl", "decisions.jsonl", "trades.csv", "equity.csv"):
        kept = (tmp_path / "whole" / name).read_bytes()
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "again" / name).read_bytes() == kept


def test_an_old_view_is_refused_until_the_next_one(data: Path, tmp_path: Path, agent: Agent) -> None:
    class Slow(Agent):
        def decide(self, view: dict[str, Any]) -> None:
            self.views.append(view)
            sizes = (0.01, 0.02, 0.03) if len(self.views) == 1 else ()
            orders = [order_for(view) | {"quantity": size, "clientOrderId": str(size)} for size in sizes]
            self.said |= {
                order["quantity"]: self.call("placeOrder", viewId=view["viewId"], **order) for order in orders
            }
            self.call("hold", viewId=view["viewId"], reason="done")

    slow = Slow(agent.port)
    slow.thread.start()
    options = "--agent", "scout:Apex", "--listen", str(agent.port), "--deadline", "5", "--latency", "3000"
    assert backtest(data, tmp_path / "out", *options) == 0
    slow.thread.join(30)
    assert (slow.end, len(slow.views)) == ("SEASON_OVER", 7)
    assert [(said["result"], said.get("rule")) for said in slow.said.values()] == [
        ("ok", None),
        ("ok", None),
        ("rejected", "stale decision"),
    ]


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
    try:
        yield f"http://127.0.0.1:{server.server_port}/decide", sent
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_agent_that_is_called_is_replayed_without_a_request(data: Path, tmp_path: Path) -> None:
    def decide(view: dict[str, Any]) -> list[dict[str, Any]]:
        if view["view"]["positions"]:
            return [{"name": "closePosition", "arguments": {"symbol": "BTC"}}]
        return [{"name": "placeOrder", "arguments": order_for(view)}, {"name": "hold", "arguments": {"reason": "in"}}]

    with webhook(decide) as (url, sent):
        options = "--agent", f"scout:Contrarian={url}", "--cassette", str(tmp_path / "cassette"), "--thinking", "off"
        assert backtest(data, tmp_path / "first", *options) == 0
        asked = len(sent)
        assert len(set(sent)) == asked >= 6
        assert backtest(data, tmp_path / "again", *options) == 0
        assert len(sent) == asked
        answers = tmp_path / "cassette" / "answers.jsonl"
        lines = answers.read_bytes().splitlines(keepends=True)
        answers.write_bytes(b"".join(lines[:3]) + lines[3][:40])  # as a kill within the second view leaves it
        assert backtest(data, tmp_path / "resumed", *options) == 0
        assert len(sent) > asked
    assert result(tmp_path / "first")["accounts"][0]["trades"] >= 2
    for name in ("ledger.jsonl", "decisions.jsonl"):
        kept = (tmp_path / "first" / name).read_bytes()
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes() == kept


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--agent", "scout"), "--agent is 'scout'; it must be NAME:VARIANT or NAME:VARIANT=URL"),
        (("--agent", "scout:Apex=http://example.org"), "such as scout:Apex or scout:Apex=http://127.0.0.1:9000"),
        (("--agent", "scout:Apex", "--models-from", "x"), "--agent: not with --models or --models-from"),
        (("--listen", "9"), "--listen: only with --agent"),
    ],
)
def test_wrong_agents_are_refused(
    data: Path, tmp_path: Path, options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert backtest(data, tmp_path / "out", *options) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


async def test_a_late_or_silent_agent_gets_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "IDLE_S", 0.01)
    monkeypatch.setattr(agents, "NEXT_VIEW_S", 0.01)
    model, settings = (
        msgspec.structs.replace(make_model("scout"), provider=EXTERNAL),
        Settings.load({}, None, demo=True),
    )
    agent = CallingAgent(model, settings)
    desk = BacktestDesk([agent], settings)
    agent.deadline_s = 0
    record = InvocationRecord(model, START)
    agent.record = record
    turn: Any = SimpleNamespace(number=1, messages=[], view=SimpleNamespace(at=START))
    with pytest.raises(Unavailable, match="not due yet"):
        await desk.view(model, None)
    with pytest.raises(ProviderError, match="has not asked for its view"):
        await agent.answer(turn)
    opened = await desk.view(model, None)
    assert (opened.id, opened.opened_at) == (str(record.id), START)
    answer = await agent.answer(turn)
    assert (answer.calls, answer.is_refusal, answer.text) == (
        (),
        True,
        "the agent did not decide before the deadline of its view",
    )
    for view_id, error in ((opened.id, ViewExpired), ("two", ViewUnknown)):
        with pytest.raises(error):
            await desk.decide(model, view_id, Hold(reason="late"))
    monkeypatch.setattr(agents, "NEXT_VIEW_S", 10)
    waiting = asyncio.create_task(desk.view(model, None))
    await asyncio.sleep(0)
    await agent.close()
    with pytest.raises(SeasonOver):
        await waiting


async def test_a_view_asked_for_while_its_decision_ends_is_not_the_end_of_the_backtest() -> None:
    model, settings = (
        msgspec.structs.replace(make_model("scout"), provider=EXTERNAL),
        Settings.load({}, None, demo=True),
    )
    agent = CallingAgent(model, settings)
    desk, agent.record = BacktestDesk([agent], settings), InvocationRecord(model, START)
    turn: Any = SimpleNamespace(number=1, messages=[], view=SimpleNamespace(at=START))
    answer = asyncio.create_task(agent.answer(turn))
    opened = await desk.view(model, None)
    holding = asyncio.create_task(desk.decide(model, opened.id, Hold(reason="done")))
    asked = asyncio.create_task(desk.view(model, None))
    assert (await holding)["holding"]
    assert len((await answer).calls) == 1
    with pytest.raises(Unavailable, match="not due yet"):
        await asked


async def test_agents_are_served_within_the_limits_of_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trader.api.connections.ConnectionLimits", partial(ConnectionLimits, head_s=1))
    settings = Settings.load({}, None, demo=True)
    async with serving_agents(BacktestDesk([], settings), [], settings, 0) as address:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.rpartition(":")[2]))
        writer.write(b"POST /mcp HTTP/1.1\r\nHost:")  # and never the rest of the head
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        writer.close()
