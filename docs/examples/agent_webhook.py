"""An agent that is called: TRADER_SECRET=whsec_… python agent_webhook.py, which listens on port 9000.

It buys BTC for 100 and holds it. Nothing but Python is needed; every request is verified before it is read.
A repeated request, which is a retry or a replay, gets the first answer again.
"""

import base64
import functools
import hashlib
import hmac
import json
import os
import time
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = base64.b64decode(os.environ["TRADER_SECRET"].removeprefix("whsec_"))


def is_signed(headers: Message, body: bytes) -> bool:
    view_id, sent_at = headers["webhook-id"], headers["webhook-timestamp"] or "0"
    expected = base64.b64encode(hmac.digest(SECRET, f"{view_id}.{sent_at}.".encode() + body, hashlib.sha256)).decode()
    signatures = (headers["webhook-signature"] or "").split()
    return any(hmac.compare_digest(each, f"v1,{expected}") for each in signatures) and (
        abs(time.time() - int(sent_at)) < 300
    )


@functools.lru_cache(maxsize=1000)
def answer_to(body: bytes) -> bytes:
    return json.dumps({"decisions": decide(json.loads(body))}).encode()


def decide(opened: dict[str, Any]) -> list[dict[str, Any]]:
    if opened["view"]["positions"]:
        return [{"name": "hold", "arguments": {"reason": "BTC is held already"}}]
    mark = opened["view"]["markets"]["BTC"]["price"]
    order = {"symbol": "BTC", "side": "buy", "quantity": 100 / mark, "exitPlan": {"stop": mark * 0.97}}
    return [{"name": "placeOrder", "arguments": {"clientOrderId": opened["viewId"], **order}}]


class Agent(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = answer_to(body) if is_signed(self.headers, body) else b""
        self.send_response(200 if answer else 401)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ.get("PORT", "9000"))), Agent)
    print(f"listening on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
