"""A second venue, in memory: it implements the protocol of a venue without any code of Lighter."""

from collections.abc import Collection, Mapping
from datetime import datetime
from decimal import Decimal

import msgspec
from support.scripted import ScriptedSource

from trader.core.clock import Clock
from trader.exchange.domain.venue_orders import VenueFill, VenueOrder, VenueOrderType
from trader.live.domain.orders import Placed, Refused, SendOutcome, Unknown, VenueFunding, VenueOrderState
from trader.live.domain.reconciliation import ProtectiveOrder, VenueReport
from trader.market.domain.markets import SimulatedMarket
from trader.settings.settings import Settings

ZERO = Decimal(0)


class MemoryAccount:
    """One account, which is its own gateway and records. Market orders fill at once, at the price of their market."""

    expires_s = 60.0

    def __init__(self, clock: Clock, prices: Mapping[str, Decimal]) -> None:
        self.orders = self.records = self
        self.sent: dict[int, VenueOrder] = {}
        self.states: dict[int, VenueOrderState] = {}
        self.fills: list[VenueFill] = []
        self.loses_answers = False
        self.is_down = False
        self._clock = clock
        self._prices = prices

    async def place(self, order: VenueOrder) -> SendOutcome:
        if self.is_down:
            return Unknown("the venue does not answer")
        if order.client_index not in self.states:
            self._accept(order)
        return Unknown("the answer was lost") if self.loses_answers else Placed(self.states[order.client_index])

    async def resolve(self, order: VenueOrder, nonce: int | None, expires_at: datetime) -> SendOutcome:
        return self._certain(order)

    async def find(self, client_index: int) -> VenueOrderState | None:
        return self.states.get(client_index)

    async def find_all(self, client_indexes: Collection[int]) -> Mapping[int, VenueOrderState]:
        return {index: self.states[index] for index in client_indexes if index in self.states}

    async def cancel(self, order: VenueOrderState) -> SendOutcome:
        state = self.states[order.client_index]
        if not state.is_final:
            state = msgspec.structs.replace(state, is_final=True, status="cancelled")
            self.states[order.client_index] = state
        return Placed(state)

    async def cancel_unlisted(self, order: VenueOrder) -> SendOutcome:
        return self._certain(order)

    async def pause(self) -> None:
        pass

    async def report(self) -> VenueReport:
        standing = [self.sent[index] for index, state in self.states.items() if not state.is_final]
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

    async def position(self, symbol: str) -> Decimal:
        return sum((fill.side.direction * fill.quantity for fill in self.fills if fill.symbol == symbol), ZERO)

    async def fee_rates(self) -> tuple[Decimal, Decimal]:
        return ZERO, ZERO

    async def fills_of(self, venue_index: int) -> list[VenueFill]:
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
    default_index = 7

    def __init__(self, clock: Clock, prices: Mapping[str, Decimal]) -> None:
        self.source = ScriptedSource()
        self.only_account = MemoryAccount(clock, prices)
        self.is_proven = self.is_halted = self.is_closed = False

    def make_source(self, settings: Settings, rows: Mapping[str, SimulatedMarket]) -> ScriptedSource:
        return self.source

    def make_accounts(self, settings: Settings) -> "MemoryVenue":
        return self

    def prove(self) -> None:
        self.is_proven = True

    async def account(self, index: int) -> MemoryAccount:
        assert index == self.default_index
        return self.only_account

    def halt(self) -> None:
        self.is_halted = True

    async def close(self) -> None:
        self.is_closed = True
