"""A venue is a package that implements one protocol: models trade at a venue that `live` does not know."""

import inspect
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from decimal import Decimal

import msgspec
import pytest
from support import venue_template as template
from support.live import add_model, live_settings
from support.manual_clock import ManualClock
from support.scripted import START, ScriptedSource, make_tick

from trader.composition.external import open_external
from trader.core.clock import Clock
from trader.core.errors import OrderUndecided, SettingsError
from trader.core.events import EventBus
from trader.database.pool import Database
from trader.exchange.accounts import Accounts
from trader.exchange.domain.orders import ExitPlan, Order, OrderSide, OrderStatus
from trader.exchange.domain.venue_orders import VenueFill, VenueOrder, VenueOrderType
from trader.exchange.halts import Halts
from trader.exchange.ledger_writer import LedgerWriter
from trader.live.budget import RequestBudget
from trader.live.domain.orders import Placed, Refused, SendOutcome, Unknown, VenueFunding, VenueOrderState
from trader.live.domain.reconciliation import ProtectiveOrder, VenueReport
from trader.live.drift import DriftRecorder
from trader.live.exchange import LiveExchange
from trader.live.hyperliquid.account import HyperliquidAccount, HyperliquidAccounts
from trader.live.hyperliquid.orders import HyperliquidOrders
from trader.live.hyperliquid.records import HyperliquidRecords
from trader.live.ledger import LiveContext
from trader.live.lighter.account import LighterAccount, LighterAccounts
from trader.live.lighter.orders import LighterOrders
from trader.live.lighter.records import LighterRecords
from trader.live.venue import (
    AccountFeed,
    AccountRecords,
    OrderGateway,
    Remember,
    VenueAccount,
    VenueAccounts,
    VenuePackage,
)
from trader.live.venues import VENUES
from trader.market.domain.markets import Market, SimulatedMarket
from trader.market.feed import MarketFeed
from trader.portfolio.audit import audit
from trader.settings.forms import Secret, one_of
from trader.settings.settings import PRESET_VENUES, VARIABLES, Settings

ZERO = Decimal(0)


class MemoryAccount:
    """One account, which is its own gateway and records. Market orders fill at once, at the price of their market."""

    expires_s = 60.0

    def __init__(self, clock: Clock, prices: Mapping[str, Decimal]) -> None:
        self.orders = self.records = self
        self.feed = AccountFeed()
        self.sent: dict[int, VenueOrder] = {}
        self.states: dict[int, VenueOrderState] = {}
        self.fills: list[VenueFill] = []
        self.loses_answers = False
        self.is_down = False
        self._clock = clock
        self._prices = prices

    answered_at: datetime | None = None

    async def place(self, orders: Sequence[VenueOrder], market: Market, remember: Remember) -> SendOutcome:
        await remember("attempt")
        if self.is_down:
            return Unknown("the venue does not answer")
        for order in orders:
            if order.client_index not in self.states:
                self._accept(order)
        index = orders[0].client_index
        return Unknown("the answer was lost") if self.loses_answers else Placed(self.states[index])

    async def resolve(self, order: VenueOrder, attempt: str, expires_at: datetime) -> SendOutcome:
        return self._certain(order)

    async def refusal(self) -> str | None:
        return None

    async def find_all(self, client_indexes: Collection[int]) -> Mapping[int, VenueOrderState]:
        return {index: self.states[index] for index in client_indexes if index in self.states}

    async def opened_since(self, since: datetime) -> Collection[int]:
        return ()

    async def cancel(self, symbol: str, client_index: int) -> SendOutcome:
        state = self.states[client_index]
        if not state.is_final:
            state = msgspec.structs.replace(state, is_final=True, status="cancelled")
            self.states[client_index] = state
        return Placed(state)

    async def pause(self) -> None:
        pass

    async def report(self) -> VenueReport:
        standing = self.standing()
        return VenueReport(
            positions={symbol: quantity for symbol in self._prices if (quantity := await self.position(symbol))},
            protective_orders={
                order.client_index: ProtectiveOrder(order.symbol, order.type, order.trigger)
                for order in standing
                if order.trigger is not None
            },
            others=frozenset(order.client_index for order in standing if order.trigger is None),
            balance=10_000 - sum((fill.side.direction * fill.quantity * fill.price for fill in self.fills), ZERO),
        )

    def standing(self) -> list[VenueOrder]:
        return [self.sent[index] for index, state in self.states.items() if not state.is_final]

    async def position(self, symbol: str) -> Decimal:
        return sum((fill.side.direction * fill.quantity for fill in self.fills if fill.symbol == symbol), ZERO)

    async def fee_rates(self) -> tuple[Decimal, Decimal]:
        return ZERO, ZERO

    async def fills_of(self, client_index: int, venue_index: int, filled: Decimal | None = None) -> list[VenueFill]:
        return [fill for fill in self.fills if fill.trade_id == venue_index]

    async def fills_since(self, since: datetime) -> list[VenueFill]:
        return [fill for fill in self.fills if fill.at >= since]

    async def fundings_since(self, since: datetime) -> list[VenueFunding]:
        return []

    def _certain(self, order: VenueOrder) -> SendOutcome:
        state = self.states.get(order.client_index)
        return Refused("the venue never took it") if state is None else Placed(state)

    def _accept(self, order: VenueOrder) -> None:
        index, is_market = order.client_index, order.type is VenueOrderType.MARKET
        self.sent[index] = order
        self.states[index] = VenueOrderState(
            client_index=index,
            venue_index=len(self.sent),
            symbol=order.symbol,
            filled=order.quantity if is_market else ZERO,
            is_final=is_market,
            status="filled" if is_market else "open",
        )
        if is_market:
            self.fills.append(
                VenueFill(
                    trade_id=len(self.sent), client_index=index, kind="trade", symbol=order.symbol, side=order.side,
                    quantity=order.quantity, price=self._prices[order.symbol], fee_rate=ZERO, maker=False,
                    at=self._clock.now(),
                )
            )  # fmt: skip


class MemoryVenue:
    """The package of this venue, and its single account."""

    url = "memory://venue"
    default_account = "7"

    def __init__(self, clock: Clock, prices: Mapping[str, Decimal]) -> None:
        self.source = ScriptedSource()
        self.keys: dict[str, Secret] = {}
        self.only_account = MemoryAccount(clock, prices)
        self.budget = RequestBudget(60, per_kind=40)
        self.is_proven = self.is_halted = self.is_closed = False

    def make_source(
        self, settings: Settings, rows: Mapping[str, SimulatedMarket], budget: RequestBudget | None = None
    ) -> ScriptedSource:
        return self.source

    def make_accounts(self, settings: Settings) -> "MemoryVenue":
        return self

    def prove(self) -> None:
        self.is_proven = True

    async def account(self, name: str) -> MemoryAccount:
        assert name == self.default_account
        return self.only_account

    def halt(self) -> None:
        self.is_halted = True

    async def close(self) -> None:
        self.is_closed = True


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
    (answer,) = await exchange.place_orders(buy("0.1", "one"))
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
        await exchange.place_orders(buy("0.1", "lost"))
    venue.only_account.loses_answers = False
    await exchange.live_account("apex").synchronize()
    assert (await exchange.place_orders(buy("0.1", "lost")))[0].status is OrderStatus.FILLED
    assert len(venue.only_account.fills) == 1
    (fill,) = venue.only_account.fills
    venue.only_account.fills.append(msgspec.structs.replace(fill, trade_id=99, client_index=None, at=START))
    await exchange.live_account("apex").synchronize()
    assert exchange.accounts["apex"].positions["BTC"].quantity == Decimal("0.2")
    assert sum(order.quantity for order in venue.only_account.standing() if order.trigger is not None) == Decimal("0.2")


@pytest.mark.parametrize(
    ("protocol", "filled_by"),
    [
        (VenuePackage, [template, *VENUES.values()]),
        (VenueAccounts, [template.TemplateAccounts, LighterAccounts, HyperliquidAccounts, MemoryVenue]),
        (VenueAccount, [template.TemplateAccount, LighterAccount, HyperliquidAccount, MemoryAccount]),
        (OrderGateway, [template.TemplateOrders, LighterOrders, HyperliquidOrders, MemoryAccount]),
        (AccountRecords, [template.TemplateRecords, LighterRecords, HyperliquidRecords, MemoryAccount]),
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
