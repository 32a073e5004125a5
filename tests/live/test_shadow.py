"""Shadow: orders of paper that are signed and never sent, and the books that they would have met."""

import asyncio
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from support.composed import composed
from support.fake_exchange import FakeExchange
from support.fake_hyperliquid import ADDRESS, AGENT, FakeHyperliquid, PlainAgent
from support.fake_ledger import ACCOUNT, KEY_INDEX, PLAIN_KEY
from support.live import LADDER, SYMBOLS, PlainSigner, add_model, prepared
from support.waiting import becomes, until

from trader.core.clock import SystemClock
from trader.core.errors import StartError
from trader.core.events import EventBus
from trader.database.pool import Database
from trader.exchange.domain.ledger import row_id
from trader.exchange.domain.orders import AnswerFill, Order, OrderAnswer, OrderSide, OrderStatus, OrderType
from trader.live.domain.ladder import LadderFigures
from trader.live.hyperliquid.account import order_signer as hyperliquid_signer
from trader.live.hyperliquid.api import HyperliquidApi
from trader.live.ladder import read_ladder
from trader.live.lighter.account import order_signer as lighter_signer
from trader.live.lighter.api import LighterApi
from trader.live.shadow import Shadow
from trader.live.source import VenueSource
from trader.settings.forms import Secret

D = Decimal


def answered(order: Order, price: str | None, at: Any) -> OrderAnswer:
    status = OrderStatus.RESTING if price is None else OrderStatus.FILLED
    answer = OrderAnswer.of(order, row_id("shadow", 1), status, at)
    if price is None:
        return answer
    fill = AnswerFill(order.quantity, D(price), D(0), False, at)
    return answer.so_far("filled", None, [fill], D(0))


async def rows(database: Database) -> list[asyncpg.Record]:
    async with database.connection() as conn:
        return list(await conn.fetch("SELECT * FROM shadow_drift ORDER BY id"))


@pytest.mark.parametrize("kind", [FakeExchange, FakeHyperliquid])
async def test_an_order_in_shadow_is_signed_and_compared_and_never_sent(
    database: Database, tmp_path: Path, kind: type[FakeExchange]
) -> None:
    async with prepared(database, kind) as bench:
        (tmp_path / "ladder.toml").write_text(LADDER)
        ladder = read_ladder(tmp_path / "ladder.toml")
        model = await add_model(database, "apex")
        ladder.write(ladder.certify(model, "shadow", LadderFigures(), "a person", bench.clock.now()))
        key, url = Secret(PLAIN_KEY), bench.venue.url
        if kind is FakeHyperliquid:
            api, signer = HyperliquidApi(url), hyperliquid_signer(PlainAgent(key, is_testnet=False), ADDRESS)
        else:
            api, signer = LighterApi(url), lighter_signer(PlainSigner(url, ACCOUNT, KEY_INDEX, key))  # type: ignore[assignment]
        source = VenueSource(api, SYMBOLS)
        await source.open()
        asked = api.budget.used_share
        bench.bus, shadow = EventBus(), Shadow(database, bench.market, bench.clock, source, signer, ladder)
        bench.exchange = _Quiet()  # type: ignore[assignment]
        await bench.tell()
        market = Order(account_id="apex", symbol="BTC", side=OrderSide.BUY, quantity=D("0.1"))
        limit = Order(
            account_id="apex", symbol="BTC", side=OrderSide.SELL, quantity=D("0.1"), type=OrderType.LIMIT,
            limit_price=D(99000),
        )  # fmt: skip
        for order, price in ((market, "93906"), (limit, None)):
            shadow.take([order], [answered(order, price, bench.clock.now())])
        paper_only = Order(account_id="other", symbol="BTC", side=OrderSide.BUY, quantity=D(1))
        shadow.take([paper_only], [answered(paper_only, "1", bench.clock.now())])
        for mid in ("94000", "94100", "94200"):
            await until(lambda: len(bench.market.quotes()) > 0)
            bench.venue.reach("BTC", mid)
            await bench.clock.advance(timedelta(seconds=0.6))
            await bench.tell()
            for _ in range(20):
                await asyncio.sleep(0)
        while len(await rows(database)) < 2:
            await bench.clock.advance(timedelta(seconds=0.6))
            await bench.tell()
        await shadow.close()
        await signer.close()
        await source.close()
        by_side = {row["side"]: row for row in await rows(database)}
        assert by_side["buy"]["account_id"] == "apex"
        assert by_side["buy"]["drift_bps"] > 10
        assert by_side["buy"]["later_bps"] >= by_side["buy"]["drift_bps"]
        assert by_side["sell"]["paper_price"] is by_side["sell"]["drift_bps"] is None
        assert all(len(row["signed"]) > 20 for row in by_side.values())
        assert len({row["signed"] for row in by_side.values()}) == 2
        assert bench.venue.sent == []
        assert api.budget.used_share == asked, "nothing more is read for it"


@pytest.mark.slow
@pytest.mark.parametrize(("venue", "kind"), [("lighter", FakeExchange), ("hyperliquid", FakeHyperliquid)])
async def test_a_paper_service_on_a_venues_prices_signs_for_the_entrants_in_shadow(
    database: Database, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, venue: str, kind: type[FakeExchange]
) -> None:
    """As the service starts; only the venue's own libraries are replaced."""
    monkeypatch.setattr("trader.live.lighter.LighterSigner", PlainSigner)
    monkeypatch.setattr("trader.live.hyperliquid.HyperliquidSigner", PlainAgent)
    (file := tmp_path / "ladder.toml").write_text(LADDER)
    ladder, model = read_ladder(file), await add_model(database, "apex")
    ladder.write(ladder.certify(model, "shadow", LadderFigures(), "a person", SystemClock().now()))
    fake = kind()
    await fake.start()
    account = ADDRESS if kind is FakeHyperliquid else str(ACCOUNT)
    key = PLAIN_KEY if venue == "lighter" else "ab" * 32
    try:
        async with composed(
            dsn, MARKET_SOURCE=f"venue:{venue}", VENUE_URL=fake.url, VENUE_ACCOUNT_INDEX=account, VENUE_API_KEY=key,
            LADDER_FILE=str(file), MARKETS="BTC,ETH", SIM_LATENCY_MS="0",
        ) as (service, client):  # fmt: skip
            market = service.context.market
            await until(lambda: market.quote("BTC") is not None)
            order = {"accountId": "apex", "symbol": "BTC", "side": "buy", "quantity": 0.01}
            async with client.post("/api/rpc/simulator.placeOrder", json=order) as answer:
                assert (await answer.json())["order"]["status"] == "filled"
            await becomes(lambda: count(database), 1)
        assert [row["account_id"] for row in await rows(database)] == ["apex"]
        assert fake.sent == []
    finally:
        await fake.stop()


def test_the_owners_own_key_signs_nothing() -> None:
    with pytest.raises(StartError, match="which may withdraw"):
        hyperliquid_signer(PlainAgent(Secret(PLAIN_KEY), is_testnet=False), AGENT)


async def count(database: Database) -> int:
    return len(await rows(database))


class _Quiet:
    """Takes ticks like an exchange."""

    async def on_tick(self, _: Any) -> None:
        pass
