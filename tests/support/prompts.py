"""Prompts as received by AI models: recorded candles, replayed in lockstep through the real workflow."""

import asyncio
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
from support.venue import make_exchange

from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.agents.domain.models import Model
from trader.agents.domain.tools import tool_schemas
from trader.agents.domain.view import Shown
from trader.agents.providers.provider import RuleProvider
from trader.agents.providers.providers import Providers
from trader.agents.schedule import InvocationScheduler
from trader.agents.services import AgentServices, KnownModels
from trader.agents.sql.models import upsert_model
from trader.agents.variants import VARIANTS
from trader.composition.service import jobs
from trader.core.events import EventBus
from trader.core.schedulers import Schedulers
from trader.core.variant_id import VariantId
from trader.database.partitions import ensure_partitions
from trader.database.pool import Database
from trader.market.domain.markets import Tick
from trader.market.feed import MarketFeed
from trader.market.sources.replay import ReplaySource
from trader.portfolio.snapshots import PortfolioService
from trader.settings.settings import Settings


def data_of(content: str) -> dict[str, Any]:
    """Return the view in a user message, with a record by market in place of the tables of markets."""
    shown: dict[str, Any] = msgspec.json.decode(content.partition("\n\n")[0])
    for name in ("markets", "now"):
        (_, *names), *rows = shown[name]
        shown[name] = {symbol: dict(zip(names, values, strict=True)) for symbol, *values in rows}
    return shown


class Eavesdropper(RuleProvider):
    """A provider that keeps the first messages of each invocation, and answers as the rule agent."""

    name = "eavesdropper"
    is_remote = True

    def __init__(self) -> None:
        self.prompts: dict[VariantId, list[str]] = {variant: [] for variant in VariantId}

    async def shown(self, model: Model) -> Shown:
        return Shown(VARIANTS[model.variant].intervals)

    async def answer(self, turn: Turn) -> ModelAnswer:
        if turn.number == 1:
            tools = msgspec.json.encode(tool_schemas(turn.symbols)).decode()
            self.prompts[turn.model.variant].append(
                "\n".join([tools, *(message["content"] for message in turn.messages)])
            )
        return await super().answer(turn)


async def replayed_prompts(
    database: Database, folder: Path, start: datetime, span: timedelta
) -> dict[VariantId, list[str]]:
    """Return the prompts of every cycle of a part of a recording, per variant: tools, system message, user message."""
    source = ReplaySource(folder, ("BTC", "ETH", "SOL"), speed=0, start=start, end=start + span)
    settings = Settings.load({}, None, demo=True)
    provider, finished = Eavesdropper(), asyncio.Event()
    async with AsyncExitStack() as stack:
        await source.open()
        stack.push_async_callback(source.close)
        clock, events = source.clock(None), EventBus()
        market = MarketFeed(source, clock)
        exchange = make_exchange(database, market, clock, settings, events)
        await _add_models(database, clock.now())
        await exchange.lead()
        stack.push_async_callback(exchange.resign)
        shared = database, exchange, market, clock, events, settings, Providers(provider)
        agents = InvocationScheduler(AgentServices(*shared, KnownModels(database)))
        await agents.start()
        stack.push_async_callback(agents.close)
        portfolio = PortfolioService(database, exchange, clock, settings)
        schedulers = Schedulers(jobs(events, agents.start_batch, portfolio.take_snapshots), clock)
        await schedulers.start()
        stack.push_async_callback(schedulers.close)

        async def on_tick(tick: Tick) -> None:
            await exchange.on_tick(tick)
            if tick.at == source.ends_at:
                finished.set()

        feed = asyncio.create_task(market.run(on_tick, clock.now()))
        ended = asyncio.create_task(finished.wait())
        await asyncio.wait([feed, ended], return_when=asyncio.FIRST_COMPLETED)
        for task in (feed, ended):
            task.cancel()
        await asyncio.wait([feed, ended])
    return provider.prompts


async def _add_models(database: Database, now: datetime) -> None:
    async with database.connection() as conn:
        await ensure_partitions(conn, now, now + timedelta(days=2))
        for variant in VariantId:
            model = Model(
                id=variant.lower(), name=variant, variant=variant, provider=Eavesdropper.name,
                router_model_name="rules", created_at=now,
            )  # fmt: skip
            await upsert_model(conn, model)


def kept_part(before: str, after: str) -> float:
    """Return the share of a prompt that repeats the beginning of the previous one."""
    same = next((n for n, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), len(after))
    return same / len(after)
