"""External agents take an exam by their key: one view of each state, whose order is scored like any entrant's."""

import json
import socket
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import orjson
import pytest

from trader.__main__ import main

KEY = "tra_of-a-test"


class BuyingAgent:
    """Polls for views, buys ETH in each, and holds."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.views: list[dict[str, Any]] = []
        self.end: Any = None
        self.thread = threading.Thread(target=self.run)

    def post(self, name: str, **fields: Any) -> tuple[int, Any]:
        while True:
            connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
            try:
                headers = {"Authorization": f"Bearer {KEY}"}
                connection.request("POST", f"/api/rpc/agent.{name}", json.dumps(fields), headers)
                response = connection.getresponse()
                answer = json.loads(response.read())
            except ConnectionRefusedError:
                time.sleep(0.02)  # the exam has not begun to listen
                continue
            finally:
                connection.close()
            if response.status != 503:
                return response.status, answer

    def run(self) -> None:
        while (got := self.post("getView"))[0] == 200:
            view = got[1]
            self.views.append(view)
            mark = view["view"]["now"]["ETH"]["price"]
            order = {"symbol": "ETH", "side": "buy", "quantity": 1, "leverage": 2, "exitPlan": {"stop": mark * 0.9}}
            self.post("placeOrder", viewId=view["viewId"], clientOrderId=view["viewId"], **order)
            self.post("hold", viewId=view["viewId"], reason="bought")
        self.end = got[1]["code"]


def test_an_agent_decides_once_in_each_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRADER_KEY", KEY)
    agent = BuyingAgent()
    agent.thread.start()
    options = ("--agent", "scout:Apex", "--listen", str(agent.port), "--states", "4", "--secret", "s", "--json")
    assert main(["exam", "run", "--out", str(tmp_path / "exam"), *options]) == 0
    agent.thread.join(30)
    assert agent.end == "SEASON_OVER"
    assert len({view["viewId"] for view in agent.views}) == 4
    scout, nothing = orjson.loads(capsys.readouterr().out)["entrants"]
    assert (scout["entrant"], scout["states"], nothing["states"]) == ("scout", 4, 4)
    assert scout["burntBp"]["mean"] > 0
    assert main(["exam", "check", str(tmp_path / "exam")]) == 0
