"""The reference of `benchmarks.wire`: a dashboard's procedures, each request read from PostgreSQL."""

from contextlib import AsyncExitStack
from decimal import Decimal
from typing import Any, Final

import msgspec
from aiohttp import web

from trader.api.rpc import REGISTRY, load_procedures
from trader.api.schemas.common import ENCODER, Checked
from trader.api.schemas.positions import CryptoPrice, GetCryptoPricesOutput, positions_of
from trader.clock import SystemClock
from trader.domain.exchange.account import Account
from trader.domain.market.markets import MARKETS
from trader.errors import NotFound
from trader.services.portfolio.analytics import Analytics
from trader.services.portfolio.snapshots import Portfolio
from trader.services.portfolio.trades import TradingRecords
from trader.settings import Settings
from trader.store.agents.invocations import select_models
from trader.store.database.pool import Database
from trader.store.exchange.accounts import select_accounts, select_last_marks

PROCEDURES: Final = ("trading.getTrades", "variants.getVariantHistory", "analytics.getLeaderboard")


class Books:
    """What readers ask of the exchange; accounts as of the start, since the models do not trade here."""

    def __init__(self, accounts: dict[str, Account], marks: dict[str, Decimal]) -> None:
        self.accounts = accounts
        self.markets = MARKETS
        self._marks = marks

    def account(self, account_id: str) -> Account:
        if account_id not in self.accounts:
            raise NotFound(f"there is no account {account_id}")
        return self.accounts[account_id]

    def marks(self) -> dict[str, Decimal]:
        return self._marks


class Context(msgspec.Struct):
    clock: Any
    trading: Any
    portfolio: Any
    analytics: Any


async def make_app(dsn: str, stack: AsyncExitStack) -> web.Application:
    settings = Settings.load({}, None, demo=True)
    database = await Database.connect(dsn)
    stack.push_async_callback(database.close)
    async with database.connection() as conn:
        exchange: Any = Books(await select_accounts(conn), dict(await select_last_marks(conn)))
    clock = SystemClock()
    context = Context(
        clock,
        TradingRecords(database, exchange),
        Portfolio(database, exchange, clock, settings),
        Analytics(database, exchange, clock),
    )
    load_procedures()
    app = web.Application()

    def add(name: str) -> None:
        declared = REGISTRY.procedures[name]

        async def answer(request: web.Request) -> web.Response:
            asked = declared.input_decoder.decode(await request.read())
            untyped: Any = context
            made = await declared.handler(untyped, asked)
            body = made.body if isinstance(made, Checked) else ENCODER.encode(made)
            return web.Response(body=body, content_type="application/json")

        app.router.add_post(f"/api/rpc/{name}", answer)

    async def positions(_: web.Request) -> web.Response:
        async with database.connection() as conn:
            accounts, marks = await select_accounts(conn), await select_last_marks(conn)
            models = {model.id: model for model in await select_models(conn)}
        body = ENCODER.encode(positions_of(accounts.values(), marks, MARKETS, models))
        return web.Response(body=body, content_type="application/json")

    async def prices(_: web.Request) -> web.Response:
        async with database.connection() as conn:
            marks = await select_last_marks(conn)
        found = [CryptoPrice(symbol=symbol, price=mark) for symbol, mark in marks.items()]
        return web.Response(body=ENCODER.encode(GetCryptoPricesOutput(prices=found)), content_type="application/json")

    for name in PROCEDURES:
        add(name)
    app.router.add_post("/api/rpc/trading.getPositions", positions)
    app.router.add_post("/api/rpc/trading.getCryptoPrices", prices)
    return app
