"""Prompts as AI models get them: recorded candles, replayed in lockstep through the real workflow."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from pathlib import Path

import msgspec
from support.venue import make_exchange

from trader.domain.agents.conversation import ModelAnswer, Turn
from trader.domain.agents.tools import tool_schemas
from trader.domain.market.markets import Interval, Tick
from trader.domain.models import Model, VariantId
from trader.gateways.agents.providers import Providers, RuleProvider
from trader.gateways.market.replay import ReplaySource
from trader.schedulers import Schedulers, jobs
from trader.services.agents.schedule import Agents
from trader.services.events import EventBus
from trader.services.market.feed import MarketFeed
from trader.services.portfolio.snapshots import Portfolio
from trader.settings import Settings
from trader.store.agents.models import upsert_model
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Database
from trader.variants import VARIANTS


class Eavesdropper(RuleProvider):
    """Is asked like an AI model, keeps the first messages of each invocation, and answers like the rule agent."""

    name = "eavesdropper"
    is_remote = True

    def __init__(self) -> None:
        self.prompts: dict[VariantId, list[str]] = {variant: [] for variant in VariantId}

    async def intervals(self, model: Model) -> Sequence[Interval]:
        return VARIANTS[model.variant].intervals

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
        agents = Agents(database, exchange, market, clock, events, settings, Providers(provider))
        await agents.start()
        stack.push_async_callback(agents.close)
        portfolio = Portfolio(database, exchange, clock, settings)
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
    """Return which part of a prompt is the beginning of the one before."""
    same = next((n for n, (old, new) in enumerate(zip(before, after, strict=False)) if old != new), len(after))
    return same / len(after)
