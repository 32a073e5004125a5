"""A live exchange over a real database and the fake venue, whose markets and faults the test controls.

Only signing is replaced: `PlainSigner` writes the transactions that the venue's SDK would sign and sends them over real
HTTP, so that this runs where the SDK is not installed.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, Final

import aiohttp
import msgspec
import orjson
import pytest
from support.fake_exchange import CANCEL, CANCEL_ALL, CREATE, GROUP, FakeExchange
from support.fake_hyperliquid import ADDRESS, FakeHyperliquid, PlainAgent
from support.fake_ledger import ACCOUNT, KEY_INDEX, PLAIN_KEY, hash_of, public_key_of
from support.fake_venue import IDS
from support.manual_clock import ManualClock
from support.scripted import START, ScriptedSource, make_book
from support.venue import without_depth
from support.waiting import turns

from trader.agents.domain.models import Model
from trader.agents.sql.models import update_venue_account, upsert_model
from trader.core.events import Event, EventBus, MarketChecked
from trader.core.money import round_to
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.exchange.accounts import Accounts
from trader.exchange.domain.account import Account
from trader.exchange.domain.halts import HaltCause, Verb
from trader.exchange.domain.orders import Order, OrderAnswer, OrderSide
from trader.exchange.domain.venue_orders import VenueOrder
from trader.exchange.halts import Halts
from trader.exchange.ledger_writer import LedgerWriter
from trader.exchange.sql.accounts import select_accounts
from trader.live.budget import RequestBudget
from trader.live.domain.orders import SendOutcome, VenueOrderState
from trader.live.drift import DriftRecorder
from trader.live.exchange import LiveExchange
from trader.live.hyperliquid.account import HyperliquidAccounts
from trader.live.hyperliquid.api import HyperliquidApi
from trader.live.ladder import Ladder, read_ladder
from trader.live.ledger import LiveContext
from trader.live.lighter.account import LighterAccount, LighterAccounts
from trader.live.lighter.api import LighterApi
from trader.live.lighter.signer import OrderTerms, Signed
from trader.market.domain.markets import MARKETS as RULES
from trader.market.domain.markets import Market, Quote, Tick
from trader.market.feed import MarketFeed
from trader.operations.loss_limits import LossLimits
from trader.operations.operator_commands import OperatorCommands
from trader.portfolio.audit import audit
from trader.settings.forms import Secret
from trader.settings.settings import Settings

SYMBOLS: Final = ("BTC", "ETH")
CENT: Final = Decimal("0.01")
LATER: Final = datetime(9999, 1, 1, tzinfo=UTC)
MARKETS: Final = {
    symbol: msgspec.structs.replace(RULES[symbol], tick=Decimal(tick), lot=Decimal("0.0001"))
    for symbol, tick in (("BTC", "0.1"), ("ETH", "0.01"))
}
"""The fake venue's markets."""
SYNCHRONIZATIONS_MAX: Final = 5
"""How many synchronizations it takes at most until the venue shows what has happened before."""


LADDER = """
[shadow]
days = 1
fills = 1
drawdown_percent = 20

[testnet]
days = 1
fills = 1
drawdown_percent = 10
drift_p95_bps = 20
caps = { order = 100000, account = 200000, day = 300000, total = 250000 }

[live]
days = 1
fills = 1
drawdown_percent = 5
drift_p95_bps = 20
caps = { order = 10000, account = 20000, day = 30000, total = 25000, approve_above = 9500 }
"""


class PlainRefusal(Exception):
    """An answer other than 200, as raised by the SDK."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(status, body)
        self.status, self.body = status, body


class PlainSigner:
    """Writes and sends transactions as the SDK does, but without a signature."""

    def __init__(self, base_url: str, account_index: int, key_index: int, key: Secret) -> None:
        self._public = public_key_of(key.reveal())
        self.account_index, self.key_index = account_index, key_index
        self.sender: Any = self
        self.status_error: type[Exception] = PlainRefusal
        self._url = base_url + "/api/v1/sendTx"
        self._http = aiohttp.ClientSession()

    def check(self) -> None:
        pass

    async def mismatch(self) -> str | None:
        query = {"account_index": str(self.account_index), "api_key_index": str(self.key_index)}
        url = self._url.replace("sendTx", "apikeys")
        try:
            async with self._http.get(url, params=query) as answer:
                (key,) = (await answer.json())["api_keys"]
        except (aiohttp.ClientError, ValueError, LookupError) as error:
            return f"failed to get keys: {error}"
        return None if key["public_key"] == self._public.removeprefix("0x") else "another key"

    def create_orders(self, orders: Sequence[OrderTerms], *, nonce: int) -> Signed:
        kinds = {"limit": 0, "market": 1, "stop": 2, "target": 4}
        parts: list[dict[str, Any]] = [
            {
                "MarketIndex": order.market_id, "ClientOrderIndex": order.client_index, "BaseAmount": order.lots,
                "Price": order.price_ticks, "IsAsk": int(order.is_ask), "Type": kinds[order.type],
                "ReduceOnly": int(order.reduce_only), "TriggerPrice": order.trigger_ticks,
                "TimeInForce": 2 if order.post_only else 1,
            }
            for order in orders
        ]  # fmt: skip
        if len(parts) == 1:
            return self._signed(CREATE, parts[0], nonce)
        return self._signed(GROUP, {"GroupingType": {2: 1, 3: 3}[len(parts)], "Orders": parts}, nonce)

    def cancel_order(self, market_id: int, index: int, *, nonce: int) -> Signed:
        return self._signed(CANCEL, {"MarketIndex": market_id, "Index": index}, nonce)

    def cancel_all(self, kind: int, at_ms: int, *, nonce: int) -> Signed:
        return self._signed(CANCEL_ALL, {"TimeInForce": kind, "Time": at_ms}, nonce)

    def authorization(self) -> str:
        return f"1:{self.account_index}:{self.key_index}:token"

    async def send_tx(self, *, tx_type: int, tx_info: str) -> SimpleNamespace:
        async with self._http.post(self._url, data={"tx_type": str(tx_type), "tx_info": tx_info}) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise PlainRefusal(answer.status, text)
            told = orjson.loads(text)
            return SimpleNamespace(**{"code": None, "message": None, **told})

    async def close(self) -> None:
        await self._http.close()

    def _signed(self, kind: int, fields: dict[str, Any], nonce: int) -> Signed:
        whole = {"AccountIndex": self.account_index, "ApiKeyIndex": self.key_index, "Nonce": nonce, **fields}
        text = orjson.dumps(whole).decode()
        return Signed(kind, text, hash_of(text))


class Sender:
    """Places orders at a `LighterAccount`, remembering their attempts."""

    def __init__(self, account: LighterAccount, markets: Mapping[str, Market]) -> None:
        self.account, self.markets = account, markets
        self.attempts: dict[int, str] = {}

    async def place(self, *orders: VenueOrder) -> SendOutcome:
        first = orders[0]

        async def remember(attempt: str) -> None:
            self.attempts[first.client_index] = attempt

        market = self.markets.get(first.symbol, self.markets["BTC"])
        return await self.account.orders.place(orders, market, remember)

    async def resolve(self, order: VenueOrder) -> SendOutcome:
        return await self.account.orders.resolve(order, self.attempts[order.client_index], LATER)

    async def cancel(self, state: VenueOrderState) -> SendOutcome:
        return await self.account.orders.cancel(state.symbol, state.client_index)


def live_settings(url: str, *, account: str = str(ACCOUNT), **more: str) -> Settings:
    given = {
        "TRADING_MODE": "live", "VENUE_URL": url, "VENUE_ACCOUNT_INDEX": account, "LIVE_CONFIRM": account,
        "VENUE_API_KEY": PLAIN_KEY, "VENUE_API_KEY_INDEX": str(KEY_INDEX), "MARKETS": ",".join(SYMBOLS),
        "OPENAI_BASE_URL": "http://127.0.0.1:9", "LIVE_REHEARSAL": "override:the tests", **more,
    }  # fmt: skip
    return Settings.load(given, None, demo=False)


class Bench:
    """A service that trades live, its database and its venue. It can be killed and started again."""

    def __init__(self, database: Database, venue: FakeExchange, clock: ManualClock, source: ScriptedSource) -> None:
        self.database, self.venue, self.clock, self.source = database, venue, clock, source
        self.events: list[Event] = []
        venue.refuses_streams = True  # a test that follows the accounts calls `follow`
        self.budget: RequestBudget | None = None
        self.funding_rate: str | None = None
        self.market = MarketFeed(source, clock)
        self.venue_accounts: LighterAccounts | HyperliquidAccounts
        self.writer: LedgerWriter
        self.bus: EventBus
        self.exchange: LiveExchange
        self.halts: Halts
        self.ladder: Ladder | None = None

    async def start(self, **settings: str) -> None:
        self.bus = EventBus()
        self.bus.subscribe(self.events.append)
        if isinstance(self.venue, FakeHyperliquid):
            chosen = live_settings(self.venue.url, account=ADDRESS, VENUE="hyperliquid", **settings)
            self.venue_accounts = HyperliquidAccounts(
                chosen, self.budget, agent=PlainAgent, pause_s=0.001, clock=self.clock
            )
        else:
            chosen = live_settings(self.venue.url, **settings)
            self.venue_accounts = LighterAccounts(chosen, self.budget, make_signer=PlainSigner, pause_s=0.001)
        self.halts = Halts(self.database, self.clock, self.bus)
        await self.halts.load()
        self.ladder = self._ladder(chosen)
        self.writer = LedgerWriter(self.database)
        context = LiveContext(
            database=self.database, market=self.market, clock=self.clock, settings=chosen,
            accounts=Accounts(self.database, self.writer, self.bus), events=self.bus, venue=self.venue_accounts,
            halts=self.halts, drift=DriftRecorder(self.database), ladder=self.ladder,
        )  # fmt: skip
        self.exchange = LiveExchange(context)
        await self.exchange.lead()

    def _ladder(self, settings: Settings) -> Ladder | None:
        if settings.ladder_file is None:
            return None
        file = read_ladder(settings.ladder_file, self.source.markets.values())
        return Ladder(self.database, self.clock, self.halts, self.bus, file, settings)

    async def kill(self) -> None:
        """End as in a power cut: nothing more is sent or written, whatever is pending."""
        self.exchange.suspend()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("trader.live.exchange.FINISH_S", 0.001)
            await self.stop()

    async def cycle(self, seconds: float) -> None:
        """Let time pass, as the price tracker does once a cycle, and wait until each account has synchronized."""
        await self.clock.advance(timedelta(seconds=seconds))
        await self.tell()
        self.bus.publish(MarketChecked(self.clock.now()))
        await self.rest()

    async def rest(self) -> None:
        """Wait until no account synchronizes."""
        await turns(20)
        for account_id in list(self.exchange.accounts):
            async with self.exchange.live_account(account_id).lock:
                pass

    async def stop(self) -> None:
        await self.exchange.resign()
        await self.venue_accounts.close()

    async def follow(self) -> None:
        """Wait until each account is followed on the venue's streams, where it has some."""
        if isinstance(self.venue, FakeHyperliquid):
            return
        self.venue.refuses_streams = False
        while not all([(await self.venue_accounts.account(index)).feed.following for index in self.traded]):
            await asyncio.sleep(0.01)

    @property
    def traded(self) -> list[str]:
        """The venue's accounts that are traded."""
        names = list(self.exchange.accounts)
        return [self.exchange.live_account(name).account_index for name in names]

    async def synchronize(self) -> None:
        """Synchronize every account until the venue shows all. Raise the errors of `LiveAccount.synchronize`."""
        for _ in range(SYNCHRONIZATIONS_MAX):
            is_late = self.venue.shows_late
            for account_id in list(self.exchange.accounts):
                await self.exchange.live_account(account_id).synchronize()
            if not is_late:
                return

    async def reconcile(self) -> None:
        """Synchronize every account, and assert that books, rows and venue agree."""
        await self.synchronize()
        await self.agree()

    async def see(self, mids: Mapping[str, str], *, after_s: float = 1) -> None:
        """Move time and the markets, here and at the venue, which pays funding when an hour passes."""
        now = self.clock.now()
        hour = (now + timedelta(seconds=after_s)).replace(minute=0, second=0, microsecond=0)
        for symbol in SYMBOLS:
            if self.funding_rate is not None and now < hour:
                self.venue.pay_funding(symbol, hour, self.funding_rate)
        for symbol, mid in mids.items():
            self.venue.reach(symbol, mid)
        await self.clock.advance(timedelta(seconds=after_s))
        await self.tell()

    async def move(self, mids: Mapping[str, str], *, after_s: float = 1) -> None:
        """Move time and the markets, and let every account book what happened at the venue."""
        await self.see(mids, after_s=after_s)
        await self.synchronize()

    async def tell(self) -> None:
        """Send the venue's current prices to the service."""
        now = self.clock.now()
        quotes = {
            symbol: Quote.of(make_book(symbol, self.venue.markets[symbol].mid, now, size="50")) for symbol in SYMBOLS
        }
        tick = Tick(now, quotes)
        self.source.script.append(tick)
        await self.market.take(tick, self.exchange.on_tick)

    async def buy(self, quantity: str, **more: Any) -> OrderAnswer:
        return await self.place(OrderSide.BUY, quantity, **more)

    async def sell(self, quantity: str, **more: Any) -> OrderAnswer:
        return await self.place(OrderSide.SELL, quantity, **more)

    async def place(self, side: OrderSide, quantity: str, **more: Any) -> OrderAnswer:
        fields = {"account_id": "apex", "symbol": "BTC", **more}
        return (await self.exchange.place_orders(Order(side=side, quantity=Decimal(quantity), **fields)))[0]

    @asynccontextmanager
    async def flattening(self) -> AsyncIterator[OperatorCommands]:
        """Give the command to flatten everything, which the block lets the service carry out."""
        limits = LossLimits(self.database, self.exchange, self.halts, live_settings(self.venue.url))
        operations = OperatorCommands(self.database, self.exchange, self.halts, limits)
        operations.start()
        await self.halts.halt(None, HaltCause.OPERATOR, "enough", "somebody", Verb.FLATTEN)
        yield operations
        await operations.close()

    async def close_reasons(self) -> list[str]:
        """Return why the trades were closed, in their order."""
        async with self.database.connection() as conn:
            rows = await conn.fetch("SELECT close_reason FROM orders WHERE status = 'CLOSED' ORDER BY closed_at, id")
        return [row["close_reason"] for row in rows]

    def account(self, account_id: str = "apex") -> Account:
        return self.exchange.accounts[account_id]

    def lacks_protection(
        self, account_id: str = "apex", index: int = ACCOUNT
    ) -> set[tuple[int, str, Decimal, Decimal]]:
        """Return by which orders the venue differs from the exit plans, besides those of an entry that still fills."""
        wanted, ledger = wanted_protection(self.account(account_id), self.exchange.markets), self.venue.ledgers[index]
        standing = [order for order in ledger.orders.values() if order.status == "pending"]
        terms = [(order.market_id, order.type, order.trigger, order.quantity) for order in standing]
        spare = {each for each, order in zip(terms, standing, strict=True) if order.parent and order.parent.is_active}
        doubled = {each for each in terms if terms.count(each) > 1}
        return wanted ^ set(terms) - (spare - wanted) | doubled

    async def agree(self, account_id: str = "apex", index: int = ACCOUNT, within: Decimal = CENT) -> None:
        """Assert that books, rows and venue agree, the balance `within` an amount, and that the books balance."""
        account, ledger = self.account(account_id), self.venue.ledgers[index]
        held = {
            IDS[symbol]: position.side.direction * position.quantity for symbol, position in account.positions.items()
        }
        assert held == ledger.positions()
        assert self.lacks_protection(account_id, index) == set()
        resting = {order.limit_price: order.remaining for order in account.resting}
        for position in account.positions.values():
            resting |= {target.price: target.quantity for target in position.exit_plan.targets}
        assert resting == {
            order.price: order.quantity - order.filled for order in ledger.orders.values() if order.status == "open"
        }
        paid = sum(
            (position.side.direction * position.entry_notional for position in account.positions.values()), Decimal(0)
        )
        theirs = ledger.collateral - sum((cost for _, cost in ledger.held.values()), Decimal(0))
        assert abs(account.cash - paid - theirs) < within, (account.cash - paid, theirs)
        async with self.database.connection() as conn:
            rows = (await select_accounts(conn))[account_id]
            unknown = await conn.fetchval("SELECT count(*) FROM venue_orders WHERE status = 'SENT'")
        assert without_depth(rows) == without_depth(account)
        assert unknown == 0
        assert (await audit(self.database)).problems == []
        assert dict(self.exchange.troubles) == {}


def wanted_protection(account: Account, markets: Mapping[str, Market]) -> set[tuple[int, str, Decimal, Decimal]]:
    """Return the protective orders that the exit plans require: market, kind, trigger and quantity."""
    return {
        (IDS[symbol], kind, round_to(price, markets[symbol].tick_at(price)), position.quantity)
        for symbol, position in account.positions.items()
        for kind, price in (("stop-loss", position.exit_plan.stop), ("take-profit", position.exit_plan.target))
        if price is not None and position.closing is None
    }


async def add_model(
    database: Database, model_id: str, index: int | str | None = None, *, active: bool = True,
    key_variable: str | None = None,
) -> Model:  # fmt: skip
    model = Model(
        id=model_id, name=model_id, variant=VariantId.APEX, provider="rules", router_model_name="rules/apex",
        created_at=START, active=active,
    )  # fmt: skip
    async with database.transaction() as conn:
        await upsert_model(conn, model)
        await update_venue_account(conn, model_id, None if index is None else str(index), key_variable)
    return model


@asynccontextmanager
async def prepared(database: Database, kind: type[FakeExchange] = FakeExchange) -> AsyncIterator[Bench]:
    """Everything but a running service: `bench.start()` starts it."""
    clock, source = ManualClock(START), ScriptedSource()
    venue = kind(clock.now)
    await venue.start()
    api = HyperliquidApi(venue.url) if kind is FakeHyperliquid else LighterApi(venue.url)
    listings = await api.listings()
    await api.close()
    source.markets = {symbol: listings[symbol].market for symbol in SYMBOLS}
    try:
        yield Bench(database, venue, clock, source)
    finally:
        await venue.stop()


@asynccontextmanager
async def trading(database: Database, kind: type[FakeExchange] = FakeExchange) -> AsyncIterator[Bench]:
    """A service that trades one model, `apex`, on the venue's first account, with prices."""
    async with prepared(database, kind) as bench:
        await add_model(database, "apex")
        await bench.start()
        await bench.tell()
        try:
            yield bench
        finally:
            await bench.stop()
