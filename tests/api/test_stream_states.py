"""The contents of the state streams, over the real services on a real database."""

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from support.records import FakeExchange, add_invocation, make_account, make_model, make_position
from support.scripted import START, make_settings
from support.service_context import make_context
from support.venue import Venue, running

from trader.agents.domain.models import Model
from trader.agents.providers.providers import Providers
from trader.agents.services import AgentServices, KnownModels
from trader.agents.sql.models import upsert_model
from trader.agents.variants import color_of
from trader.api import stream_table
from trader.api.context import Context
from trader.api.procedures.models import get_invocations
from trader.api.procedures.trading import get_positions, get_trades
from trader.api.schemas.common import ENCODER
from trader.api.schemas.models import GetInvocationsInput
from trader.api.schemas.positions import GetPositionsInput
from trader.api.schemas.trades import GetTradesInput
from trader.core.events import EventBus
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.exchange.domain.orders import ExitPlan


class House:
    """A venue with models and their readers."""

    def __init__(self, venue: Venue, context: Context) -> None:
        self.venue = venue
        self.context = context
        self.loads = stream_table.state_loaders(context)

    async def state(self, stream: str) -> Any:
        return json.loads(await self.loads[stream](), parse_float=Decimal)


def wire(answer: object) -> Any:
    return json.loads(ENCODER.encode(answer), parse_float=Decimal)


@pytest.fixture
async def house(database: Database) -> AsyncIterator[House]:
    settings = make_settings()
    async with database.connection() as conn:
        for name, variant in (("apex", VariantId.APEX), ("sov", VariantId.SOVEREIGN)):
            await upsert_model(conn, make_model(name, variant))
        idle = make_model("retired", VariantId.CONTRARIAN)
        await upsert_model(conn, Model(**{**{f: getattr(idle, f) for f in idle.__struct_fields__}, "active": False}))
    async with running(database) as venue:
        exchange, clock = venue.exchange, venue.clock
        shared = database, exchange, venue.market, clock, EventBus(), settings, Providers()
        context = make_context(AgentServices(*shared, KnownModels(database)))
        await context.agents.start()
        yield House(venue, context)
        await context.agents.close()


async def test_each_active_model_has_an_entry_even_without_positions_or_prices(house: House) -> None:
    entries = await house.state("positions")
    assert entries == [
        {
            "modelId": name,
            "modelName": f"Model {name}",
            "modelVariant": variant,
            "color": color_of(make_model(name, VariantId(variant))),
            "positions": [],
            "totalUnrealizedPnl": 0,
            "availableCash": 10000,
        }
        for name, variant in (("apex", "Apex"), ("sov", "Sovereign"))
    ]


async def test_positions_equal_the_procedures_output(house: House) -> None:
    venue = house.venue
    await venue.see({"BTC": "94000", "ETH": "3300"})
    await venue.buy("0.5", account_id="apex", leverage=Decimal(10), exit_plan=ExitPlan(stop=Decimal(90000)))
    await venue.sell("2", account_id="apex", symbol="ETH", leverage=Decimal(2))
    await venue.buy("0.1", account_id="manual")
    await venue.buy("0.01", account_id="retired")
    await venue.see({"BTC": "95000", "ETH": "3200"})
    entries = await house.state("positions")
    assert [entry["modelId"] for entry in entries] == ["apex", "sov", "manual", "retired"]
    for entry in entries:
        request = GetPositionsInput(model_id=entry["modelId"])
        assert entry["positions"] == wire(await get_positions(house.context, request))
    apex, _, manual, retired = entries
    account = venue.exchange.accounts["apex"]
    gain = sum(Decimal(position["unrealizedPnl"]) for position in apex["positions"])
    assert apex["totalUnrealizedPnl"] == gain > 0
    assert Decimal(apex["availableCash"]) == account.cash + gain - account.margin
    assert (manual["modelName"], "modelVariant" in manual) == ("manual", False)
    assert retired["modelVariant"] == "Contrarian"


async def test_trades_equal_the_procedures_latest(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stream_table.TRADES_MAX == 100
    for _ in range(3):
        await house.venue.see({"BTC": "94000"})
        await house.venue.buy("0.02", account_id="apex")
        await house.venue.sell("0.02", account_id="apex")
    trades = await house.state("trades")
    assert len(trades) == 3
    assert trades == wire((await get_trades(house.context, GetTradesInput(limit=100))).trades)
    monkeypatch.setattr(stream_table, "TRADES_MAX", 2)
    assert await house.state("trades") == trades[:2]


async def test_conversations_equal_the_procedures_latest(house: House, database: Database) -> None:
    async with database.connection() as conn:
        for number in range(52):
            await add_invocation(conn, "apex", START + number * timedelta(minutes=1), calls=("ok",))
    conversations = await house.state("conversations")
    assert len(conversations) == stream_table.CONVERSATIONS_MAX == 50
    request = GetInvocationsInput(limit=50)
    assert conversations == wire((await get_invocations(house.context, request)).conversations)
    assert conversations[0]["timestamp"] == "2025-01-01T12:51:30.000Z"
    assert conversations[0]["toolCalls"][0]["status"] == "ok"


async def test_the_portfolio_is_live(house: House) -> None:
    venue = house.venue
    await venue.see({"BTC": "94000"})
    await venue.buy("0.5", account_id="apex", leverage=Decimal(10))
    await house.context.portfolio.take_snapshots(venue.clock.now())
    await venue.see({"BTC": "95000"})
    update = await house.state("portfolio")
    account = venue.exchange.accounts["apex"]
    gain = account.positions["BTC"].unrealized(venue.exchange.marks()["BTC"])
    assert update["lastUpdatedAt"] == "2025-01-01T12:00:32.000Z"
    assert update["modelsUpdated"] == len(update["snapshots"]) == 3
    assert update["snapshotsCreated"] == 3
    assert update["snapshots"][0] == {
        "modelId": "apex",
        "modelName": "Model apex",
        "variant": "Apex",
        "netPortfolio": account.cash + gain,
        "cash": account.cash,
        "unrealizedPnl": gain,
        "createdAt": "2025-01-01T12:00:32.000Z",
    }


async def test_a_sum_that_needs_an_unknown_price_is_null() -> None:
    exchange: Any = FakeExchange(make_account("apex", positions={"BTC": make_position()}))
    [entry] = await stream_table.position_entries(exchange, {"apex": make_model("apex")})
    assert (entry.total_unrealized_pnl, entry.available_cash) == (None, None)
    assert entry.positions[0].unrealized_pnl is None


async def test_a_thousand_accounts_do_not_block_other_calls() -> None:
    accounts = [make_account(f"a{n}", positions={"BTC": make_position()}) for n in range(1000)]
    exchange: Any = FakeExchange(*accounts, marks={"BTC": "50000"})
    task = asyncio.ensure_future(stream_table.position_entries(exchange, {}))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)  # one turn of the loop
        turns += 1
    assert len(task.result()) == 1000
    assert turns >= 1000 // stream_table.ACCOUNTS_AT_ONCE
