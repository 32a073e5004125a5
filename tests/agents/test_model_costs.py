"""Costs of models: tokens and money in the current run, and the gain net of costs."""

from decimal import Decimal

import pytest
from support.manual_clock import ManualClock
from support.records import HOUR, START, FakeExchange, add_model, add_run, id_of, make_account, make_run

from trader.agents.domain.invocations import Invocation, InvocationStatus
from trader.agents.domain.models import Model
from trader.agents.sql import invocations as store
from trader.agents.sql.models import upsert_model
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.exchange.paper import PaperExchange
from trader.portfolio.analytics import Analytics, ModelStats
from trader.portfolio.run_statistics import CurrentRuns

D = Decimal
INSERT_LINK = "INSERT INTO chain_links (invocation_id, record_digest) VALUES ($1, sha256('x'))"


class Bench:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.exchange = FakeExchange()
        served: PaperExchange = self.exchange  # type: ignore[assignment]
        self.analytics = Analytics(database, served, ManualClock(START), CurrentRuns(database))

    async def invoke(
        self, hour: int, tokens: tuple[int, int], cost: str | None, status: InvocationStatus = "completed"
    ) -> None:
        at = START + hour * HOUR
        invocation = Invocation(
            id=id_of("invocation", "one", at), model_id="one", status=status, started_at=at, finished_at=at,
            failure_reason=None if status == "completed" else "it broke", input_tokens=tokens[0],
            output_tokens=tokens[1], cost_usd=None if cost is None else D(cost),
        )  # fmt: skip
        async with self.database.connection() as conn:
            await store.insert_invocation(conn, invocation)
            await store.update_invocation(conn, invocation)
            await conn.execute(INSERT_LINK, invocation.id)

    async def stats(self) -> ModelStats:
        (stats,) = await self.analytics.model_stats()
        return stats


@pytest.fixture
async def bench(database: Database) -> Bench:
    bench = Bench(database)
    async with database.connection() as conn:
        await add_model(conn, "one")
        await upsert_model(
            conn,
            Model(
                id="one", name="One", variant=VariantId.APEX, provider="openrouter", router_model_name="lab/one",
                created_at=START,
            ),
        )  # fmt: skip
    bench.exchange.put(make_account("one", run=make_run("one", 1), realized=50))
    return bench


async def test_tokens_and_cost_are_summed_and_taken_from_the_gain(bench: Bench) -> None:
    await bench.invoke(1, (1000, 20), "0.25")
    await bench.invoke(2, (500, 10), None)
    await bench.invoke(3, (100, 1), "0.125", "failed")
    stats = await bench.stats()
    run = stats.totals
    assert (run.input_tokens, run.output_tokens, stats.cost_usd) == (1600, 31, D("0.375"))
    assert stats.net_after_cost == D("49.625")


async def test_an_unreported_cost_is_not_zero(bench: Bench) -> None:
    await bench.invoke(1, (1000, 20), None)
    stats = await bench.stats()
    assert stats.totals.input_tokens == 1000
    assert (stats.cost_usd, stats.net_after_cost) == (None, None)
    await bench.invoke(2, (0, 0), "0.5")
    assert (await bench.stats()).net_after_cost == D("49.5")


async def test_the_cost_covers_only_the_current_run(bench: Bench) -> None:
    await bench.invoke(1, (1000, 20), "1")
    async with bench.database.connection() as conn:
        await add_run(conn, "one", make_run("one", 2, at=START + 2 * HOUR))
    await bench.invoke(3, (7, 3), "0.5")
    run = (await bench.stats()).totals
    assert (run.input_tokens, run.output_tokens, run.cost_usd) == (7, 3, D("0.5"))


async def test_a_rule_agent_costs_nothing(bench: Bench) -> None:
    async with bench.database.connection() as conn:
        await conn.execute("UPDATE models SET provider = 'rules'")
    stats = await bench.stats()
    assert (stats.cost_usd, stats.net_after_cost) == (D(0), D(50))
