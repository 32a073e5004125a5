"""Services of agents: the dependencies that all invocations of a process share, and its known models."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType

import msgspec

from trader.agents.conversation import INVOCATION_LIMIT_S
from trader.agents.domain.models import Model
from trader.agents.providers.providers import Providers
from trader.agents.providers.taapi import Taapi
from trader.agents.sql.models import select_models
from trader.core.clock import Clock
from trader.core.events import EventBus
from trader.database.pool import Database
from trader.exchange.protocol import Exchange
from trader.market.feed import MarketFeed
from trader.settings.settings import Settings

SeasonCheck = Callable[[Model], Awaitable[None]]
"""Raises `SeasonOver` for a model whose season is over, which may no longer open positions."""


async def without_season(_: Model) -> None:
    """Let every model open positions."""


class KnownModels:
    """The models of the database, as of the last reload. `version` increases when they change."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._models: dict[str, Model] = {}
        self._reading = asyncio.Lock()
        self.version = 0

    @property
    def by_id(self) -> Mapping[str, Model]:
        """The models by id, oldest first. A later reload does not change this mapping."""
        return MappingProxyType(self._models)

    async def reload(self) -> None:
        """Reload the models, since commands may have added some. Reads are serialized, so none overwrites a later one.

        :raises Unavailable: they cannot be read now
        """
        async with self._reading:
            async with self._database.connection() as conn:
                models = await select_models(conn)
            known = {model.id: model for model in models}
            if known != self._models:
                self._models = known
                self.version += 1


class AgentServices(msgspec.Struct, frozen=True):
    """Dependencies shared by the invocations of a process. `invocation_limit_s` limits one in real time."""

    database: Database
    exchange: Exchange
    market: MarketFeed
    clock: Clock
    events: EventBus
    settings: Settings
    providers: Providers
    models: KnownModels
    supplier: Taapi | None = None
    require_season: SeasonCheck = without_season
    invocation_limit_s: float = INVOCATION_LIMIT_S
