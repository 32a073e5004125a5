"""A running exchange over a real database, whose market the test moves."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from decimal import Decimal

import pytest
from support.manual_clock import ManualClock
from support.scripted import START, ScriptedSource, make_settings, make_tick
from support.waiting import until

from trader.core.clock import Clock
from trader.core.errors import Unavailable
from trader.core.events import Event, EventBus
from trader.database.pool import Connection, Database
from trader.exchange.accounts import Accounts
from trader.exchange.domain.account import Account
from trader.exchange.domain.ledger import Posting
from trader.exchange.domain.orders import Order, OrderAnswer, OrderSide
from trader.exchange.halts import Halts
from trader.exchange.ledger_writer import LedgerWriter
from trader.exchange.paper import PaperExchange
from trader.exchange.sql.accounts import select_accounts
from trader.exchange.sql.ledger import write_postings
from trader.market.feed import MarketFeed
from trader.portfolio.audit import audit
from trader.settings.settings import Settings


def make_exchange(
    database: Database,
    market: MarketFeed,
    clock: Clock,
    settings: Settings,
    events: EventBus | None = None,
    kind: type[PaperExchange] = PaperExchange,
) -> PaperExchange:
    """A paper exchange that shares its accounts and halts with no other part."""
    bus = events or EventBus()
    accounts, halts = Accounts(database, LedgerWriter(database), bus), Halts(database, clock, bus)
    return kind(database, market, clock, settings, accounts, halts)


def break_ledger_writer(
    patch: pytest.MonkeyPatch, account_id: str | None = None, error: Exception | None = None
) -> list[list[str]]:
    """Make the writing of postings, of all accounts or one, fail with an error; by default, with a bug's.

    Return the accounts of each statement to come.
    """
    statements: list[list[str]] = []

    async def broken(conn: Connection, postings: Sequence[Posting], term: int) -> set[str]:
        statements.append([posting.account.id for posting in postings])
        if account_id is None or account_id in statements[-1]:
            raise error or KeyError("no such thing")
        return await write_postings(conn, postings, term)

    patch.setattr("trader.exchange.ledger_writer.write_postings", broken)
    return statements


async def refuse_posting(writer: LedgerWriter, posting: object) -> None:
    """Take the place of `LedgerWriter.write` while the server is away."""
    raise Unavailable("the server is gone")


class Venue:
    """A running exchange whose market the test moves."""

    def __init__(self, database: Database, source: ScriptedSource, clock: ManualClock, **settings: str) -> None:
        self.database = database
        self.source = source
        self.clock = clock
        self.events: list[Event] = []
        self.bus = bus = EventBus()
        bus.subscribe(self.events.append)
        self.market = MarketFeed(source, clock)
        self.settings = make_settings(**settings)
        self.halts = Halts(database, clock, bus)
        self.accounts = Accounts(database, LedgerWriter(database), bus)
        self.exchange = PaperExchange(database, self.market, clock, self.settings, self.accounts, self.halts)

    async def see(self, mids: Mapping[str, str], *, after_s: float = 1, size: str = "1") -> None:
        """Move time and the markets."""
        tick = make_tick(self.clock.now() + timedelta(seconds=after_s), mids, size=size)
        self.source.script.append(tick)
        await self.clock.advance(timedelta(seconds=after_s))
        await self.market.take(tick, self.exchange.on_tick)

    async def doubt(self, patch: pytest.MonkeyPatch, *account_ids: str) -> None:
        """Let the database not confirm an order of each account."""
        with patch.context() as patched:
            patched.setattr(LedgerWriter, "write", refuse_posting)
            for account_id in account_ids:
                with pytest.raises(Unavailable):
                    await self.buy("0.01", leverage=Decimal(5), account_id=account_id)

    async def recovered(self) -> None:
        """Wait until no account is in doubt."""
        await until(lambda: not self.accounts.in_doubt)

    async def buy(self, quantity: str, **more: object) -> OrderAnswer:
        return await self._place(OrderSide.BUY, quantity, more)

    async def sell(self, quantity: str, **more: object) -> OrderAnswer:
        return await self._place(OrderSide.SELL, quantity, more)

    async def _place(self, side: OrderSide, quantity: str, more: dict[str, object]) -> OrderAnswer:
        fields = {"account_id": "a", "symbol": "BTC", **more}
        order = Order(side=side, quantity=Decimal(quantity), **fields)  # type: ignore[arg-type]
        return (await self.exchange.place_orders(order))[0]

    async def pair(self, first: Mapping[str, object], second: Mapping[str, object]) -> Sequence[OrderAnswer]:
        """Place a pair of orders, each given by what differs from buying 0.01 BTC for the account a."""
        usual = {"account_id": "a", "symbol": "BTC", "side": OrderSide.BUY, "quantity": Decimal("0.01")}
        return await self.exchange.place_orders(*(Order(**{**usual, **each}) for each in (first, second)))  # type: ignore[arg-type]

    async def rows(self) -> dict[str, Account]:
        async with self.database.connection() as conn:
            return await select_accounts(conn)


@asynccontextmanager
async def running(
    database: Database, source: ScriptedSource | None = None, clock: ManualClock | None = None, **settings: str
) -> AsyncIterator[Venue]:
    """A leading exchange; by default, on a market and at a time of its own."""
    venue = Venue(database, source or ScriptedSource(), clock or ManualClock(START), **settings)
    await venue.exchange.lead()
    try:
        yield venue
    finally:
        await venue.exchange.resign()


async def agree_with_rows(venue: Venue) -> None:
    """Assert that memory equals the rows, and that the rows balance."""
    rows = await venue.rows()
    assert {account_id: without_depth(account) for account_id, account in venue.exchange.accounts.items()} == {
        account_id: without_depth(account) for account_id, account in rows.items()
    }
    assert (await audit(venue.database)).problems == []


def without_depth(account: Account) -> dict[str, object]:
    """Return an account without the depth of the books, which it shares with others."""
    return {name: getattr(account, name) for name in account.__struct_fields__ if name != "taken"} | {
        "positions": dict(account.positions)
    }


ORDERS_AND_LEDGER = (
    "orders ORDER BY id", "fills ORDER BY account_id, sequence", "funding_payments ORDER BY account_id, sequence",
    "limit_orders ORDER BY id", "insurance_payments ORDER BY account_id, sequence", "runs ORDER BY id",
)  # fmt: skip


async def dump(database: Database) -> list[list[tuple[object, ...]]]:
    async with database.connection() as conn:
        return [[tuple(r) for r in await conn.fetch(f"SELECT * FROM {table}")] for table in ORDERS_AND_LEDGER]
