"""The stop outside the service: an account at the fake venue is emptied, whatever the venue does."""

import asyncio
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from aiohttp import web
from support.fake_exchange import CANCEL_ALL, CREATE, FakeExchange
from support.fake_ledger import ACCOUNT, PLAIN_KEY, public_key_of
from support.live import PlainSigner
from support.waiting import until

from trader.__main__ import main
from trader.core.errors import MarketDataError, StartError
from trader.live import lighter
from trader.live.budget import RequestBudget
from trader.live.emptying import EMPTY_LOOKS, empty, watch
from trader.live.lighter.rehearsal import LighterRehearsal
from trader.settings.forms import Secret

D = Decimal
OWN_INDEX = 5


@pytest.fixture
async def venue() -> AsyncIterator[FakeExchange]:
    """An account with positions on both sides, one in a market that no service trades, and orders of every kind."""
    venue = FakeExchange()
    await venue.start()
    venue.ledger.keys[OWN_INDEX] = public_key_of(PLAIN_KEY)
    for symbol, quantity in (("BTC", "0.25"), ("ETH", "-2"), ("SOL", "30")):
        venue.trade_by_hand(symbol, quantity)
    order = {"MarketIndex": 1, "BaseAmount": 1000, "AccountIndex": ACCOUNT, "ApiKeyIndex": OWN_INDEX}
    for number, more in enumerate((
        {"Price": 900_000, "IsAsk": 0, "Type": 0, "ReduceOnly": 0, "TriggerPrice": 0},
        {"Price": 900_000, "IsAsk": 1, "Type": 2, "ReduceOnly": 1, "TriggerPrice": 930_000},
    )):  # fmt: skip
        venue.late.append(
            (CREATE, {**order, **more, "ClientOrderIndex": 1 + number, "Nonce": venue.next_nonce + number})
        )
    venue.deliver()
    yield venue
    await venue.stop()


@pytest.fixture
async def closer(venue: FakeExchange) -> AsyncIterator[LighterRehearsal]:
    closer = LighterRehearsal(PlainSigner(venue.url, ACCOUNT, OWN_INDEX, Secret(PLAIN_KEY)), venue.url, pause_s=0.001)
    yield closer
    await closer.close()


def is_empty(venue: FakeExchange) -> bool:
    return not venue.positions() and not any(order.is_active for order in venue.orders.values())


async def test_all_orders_are_canceled_first_and_then_the_venues_positions_closed(
    venue: FakeExchange, closer: LighterRehearsal
) -> None:
    await closer.prove()
    before = len(venue.sent)
    assert await empty(closer, looks=60, pause_s=0)
    assert is_empty(venue)
    assert venue.sent[before][0] == CANCEL_ALL
    made = [given for kind, given in venue.sent[before:] if kind == CREATE]
    assert all(given["ReduceOnly"] == 1 and given["Type"] == 1 for given in made)
    assert {given["MarketIndex"] for given in made} == {0, 1, 2}


async def test_every_request_is_taken_from_the_budget_of_the_address(
    venue: FakeExchange, closer: LighterRehearsal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog counts too: it arms the scheduled cancellation. The rules are read once for all positions."""
    taken, take = list[int](), RequestBudget.take

    async def counted(budget: RequestBudget, weight: int, *, kind: int | None = None) -> None:
        await take(budget, weight, kind=kind)
        taken.append(weight)

    monkeypatch.setattr(RequestBudget, "take", counted)
    venue.excuse("lag_s", "event_lag_s")
    watching = asyncio.create_task(watch(closer, "http://127.0.0.1:9/health", 0, pause_s=0.001))
    await until(lambda: venue.ledger.cancels_at is not None)
    watching.cancel()
    await asyncio.wait([watching])
    assert is_empty(venue)
    assert len(venue.asked) + len(venue.sent) <= len(taken) <= len(venue.asked) + len(venue.sent) + 1
    assert venue.limited == 0
    looks = [path for path, _ in venue.asked if path.endswith("orderBookDetails")]
    assert len(looks) == 1


@pytest.mark.parametrize("seed", range(4))
async def test_the_account_is_emptied_through_any_faults(
    venue: FakeExchange, closer: LighterRehearsal, seed: int
) -> None:
    random = venue.random = Random(seed)
    venue.fault_at_random(random, share=0.6)
    venue.stale_nonces, venue.fill_share, venue.nonce_lag_s = random.choice((0, 5)), D("0.6"), (0.0, 3.0)
    venue.sequencer_refusals = random.choice((0, 2))
    assert await empty(closer, looks=400, pause_s=0)
    venue.deliver()
    assert is_empty(venue)


async def test_an_account_that_cannot_be_emptied_is_reported(venue: FakeExchange, closer: LighterRehearsal) -> None:
    venue.refusal = (21708, "halted")
    assert not await empty(closer, looks=EMPTY_LOOKS + 3, pause_s=0)
    venue.is_down = True
    assert not await empty(closer, looks=EMPTY_LOOKS, pause_s=0), "an unreadable account is not an empty one"


async def test_a_key_that_is_not_registered_is_refused(venue: FakeExchange, closer: LighterRehearsal) -> None:
    del venue.ledger.keys[OWN_INDEX]
    with pytest.raises(StartError, match="no API key with index 5 for account 7"):
        await closer.prove()


class Service:
    """Answers /health, until it does not."""

    def __init__(self) -> None:
        self.answer: web.Response | None = None
        self.asked = 0

    async def health(self, _: web.Request) -> web.StreamResponse:
        self.asked += 1
        if self.answer is None:
            return web.json_response({"status": "unhealthy"}, status=503)
        return web.Response(body=self.answer.body, status=self.answer.status)


@pytest.fixture
async def service(closer: LighterRehearsal) -> AsyncIterator[Service]:
    """A service, and a watch of it that empties the account of `closer`."""
    service, app = Service(), web.Application()
    app.router.add_get("/health", service.health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/health"
    watching = asyncio.create_task(watch(closer, url, 0.5, pause_s=0.001))
    yield service
    watching.cancel()
    await asyncio.wait([watching])
    await runner.cleanup()


async def test_a_silent_service_is_replaced_until_it_answers_again(venue: FakeExchange, service: Service) -> None:
    await until(lambda: service.asked > 30)
    assert venue.sent == [], "an unhealthy service still answers"
    service.answer = web.Response(text="<html>Bad Gateway</html>", status=502)
    await until(lambda: venue.ledger.cancels_at is not None)
    assert is_empty(venue)
    venue.trade_by_hand("BTC", "0.1")  # what hangs still trades
    await until(lambda: venue.ledger.cancels_at is None)
    await until(lambda: is_empty(venue) and venue.ledger.cancels_at is not None)
    service.answer, asked = None, service.asked
    await until(lambda: service.asked > asked + 1)  # the first of these was answered, and that was noticed
    assert venue.ledger.cancels_at is None
    venue.trade_by_hand("BTC", "0.1")
    await until(lambda: service.asked > asked + 30)
    assert venue.positions() == {1: D("0.1")}, "the service has it again"


def test_scheduled_cancellations_are_armed_only_while_the_account_is_empty() -> None:
    """No look that finds something comes between arming and calling off."""
    looks, calls = [None] * EMPTY_LOOKS + ["0.1 BTC"] + [None] * EMPTY_LOOKS * 3, []

    class Scripted:
        async def look(self, *, acts: bool = True) -> str | None:
            assert acts
            found = looks.pop(0) if looks else None
            calls.append(found or "empty")
            return found

        async def cancel_all_at(self, at: Any) -> bool:
            calls.append("arm" if at else "call off")
            return True

    async def run() -> None:
        watching = asyncio.create_task(watch(Scripted(), "http://127.0.0.1:9/health", 0, pause_s=0))  # type: ignore[arg-type]
        await until(lambda: not looks)
        watching.cancel()
        await asyncio.wait([watching])

    asyncio.run(run())
    place = calls.index("0.1 BTC")
    assert "arm" in calls[:place]
    assert [call for call in calls[:place] if "a" in call and call != "empty"][-1] == "call off"


@pytest.mark.parametrize(("found", "code"), [(None, 0), ("0.1 BTC", 1)])
def test_the_command_takes_a_key_file_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, found: str | None, code: int
) -> None:
    key = tmp_path / "close.key"
    words = ["venue-close", "7", "--key-file", str(key), "--key-index", "5", "--within", "1"]
    assert main(words) == 1
    key.write_text("nonsense\n")
    assert main(words) == 1
    errors = capsys.readouterr().err
    assert "No such file" in errors
    assert "expected the private key of an API key" in errors
    assert "nonsense" not in errors

    class Found:
        async def prove(self) -> None:
            raise MarketDataError("the venue is down")

        async def look(self) -> str | None:
            return found

        async def close(self) -> None:
            pass

    def make_closer(url: str, account: str, index: int, given: Secret) -> Found:
        assert (url, account, index, given.reveal()) == (lighter.ADDRESS, "7", 5, PLAIN_KEY)
        return Found()

    key.write_text(f"{PLAIN_KEY}\n")
    monkeypatch.setattr(lighter, "make_closer", make_closer)
    monkeypatch.setattr("trader.live.emptying.EMPTY_LOOKS", 1)
    monkeypatch.setattr("trader.live.emptying.PAUSE_S", 0.001)
    assert main(words) == code
    assert ("is empty" in capsys.readouterr().out) is (code == 0)
    assert main([*words, "--watch", "http://127.0.0.1:9/health"]) == 1
