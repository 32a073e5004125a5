"""An agent in thirty lines: pip install httpx; then TRADER_KEY=tra_… python agent_httpx.py

It buys BTC for 100 and holds it. CYCLES limits how often it decides.
"""

import os
import time
from typing import Any

import httpx

URL = os.environ.get("TRADER_URL", "http://localhost:8081")
client = httpx.Client(base_url=URL, headers={"Authorization": f"Bearer {os.environ['TRADER_KEY']}"}, timeout=30)


def call(name: str, **fields: object) -> Any:
    while (response := client.post(f"/api/rpc/agent.{name}", json=fields)).status_code in {429, 503}:
        time.sleep(int(response.headers["Retry-After"]))
    assert response.status_code == 200, response.text
    return response.json()


for _ in range(int(os.environ.get("CYCLES", "1000000"))):
    view = call("getView")
    reason = "BTC is held already"
    if not view["view"]["positions"]:
        mark = view["view"]["markets"]["BTC"]["price"]
        order = {"symbol": "BTC", "side": "buy", "quantity": 100 / mark, "exitPlan": {"stop": mark * 0.97}}
        answer = call("placeOrder", viewId=view["viewId"], clientOrderId=view["viewId"], **order)
        reason = f"{answer['result']}: {answer.get('reason') or answer.get('filledQuantity')} BTC"
    call("hold", viewId=view["viewId"], reason=reason)
    print(view["openedAt"], reason)
