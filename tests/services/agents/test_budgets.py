"""Cadence and budgets: when a model decides, and what it may do when the money of its day is spent."""

from datetime import timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from support.floor import Floor, calling, hold, open_floor, opening

from trader.domain.agents.conversation import ModelAnswer
from trader.domain.models import ModelConfiguration, Price
from trader.services.agents.budgets import Budget
from trader.store.database.paging import Page
from trader.store.database.pool import Database

PRICE = Price(input=1, cached=0.1, output=2)


def priced(answer: ModelAnswer, **fields: Any) -> ModelAnswer:
    """The answer as if a provider had been asked, with these figures."""
    return msgspec.structs.replace(answer, duration_ms=5, **fields)


async def run_minutes(floor: Floor, minutes: int) -> list[str]:
    """Run the executor at every full minute; return when the models were asked, as HH:MM."""
    before = len(floor.provider.turns)
    for _ in range(minutes):
        now = floor.clock.now()
        until = now.replace(second=0, microsecond=0) + timedelta(minutes=1)
        await floor.see(after_s=(until - now).total_seconds())
        await floor.start_batch()
        await floor.idle()
    return [f"{turn.view.at:%H:%M}" for turn in floor.provider.turns[before:]]


async def test_a_model_decides_on_the_grid_of_its_cadence(floor: Floor) -> None:
    await floor.add("slow", configuration=ModelConfiguration(every="5m"))
    assert await run_minutes(floor, 12) == ["12:05", "12:10"]
    await floor.add("fast")
    assert await run_minutes(floor, 3) == ["12:13", "12:14", "12:15", "12:15"]
    assert not floor.agents.skipped


async def test_a_cycle_that_the_executor_missed_is_made_up_for(floor: Floor) -> None:
    await floor.add("slow", configuration=ModelConfiguration(every="5m"))
    assert await run_minutes(floor, 4) == []
    await floor.see(after_s=120)
    await floor.start_batch()
    await floor.idle()
    assert [f"{turn.view.at:%H:%M}" for turn in floor.provider.turns] == ["12:06"]


async def test_a_model_whose_budget_is_spent_only_reduces_once_in_15_minutes(floor: Floor) -> None:
    configuration = ModelConfiguration(price=PRICE, budget_usd_per_day=0.0005)
    await floor.add("ada", configuration=configuration)
    fields = {"input_tokens": 200, "output_tokens": 50, "cached_tokens": 100}
    floor.provider.scripts["ada"] = [priced(calling(opening()), **fields), priced(hold(), **fields)]
    # Each step costs (100 × 1 + 100 × 0.1 + 50 × 2) / 1,000,000 USD, two of them 0.00042.
    assert len(await run_minutes(floor, 2)) == 4, "the invocation that reaches the budget is the last"
    (budget,) = floor.agents.budgets.states(floor.agents.models).values()
    assert budget == Budget(Decimal("0.0005"), Decimal("0.00084"), False, "manage")
    floor.provider.scripts["ada"] = [calling(opening(), ("closePosition", {"symbol": "BTC"})), hold()]
    assert await run_minutes(floor, 20) == ["12:15", "12:15"]
    view = floor.provider.turns[-1].view
    assert view.restriction is not None
    assert "your budget of 0.0005 USD for the day is spent" in floor.provider.turns[-1].messages[1]["content"]
    (record,) = await floor.agents.invocations(page=Page(1))
    assert [call.status for call in record.tool_calls] == ["rejected", "ok", "ok"]
    assert record.tool_calls[0].metadata["results"][0]["rule"] == "budget"
    assert floor.exchange.account("ada").positions == {}
    assert "ada only manages what it holds until 00:00 UTC" in (floor.agents.warning() or "")


async def test_a_model_that_pauses_is_asked_again_the_next_day(floor: Floor) -> None:
    configuration = ModelConfiguration(budget_usd_per_day=1, when_spent="pause", every="1h")
    await floor.add("ada", configuration=configuration)
    floor.provider.scripts["ada"] = [priced(hold(), cost_usd=Decimal(1))]
    await floor.clock.advance(timedelta(hours=9, minutes=58))
    assert await run_minutes(floor, 3) == ["22:00"]
    await floor.clock.advance(timedelta(minutes=56))
    assert await run_minutes(floor, 3) == [], "at 23:00"
    await floor.clock.advance(timedelta(minutes=57))
    assert await run_minutes(floor, 3) == ["00:00"]


async def test_the_budget_of_all_models_limits_each(database: Database) -> None:
    async with open_floor(database, AI_BUDGET_USD_PER_DAY="3") as floor:
        await floor.add("ada", "bob", configuration=ModelConfiguration(when_spent="pause"))
        floor.provider.scripts["ada"] = [priced(hold(), cost_usd=Decimal(2))]
        floor.provider.scripts["bob"] = [priced(hold(), cost_usd=None)]
        assert len(await run_minutes(floor, 5)) == 4
        states = floor.agents.budgets.states(floor.agents.models)
        assert states == {
            "ada": Budget(None, Decimal(4), False, "pause"),
            "bob": Budget(None, Decimal(0), True, "pause"),
        }


async def test_what_was_spent_before_a_restart_counts(database: Database) -> None:
    configuration = ModelConfiguration(budget_usd_per_day=1, when_spent="pause")
    async with open_floor(database) as floor:
        await floor.add("ada", configuration=configuration)
        floor.provider.scripts["ada"] = [priced(hold(), cost_usd=Decimal(5))]
        assert len(await run_minutes(floor, 2)) == 1
        floor.agents.budgets.forget()
        assert await run_minutes(floor, 2) == []


async def test_a_cost_that_is_known_in_part_says_so(floor: Floor) -> None:
    await floor.add("ada")
    floor.provider.scripts["ada"] = [
        priced(calling(("fetchIndicators", {"symbol": "BTC", "interval": "1h"})), cost_usd=Decimal("0.5")),
        priced(hold(), cost_usd=None),
    ]
    (record,) = await floor.cycle()
    assert (record.invocation.cost_usd, record.invocation.unpriced_steps) == (Decimal("0.5"), 1)
    assert record.invocation.is_cost_partial
    await floor.add("rules", provider="fake", configuration=ModelConfiguration(price=PRICE))
    floor.provider.scripts["rules"] = [priced(hold(), input_tokens=1_000_000, output_tokens=0)]
    _, record = await floor.cycle()
    assert (record.invocation.cost_usd, record.invocation.is_cost_partial) == (Decimal(1), False)


@pytest.mark.parametrize(("tokens_max", "steps"), [("12000", 1), ("13000", 2)])
async def test_the_next_prompt_is_estimated_before_it_is_asked(database: Database, tokens_max: str, steps: int) -> None:
    async with open_floor(database, RUN_TOKENS_MAX=tokens_max) as floor:
        await floor.add("ada")
        fetch = calling(("fetchIndicators", {"symbol": "BTC", "interval": "1h"}))
        floor.provider.scripts["ada"] = [priced(fetch, input_tokens=6_000, output_tokens=100, tokens_spent=6_100)] * 10
        (record,) = await floor.cycle()
        assert record.invocation.status == "completed"
        assert len(floor.provider.turns) == steps
        assert len(floor.provider.turns) == 1 or 256 <= floor.provider.turns[1].answer_tokens_max < 900


async def test_a_prompt_that_the_provider_cut_is_reported_once(floor: Floor, caplog: Any) -> None:
    await floor.add("ada")
    floor.provider.scripts["ada"] = [priced(hold(), input_tokens=600, output_tokens=9)]
    await floor.cycle()
    await floor.cycle()
    assert sum("num_ctx" in message for message in caplog.messages) == 1
    assert "ada: its provider counted less than half" in (floor.agents.warning() or "")
