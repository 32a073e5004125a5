"""Cadence and budgets: when a model decides, and what it may do once its daily budget is spent."""

import random
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from operator import methodcaller
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from msgspec.structs import replace
from support.records import make_model
from support.run_profile import is_nightly
from support.scripted import START
from support.trading_floor import Floor, calling, hang, hold, open_floor, opening
from support.waiting import until

from trader.agents.budgets import ASSUMED_PRICE, Budgets
from trader.agents.domain.conversation import ModelAnswer, Turn
from trader.agents.domain.invocations import Invocation
from trader.agents.domain.models import Model, ModelConfiguration, TokenPrice
from trader.agents.domain.prompt import estimated_tokens
from trader.core.errors import ProviderTimeout
from trader.database.pool import Database, Page

NO_COST = Invocation(id=uuid4(), model_id="", status="completed", started_at=START, cost_usd=Decimal(0))
PRICE = TokenPrice(input=1, cached=0.1, output=2)


def priced(answer: ModelAnswer, **fields: Any) -> ModelAnswer:
    """The answer as if a provider had been asked, with these figures."""
    return msgspec.structs.replace(answer, duration_ms=5, **fields)


async def run_minutes(floor: Floor, minutes: int) -> list[str]:
    """Run the executor at every full minute; return when the models were asked, as HH:MM."""
    before = len(floor.provider.turns)
    for _ in range(minutes):
        now = floor.clock.now()
        until = now.replace(second=0, microsecond=0) + timedelta(minutes=1)
        await floor.cycle(after_s=(until - now).total_seconds())
    return [f"{turn.view.at:%H:%M}" for turn in floor.provider.turns[before:]]


async def test_a_model_decides_on_the_grid_of_its_cadence(floor: Floor) -> None:
    await floor.add("slow", configuration=ModelConfiguration(every="5m"))
    assert await run_minutes(floor, 12) == ["12:05", "12:10"]
    await floor.add("fast")
    assert await run_minutes(floor, 3) == ["12:13", "12:14", "12:15", "12:15"]
    assert not floor.agents.skipped


async def test_a_cycle_missed_by_the_executor_is_made_up(floor: Floor) -> None:
    await floor.add("slow", configuration=ModelConfiguration(every="5m"))
    assert await run_minutes(floor, 4) == []
    await floor.cycle(after_s=120)
    assert [f"{turn.view.at:%H:%M}" for turn in floor.provider.turns] == ["12:06"]


async def test_the_reservation_of_an_interrupted_invocation_counts_against_its_budget(database: Database) -> None:
    """The cost of a request is unknown if its process is killed meanwhile, so the whole reservation counts."""

    async with open_floor(database) as floor:
        await floor.add("ada", configuration=ModelConfiguration(price=PRICE, budget_usd_per_day=1))
        await floor.see()
        floor.provider.scripts["ada"] = [hang]
        await floor.start_batch()
        await until(lambda: floor.provider.turns)
        reserved = floor.agents.budgets.states(floor.models.by_id)["ada"].reserved
        assert reserved > 0
        async with open_floor(database) as later:  # the process that follows after this one is killed
            await later.agents.start()
            await later.see()
            await later.start_batch()
            budget = later.agents.budgets.states(later.models.by_id)["ada"]
            assert (budget.spent, budget.is_estimated) == (reserved, True)
        await floor.agents.close()


async def test_a_reservation_ends_with_its_term(floor: Floor) -> None:
    """Its invocation was interrupted; its record has what counts against the budget."""
    await floor.add("ada", configuration=ModelConfiguration(price=PRICE, budget_usd_per_day=1))
    floor.provider.scripts["ada"] = [hang]
    await floor.see()
    await floor.start_batch()
    await until(lambda: floor.provider.turns)
    budgets = floor.agents.budgets
    assert budgets.states(floor.models.by_id)["ada"].reserved > 0
    budgets.forget()
    await budgets.begin_cycle(floor.clock.now(), floor.models.by_id)
    assert budgets.states(floor.models.by_id)["ada"].reserved == 0


async def test_what_began_yesterday_costs_nothing_of_today(floor: Floor) -> None:
    await floor.add("ada", configuration=ModelConfiguration(price=PRICE, budget_usd_per_day=1))
    floor.provider.scripts["ada"] = [priced(hold(), input_tokens=5_000, output_tokens=7_500, cached_tokens=0)]
    await run_minutes(floor, 1)
    budgets = floor.agents.budgets
    invocation = (await floor.invocations.finished(page=Page(1)))[0].invocation
    for days, spent in ((1, "0.02"), (0, "0.04")):
        budgets.settle(replace(invocation, started_at=invocation.started_at - timedelta(days=days)))
        assert budgets.states(floor.models.by_id)["ada"].spent == Decimal(spent)


async def test_a_model_whose_budget_is_spent_only_reduces_once_in_15_minutes(floor: Floor) -> None:
    configuration = ModelConfiguration(price=PRICE, budget_usd_per_day=0.1, manage_usd_per_day=0.05)
    await floor.add("ada", configuration=configuration)
    fields = {"input_tokens": 5_000, "output_tokens": 7_500, "cached_tokens": 0}  # 0.02 USD
    floor.provider.scripts["ada"] = [priced(calling(opening()), **fields), priced(hold(), **fields)]
    assert await run_minutes(floor, 1) == ["12:01", "12:01"]
    (budget,) = floor.agents.budgets.states(floor.models.by_id).values()
    assert (budget.usd, budget.spent, budget.state) == (Decimal("0.1"), Decimal("0.04"), "manage")
    floor.provider.scripts["ada"] = [calling(opening(), ("closePosition", {"symbol": "BTC"})), hold()]
    assert await run_minutes(floor, 20) == ["12:15", "12:15"]
    view = floor.provider.turns[-1].view
    assert view.restriction is not None
    assert "your budget of 0.1 USD for the day is spent" in floor.provider.turns[-1].messages[1]["content"]
    (record,) = await floor.invocations.finished(page=Page(1))
    assert [call.status for call in record.tool_calls] == ["rejected", "ok", "ok"]
    assert record.tool_calls[0].metadata["results"][0]["rule"] == "budget"
    assert floor.exchange.account("ada").positions == {}
    assert "ada only manages what it holds until 00:00 UTC" in (floor.agents.warnings().summary or "")


def spending_all(turn: Turn) -> ModelAnswer:
    """Answer with as many tokens as the turn allows; nothing of the prompt is cached."""
    fetch = calling(("fetchIndicators", {"symbol": "BTC", "interval": "1h"}))
    asked, said = estimated_tokens(turn.messages, turn.symbols), turn.answer_tokens_max
    return priced(fetch, tokens_spent=asked + said, input_tokens=asked, output_tokens=said, cached_tokens=0)


def spending_half(turn: Turn) -> ModelAnswer:
    """Answer once, with half of the tokens that the turn allows."""
    asked, said = estimated_tokens(turn.messages, turn.symbols), turn.answer_tokens_max // 2
    return priced(hold(), tokens_spent=asked + said, input_tokens=asked, output_tokens=said, cached_tokens=0)


@pytest.mark.parametrize("when_spent", ["manage", "pause"])
@pytest.mark.parametrize("budget", [0.02, 0.05, 0.4])
async def test_a_budget_is_never_exceeded(floor: Floor, when_spent: Any, budget: float) -> None:
    await floor.add(
        "ada", configuration=ModelConfiguration(price=PRICE, budget_usd_per_day=budget, when_spent=when_spent)
    )
    floor.provider.scripts["ada"] = [spending_all]
    await run_minutes(floor, 40)
    (state,) = floor.agents.budgets.states(floor.models.by_id).values()
    assert 0.5 * budget < float(state.spent) <= budget, "and most of it can be used"
    assert state.state == "pause"
    assert not state.reserved


async def test_concurrent_models_do_not_exceed_the_combined_budget(database: Database) -> None:
    async with open_floor(database, AI_BUDGET_USD_PER_DAY="0.3") as floor:
        for number in range(8):
            await floor.add(f"m{number}", configuration=ModelConfiguration(price=PRICE, when_spent="pause"))
            floor.provider.scripts[f"m{number}"] = [spending_all]
        await run_minutes(floor, 6)
        assert Decimal("0.25") < floor.agents.budgets.total_spent <= Decimal("0.3")


async def test_the_models_of_an_owner_share_a_budget(floor: Floor) -> None:
    owned = ModelConfiguration(price=PRICE, owner="lab", owner_budget_usd_per_day=0.1, when_spent="pause")
    await floor.add("ada", "bob", configuration=owned)
    await floor.add("eve", configuration=ModelConfiguration(price=PRICE))
    for name in ("ada", "bob", "eve"):
        floor.provider.scripts[name] = [spending_all]
    await run_minutes(floor, 10)
    states = floor.agents.budgets.states(floor.models.by_id)
    assert set(states) == {"ada", "bob"}
    assert sum(state.spent for state in states.values()) <= Decimal("0.1")
    assert floor.provider.turns[-1].model.id == "eve"


@pytest.mark.slow
@pytest.mark.parametrize(("whose", "budget"), [("owner", 0.2), ("all", 0.2), ("owner", 3)])
async def test_no_model_that_shares_a_budget_starves(database: Database, budget: float, whose: str) -> None:
    """Twenty models share a budget that their smallest reservations exceed, or one for many invocations of each."""
    settings = {"AI_BUDGET_USD_PER_DAY": str(budget)} if whose == "all" else {}
    configuration = ModelConfiguration(price=PRICE, owner="lab", when_spent="pause", every="1h")
    if whose == "owner":
        configuration = replace(configuration, owner_budget_usd_per_day=budget)
    names = [f"m{number:02}" for number in range(20)]
    async with open_floor(database, **settings) as floor:
        await floor.add(*names, configuration=configuration)
        floor.provider.scripts = {name: [spending_half] for name in names}
        for _ in range(4):
            await floor.clock.advance(timedelta(minutes=59))
            await run_minutes(floor, 1)
        spent = {name: float(state.spent) for name, state in floor.agents.budgets.states(floor.models.by_id).items()}
    assert sum(spent.values()) <= budget
    assert 0 < max(spent.values()) < 2.1 * min(spent.values()), "each was asked, none much more often than another"


async def test_what_a_model_does_not_want_of_its_share_goes_to_others(floor: Floor) -> None:
    owned = ModelConfiguration(price=PRICE, owner="lab", owner_budget_usd_per_day=0.2, when_spent="pause")
    await floor.add("ada", configuration=owned)
    await floor.add("bob", configuration=replace(owned, every="24h"))
    floor.provider.scripts["ada"] = [spending_all]
    await run_minutes(floor, 20)
    state = floor.agents.budgets.states(floor.models.by_id)["ada"]
    assert Decimal("0.15") < state.spent <= Decimal("0.2")


async def test_a_prompt_that_a_budget_cannot_pay_is_not_sent(floor: Floor) -> None:
    configuration = ModelConfiguration(price=PRICE, budget_usd_per_day=0.019, when_spent="pause", prompt="x" * 30_000)
    await floor.add("ada", configuration=configuration)
    (record,) = await floor.cycle()
    assert "its budget leaves 1" in (record.invocation.failure_reason or "")
    assert not floor.provider.turns


async def test_unreported_tokens_are_estimated(database: Database) -> None:
    """A model that times out is charged the maximum cost of its requests."""
    timeout = ProviderTimeout("late", unmetered_attempts=1, unreported=(6_000, 8_000))
    async with open_floor(database, AI_BUDGET_USD_PER_DAY="7") as floor:
        await floor.add("ada", configuration=ModelConfiguration(price=PRICE))
        await floor.add("bob")
        for name in ("ada", "bob"):
            floor.provider.scripts[name] = [timeout]
        ada, bob = await floor.cycle()
        assert (ada.invocation.cost_usd, ada.invocation.unpriced_steps) == (Decimal("0.044"), 0), "it was asked twice"
        assert ada.invocation.is_cost_estimated
        assert (bob.invocation.cost_usd, bob.invocation.unpriced_steps) == (None, 2)
        states = floor.agents.budgets.states(floor.models.by_id)
        assert (states["ada"].spent, states["ada"].is_estimated) == (Decimal("0.044"), True)
        assert states["bob"].spent > 1, "without a price the dearest is assumed"
        assert "bob has a budget and no price" in (floor.agents.warnings().summary or "")
        floor.agents.budgets.forget()
        await floor.agents.budgets.follow(floor.clock.now(), floor.models.by_id)
        assert floor.agents.budgets.states(floor.models.by_id) == states, "as the rows say"


@pytest.mark.parametrize("seed", range(20 if is_nightly() else 3))
async def test_what_is_kept_of_budgets_equals_a_fresh_computation(database: Database, seed: int) -> None:
    chance, now = random.Random(seed), START
    history: list[Callable[[Budgets], object]] = []
    shared = {"owner": "lab", "owner_budget_usd_per_day": 3}
    budgets = Budgets(database, Decimal(7), 20_000, 4_000)

    def model(name: str) -> Model:
        price = TokenPrice(input=chance.choice([1, 3, 15]), output=chance.choice([2, 60]))
        limit = chance.choice([{}, {"budget_usd_per_day": 1}, {"when_spent": "manage", "budget_usd_per_day": 0.5}])
        every = chance.choice(["1m", "15m", "4h"])
        owner = shared if name != "eve" else {}
        configuration = ModelConfiguration(price=price, every=every, **owner, **limit)  # type: ignore[arg-type]
        return msgspec.structs.replace(make_model(name), provider="fake", configuration=configuration)

    models = {name: model(name) for name in ("ada", "bob", "eve")}
    await budgets.begin_cycle(now, models)
    for step in range(150):
        name = chance.choice([*models])
        chosen = models[name]
        match chance.choice(["reserve", "settle", "compare", "cycle"]):
            case "reserve":
                alone = Budgets(database, Decimal(1_000), 20_000, 4_000)
                await alone.begin_cycle(now, models)
                if (tokens := budgets.reserve(chosen)) is not None and alone.reserve(chosen) == 20_000:
                    assert (budgets.reserved(chosen) or 0) / tokens >= (alone.reserved(chosen) or 0) / 20_000
            case "settle":
                cost = Decimal(chance.choice(["0.1", "0.4"]))
                ended = Invocation(id=uuid4(), model_id=name, status="completed", started_at=now, cost_usd=cost)
                history.append(methodcaller("settle", ended))
                history[-1](budgets)
            case "compare":
                history.append(methodcaller("compare", chosen, Decimal(chance.randint(1, 30)), Decimal(10)))
                history[-1](budgets)
            case "cycle":
                for each in models:  # every invocation has ended
                    history.append(methodcaller("settle", replace(NO_COST, model_id=each, started_at=now)))
                    history[-1](budgets)
                now += timedelta(minutes=chance.choice([1, 60, 200]))
                models = {**models, name: model(name)}
                await budgets.begin_cycle(now, models)
                fresh = Budgets(database, Decimal(7), 20_000, 4_000)
                await fresh.begin_cycle(now, models)
                for act in history:
                    act(fresh)
                assert budgets.states(models) == fresh.states(models), step
        known = budgets.states(models)
        await budgets.begin_cycle(now, models)  # which drops what is kept
        assert known == budgets.states(models), step


@pytest.mark.parametrize(("own", "warned"), [("0.81", 0), ("1.19", 0), ("0.8", 1), ("1.2", 1), ("9", 1)])
async def test_the_cost_of_the_provider_wins_over_the_price_of_the_file(
    floor: Floor, caplog: pytest.LogCaptureFixture, own: str, warned: int
) -> None:
    configuration = ModelConfiguration(price=PRICE, budget_usd_per_day=100)
    await floor.add("ada", configuration=configuration)
    floor.provider.scripts["ada"] = [priced(hold(), input_tokens=1_000_000, output_tokens=0, cost_usd=Decimal(own))]
    for _ in range(2):
        (record,) = await floor.cycle()
        assert record.invocation.cost_usd == Decimal(own)
    text = f"ada: its provider reports costs of {own} USD, but its price in the models file gives 1 USD"
    assert sum(text in message for message in caplog.messages) == warned, "once"
    twice = text.replace(f"of {own} ", f"of {2 * Decimal(own)} ").replace("gives 1 ", "gives 2 ")
    assert (twice in (floor.agents.warnings().summary or "")) == bool(warned)
    assert set(floor.agents.with_wrong_prices()) == ({"ada"} if warned else set())
    await floor.add("ada", configuration=replace(configuration, price=TokenPrice(input=float(own), output=2)))
    await floor.cycle()
    assert not floor.agents.with_wrong_prices(), "the price was corrected"


async def test_the_reservation_grows_with_what_the_provider_charges(floor: Floor) -> None:
    await floor.add("ada", configuration=ModelConfiguration(price=PRICE, budget_usd_per_day=1))
    reserved: list[Decimal] = []

    def charge(turn: Turn) -> ModelAnswer:
        reserved.append(floor.agents.budgets.reserved(turn.model) or Decimal(0))
        return priced(hold(), input_tokens=9_000, output_tokens=0, cost_usd=Decimal("0.027"))

    floor.provider.scripts["ada"] = [charge]
    await run_minutes(floor, 2)
    first, second = map(float, reserved)
    assert second == pytest.approx(3 * first)


async def test_a_paused_model_is_asked_again_the_next_day(floor: Floor) -> None:
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
        floor.provider.scripts["ada"] = [priced(hold(), cost_usd=Decimal("0.9"))]
        floor.provider.scripts["bob"] = [priced(hold(), cost_usd=None)]
        await run_minutes(floor, 5)
        states = floor.agents.budgets.states(floor.models.by_id)
        assert states["ada"][1:4] == (2 * Decimal("0.9"), False, "pause")
        assert states["bob"][1:4] == (5 * ASSUMED_PRICE.cost(100, 0, 100), True, "open"), "it keeps its share"
        assert floor.agents.budgets.total_spent <= 3


async def test_spending_before_a_restart_counts(database: Database) -> None:
    configuration = ModelConfiguration(budget_usd_per_day=1, when_spent="pause")
    async with open_floor(database) as floor:
        await floor.add("ada", configuration=configuration)
        floor.provider.scripts["ada"] = [priced(hold(), cost_usd=Decimal(5))]
        assert len(await run_minutes(floor, 2)) == 1
        floor.agents.budgets.forget()
        assert await run_minutes(floor, 2) == []


async def test_a_partly_known_cost_is_marked_partial(floor: Floor) -> None:
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
async def test_the_next_prompt_is_estimated_before_it_is_sent(database: Database, tokens_max: str, steps: int) -> None:
    async with open_floor(database, RUN_TOKENS_MAX=tokens_max) as floor:
        await floor.add("ada")
        fetch = calling(("fetchIndicators", {"symbol": "BTC", "interval": "1h"}))
        floor.provider.scripts["ada"] = [priced(fetch, input_tokens=6_000, output_tokens=100, tokens_spent=6_100)] * 10
        (record,) = await floor.cycle()
        assert record.invocation.status == "completed"
        assert len(floor.provider.turns) == steps
        assert len(floor.provider.turns) == 1 or 256 <= floor.provider.turns[1].answer_tokens_max < 900


async def test_a_prompt_truncated_by_the_provider_is_reported_once(floor: Floor, caplog: Any) -> None:
    await floor.add("ada")
    floor.provider.scripts["ada"] = [priced(hold(), input_tokens=600, output_tokens=9)]
    await floor.cycle()
    await floor.cycle()
    assert sum("num_ctx" in message for message in caplog.messages) == 1
    assert "ada: its provider counted fewer tokens than the prompt has" in (floor.agents.warnings().summary or "")
