"""What a season leaves behind beside the books: runs of the model with their steps and calls, snapshots, hours."""

import zlib
from datetime import datetime, timedelta
from decimal import Decimal
from random import Random
from typing import Any, Final
from uuid import UUID

import msgspec
import orjson

from trader.domain.agents.conversation import ToolRequest
from trader.domain.agents.invocations import invocation_id, tool_call_id
from trader.domain.agents.messages import answer_json, decision_json
from trader.domain.agents.tools import TOOL_CALL_TYPES, TOOL_NAMES, Decision, FetchIndicators, raw_of
from trader.domain.exchange.account import Run
from trader.domain.exchange.orders import OrderAnswer, OrderStatus
from trader.domain.models import Model
from trader.domain.money import ZERO
from trader.store.exchange.bulk import copy_line

PRICES: Final = (("0.27", "1.10"), ("0.15", "0.60"), ("0.60", "2.20"), ("1.25", "10"), ("3", "15"))
"""US dollars per million tokens, in and out, of the kinds of language model there are."""

_MILLION: Final = Decimal(1_000_000)
_MS: Final = timedelta(milliseconds=1)

_FAILURES: Final = (
    ("failed", "ProviderError: HTTP 429, rate limit exceeded"),
    ("failed", "ProviderError: HTTP 502 from the provider"),
    ("failed", "ProviderError: the answer is no JSON"),
    ("timeout", "the invocation took longer than 120 s"),
)


class RunNotes:
    """The record of one run in the making. The run began a minute before the moment at which its orders are placed."""

    def __init__(self, model: Model, at: datetime, rng: Random) -> None:
        self._model = model
        self._rng = rng
        self.at = at
        self.started_at = at - timedelta(milliseconds=rng.randrange(2_000, 58_000))
        self.id: UUID = invocation_id(model, self.started_at)
        self._calls: list[str] = []
        self._tools: list[list[str]] = [[]]
        self._said: list[dict[str, Any]] = []
        self.steps: list[str] = []
        self.payload = b""

    @property
    def client_order_id(self) -> str:
        """Of the order that the next call places."""
        return f"{self.id}:{len(self._calls) + 1}"

    def add_order(self, decision: Decision, answer: OrderAnswer) -> None:
        """A call that placed an order."""
        rejected = answer.status in {OrderStatus.REJECTED, OrderStatus.CANCELLED}
        self.add(decision, answer_json(answer), rejected=rejected)

    def add(self, decision: Decision, result: dict[str, Any] | None, *, rejected: bool = False) -> None:
        """A call with its result; None: it failed."""
        number, name = len(self._calls) + 1, TOOL_NAMES[type(decision)]
        arguments = msgspec.json.encode(decision).decode()
        status = "failed" if result is None else "rejected" if rejected else "ok"
        metadata = {
            "raw": raw_of(ToolRequest(f"call_{number}", name, arguments)),
            "decisions": [decision_json(decision)],
            "results": [{"error": "The market data could not be read in time."} if result is None else result],
        }
        call_id = tool_call_id(self.id, number)
        values = (self.id, number, call_id, TOOL_CALL_TYPES[name], status, metadata, self.at)
        self._calls.append(copy_line(values))
        self._tools[-1].append(name)
        if isinstance(decision, FetchIndicators):
            self._tools.append([])

    def completed(self, response: str) -> "RunNotes":
        """The run came to its end; its rows are made."""
        return self._end("completed", None, response)

    def failed(self) -> "RunNotes":
        """The provider let the run down."""
        status, reason = self._rng.choice(_FAILURES)
        return self._end(status, reason, None)

    def _end(self, status: str, reason: str | None, response: str | None) -> "RunNotes":
        rng, model = self._rng, self._model
        is_remote = model.provider != "rules"
        tokens_in = tokens_out = 0
        cost: Decimal | None = Decimal(0) if is_remote else None
        price_in, price_out = PRICES[zlib.crc32(model.router_model_name.encode()) % len(PRICES)]
        steps = [tools for tools in self._tools if tools] if status == "completed" else []
        span = max(1, (self.at - self.started_at) // _MS // max(1, len(steps)))
        for number, tools in enumerate(steps, 1):
            asked = rng.randrange(5_200, 7_600) + 700 * number if is_remote else 0
            said = rng.randrange(120, 900) if is_remote else 0
            paid = (asked * Decimal(price_in) + said * Decimal(price_out)) / _MILLION if is_remote else None
            tokens_in, tokens_out = tokens_in + asked, tokens_out + said
            cost = None if cost is None or paid is None else cost + paid
            at = self.started_at + number * span * _MS
            key = 1 if is_remote else None
            values = (self.id, number, model.provider, key, model.router_model_name, tools, asked, said, paid, span, at)
            self.steps.append(copy_line(values))
        finished_at = self.at + timedelta(milliseconds=rng.randrange(20, 900))
        self.row = copy_line(
            (self.id, model.id, status, reason, response, len(steps), tokens_in, tokens_out, cost, self.started_at,
             finished_at)
        )  # fmt: skip
        if is_remote and status == "completed":
            said_text = {"messages": [{"role": "user", "content": f"{model.name} at {self.at}"}], "answers": []}
            self.payload = zlib.compress(orjson.dumps({**said_text, "answers": [response]}), 1)
        return self

    def lines_of_calls(self) -> list[str]:
        return self._calls


class SeasonRows:
    """Lines of COPY by table: those of a day, handed over by `take_day`, and the ledger, whole at the end."""

    def __init__(self, model: Model, run: Run, payload_from: int) -> None:
        self.prefix = f"{model.id}\t{run.id}\t"
        self._model_id = model.id
        self._run_id = run.id
        self._payload_from = payload_from
        self.invocations: list[str] = []
        self.steps: list[str] = []
        self.calls: list[str] = []
        self.payloads: list[str] = []
        self.requests: list[str] = []
        self.hours: list[str] = []
        self.closed: list[str] = []
        self.open: dict[UUID, str] = {}
        self.fills: list[str] = []
        self.funding: list[str] = []
        self.insurance: list[str] = []
        self.limits: dict[UUID, str] = {}
        self._hour = ""
        self._total, self._count, self._last, self._last_at = ZERO, 0, ZERO, ""

    def add_run(self, notes: RunNotes) -> None:
        """A run that has ended."""
        self.invocations.append(notes.row)
        self.steps += notes.steps
        self.calls += notes.lines_of_calls()
        if notes.payload and notes.at.timestamp() >= self._payload_from:
            self.payloads.append(copy_line((notes.id, notes.payload, notes.started_at)))

    def note_value(self, net: Decimal, at: str, *, is_new_hour: bool) -> None:
        """A snapshot, for the rollup. `at` is its ISO time, in UTC."""
        if is_new_hour or not self._hour:
            self.close_hour()
            self._hour = at[:13]
        self._total += net
        self._count += 1
        self._last, self._last_at = net, at

    def close_hour(self) -> None:
        """Finish the row of the hour that is being added up."""
        if self._count:
            hour = f"{self._hour}:00:00+00:00"
            self.hours.append(
                f"{self._model_id}\t{hour}\t{self._run_id}\t{self._total}\t{self._count}\t{self._last}\t{self._last_at}\n"
            )
        self._total, self._count = ZERO, 0

    def take_day(self) -> dict[str, list[str]]:
        """The lines since the last call, by table, in the order in which they may be written."""
        taken = {
            "invocations": self.invocations,
            "invocation_steps": self.steps,
            "tool_calls": self.calls,
            "invocation_payloads": self.payloads,
            "order_requests": self.requests,
            "portfolio_hourly": self.hours,
        }
        self.invocations, self.steps, self.calls, self.payloads, self.requests, self.hours = [], [], [], [], [], []
        return taken

    def take_ledger(self) -> dict[str, list[str]]:
        """The books, by table, in the order in which they may be written."""
        return {
            "orders": [*self.closed, *self.open.values()],
            "limit_orders": list(self.limits.values()),
            "fills": self.fills,
            "funding_payments": self.funding,
            "insurance_payments": self.insurance,
        }
