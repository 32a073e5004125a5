"""Reproduction of invocations: on the recorded market they give the same books, and a changed row is detected."""

import asyncio
import zlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import orjson
import pytest
from support.trading_floor import Floor, ScriptedProvider, calling, hold, open_floor, opening
from support.waiting import until

from trader.__main__ import main
from trader.agents.domain.invocations import FinishedInvocation
from trader.agents.reproduction import InvocationReproduction, reproduce_invocation
from trader.core.errors import NotFound
from trader.database.pool import Database, Page
from trader.exchange.domain.halts import HaltCause
from trader.exchange.domain.orders import Cause


@pytest.fixture
async def floor(database: Database) -> AsyncIterator[Floor]:
    async with open_floor(database) as floor:
        await floor.add("ada")
        yield floor


async def run_one(floor: Floor, *script: Any) -> FinishedInvocation:
    floor.provider.scripts["ada"] = list(script)
    (record,) = await floor.cycle()
    return record


async def again(floor: Floor, record: FinishedInvocation) -> InvocationReproduction:
    return await reproduce_invocation(floor.database, record.invocation.id)


async def test_the_whole_life_of_a_position_is_reproduced(floor: Floor) -> None:
    runs = [
        [calling(opening()), hold("in")],
        [calling(opening(quantity=0.25, leverage=10)), hold("more")],
        [calling(("updateExitPlan", {"symbol": "BTC", "stop": 93_000.5})), hold()],
        [calling(("closePosition", {"symbol": "btcusdt", "fraction": 0.3})), hold()],
        [calling(("closePosition", {"symbol": "BTC"})), hold()],
    ]
    records = [await run_one(floor, *script) for script in runs]
    assert not floor.exchange.account("ada").positions
    reproductions = [await again(floor, record) for record in records]
    assert [[call.same for _, call in reproduction.calls] for reproduction in reproductions] == [[True, True]] * 5, (
        reproductions
    )
    assert all(each.is_same for each in reproductions)
    assert [each.calls[0][1].detail for each in reproductions] == [
        "1 fill, to the last digit",
        "1 fill, to the last digit",
        "the exit plan is set",
        "1 fill, to the last digit",
        "1 fill, to the last digit",
    ]


async def test_calls_that_change_nothing_are_reproduced(floor: Floor) -> None:
    await run_one(floor, calling(opening()), hold("in"))
    record = await run_one(
        floor,
        calling(
            ("createPosition", '{"symbol": "BTC"'),
            ("withdraw", {"all": True}),
            ("closePosition", {"symbol": "DOGE"}),
            ("fetchIndicators", {"symbol": "ETH", "interval": "4h"}),
            opening(leverage=11),
            opening(symbol="ETH", quantity=0.0001, stop=3_000, target=None),
            opening(symbol="ETH", quantity=10, leverage=1, stop=3_000, target=None),
            ("updateExitPlan", {"symbol": "BTC", "stop": 95_000}),
        ),
        hold(),
    )
    assert [call.status for call in record.tool_calls] == [
        "failed", "failed", "failed", "ok", "rejected", "rejected", "rejected", "rejected", "ok",
    ]  # fmt: skip
    reproduction = await again(floor, record)
    assert reproduction.is_same, reproduction
    assert "above the 10" in reproduction.calls[4][1].detail
    assert "insufficient margin" in reproduction.calls[6][1].detail


async def test_a_call_that_a_halt_refused_is_reproduced(floor: Floor) -> None:
    await floor.halts.halt("ada", HaltCause.OPERATOR, "venue maintenance", "someone")
    reproduction = await again(floor, await run_one(floor, calling(opening()), hold()))
    assert (reproduction.is_same, reproduction.calls[0][1].detail) == (
        True,
        "rejected: trading is halted for account ada (operator: venue maintenance); only reducing is allowed",
    )


async def test_updates_during_the_wait_of_an_order_are_reproduced(database: Database) -> None:
    """The update that the order waits for brings funding and fires a stop before the order meets its book."""
    async with open_floor(database, SIM_LATENCY_MS="200") as floor:
        await floor.add("ada")

        async def cycle(script: Any, mids: dict[str, str], *, after_s: float = 1) -> FinishedInvocation:
            floor.provider.scripts["ada"] = [script, hold()]
            await floor.start_batch()
            await floor.see(mids, after_s=after_s)
            await floor.idle()
            return (await floor.invocations.finished(page=Page(1)))[0]

        await cycle(calling(opening(stop=93_900, target=None)), {"BTC": "94000", "ETH": "3300"})
        to_the_hour = floor.clock.now().replace(minute=0, second=0) + timedelta(hours=1) - floor.clock.now()
        await floor.see(after_s=to_the_hour.total_seconds() - 1)
        record = await cycle(
            calling(opening(symbol="ETH", quantity=1, stop=3_000, target=None)),
            {"BTC": "93000", "ETH": "3310"},
            after_s=1.5,
        )
        positions = floor.exchange.account("ada").positions
        assert {symbol: position.closing for symbol, position in positions.items()} == {"BTC": "stop", "ETH": None}
        async with database.connection() as conn:
            causes = [row[0] for row in await conn.fetch("SELECT cause FROM fills ORDER BY sequence")]
            assert await conn.fetchval("SELECT count(*) FROM funding_payments") == 1
        assert causes == [Cause.ORDER, Cause.ORDER]
        reproduction = await again(floor, record)
        assert reproduction.is_same, reproduction
        await floor.see()
        assert list(floor.exchange.account("ada").positions) == ["ETH"]


async def test_an_order_that_met_no_book_is_reproduced(database: Database) -> None:
    async with open_floor(database, SIM_LATENCY_MS="200") as floor:
        await floor.add("ada")
        floor.provider.scripts["ada"] = [calling(opening()), hold()]
        await floor.start_batch()
        await until(lambda: floor.market.orders_waiting)
        following = asyncio.create_task(floor.market.run(floor.exchange.on_tick, floor.clock.now()))
        await floor.idle()  # the source has no more ticks
        following.cancel()
        (record,) = await floor.invocations.finished()
        assert record.tool_calls[0].metadata["results"][0]["reason"] == "The market source is down: the feed ended"
        reproduction = await again(floor, record)
        assert reproduction.is_same, reproduction
        assert "it met no order book" in reproduction.calls[0][1].detail


async def test_inputs_of_a_rule_agent_are_recorded(floor: Floor) -> None:
    floor.provider.is_remote = False
    reproduction = await again(floor, await run_one(floor, calling(opening()), hold("in")))
    assert reproduction.is_same, reproduction
    assert reproduction.calls[0][1].detail == "1 fill, to the last digit"


async def test_a_changed_row_is_detected(floor: Floor) -> None:
    record = await run_one(floor, calling(opening()), hold("in"))
    async with floor.database.connection() as conn:
        await conn.execute("UPDATE fills SET price = price + 0.1")
    reproduction = await again(floor, record)
    assert [call.same for _, call in reproduction.calls] == [False, True]
    assert "94000.2" in reproduction.calls[0][1].detail
    assert not reproduction.is_same
    async with floor.database.connection() as conn:
        await conn.execute("UPDATE fills SET price = price - 0.1")
        assert (await again(floor, record)).is_same
        await conn.execute("UPDATE tool_calls SET metadata = jsonb_set(metadata, '{results,0,averagePrice}', '\"1\"')")
    assert "now: ok" in (await again(floor, record)).calls[0][1].detail


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("quotes", 0, "asks", 0, 0), "94000.2"),
        (("rules", "taker_rate"), "0.001"),
        (("limits", "leverage_max"), 2),
        (("situation", "account", "run", "initial_capital"), "100"),
    ],
)
async def test_different_inputs_give_different_books(floor: Floor, path: tuple[Any, ...], value: Any) -> None:
    record = await run_one(floor, calling(opening()), hold("in"))
    async with floor.database.connection() as conn:
        kept = orjson.loads(zlib.decompress(await conn.fetchval("SELECT payload FROM invocation_payloads")))
        place = kept["meetings"][0]
        for step in path[:-1]:
            place = place[step]
        assert place[path[-1]] != value
        place[path[-1]] = value
        await conn.execute("UPDATE invocation_payloads SET payload = $1", zlib.compress(orjson.dumps(kept)))
    assert (await again(floor, record)).calls[0][1].same is False


async def test_missing_inputs_are_reported(floor: Floor) -> None:
    record = await run_one(floor, calling(opening()), hold("in"))
    async with floor.database.connection() as conn:
        await conn.execute("DELETE FROM invocation_payloads")
    reproduction = await again(floor, record)
    assert [call.same for _, call in reproduction.calls] == [None, True]
    with pytest.raises(NotFound):
        await reproduce_invocation(floor.database, UUID(int=7))


async def test_calls_executed_at_a_venue_are_not_reproduced_on_paper(floor: Floor) -> None:
    calls = calling(opening(), opening(symbol="ETH", leverage=99), ("closePosition", {"symbol": "SOL"}))
    record = await run_one(floor, calls, hold())
    async with floor.database.connection() as conn:
        await conn.execute(
            "UPDATE service_state SET trading_mode = 'live', venue_url = 'https://venue', venue_account_index = '1'"
        )
        await conn.execute("UPDATE fills SET price = price + 1")  # at a price that no book of the simulator has
    reproduction = await again(floor, record)
    assert [call.same for _, call in reproduction.calls] == [None, True, True, True]
    assert (
        reproduction.calls[0][1].detail
        == "the guard approves it, as recorded; its execution at the venue cannot be reproduced"
    )
    async with floor.database.connection() as conn:
        await conn.execute("UPDATE tool_calls SET metadata = jsonb_set(metadata, '{results,0,reason}', '\"luck\"')")
    assert [call.same for _, call in (await again(floor, record)).calls] == [None, False, False, True]


async def test_the_command_reports_the_result(floor: Floor, dsn: str, capsys: pytest.CaptureFixture[str]) -> None:
    record = await run_one(floor, calling(opening()), hold("in"))

    def run(invocation: UUID) -> int:
        with ThreadPoolExecutor(1) as pool:  # the test has an event loop already
            code: int = pool.submit(main, ["reproduce", str(invocation), "--database-url", dsn]).result()
        return code

    assert run(record.invocation.id) == 0
    said = capsys.readouterr().out
    assert "1. createPosition (ok): same: 1 fill, to the last digit" in said
    assert said.endswith("The books are identical.\n")
    async with floor.database.connection() as conn:
        await conn.execute("UPDATE fills SET fee = fee + $1", Decimal(1))
    assert run(record.invocation.id) == 1
    assert capsys.readouterr().out.endswith("The books are NOT identical.\n")
    assert run(UUID(int=7)) == 2
    assert "there is no invocation" in capsys.readouterr().err


PAIR = {
    "first": {"symbol": "BTC", "side": "buy", "quantity": 0.01, "exitPlan": {"stop": 90_000}},
    "second": {"symbol": "ETH", "side": "sell", "quantity": 0.3, "exitPlan": {"stop": 3_600}},
}


async def test_a_pair_is_reproduced(database: Database) -> None:
    """The markets have their books after the latency one after the other, while an exit plan of a third one fires."""
    provider = ScriptedProvider("strategy")
    async with open_floor(database, provider=provider, SIM_LATENCY_MS="200") as floor:
        await floor.add("ada", provider="strategy")

        async def cycle(*calls: tuple[str, Any]) -> FinishedInvocation:
            provider.scripts["ada"] = [calling(*calls), hold()]
            await floor.start_batch()
            for mids in ({"SOL": "199"}, {"ETH": "3310"}, {"BTC": "94100"}):
                await until(lambda: floor.market.orders_waiting)
                await floor.see(mids)
            await floor.idle()
            return (await floor.invocations.finished(page=Page(1)))[0]

        too_large = {**PAIR["second"], "quantity": 3}
        filled = await cycle(("placePair", PAIR))
        refused = await cycle(("placePair", {**PAIR, "second": too_large}))
        for record, ends, detail in (
            (filled, ["filled", "filled"], "2 fills, to the last digit"),
            (
                refused,
                ["rejected", "rejected"],
                "rejected: neither order of the pair is placed; the second (sell 3 ETH)",
            ),
        ):
            (call, *_) = record.tool_calls
            assert [result["status"] for result in call.metadata["results"]] == ends
            assert [decision["symbol"] for decision in call.metadata["decisions"]] == ["BTC", "ETH"]
            reproduction = await again(floor, record)
            assert reproduction.is_same, reproduction
            assert reproduction.calls[0][1].detail.startswith(detail)
        async with database.connection() as conn:
            await conn.execute("UPDATE fills SET price = price + 1 WHERE symbol = 'ETH'")
        assert (await again(floor, filled)).calls[0][1].same is False
