"""A bug in the desk of an account at the venue: it is told, it opens nothing, and it does not end the looks."""

from collections.abc import AsyncIterator
from decimal import Decimal

import pytest
from support.fake_exchange import ACCOUNT
from support.fake_venue import until
from support.live import Bench, add_model, prepared, trading

from trader.domain.exchange.orders import ExitPlan, OrderStatus
from trader.services.events import MarketChecked
from trader.services.live.outbox import Outbox
from trader.store.database.pool import Database

D = Decimal
PLAN = ExitPlan(stop=D("90000.04"), target=D(99000))
POLL = Outbox.poll


@pytest.fixture
async def bench(database: Database) -> AsyncIterator[Bench]:
    async with trading(database) as bench:
        yield bench


async def poll_of_apex_fails(outbox: Outbox) -> None:
    """What has become of standing orders is looked at with a bug that only one account meets."""
    if outbox.account_id == "apex":
        raise KeyError("no such thing")
    await POLL(outbox)


async def test_a_bug_in_a_look_is_told_and_opens_nothing_until_one_goes_well(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    with monkeypatch.context() as broken:
        broken.setattr(Outbox, "poll", poll_of_apex_fails)
        bench.exchange._floor.events.publish(MarketChecked(bench.clock.now()))
        await until(lambda: bench.exchange.troubles)
    assert "internal error (KeyError)" in bench.exchange.troubles["apex"]
    assert "in poll_of_apex_fails" in caplog.text, "with its trace"
    assert "only reducing is allowed" in ((await bench.buy("0.1", leverage=D(5))).reason or "")
    assert (await bench.sell("0.05", reduce_only=True)).status is OrderStatus.FILLED
    bench.exchange._floor.events.publish(MarketChecked(bench.clock.now()))
    await until(lambda: not bench.exchange.troubles)
    await bench.agree()
    assert (await bench.buy("0.1", leverage=D(5))).status is OrderStatus.FILLED


async def test_a_bug_in_the_first_look_at_an_account_keeps_the_others_from_nothing(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with prepared(database) as bench:
        await add_model(database, "apex")
        await add_model(database, "other", ACCOUNT + 1)
        bench.venue.open(ACCOUNT + 1, "50000")
        monkeypatch.setattr(Outbox, "poll", poll_of_apex_fails)
        await bench.start()
        await bench.tell()
        assert bench.exchange.troubles.keys() == {"apex"}
        assert (await bench.buy("0.1", leverage=D(5), account_id="other")).status is OrderStatus.FILLED
        await bench.stop()
