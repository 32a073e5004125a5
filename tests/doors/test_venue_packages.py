"""A venue is a package that implements one protocol: models trade at a venue that `live` does not know."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from decimal import Decimal

import msgspec
import pytest
from support.live import add_model, live_settings
from support.manual_clock import ManualClock
from support.memory_venue import MemoryAccount, MemoryVenue
from support.scripted import START, make_tick

from trader.composition.external import open_external
from trader.core.errors import OrderUndecided, SettingsError
from trader.core.events import EventBus
from trader.database.pool import Database
from trader.exchange.accounts import Accounts
from trader.exchange.domain.orders import ExitPlan, Order, OrderSide, OrderStatus
from trader.exchange.halts import Halts
from trader.exchange.ledger_writer import LedgerWriter
from trader.live import template
from trader.live.drift import DriftRecorder
from trader.live.exchange import LiveExchange
from trader.live.ledger import LiveContext
from trader.live.lighter.account import LighterAccount, LighterAccounts
from trader.live.lighter.orders import LighterOrders
from trader.live.lighter.records import LighterRecords
from trader.live.venue import AccountRecords, OrderGateway, VenueAccount, VenueAccounts, VenuePackage
from trader.live.venues import VENUES
from trader.market.feed import MarketFeed
from trader.portfolio.audit import audit
from trader.settings.forms import one_of
from trader.settings.presets import PRESET_VENUES
from trader.settings.settings import VARIABLES

D = Decimal
PRICES = {"BTC": D(94000), "ETH": D(3300)}
TEMPLATE: VenuePackage = template
"""mypy compares the template with the protocol, down to the types of each method."""


@pytest.fixture
async def traded(
    database: Database, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[LiveExchange, MemoryVenue]]:
    """A live exchange at a venue added as one row of each table, with the figures of another."""
    clock = ManualClock(START)
    venue = MemoryVenue(clock, PRICES)
    with pytest.raises(SettingsError, match="VENUE: expected one of lighter"):
        live_settings("http://127.0.0.1:9", DATABASE_URL=dsn, VENUE="memory")
    monkeypatch.setitem(VENUES, "memory", venue)
    monkeypatch.setitem(VARIABLES, "venue", VARIABLES["venue"]._replace(form=one_of(*VENUES)))
    monkeypatch.setitem(PRESET_VENUES, "memory", PRESET_VENUES["hyperliquid"])
    settings = live_settings("http://127.0.0.1:9", DATABASE_URL=dsn, VENUE="memory")
    assert settings.venue_preset == "hyperliquid"
    await add_model(database, "apex")
    async with AsyncExitStack() as stack:
        external = await open_external(settings, stack)
        assert external.source is venue.source
        assert external.venue_accounts is not None
        events, market = EventBus(), MarketFeed(external.source, clock)
        context = LiveContext(
            database=external.database, market=market, clock=clock, settings=settings,
            accounts=Accounts(external.database, LedgerWriter(external.database), events), events=events,
            venue=external.venue_accounts, halts=Halts(external.database, clock, events),
            drift=DriftRecorder(external.database),
        )  # fmt: skip
        exchange = LiveExchange(context)
        await exchange.lead()
        tick = make_tick(clock.now(), PRICES, size="50")
        venue.source.script.append(tick)
        await market.take(tick, exchange.on_tick)
        yield exchange, venue
        await exchange.resign()
    assert (venue.is_proven, venue.is_halted, venue.is_closed) == (True, True, True)


def buy(quantity: str, name: str) -> Order:
    return Order(
        account_id="apex", symbol="BTC", side=OrderSide.BUY, quantity=D(quantity), client_order_id=name,
        exit_plan=ExitPlan(stop=D(90000)),
    )  # fmt: skip


async def test_a_model_trades_at_a_venue_that_is_a_row_of_the_table(
    traded: tuple[LiveExchange, MemoryVenue], database: Database
) -> None:
    exchange, venue = traded
    answer = await exchange.place_order(buy("0.1", "one"))
    assert (answer.status, answer.average_price) == (OrderStatus.FILLED, D(94000))
    (stop,) = (order for order in venue.only_account.sent.values() if order.trigger is not None)
    assert (stop.trigger, stop.quantity, stop.reduce_only) == (D(90000), D("0.1"), True)
    await exchange.live_account("apex").synchronize()
    assert dict(exchange.troubles) == {}
    assert (await audit(database)).problems == []


async def test_its_lost_answers_are_resolved_and_its_own_trades_are_noticed(
    traded: tuple[LiveExchange, MemoryVenue],
) -> None:
    exchange, venue = traded
    venue.only_account.loses_answers = True
    with pytest.raises(OrderUndecided):
        await exchange.place_order(buy("0.1", "lost"))
    venue.only_account.loses_answers = False
    await exchange.live_account("apex").synchronize()
    assert (await exchange.place_order(buy("0.1", "lost"))).status is OrderStatus.FILLED
    assert len(venue.only_account.fills) == 1
    (fill,) = venue.only_account.fills
    venue.only_account.fills.append(msgspec.structs.replace(fill, trade_id=99, client_index=None, at=START))
    await exchange.live_account("apex").synchronize()
    assert "the venue holds more than the books" in exchange.troubles["apex"]


@pytest.mark.parametrize(
    ("protocol", "filled_by"),
    [
        (VenuePackage, [template, *VENUES.values()]),
        (VenueAccounts, [template.TemplateAccounts, LighterAccounts, MemoryVenue]),
        (VenueAccount, [template.TemplateAccount, LighterAccount, MemoryAccount]),
        (OrderGateway, [template.TemplateOrders, LighterOrders, MemoryAccount]),
        (AccountRecords, [template.TemplateRecords, LighterRecords, MemoryAccount]),
    ],
)
def test_the_template_and_every_venue_fill_the_protocol(protocol: type, filled_by: list[object]) -> None:
    methods = {name: member for name, member in vars(protocol).items() if inspect.isfunction(member) and name[0] != "_"}
    for venue in filled_by:
        for name, method in methods.items():
            assert parameters(getattr(venue, name)) == parameters(method), (venue, name)


def parameters(function: Callable[..., object]) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


async def test_every_method_of_the_template_is_still_to_be_written() -> None:
    for kind in (template.TemplateOrders, template.TemplateRecords):
        for _, method in inspect.getmembers(kind(), inspect.iscoroutinefunction):
            assert inspect.getdoc(method)
            with pytest.raises(NotImplementedError):
                await method(*parameters(method))


def test_the_setting_names_the_venues_of_the_table() -> None:
    assert VARIABLES["venue"].form == one_of(*VENUES)
    assert VENUES.keys() <= PRESET_VENUES.keys()
