"""The limits of live trading at n and n + 1 that refuse nothing in words; see test_refusals.py for those that do."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast
from uuid import uuid4

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from support.books import DEFAULT_MARKETS
from support.feed import START
from support.limits import Accepts, outcomes, stop_loop
from support.manual_clock import ManualClock
from support.records import make_account
from support.venue_answers import answering, lighter_records
from support.waiting import turns

from trader.core.clock import EPOCH
from trader.core.errors import MarketDataError, StartError
from trader.exchange.domain.orders import Cause, OrderSide, Side
from trader.exchange.domain.venue_orders import SentOrder, SentStatus, VenueFill, VenueOrder, VenueOrderType
from trader.live.book import BookChange, LevelChange
from trader.live.budget import RequestBudget
from trader.live.domain.orders import Busy, Placed, SendOutcome, VenueOrderState
from trader.live.domain.reconciliation import VenueReport
from trader.live.http import VenueHttp
from trader.live.hyperliquid.actions import ActionAnswer, Resting, Status
from trader.live.hyperliquid.orders import HyperliquidOrders
from trader.live.lighter.account import prove_access
from trader.live.lighter.api import LighterApi
from trader.live.lighter.orders import LighterOrders
from trader.live.lighter.rows import Transaction
from trader.live.lighter.signer import Signed
from trader.live.lighter.transactions import INACTIVE, INVALID_NONCE, SendAnswer, Transactions
from trader.live.market import Listing, VenueMarket
from trader.live.outbox import Outbox
from trader.live.reconciler import Reconciler
from trader.live.socket import MarketStream, Socket, connect

MS: Final = timedelta(milliseconds=1)
D = Decimal


async def asks_again(refusals: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    """Return whether a read survives this many refusals of its rate."""
    http, asked = VenueHttp("http://there", RequestBudget(60, per_kind=60), pause_s=0.0), 0

    async def ask(*_: object) -> tuple[int, dict[str, str], bytes]:
        nonlocal asked
        asked += 1
        return 429 if asked <= refusals else 200, {}, b""

    patch.setattr(http, "ask", ask)
    return (await http.read("GET", "/", 1))[0] == 200


async def pauses(seconds: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    """Return whether a read waits as long as the venue says."""
    http = VenueHttp("http://there", RequestBudget(60, per_kind=60), pause_s=0.0)
    paused: list[float] = []

    async def ask(*_: object) -> tuple[int, dict[str, str], bytes]:
        return 200 if paused else 429, {"Retry-After": str(seconds)}, b""

    async def sleep(pause_s: float) -> None:
        paused.append(pause_s)

    patch.setattr(http, "ask", ask)
    patch.setattr("trader.live.http.asyncio", SimpleNamespace(sleep=sleep))
    await http.read("GET", "/", 1)
    return paused == [seconds]


async def lists(decimals: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    api, fraction = LighterApi("http://there"), {"min_initial_margin_fraction": 9, "maintenance_margin_fraction": 9}
    amounts = {"min_base_amount": 1, "min_quote_amount": 1, "size_decimals": decimals, "price_decimals": 1}
    detail = {"symbol": "BTC", "market_id": 1, "status": "active", **fraction, **amounts}
    answering(patch, api, lambda: {"order_book_details": [detail]})
    return "BTC" in await api.listings()


async def is_in_seconds(above: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    row = {"timestamp": 10**11 + above, "market_id": 1, "change": 1, "rate": 1, "position_size": 1}
    (payment,) = await lighter_records(patch, lambda: {"position_fundings": [row]}).fundings_since(EPOCH)
    return payment.boundary.year > 5000


def is_heard(ms: int, *_: object) -> bool:
    market, level = VenueMarket("BTC", 1), [LevelChange(D(1), D(1))]
    market.on_whole_book(BookChange(1, asks=[LevelChange(D(2), D(1))], bids=level), START)
    market.quote(START + ms * MS)
    return market.trouble is None


def keeps_rates(count: int, *_: object) -> bool:
    market = VenueMarket("BTC", 1)
    for hour in range(count):
        market.record_rate(START + hour * timedelta(hours=1), D(hour))
    return len(market.rates) == count


# --- orders and transactions of a venue -------------------------------------------------------------------------------

LISTING: Final = Listing(1, DEFAULT_MARKETS["BTC"], is_active=True)
ORDER: Final = VenueOrder(
    client_index=7, symbol="BTC", side=OrderSide.BUY, type=VenueOrderType.MARKET, quantity=D(1), price=D(100)
)
STOP: Final = msgspec.structs.replace(
    ORDER, client_index=8, side=OrderSide.SELL, type=VenueOrderType.STOP, trigger=D(90), reduce_only=True
)


async def nothing(*_: object, **more: object) -> None: ...


async def remember(_: str) -> None: ...


def state_of(index: int, *, is_final: bool, filled: int = 0) -> VenueOrderState:
    return VenueOrderState(
        client_index=index, venue_index=70 + index, symbol="BTC", filled=D(filled), is_final=is_final, status=""
    )


class LateVenue:
    """Both venues' answers about one account, in which what was sent shows at the look of this number."""

    def __init__(self, looks: int) -> None:
        self.due, self.looks = looks, 0
        self.sent: list[object] = []

    def shows(self) -> bool:
        self.looks += 1
        return self.looks >= self.due

    def hyperliquid(self, *statuses: Status | str) -> HyperliquidOrders:
        async def send(action: dict[str, Any], *_: object, **more: object) -> ActionAnswer:
            self.sent.append(action["type"])
            return ActionAnswer(True, statuses=statuses)

        async def setting(*_: object, **more: object) -> Any:
            leverage = LISTING.market.leverage_max if self.shows() else 1
            return SimpleNamespace(leverage=SimpleNamespace(type="cross", value=leverage))

        async def find(_: object) -> Any:
            return SimpleNamespace(order=None, status="") if self.shows() else None

        api: Any = SimpleNamespace(
            known={"BTC": LISTING}, coins={1: "BTC"}, listings=nothing, listing=lambda _: LISTING, info=setting
        )
        actions: Any = SimpleNamespace(account="0x", expiry=lambda: START, send=send)
        records: Any = SimpleNamespace(find=find, state_of=lambda *row: state_of(row[2], is_final=True))
        return HyperliquidOrders(api, actions, records, pause_s=0.0)

    def lighter(self, sending: Callable[[], SendAnswer], *, by_transaction: bool = False) -> LighterOrders:
        """Return the orders of an account whose transactions are answered so, and then show, or their orders do."""
        row = SimpleNamespace(client_order_index=7, order_index=77, market_index=1, filled_base_amount=D(1),
                              is_final=True, status="filled")  # fmt: skip

        async def send(*_: object, **more: object) -> Any:
            self.sent.append("transaction")
            return sending()

        async def cancel(*_: object, **more: object) -> Any:
            return "1:aa", await send()

        async def transaction(_: str) -> Transaction:
            return Transaction("aa", 2 if by_transaction and self.shows() else 1, 1, 1)

        async def one(*_: object, **more: object) -> int:
            return 1

        async def no_rows(*_: object, **more: object) -> Any:
            return SimpleNamespace(orders=[])

        async def no_orders() -> list[object]:
            return []

        signer = SimpleNamespace(account_index=1, create_orders=lambda *_, **more: Signed(14, "", "aa"))
        frames: Any = SimpleNamespace(
            signer=signer, following=0, change=nothing, learn=list, transaction=lambda _: None,
            order=lambda _: row if by_transaction or self.shows() else None,
        )  # fmt: skip
        api: Any = SimpleNamespace(
            known={"BTC": LISTING}, listings=nothing, listing=lambda _: LISTING, symbol_of=lambda _: "BTC",
            get=no_rows, answered_at=None,
        )  # fmt: skip
        transactions: Any = SimpleNamespace(next_nonce=one, send=send, cancel=cancel, find=transaction)
        records: Any = SimpleNamespace(active_orders=no_orders)
        return LighterOrders(api, frames, transactions, records, pause_s=0.0)


async def awaits_leverage(looks: int, *_: object) -> bool:
    outcome = await LateVenue(looks).hyperliquid("waitingForFill").place([ORDER], LISTING.market, remember)
    return not isinstance(outcome, Busy)


async def awaits_stop(looks: int, *_: object) -> bool:
    venue, taken = LateVenue(looks), Status(resting=Resting(77))
    orders = venue.hyperliquid(taken, taken)
    entry = msgspec.structs.replace(ORDER, reduce_only=True)  # whose leverage is not looked at
    assert isinstance(await orders.place([entry, STOP], LISTING.market, remember), Placed)
    return venue.looks == looks


async def awaits_cancel(looks: int, *_: object) -> bool:
    return isinstance(await LateVenue(looks).hyperliquid("success").cancel("BTC", 7), Placed)


TAKEN: Final = SendAnswer(True, 200)


def after_refusals(count: int, code: int, then: SendAnswer) -> Callable[[], SendAnswer]:
    answers = iter([SendAnswer(False, code)] * count)
    return lambda: next(answers, then)


async def places_after_nonces(refusals: int, *_: object) -> bool:
    orders = LateVenue(1).lighter(after_refusals(refusals, INVALID_NONCE, TAKEN))
    return isinstance(await orders.place([ORDER], LISTING.market, remember), Placed)


async def cancels_after_nonces(refusals: int, *_: object) -> bool:
    orders = LateVenue(1).lighter(after_refusals(refusals, INVALID_NONCE, SendAnswer(False, min(INACTIVE))))
    return isinstance(await orders.cancel("BTC", 7), Placed)


async def awaits_order(looks: int, *_: object) -> bool:
    outcome = await LateVenue(looks).lighter(lambda: TAKEN).place([ORDER], LISTING.market, remember)
    return isinstance(outcome, Placed)


async def awaits_end(looks: int, *_: object) -> bool:
    """The venue shows the order as open until this look."""
    venue = LateVenue(looks)
    orders = venue.lighter(lambda: SendAnswer(False, min(INACTIVE)), by_transaction=True)

    async def find(client_index: int) -> VenueOrderState | None:
        return state_of(client_index, is_final=venue.shows())

    orders.find = find  # type: ignore[method-assign]
    return isinstance(await orders.cancel("BTC", 7), Placed)


async def awaits_transaction(looks: int, *_: object) -> bool:
    venue = LateVenue(looks)
    await venue.lighter(lambda: TAKEN, by_transaction=True).cancel("BTC", 7)
    return len(venue.sent) == 1


async def awaits_answer(ms: int, patch: pytest.MonkeyPatch, _: Path) -> bool:
    pass_ms, asked, let = stop_loop(patch), asyncio.Event(), asyncio.Event()

    async def send_tx(**fields: object) -> Any:
        asked.set()
        await let.wait()
        return SimpleNamespace(code=200, message="")

    class NoError(Exception): ...

    signer = SimpleNamespace(account_index=1, sender=SimpleNamespace(send_tx=send_tx), status_error=NoError)
    frames: Any = SimpleNamespace(signer=signer)
    api: Any = SimpleNamespace(budget=RequestBudget(60, per_kind=60), take=nothing, has_quota=False)
    sending = asyncio.create_task(Transactions(api, frames).send(Signed(14, "", "aa")))
    await asked.wait()
    pass_ms(ms)
    await turns(3)
    let.set()
    return (await sending).is_taken is True


async def proves(failures: int, *_: object) -> bool:
    """The SDK does not tell a failed request from another key."""
    left = iter([*["mismatch"] * failures, None])

    async def account(_: int) -> Any:
        return SimpleNamespace(account_trading_mode=0)

    async def mismatch() -> str | None:
        return next(left)

    async def keys(*_: object, **more: object) -> Any:
        return SimpleNamespace(api_keys=[SimpleNamespace(api_key_index=4)])

    api: Any = SimpleNamespace(account=account, take=nothing, get=keys)
    signer: Any = SimpleNamespace(account_index=1, key_index=4, mismatch=mismatch)
    with suppress(StartError):
        await prove_access(api, signer)
        return True
    return False


# --- outbox and reconciliation ----------------------------------------------------------------------------------------


class LiveBench:
    """An outbox and a reconciler, whose ledger and venue are what the test says."""

    def __init__(self, *orders: SentOrder) -> None:
        self.clock = ManualClock(START)
        self.placed, self.booked, self.searches, self.reads = 0, 0, 0, 0
        self.shown_at_read, self.balance = 1, D(0)
        market = SimpleNamespace(quote=lambda _: None, marks={})
        account = SimpleNamespace(cash=D(100), positions={}, run=make_account("a").run)
        ledger: Any = SimpleNamespace(
            account_id="a", account=account, held={}, open_orders={each.client_index: each for each in orders},
            is_funding_awaited=False, refresh=nothing, require_term=lambda: 1, record_attempt=nothing,
            book_funding_before=nothing, commit=self.commit, unbooked=self.unbooked,
        )  # fmt: skip
        self.ledger = ledger
        self.orders = SimpleNamespace(place=self.place, pause=nothing, find_all=self.find_all)
        self.records = SimpleNamespace(
            fills_of=self.fills_of, fills_since=self.fills_since, report=self.report, answered_at=None
        )
        venue = SimpleNamespace(
            orders=self.orders, records=self.records, feed=SimpleNamespace(listener=None, following=0), expires_s=60
        )
        context: Any = SimpleNamespace(
            clock=self.clock, market=market, rules=SimpleNamespace(markets={"BTC": LISTING.market}), ladder=None,
            venue=SimpleNamespace(account=self.account_at(venue)), drift=SimpleNamespace(record=nothing),
            events=SimpleNamespace(publish=lambda _: None),
        )  # fmt: skip
        self.outbox = Outbox(context, ledger, "1", lambda: None)
        protective: Any = SimpleNamespace(standing=dict, wanted=tuple, sync=nothing)
        self.reconciler = Reconciler(context, ledger, self.outbox, protective, START)

    def account_at(self, venue: object) -> Callable[[str], Coroutine[Any, Any, object]]:
        async def account(_: str) -> object:
            return venue

        return account

    async def place(self, *_: object) -> SendOutcome:
        self.placed += 1
        return Busy("later")

    async def commit(self, _: object) -> Any:
        self.booked += 1
        (sent,) = self.ledger.open_orders.values()
        return SimpleNamespace(sent=[sent], answers=[], fills=())

    async def find_all(self, indexes: Iterable[int]) -> dict[int, VenueOrderState]:
        return {index: state_of(index, is_final=True, filled=1) for index in indexes}

    async def fills_of(self, *_: object) -> list[VenueFill]:
        self.reads += 1
        fill = VenueFill(
            trade_id=1, client_index=7, kind="", symbol="BTC", side=OrderSide.BUY, quantity=D(1), price=D(100),
            fee_rate=D(0), maker=False, at=START,
        )  # fmt: skip
        return [fill] if self.reads >= self.shown_at_read else []

    async def unbooked(self, fills: list[VenueFill]) -> list[VenueFill]:
        return fills

    async def fills_since(self, _: object) -> list[VenueFill]:
        self.searches += 1
        return []

    async def report(self) -> VenueReport:
        return VenueReport(positions=self.ledger.held, protective_orders={}, others=frozenset(), balance=self.balance)

    async def agrees(self, gap: Decimal) -> bool:
        """Return whether the books agree with a venue that has so much more money."""
        await self.outbox.refresh()
        positions = self.ledger.account.positions.values()
        self.balance = self.ledger.account.cash - sum(each.entry_notional for each in positions) + gap
        await self.reconciler.compare()
        return self.reconciler.agrees


def sent(status: SentStatus, **more: Any) -> SentOrder:
    order = msgspec.structs.replace(ORDER, **more)
    return SentOrder(
        account_id="a", run_id=uuid4(), order=order, cause=Cause.ORDER, status=status, expires_at=START,
        created_at=START, changed_at=START, venue_index=77 if status is SentStatus.STANDING else None,
    )  # fmt: skip


async def places_again(ms: int, *_: object) -> bool:
    bench = LiveBench(sent(SentStatus.SENT, reduce_only=True))
    bench.ledger.account.positions["BTC"] = object()
    await bench.outbox.refresh()
    await bench.clock.advance(ms * MS)
    await bench.outbox.resolve()
    return bench.placed == 1


async def reads_trades(reads: int, *_: object) -> bool:
    bench = LiveBench(sent(SentStatus.STANDING, type=VenueOrderType.LIMIT))
    bench.shown_at_read = reads
    await bench.outbox.refresh()
    await bench.outbox.poll()
    assert (bench.outbox.trouble is None) == bool(bench.booked)
    return bench.booked == 1


async def stays_young(ms: int, *_: object) -> bool:
    bench = LiveBench(sent(SentStatus.STANDING, type=VenueOrderType.LIMIT))
    await bench.outbox.refresh()
    await bench.outbox.poll()
    await bench.clock.advance(ms * MS)
    assert bench.outbox.is_young("BTC") == bench.outbox.is_young(None)
    return bench.outbox.is_young("BTC")


def agrees_about(cents: int) -> Coroutine[Any, Any, bool]:
    return LiveBench().agrees(D(cents) / 100)


async def awaits_funding(cents: int, *_: object) -> bool:
    """A position of 1,000 USD stands over an hour whose payment is not shown yet."""
    bench = LiveBench()
    bench.ledger.account.positions["BTC"] = SimpleNamespace(side=Side.LONG, entry_notional=D(1000))
    bench.ledger.held, bench.ledger.is_funding_awaited = {"BTC": D(1)}, True
    return await bench.agrees(D(cents) / 100)


async def searches_gap(times: int, *_: object) -> bool:
    """A gap that is tolerated: its cause is sought this many times."""
    bench = LiveBench()
    for _each in range(times):
        assert await bench.agrees(D("0.01"))
    return bench.searches == times


# --- streams ----------------------------------------------------------------------------------------------------------


async def receives_message(size: int, *_: object) -> bool:
    async def handle(request: web.Request) -> web.WebSocketResponse:
        response = web.WebSocketResponse()
        await response.prepare(request)
        await response.send_str(f'"{"x" * (size - 2)}"')
        await response.receive()
        return response

    app = web.Application()
    app.router.add_get("/stream", handle)
    async with TestServer(app) as server:
        http = VenueHttp(str(server.make_url("")).rstrip("/"), RequestBudget(60, per_kind=60), pause_s=0.0)
        try:
            async with connect(http, "/stream", {}) as socket:
                return len(await socket.receive(60.0, msgspec.json.Decoder(str)) or "") == size - 2
        except MarketDataError:
            return False
        finally:
            await http.close()


class SilentStream(MarketStream):
    async def subscribe(self, market_id: int, *, to_book: bool, again: bool = False) -> None: ...

    async def receive(self, seconds: float) -> bool:
        return False


async def may_be_silent(ms: int, *_: object) -> bool:
    clock = ManualClock(START)
    stream = SilentStream(cast("Socket", None), [], clock)
    await clock.advance(ms * MS)
    with suppress(MarketDataError):
        await stream.receive_for(0.0)
        return True
    return False


LIMITS: Final[dict[str, tuple[int, Accepts]]] = {
    "refusals of a read that is repeated": (3, asks_again),
    "seconds before it is repeated": (3, pauses),
    "decimals of Lighter": (18, lists),
    "times of Lighter in seconds": (0, is_in_seconds),
    "how long a book may be silent": (10_000, is_heard),
    "rates of a market": (20_000, keeps_rates),
    "Hyperliquid: looks at a leverage that was set": (20, awaits_leverage),
    "Hyperliquid: looks at a stop that was taken": (20, awaits_stop),
    "Hyperliquid: looks at an order that was canceled": (20, awaits_cancel),
    "Lighter: nonces that others use before an order": (2, places_after_nonces),
    "Lighter: nonces that others use before a cancellation": (2, cancels_after_nonces),
    "Lighter: looks at an order that was taken": (10, awaits_order),
    "Lighter: looks at an order that was canceled": (10, awaits_end),
    "Lighter: looks at a cancellation": (10, awaits_transaction),
    "Lighter: how long an answer is awaited": (9999, awaits_answer),
    "Lighter: proofs of a key that fail": (2, proves),
    "outbox: how long a close is sent again": (299_999, places_again),
    "outbox: reads until all trades are shown": (10, reads_trades),
    "outbox: how long a report may be older than a change": (11_999, stays_young),
    "reconciler: cents of a balance": (10, lambda n, *_: agrees_about(n)),
    "reconciler: cents of a balance with funding awaited": (510, awaits_funding),
    "reconciler: searches for the cause of a small gap": (5, searches_gap),
    "stream: bytes of a message": (8 * 1024 * 1024 - 1, receives_message),
    "stream: how long it may be silent": (20_000, may_be_silent),
}


@pytest.mark.parametrize("name", LIMITS)
async def test_a_limit_of_live_trading_accepts_as_much_as_it_says_and_no_more(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert await outcomes(*LIMITS[name], monkeypatch, tmp_path) == [True, False]
