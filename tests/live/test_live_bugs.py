"""A bug in a live account: it is reported, nothing opens, and synchronization continues."""

from decimal import Decimal

import pytest
from support.fake_ledger import ACCOUNT
from support.live import Bench, add_model, prepared
from support.waiting import until

from trader.core.events import MarketChecked
from trader.database.pool import Database
from trader.exchange.domain.orders import ExitPlan, OrderStatus
from trader.live.ledger import AccountLedger
from trader.live.lighter.records import LighterRecords

D = Decimal
PLAN = ExitPlan(stop=D("90000.04"), target=D(99000))
BOOK_FUNDING = AccountLedger.book_funding


async def funding_of_apex_fails(ledger: AccountLedger, records: LighterRecords) -> None:
    """Booking funding has a bug that affects only one account."""
    if ledger.account_id == "apex":
        raise KeyError("no such thing")
    await BOOK_FUNDING(ledger, records)


async def test_a_bug_in_a_synchronization_is_reported_and_blocks_openings_until_one_succeeds(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await bench.buy("0.25", leverage=D(5), exit_plan=PLAN)
    with monkeypatch.context() as broken:
        broken.setattr(AccountLedger, "book_funding", funding_of_apex_fails)
        bench.bus.publish(MarketChecked(bench.clock.now()))
        await until(lambda: bench.exchange.troubles)
    assert "internal error (KeyError)" in bench.exchange.troubles["apex"]
    assert "in funding_of_apex_fails" in caplog.text, "with its trace"
    assert "only reducing is allowed" in ((await bench.buy("0.1", leverage=D(5))).reason or "")
    assert (await bench.sell("0.05", reduce_only=True)).status is OrderStatus.FILLED
    bench.bus.publish(MarketChecked(bench.clock.now()))
    await until(lambda: not bench.exchange.troubles)
    await bench.agree()
    assert (await bench.buy("0.1", leverage=D(5))).status is OrderStatus.FILLED


async def test_a_bug_in_the_first_synchronization_of_an_account_leaves_the_others_trading(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with prepared(database) as bench:
        await add_model(database, "apex")
        await add_model(database, "other", ACCOUNT + 1)
        bench.venue.open(ACCOUNT + 1, "50000")
        monkeypatch.setattr(AccountLedger, "book_funding", funding_of_apex_fails)
        await bench.start()
        await bench.tell()
        assert bench.exchange.troubles.keys() == {"apex"}
        assert (await bench.buy("0.1", leverage=D(5), account_id="other")).status is OrderStatus.FILLED
        await bench.stop()
