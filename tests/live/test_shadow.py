"""Shadow: orders of paper that are signed and never sent, and the books that they would have met."""

import asyncio
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
from support.fake_ledger import ACCOUNT, KEY_INDEX, PLAIN_KEY
from support.live import LADDER, PlainSigner, add_model, prepared
from support.waiting import until

from trader.core.events import EventBus
from trader.database.pool import Database
from trader.exchange.domain.ledger import row_id
from trader.exchange.domain.orders import AnswerFill, Order, OrderAnswer, OrderSide, OrderStatus, OrderType
from trader.live.domain.ladder import LadderFigures
from trader.live.ladder import read_ladder
from trader.live.lighter.api import LighterApi
from trader.live.lighter.closer import LighterOrderSigner
from trader.live.shadow import Shadow
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


async def test_an_order_in_shadow_is_signed_and_compared_and_never_sent(database: Database, tmp_path: Path) -> None:
    async with prepared(database) as bench:
        (tmp_path / "ladder.toml").write_text(LADDER)
        ladder = read_ladder(tmp_path / "ladder.toml")
        ladder.certify(await add_model(database, "apex"), "shadow", LadderFigures(), "a person", bench.clock.now())
        signer = LighterOrderSigner(
            LighterApi(bench.venue.url), PlainSigner(bench.venue.url, ACCOUNT, KEY_INDEX, Secret(PLAIN_KEY))
        )
        assert not [name for name in dir(signer) if "send" in name]
        bench.bus, shadow = EventBus(), Shadow(database, bench.market, bench.clock, signer, ladder)
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
        by_side = {row["side"]: row for row in await rows(database)}
        assert by_side["buy"]["account_id"] == "apex"
        assert by_side["buy"]["drift_bps"] > 10
        assert by_side["buy"]["later_bps"] >= by_side["buy"]["drift_bps"]
        assert by_side["sell"]["paper_price"] is by_side["sell"]["drift_bps"] is None
        assert all(len(row["signed"]) > 20 for row in by_side.values())
        assert bench.venue.sent == []


class _Quiet:
    """Takes ticks like an exchange."""

    async def on_tick(self, _: Any) -> None:
        pass
