"""Simulated invocations: records like those of language models, with steps, tool calls and cost."""

import zlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any, Final

import msgspec

from trader.domain.agents.conversation import ToolRequest
from trader.domain.agents.entrants import FIRST
from trader.domain.agents.invocations import invocation_id, tool_call_id
from trader.domain.agents.messages import answer_json, decision_json
from trader.domain.agents.tools import TOOL_CALL_TYPES, TOOL_NAMES, Decision, FetchIndicators, raw_of
from trader.domain.exchange.orders import OrderAnswer, OrderStatus
from trader.domain.models import Model

COLUMNS: Final[Mapping[str, tuple[str, ...] | None]] = {
    "invocations": (
        "id", "model_id", "status", "failure_reason", "response", "step_count", "input_tokens", "output_tokens",
        "cost_usd", "started_at", "finished_at", "entrant",
    ),
    "invocation_steps": (
        "invocation_id", "number", "provider", "key_number", "model", "tool_names", "input_tokens", "output_tokens",
        "cost_usd", "duration_ms", "created_at",
    ),
    "tool_calls": None,
    "invocation_payloads": None,
}  # fmt: skip
"""The tables of invocations in the order in which they are written, and their columns; None: all."""

Rows = dict[str, list[tuple[Any, ...]]]

PRICES: Final = (("0.27", "1.10"), ("0.15", "0.60"), ("0.60", "2.20"), ("1.25", "10"), ("3", "15"))
"""US dollars per million tokens, in and out, of typical language models."""

FAILURES: Final = (
    ("failed", "ProviderError: HTTP 429, rate limit exceeded"),
    ("failed", "ProviderError: HTTP 502 from the provider"),
    ("failed", "ProviderError: the answer is no JSON"),
    ("timeout", "the invocation took longer than 120 s"),
)


class SimulatedInvocation:
    """The record of one invocation. It starts up to a minute before `at`, when its orders are placed."""

    def __init__(self, model: Model, at: datetime, rng: Random) -> None:
        self._model = model
        self._rng = rng
        self._at = at
        self._started_at = at - timedelta(milliseconds=rng.randrange(2_000, 58_000))
        self.id = invocation_id(model, self._started_at)
        self._calls: list[tuple[Any, ...]] = []
        self._tools_by_step: list[list[str]] = [[]]

    @property
    def client_order_id(self) -> str:
        """The client order id of the order that the next tool call places."""
        return f"{self.id}:{len(self._calls) + 1}"

    def add_order(self, decision: Decision, answer: OrderAnswer) -> None:
        """Record a tool call that placed an order."""
        rejected = answer.status in {OrderStatus.REJECTED, OrderStatus.CANCELLED}
        self.add(decision, answer_json(answer), rejected=rejected)

    def add(self, decision: Decision, result: dict[str, Any] | None, *, rejected: bool = False) -> None:
        """Record a tool call with its result; None: it failed."""
        number, name = len(self._calls) + 1, TOOL_NAMES[type(decision)]
        status = "failed" if result is None else "rejected" if rejected else "ok"
        metadata = {
            "raw": raw_of(ToolRequest(f"call_{number}", name, msgspec.json.encode(decision).decode())),
            "decisions": [decision_json(decision)],
            "results": [result or {"error": "The market data could not be read in time."}],
        }
        call_id, text = tool_call_id(self.id, number), msgspec.json.encode(metadata).decode()
        self._calls.append((self.id, number, call_id, TOOL_CALL_TYPES[name], status, text, self._at))
        self._tools_by_step[-1].append(name)
        if isinstance(decision, FetchIndicators):
            self._tools_by_step.append([])

    def rows(self, response: str | None, *, has_payload: bool) -> Rows:
        """Return the rows of the invocation by table. `response` is the model's answer; None: the provider failed."""
        status, reason = ("completed", None) if response is not None else self._rng.choice(FAILURES)
        steps = self._steps() if response is not None else []
        tokens_in, tokens_out = sum(step[6] for step in steps), sum(step[7] for step in steps)
        cost = sum((step[8] for step in steps), Decimal(0)) if self._is_remote else None
        finished_at = self._at + timedelta(milliseconds=self._rng.randrange(20, 900))
        invocation = (
            self.id, self._model.id, status, reason, response, len(steps), tokens_in, tokens_out, cost,
            self._started_at, finished_at, FIRST,
        )  # fmt: skip
        rows: Rows = {"invocations": [invocation], "invocation_steps": steps, "tool_calls": self._calls}
        if has_payload and self._is_remote and response is not None:
            messages = [{"role": "user", "content": f"{self._model.name} at {self._at}"}]
            text = msgspec.json.encode({"messages": messages, "answers": [response]})
            rows["invocation_payloads"] = [(self.id, zlib.compress(text, 1), self._started_at)]
        return rows

    @property
    def _is_remote(self) -> bool:
        return self._model.provider != "rules"

    def _steps(self) -> list[tuple[Any, ...]]:
        model, rng = self._model, self._rng
        price_in, price_out = map(Decimal, PRICES[zlib.crc32(model.router_model_name.encode()) % len(PRICES)])
        tools_by_step = [tools for tools in self._tools_by_step if tools]
        span = (self._at - self._started_at) / len(tools_by_step)
        steps = []
        for number, tools in enumerate(tools_by_step, 1):
            tokens_in, tokens_out, cost, key = 0, 0, None, None
            if self._is_remote:
                tokens_in, tokens_out, key = rng.randrange(5_200, 7_600) + 700 * number, rng.randrange(120, 900), 1
                cost = (tokens_in * price_in + tokens_out * price_out) / 1_000_000
            steps.append(
                (self.id, number, model.provider, key, model.router_model_name, tools, tokens_in, tokens_out, cost,
                 span // timedelta(milliseconds=1), self._started_at + number * span)
            )  # fmt: skip
        return steps
