"""The ladder of a live service: who is let in, caps before anything is sent, steps down, and orders that wait."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from support.calls import Call
from support.live import LADDER, Bench, add_model, prepared
from support.scripted import START

from trader.agents.verification import verify
from trader.core.errors import MarketDataError, NotFound, OrderUndecided, Precondition, SettingsError, StartError
from trader.core.events import ApprovalWanted
from trader.database.pool import Database
from trader.exchange.domain.halts import HaltCause, OperatorCommand, Verb
from trader.exchange.domain.orders import OrderStatus, OrderType
from trader.live.approvals import Approvals
from trader.live.domain.ladder import STEPS, Certificate, LadderFigures
from trader.live.ladder import read_ladder
from trader.live.rehearsals import digest_of
from trader.operations.operator_commands import write_resume

D = Decimal


@dataclass
class Climb:
    """A folder with a ladder, and a bench that has not been started."""

    bench: Bench
    file: Path

    async def add(self, name: str, index: int | None = None, *, certified: bool = True) -> None:
        model = await add_model(self.bench.database, name, index)
        if certified:
            ladder = read_ladder(self.file)
            for step in STEPS[1:]:
                ladder.write(ladder.certify(model, step, LadderFigures(9, 9), "a person", START))

    async def start(self) -> None:
        await self.bench.start(LADDER_FILE=str(self.file))
        await self.bench.tell()

    async def waiting_id(self) -> UUID:
        async with self.bench.database.connection() as conn:
            found: UUID = await conn.fetchval("SELECT id FROM waiting_orders WHERE closed_at IS NULL")
            return found

    async def approve(self, order_id: UUID) -> bool:
        with suppress(NotFound):
            return bool(await self.approvals.approve(str(order_id), "a person"))
        return False

    async def carry_out(self) -> None:
        assert self.bench.ladder is not None
        await self.bench.ladder.carry_out(self.bench.exchange.place_decided)

    async def recorded(self) -> list[dict[str, Any]]:
        """Return the approvals in the chain, which is whole."""
        assert (await verify(self.bench.database, [])).findings == []
        async with self.bench.database.connection() as conn:
            rows = await conn.fetch("SELECT record FROM chain_links WHERE kind = 'approved' ORDER BY position")
            return [msgspec.json.decode(row["record"]) for row in rows]

    @property
    def approvals(self) -> Approvals:
        return Approvals(self.bench.database, self.file, "lighter")

    async def write(self, statement: str, *values: Any) -> None:
        async with self.bench.database.connection() as conn:
            await conn.execute(statement, *values)


@pytest.fixture
async def climb(database: Database, tmp_path: Path) -> AsyncIterator[Climb]:
    async with prepared(database) as bench:
        file = tmp_path / "ladder.toml"
        file.write_text(LADDER)
        bench.venue.ledger.deposit = D(100_000)
        yield Climb(bench, file)
        if hasattr(bench, "exchange"):
            await bench.stop()


@pytest.fixture
async def live(climb: Climb) -> Climb:
    await climb.add("apex")
    await climb.start()
    return climb


# Who is let in


async def test_only_the_certificates_of_every_step_below_let_a_model_trade(climb: Climb) -> None:
    await climb.add("apex", certified=False)
    with pytest.raises(StartError, match=r"may not be on the step live: it needs the certificate .*No such file"):
        await climb.start()
    await climb.bench.stop()
    model = await add_model(climb.bench.database, "apex")
    with pytest.raises(StartError, match=r"step testnet: .*shown on shadow"):  # without a paper past
        read_ladder(climb.file).certify(model, "live", LadderFigures(9, 9), "a person", START)
    await climb.add("apex")
    await climb.start()
    climb.file.with_name("certificates").joinpath("apex.live.json").unlink()
    await climb.bench.stop()
    await climb.start()  # it has been let in


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shown": LadderFigures(99, 99)}, "its digest does not match"),
        ({"step": "testnet", "digest": None}, "it is of apex on testnet"),
        ({"entrant": "rules rules/other as Apex", "digest": None}, "it is of rules rules/other as Apex"),
        ({"rules": "0", "digest": None}, r"ladder.toml has changed since"),
        ({"approved_at": START - timedelta(days=31), "digest": None}, "not of the last 30 days"),
    ],
)
async def test_a_certificate_that_does_not_fit_lets_nobody_in(climb: Climb, changes: dict[str, Any], said: str) -> None:
    await climb.add("apex")
    file = climb.file.with_name("certificates") / "apex.live.json"
    found = msgspec.json.decode(file.read_bytes(), type=Certificate)
    digest = changes.pop("digest", found.digest)
    found = msgspec.structs.replace(found, **changes)
    unsigned = msgspec.to_builtins(msgspec.structs.replace(found, digest=""))
    found = msgspec.structs.replace(found, digest=digest or digest_of(unsigned))
    file.write_bytes(msgspec.json.encode(found))
    with pytest.raises(StartError, match=said):
        await climb.start()


async def test_a_model_that_held_an_account_before_the_ladder_has_its_caps(climb: Climb) -> None:
    await climb.add("apex", certified=False)
    await climb.bench.start()
    await climb.bench.tell()
    await climb.bench.buy("0.3")
    await climb.bench.stop()
    await climb.start()
    assert "the ladder's cap" in ((await climb.bench.buy("0.05")).reason or "")
    await climb.bench.synchronize()
    assert [halt.cause for halt in climb.bench.halts.in_force] == [HaltCause.LADDER]
    assert (await climb.bench.sell("0.3", reduce_only=True)).status is OrderStatus.FILLED


def test_a_wrong_file_is_refused_with_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "ladder.toml"
    file.write_text(LADDER.replace("days = 1", "days = 2", 1).replace("account = 20000,", "account = 200,"))
    with pytest.raises(SettingsError) as raised:
        read_ladder(file)
    assert [text.split(": ", 1)[0].removeprefix(f"{file}, ") for text in raised.value.problems] == ["line 8", "line 19"]


# Caps


async def test_no_order_is_sent_beyond_a_cap(live: Climb) -> None:
    """The caps of an order, of the account with what rests, and of a day, at 94,000 for a bitcoin."""
    bench = live.bench
    assert "the order would have 10443.41 USD" in ((await bench.buy("0.11")).reason or "")
    assert (await bench.buy("0.1")).status is OrderStatus.FILLED
    resting = await bench.buy("0.1", type=OrderType.LIMIT, limit_price=D(93000))
    assert resting.status is OrderStatus.RESTING
    assert "the account would have" in ((await bench.buy("0.02")).reason or "")
    await bench.exchange.cancel_order("apex", str(resting.id))
    assert (await bench.sell("0.1", reduce_only=True)).status is OrderStatus.FILLED
    assert (await bench.buy("0.1")).status is OrderStatus.FILLED
    assert (await bench.sell("0.1", reduce_only=True)).status is OrderStatus.FILLED
    assert (await bench.buy("0.1")).status is OrderStatus.FILLED
    assert (await bench.sell("0.1", reduce_only=True)).status is OrderStatus.FILLED
    await bench.move({}, after_s=86_390)
    assert "within 24 hours would have" in ((await bench.buy("0.05")).reason or "")
    await bench.see({}, after_s=11)
    assert (await bench.buy("0.05")).status is OrderStatus.FILLED


async def test_the_caps_hold_again_before_an_order_is_signed(climb: Climb) -> None:
    """Two accounts decide at the same moment, each within the cap of all: not both orders are sent."""
    bench = climb.bench
    await climb.add("apex")
    await climb.add("sovereign", 12)
    bench.venue.open(12, "100000")
    await climb.start()
    await bench.synchronize()
    await bench.buy("0.1")
    answers = await asyncio.gather(*(bench.buy("0.1", account_id=name) for name in ("apex", "sovereign")))
    assert sum(answer.status is OrderStatus.REJECTED for answer in answers) >= 1
    assert all("all accounts would have" in (answer.reason or "the cap") for answer in answers if answer.reason)
    assert sum(ledger.positions().get(1, D(0)) for ledger in bench.venue.ledgers.values()) <= D("0.2")


# Steps down


async def step_down(live: Climb) -> str:
    await live.bench.synchronize()
    (halt,) = live.bench.halts.in_force
    assert (halt.account_id, halt.cause) == ("apex", HaltCause.LADDER)
    refused = (await live.bench.buy("0.01")).reason or ""
    assert "only reducing is allowed" in refused or "the ladder's cap" in refused
    return halt.reason


@pytest.mark.parametrize("what", ["drawdown", "drift", "difference", "model", "cap"])
async def test_a_broken_rule_steps_down_until_a_new_approval(live: Climb, what: str) -> None:
    bench = live.bench
    await bench.buy("0.1")
    await bench.synchronize()
    assert bench.halts.in_force == ()
    if what == "drawdown":
        at = START + timedelta(seconds=2)
        await live.write(
            "INSERT INTO portfolio_hourly SELECT account_id, date_trunc('hour', $1::timestamptz), id, 1, 1, 106000, $1 "
            "FROM runs",
            at,
        )
        said = "the drawdown 5."
    elif what == "drift":
        await live.write("UPDATE fill_drift SET drift_bps = -21")
        said = "the drift (p95) 21.00 bp is above 20 bp"
    elif what == "difference":
        bench.venue.ledger.deposit += 50
        await bench.see({}, after_s=20)
        said = "an unexplained difference: "
    elif what == "model":
        await live.write("UPDATE models SET router_model_name = 'rules/other'")
        said = "its certificate does not hold: it is of rules rules/apex as Apex, and apex is rules rules/other as Apex"
    else:
        live.file.write_text(LADDER.replace("10000, account = 20000", "800, account = 900").replace("9500", "90"))
        await bench.stop()
        await live.start()
        said = "the account would have 9400.00 USD"
    assert said in await step_down(live)
    await bench.stop()
    await live.start()
    command = OperatorCommand(id=UUID(int=1), verb=Verb.RESUME, account_id="apex", reason="r", asked_by="o")
    async with bench.database.transaction() as conn:
        assert list(await write_resume(conn, command)) == []
    await bench.halts.load()
    await step_down(live)
    assert (await bench.sell("0.05", reduce_only=True)).status is OrderStatus.FILLED, "closing goes on"


async def test_a_difference_that_nothing_could_be_asked_about_is_no_reason_to_step_down(live: Climb) -> None:
    bench = live.bench
    bench.venue.ledger.deposit += 50
    bench.venue.failing = {"trades"}
    with pytest.raises(MarketDataError):
        await bench.synchronize()
    assert "the venue's balance differs from the books" in bench.exchange.troubles["apex"]
    assert bench.halts.in_force == ()
    bench.venue.failing = set()
    assert "an unexplained difference: " in await step_down(live)


# Approvals


async def test_a_person_lets_an_entrant_climb_once_its_rule_holds(live: Climb) -> None:
    """The books of a bench stand in for those of paper, shadow and the test network."""
    bench, approvals = live.bench, live.approvals
    for step in STEPS[1:]:
        live.file.with_name("certificates").joinpath(f"apex.{step}.json").unlink()
    with pytest.raises(Precondition, match="apex lacks a step above it"):
        await approvals.approve("apex", "a person")
    await live.write("DELETE FROM venue_accounts")
    with pytest.raises(Precondition, match="apex lacks for live: 0 of 1 days"):
        await approvals.approve("apex", "a person")
    assert "apex may be on live" in await approvals.approve("apex", "a person", "the tests")
    await live.write(
        "UPDATE service_state SET trading_mode = 'simulated', venue_url = NULL, venue_account_index = NULL"
    )
    with pytest.raises(Precondition, match="apex lacks for shadow: 0 of 1 days; 0 of 1 fills"):
        await approvals.approve("apex", "a person")
    await bench.buy("0.01")
    await live.write(
        "INSERT INTO portfolio_hourly SELECT account_id, date_trunc('hour', $1::timestamptz), id, 1, 1, 100000, $1 "
        "FROM runs",
        START,
    )
    assert "apex may be on shadow" in await approvals.approve("apex", "a person")
    standing = (await approvals.standings())["apex"]
    assert (standing.step, standing.above, standing.shown.fills) == ("shadow", "testnet", 0), "it begins anew there"
    with pytest.raises(Precondition, match="no drift was measured"):
        await approvals.approve("apex", "a person")
    assert "apex may be on testnet" in await approvals.approve("apex", "a person", "the tests")
    certificates = [
        msgspec.json.decode(file.read_bytes(), type=Certificate)
        for file in live.file.with_name("certificates").iterdir()
    ]
    for found in certificates:
        assert found.approved_by == ("a person" if found.step == "shadow" else "a person, override: the tests")
    recorded = {record["step"]: record for record in await live.recorded()}
    assert recorded == {found.step: {**msgspec.to_builtins(found), "kind": "approved"} for found in certificates}


async def test_a_new_approval_lets_an_entrant_that_stepped_down_open_again(live: Climb) -> None:
    bench = live.bench
    await bench.buy("0.02")
    await live.write("UPDATE fill_drift SET drift_bps = -21")
    assert "the drift" in await step_down(live)
    (halt,) = bench.halts.in_force
    shown = str((await live.approvals.standings())["apex"])
    assert shown.startswith(f"STEPPED DOWN: {halt.reason}")
    (certificates := live.file.with_name("certificates")).rename(moved := certificates.with_name("moved"))
    certificates.write_text("in the way")
    with pytest.raises(StartError, match=r"apex\.live\.json cannot be written"):
        await live.approvals.approve("apex", "a person")
    certificates.unlink()
    moved.rename(certificates)
    assert "apex may open on live again" in await live.approvals.approve("apex", "a person")
    recorded = [(record["name"], record["step"]) for record in await live.recorded()]
    assert recorded == [("apex", "live")] * 2, "no certificate is written that the chain does not have"
    await bench.halts.load()
    assert (await bench.buy("0.02")).status is OrderStatus.FILLED
    await bench.synchronize()
    assert bench.halts.in_force == (), "what it showed before no longer counts"
    with pytest.raises(NotFound, match="There is no model 'nobody'"):
        await live.approvals.approve("nobody", "a person")


async def test_the_commands_show_the_ladder_and_approve(
    live: Climb, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LADDER_FILE", str(live.file))
    shown = "0 days, 0 fills, drawdown 0.00 %"
    assert shown in (await call("ladder")).out
    assert f"ladder      apex on live: {shown}" in (await call("status")).out
    refused = await call("approve", "apex")
    assert (refused.code, refused.out.strip()) == (1, "apex lacks a step above it. Nothing was approved.")


# Orders that wait for a person


async def test_an_order_above_the_limit_waits_for_a_person(live: Climb) -> None:
    bench, order = live.bench, {"quantity": "0.102", "client_order_id": "big"}
    for _ in range(2):
        with pytest.raises(OrderUndecided, match="waits at most 60 s for a person"):
            await bench.buy(**order)
    with pytest.raises(OrderUndecided, match="An order of apex waits"):
        await bench.buy("0.103")
    assert bench.venue.orders == {}
    (wanted,) = [event for event in bench.events if isinstance(event, ApprovalWanted)]
    order_id = await live.waiting_id()
    assert f"trader approve {order_id}" in wanted.text
    assert f"/#/system?approve={order_id}" in wanted.text
    await bench.stop()
    await live.start()
    await bench.synchronize()
    await live.carry_out()
    assert await live.waiting_id() == order_id, "a restart keeps it waiting"
    assert await live.recorded() == []
    assert await live.approve(order_id)
    assert not await live.approve(order_id)
    (record,) = await live.recorded()
    assert (record["order_id"], record["account_id"], record["approved_by"]) == (str(order_id), "apex", "a person")
    await live.carry_out()
    answer = await bench.buy(**order)
    assert (answer.status, answer.total_quantity) == (OrderStatus.FILLED, D("0.102"))
    assert len(bench.venue.orders) == 1
    assert await live.waiting_id() is None


async def test_an_approved_order_meets_the_present_book_and_caps(live: Climb) -> None:
    bench = live.bench
    with pytest.raises(OrderUndecided):
        await bench.buy("0.102", client_order_id="big")
    await bench.see({"BTC": "99000"})
    await live.approve(await live.waiting_id())
    await live.carry_out()
    assert "the order would have" in ((await bench.buy("0.102", client_order_id="big")).reason or "")
    assert bench.venue.orders == {}


@pytest.mark.parametrize("age_s", [61, -2], ids=["in a minute", "when the clock is set back"])
async def test_an_order_that_nobody_approves_lapses(live: Climb, age_s: int) -> None:
    bench = live.bench
    with pytest.raises(OrderUndecided):
        await bench.buy("0.102", client_order_id="big")
    await live.write("UPDATE waiting_orders SET asked_at = now() - make_interval(secs => $1)", age_s)
    assert not await live.approve(await live.waiting_id())
    await bench.see({"BTC": "90000"})  # it would be below the limit now
    await live.carry_out()
    answer = await bench.buy("0.102", client_order_id="big")
    assert (answer.status, answer.reason) == (OrderStatus.REJECTED, "nobody approved it within 60 s")


async def test_an_approval_that_comes_to_nothing_for_too_long_lapses(live: Climb) -> None:
    with pytest.raises(OrderUndecided):
        await live.bench.buy("0.102")
    await live.approve(await live.waiting_id())
    await live.write("UPDATE waiting_orders SET asked_at = now() - interval '71 s'")
    await live.carry_out()
    assert live.bench.venue.orders == {}
