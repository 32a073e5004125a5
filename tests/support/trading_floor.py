"""A trading floor: agents on a real database and a real exchange, with a market and providers that the test scripts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import orjson
from support.manual_clock import ManualClock
from support.scripted import START, ScriptedSource, make_settings, make_tick
from support.waiting import until

from trader.agents.domain.conversation import ModelAnswer, ToolRequest, Turn
from trader.agents.domain.invocations import FinishedInvocation
from trader.agents.domain.models import Model, ModelConfiguration
from trader.agents.domain.view import Shown
from trader.agents.invocations import InvocationReader
from trader.agents.providers.provider import Provider
from trader.agents.providers.providers import Providers
from trader.agents.providers.taapi import Taapi
from trader.agents.schedule import InvocationScheduler
from trader.agents.services import AgentServices, KnownModels
from trader.agents.sql.models import upsert_model
from trader.agents.variants import VARIANTS
from trader.core.events import Event, EventBus, WorkflowProgress
from trader.core.variant_id import VariantId
from trader.database.pool import Database, Page
from trader.exchange.accounts import Accounts
from trader.exchange.halts import Halts
from trader.exchange.ledger_writer import LedgerWriter
from trader.exchange.paper import PaperExchange
from trader.market.feed import MarketFeed
from trader.portfolio.seasons import require_running

MIDS = {"BTC": "94000", "ETH": "3300", "SOL": "200"}

Script = Callable[[Turn], Awaitable[ModelAnswer] | ModelAnswer]


def calling(*calls: tuple[str, Any], text: str | None = None, tokens: int = 100) -> ModelAnswer:
    """An answer with these tool calls, each (name, arguments); text arguments are sent unchanged."""
    requests = tuple(
        ToolRequest(f"call_{n}", name, given if isinstance(given, str) else orjson.dumps(given).decode())
        for n, (name, given) in enumerate(calls, 1)
    )
    message = {"role": "assistant", "content": text or ""}
    return ModelAnswer(
        text=text, calls=requests, message=message, model="fake/one", raw='{"said": 1}', key_number=1,
        input_tokens=tokens, output_tokens=tokens, tokens_spent=2 * tokens,
    )  # fmt: skip


def hold(reason: str = "nothing to do") -> ModelAnswer:
    return calling(("holding", {"reason": reason}))


async def hang(_: Turn) -> ModelAnswer:
    """Think forever."""
    await asyncio.Event().wait()
    raise AssertionError


def hold_after(release: asyncio.Event) -> Script:
    """Think until the event."""

    async def think(_: Turn) -> ModelAnswer:
        await release.wait()
        return hold()

    return think


def opening(**changes: Any) -> tuple[str, Any]:
    fields = {
        "symbol": "BTC", "side": "LONG", "quantity": 0.1, "leverage": 3, "stop": 90_000, "target": 99_000,
        "invalidation": "under 90 000", "invalidationPrice": None, "timeExit": None, "confidence": 70,
    } | changes  # fmt: skip
    return "createPosition", fields


class ScriptedProvider:
    """Answers according to the model's script, of which each step is an answer, a function of the turn, or an error."""

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.is_remote = True
        self.scripts: dict[str, list[Script | ModelAnswer | Exception]] = {}
        self.turns: list[Turn] = []
        self.refused_fields: dict[str, list[str]] = {}
        self.active = 0
        self.active_max = 0

    def left_out(self, model: Model) -> Collection[str]:
        return self.refused_fields.get(model.id, ())

    async def shown(self, model: Model) -> Shown:
        variant = VARIANTS[model.variant]
        return Shown(variant.intervals) if self.is_remote else variant.agent().shown

    async def answer(self, turn: Turn) -> ModelAnswer:
        # Copied, since the conversation grows later.
        self.turns.append(Turn(**{name: getattr(turn, name) for name in turn.__struct_fields__}))
        self.turns[-1] = Turn(
            model=turn.model, temperature=turn.temperature, number=turn.number, view=turn.view,
            messages=list(turn.messages), answer_tokens_max=turn.answer_tokens_max,
        )  # fmt: skip
        script = self.scripts.get(turn.model.id) or [hold()]
        step = script[min(turn.number, len(script)) - 1]
        self.active += 1
        self.active_max = max(self.active_max, self.active)
        try:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, ModelAnswer):
                return step
            answer = step(turn)
            return answer if isinstance(answer, ModelAnswer) else await answer
        finally:
            self.active -= 1

    async def close(self) -> None:
        pass


class Floor:
    """The parts of a trading floor, and steps for tests."""

    def __init__(
        self,
        database: Database,
        *,
        exchange_type: type[PaperExchange] = PaperExchange,
        limit_s: float = 20,
        provider: Provider | None = None,
        also: Sequence[Provider] = (),
        supplier: Callable[[ManualClock], Taapi] | None = None,
        ends_at: datetime | None = None,
        **settings: str,
    ) -> None:
        self.database = database
        self.clock = ManualClock(START)
        self.source = ScriptedSource()
        self.source.ends_at = ends_at
        self.events: list[Event] = []
        bus = EventBus()
        bus.subscribe(self.events.append)
        # Only the test moves the clock while a model thinks.
        self.settings = make_settings(**{"REPLAY_THINKING": "off", **settings})
        self.market = MarketFeed(self.source, self.clock)
        self.halts = Halts(database, self.clock, bus)
        accounts = Accounts(database, LedgerWriter(database), bus)
        self.exchange = exchange_type(database, self.market, self.clock, self.settings, accounts, self.halts)
        self.provider = ScriptedProvider()
        self.providers = Providers(self.provider if provider is None else provider, *also)
        self.models = KnownModels(database)
        self.services = AgentServices(
            database, self.exchange, self.market, self.clock, bus, self.settings, self.providers, self.models,
            supplier=None if supplier is None else supplier(self.clock),
            invocation_limit_s=limit_s,
            require_season=partial(require_running, database, self.clock),
        )  # fmt: skip
        self.agents = InvocationScheduler(self.services)
        self.invocations = InvocationReader(database, self.models, self.agents.warnings)

    async def see(self, mids: Mapping[str, str] = MIDS, *, after_s: float = 1) -> None:
        """Advance time and the markets."""
        tick = make_tick(self.clock.now() + timedelta(seconds=after_s), mids)
        self.source.script.append(tick)
        await self.clock.advance(timedelta(seconds=after_s))
        await self.market.take(tick, self.exchange.on_tick)

    async def add(
        self,
        *model_ids: str,
        variant: VariantId = VariantId.APEX,
        provider: str = "fake",
        router_model: str | None = None,
        configuration: ModelConfiguration | None = None,
    ) -> None:
        async with self.database.connection() as conn:
            for model_id in model_ids:
                model = Model(
                    id=model_id, name=model_id.title(), variant=variant, provider=provider,
                    router_model_name=router_model or f"lab/{model_id}", created_at=START,
                    configuration=configuration or ModelConfiguration(),
                )  # fmt: skip
                await upsert_model(conn, model)

    async def start_batch(self) -> None:
        await self.agents.start_batch(self.clock.now())

    async def idle(self) -> None:
        """Wait until no model runs."""
        await until(lambda: not self.agents.running())

    async def cycle(self, *, after_s: float = 1) -> list[FinishedInvocation]:
        """Run one cycle, `after_s` seconds after the last one, and return its records by model."""
        await self.see(after_s=after_s)
        await self.start_batch()
        await self.idle()
        latest = await self.invocations.finished(page=Page(200))
        since = max((record.invocation.started_at for record in latest), default=START)
        return sorted(
            (record for record in latest if record.invocation.started_at == since), key=lambda r: r.model.id
        )  # fmt: skip

    def progress(self) -> list[WorkflowProgress]:
        return [event for event in self.events if isinstance(event, WorkflowProgress)]


def results_seen(turn: Turn) -> list[dict[str, Any]]:
    """Return the results of calls as seen by the model."""
    return [orjson.loads(message["content"]) for message in turn.messages if message["role"] == "tool"]


async def run_one(floor: Floor, *script: Any) -> FinishedInvocation:
    """Run one cycle of one model with this script; return its record."""
    await floor.add("ada")
    floor.provider.scripts["ada"] = list(script)
    (record,) = await floor.cycle()
    return record


@asynccontextmanager
async def open_floor(database: Database, **options: Any) -> AsyncIterator[Floor]:
    floor = Floor(database, **options)
    await floor.exchange.lead()
    await floor.see()
    try:
        yield floor
    finally:
        await floor.agents.close()
        await floor.exchange.resign()
