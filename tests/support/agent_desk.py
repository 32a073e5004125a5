"""A service on a trading floor, for external agents: callers with keys, and their orders."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from support.manual_clock import ManualClock
from support.served import AppClient
from support.trading_floor import Floor

from trader.agents.external import ExternalAgents
from trader.agents.invocations import InvocationReader
from trader.agents.schedule import InvocationScheduler
from trader.agents.services import KnownModels
from trader.exchange.paper import PaperExchange
from trader.market.feed import MarketFeed
from trader.portfolio.analytics import Analytics
from trader.settings.settings import Settings

Command = Callable[..., Awaitable[Any]]


class Desk:
    """A service on a trading floor, and callers with keys."""

    def __init__(self, floor: Floor, client: AppClient) -> None:
        self.floor = floor
        self.client = client
        self.retry_after: str | None = None

    async def call(self, name: str, key: str | None = None, status: int = 200, **fields: object) -> Any:
        headers: Mapping[str, str] = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with self.client.post(f"/api/rpc/{name}", json=fields, headers=headers) as response:
            answer = await response.json()
            assert response.status == status, answer
            self.retry_after = response.headers.get("Retry-After")
            return answer if status == 200 else answer["code"]


@dataclass
class AgentContext:
    """The part of the context that the procedures of agents use."""

    settings: Settings
    clock: ManualClock
    market: MarketFeed
    exchange: PaperExchange
    models: KnownModels
    invocations: InvocationReader
    agents: InvocationScheduler
    desk: ExternalAgents
    analytics: Analytics | None


def order_of(view: Any, client_order_id: str = "one", **changes: object) -> dict[str, Any]:
    fields = {
        "viewId": view["viewId"], "clientOrderId": client_order_id, "symbol": "BTC", "side": "buy", "quantity": 0.01,
        "leverage": 2, "exitPlan": {"stop": 90000, "target": 99000, "invalidation": "under 90 000"}, "confidence": 60,
    }  # fmt: skip
    return fields | changes
