"""Keys of external agents over HTTP: permissions, limits, and changes by commands while the service runs."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec
import pytest
from pytest_aiohttp.plugin import AiohttpClient
from support.agent_desk import AgentContext, Command, Desk, order_of
from support.scripted import START
from support.served import make_app
from support.trading_floor import calling, hold, open_floor, opening
from support.waiting import until

from trader.agents.domain.tools import PlaceOrder, PlannedExit
from trader.agents.reproduction import reproduce_invocation
from trader.agents.sql.invocations import select_costs_since
from trader.agents.verification import verify
from trader.database.pool import Database
from trader.exchange.domain.orders import Order, OrderAnswer
from trader.operations import access
from trader.operations.loss_limits import LossLimits
from trader.operations.operator_commands import OperatorCommands
from trader.portfolio.analytics import Analytics
from trader.portfolio.domain.seasons import SeasonRecord, SeasonRules
from trader.portfolio.run_statistics import CurrentRuns
from trader.portfolio.sql.seasons import insert_season_record


async def test_a_key_belongs_to_one_account(desk: Desk, command: Command) -> None:
    scout = await command("agents", "add", "scout", "--variant", "Apex", "--owner", "alice", "--capital", "500")
    other = await command("agents", "add", "other", "--variant", "Contrarian")
    assert (scout["id"], scout["accountId"]) == ("scout", "scout")
    who = await desk.call("agent.whoami", scout["key"])
    assert (who["accountId"], who["variant"], who["owner"], who["scopes"]) == (
        "scout",
        "Apex",
        "alice",
        ["read", "trade"],
    )
    assert scout["key"].startswith(who["keyPrefix"])
    assert (await desk.call("agent.getAccount", scout["key"], accountId="scout"))["account"]["initialCapital"] == 500
    assert await desk.call("agent.getAccount", scout["key"], 403, accountId="other") == "FOREIGN_ACCOUNT"
    assert (await desk.call("agent.whoami", other["key"]))["accountId"] == "other"


async def test_only_its_key_trades_an_agents_account(desk: Desk, command: Command) -> None:
    key = (await command("agents", "add", "scout", "--variant", "Apex"))["key"]
    await desk.call("agent.whoami", key)
    order: dict[str, Any] = {"symbol": "BTC", "side": "buy", "quantity": 0.01}
    assert await desk.call("simulator.placeOrder", None, 403, accountId="scout", **order) == "FOREIGN_ACCOUNT"
    assert await desk.call("simulator.resetAccount", None, 403, accountId="scout") == "FOREIGN_ACCOUNT"
    for account in ("scout", "default"):
        assert await desk.call("simulator.placeOrder", key, 403, accountId=account, **order) == "FORBIDDEN"
    assert (await desk.call("simulator.placeOrder", None, accountId="default", **order))["order"]["status"] == "filled"
    async with desk.floor.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM order_requests WHERE account_id = 'scout'") == 0


async def test_keys_are_rotated_and_revoked_while_the_service_runs(
    desk: Desk, command: Command, database: Database
) -> None:
    first = (await command("agents", "add", "scout", "--variant", "Apex"))["key"]
    assert await desk.call("agent.whoami", None, 401) == "UNAUTHORIZED"
    assert await desk.call("agent.whoami", first[:-1] + "x", 401) == "UNAUTHORIZED"
    assert await desk.call("agent.whoami", "tra_" + "x" * 43, 401) == "UNAUTHORIZED"
    second = (await command("agents", "rotate", "scout"))["key"]
    assert await desk.call("agent.whoami", first, 401) == "KEY_REVOKED"
    assert (await desk.call("agent.whoami", second))["agentId"] == "scout"
    assert (await command("agents", "revoke", "scout"))["revoked"] == 1
    assert await desk.call("agent.whoami", second, 401) == "KEY_REVOKED"
    assert "revoked" in await command("agents", "limits", "scout", "--requests", "5", code=1)
    assert "no key 'nobody'" in await command("agents", "rotate", "nobody", code=1)
    (listed,) = (await command("agents", "list"))["agents"]
    assert (listed["keyPrefix"], listed["revokedAt"] is None) == (second[:12], False)
    async with database.connection() as conn:
        kept = str(await conn.fetch("SELECT * FROM credentials"))
    assert first[12:] not in kept
    assert second[12:] not in kept


async def test_a_key_has_scopes_and_a_limit_of_requests(desk: Desk, command: Command) -> None:
    key = (await command("agents", "add", "scout", "--variant", "Apex", "--requests", "2", "--scopes", "trade"))["key"]
    assert await desk.call("agent.whoami", key, 403) == "MISSING_SCOPE"
    await command("agents", "limits", "scout", "--scopes", "read,trade")
    await desk.call("agent.whoami", key)
    assert await desk.call("agent.whoami", key, 429) == "TOO_MANY_REQUESTS"
    assert 25 <= int(desk.retry_after or 0) <= 30
    await desk.call("models.getModels")  # others are not limited
    assert await desk.call("models.getModels", key, 429) == "TOO_MANY_REQUESTS"
    await command("agents", "limits", "scout", "--requests", "600")
    await desk.call("agent.whoami", key)


async def test_an_agent_may_take_up_to_ten_minutes(desk: Desk, command: Command, key: str) -> None:
    assert (await desk.call("agent.whoami", key))["decisionDeadlineSeconds"] == 120
    for wrong in ("601", "4", "1.5", "ten"):
        assert "whole seconds from 5 to 600" in await command("agents", "limits", "scout", "--deadline", wrong, code=2)
    said = await command("agents", "limits", "scout", "--deadline", "600")
    assert (said["deadlineSeconds"], said["decisionsPerMinute"]) == (600, 9)
    await desk.floor.models.reload()
    assert (await desk.call("agent.whoami", key))["decisionDeadlineSeconds"] == 600
    view = await desk.call("agent.getView", key)
    opened, deadline = (datetime.fromisoformat(view[name]) for name in ("openedAt", "deadline"))
    assert deadline - opened == timedelta(seconds=600)
    await desk.floor.see(after_s=590)
    assert (await desk.call("agent.placeOrder", key, **order_of(view)))["result"] == "ok"
    assert (await desk.call("agent.hold", key, viewId=view["viewId"], reason="a long graph"))["holding"]


async def test_an_agent_declares_what_a_decision_cost(desk: Desk, key: str) -> None:
    view = await desk.call("agent.getView", key)
    usage = {"model": "lab/two", "steps": 5, "inputTokens": 12_000, "outputTokens": 800, "costUsd": 0.021}
    for wrong in ({"costUsd": -1}, {"steps": 1.5}, {"tokens": 3}):
        wrongly = {"viewId": view["viewId"], "reason": "flat", "usage": wrong}
        assert await desk.call("agent.hold", key, 400, **wrongly) == "VALIDATION_ERROR"
    await desk.call("agent.hold", key, viewId=view["viewId"], reason="flat", usage=usage)
    (record,) = (await desk.call("agent.getHistory", key))["conversations"]
    assert record["declaredUsage"] == usage
    assert (record["inputTokens"], record["outputTokens"], record["costUsd"]) == (12_000, 800, 0.021)
    async with desk.floor.database.connection() as conn:
        assert await select_costs_since(conn, START) == {}, "a declared cost is in no budget of the service"
        assert await conn.fetchval("SELECT cost_usd FROM invocation_counts") == Decimal("0.021")
    assert not (await verify(desk.floor.database, [])).findings


async def test_an_agent_shows_its_steps_while_it_decides(desk: Desk, key: str) -> None:
    view = await desk.call("agent.getView", key)
    own = {"viewId": view["viewId"]}
    parts = [{"kind": "step", "title": "plan", "text": "look at ETH"}, {"text": "it trends"}]
    assert (await desk.call("agent.note", key, **own, parts=parts))["noted"]
    assert (await desk.call("agent.note", key, **own, text="ETH next"))["noted"]
    refused: tuple[dict[str, Any], ...] = (
        {},
        {"parts": []},
        {"parts": [{"kind": "mood", "text": "x"}]},
        {"parts": [{"text": "x" * 1001}]},
    )
    for wrong in refused:
        assert await desk.call("agent.note", key, 400, **own, **wrong) == "VALIDATION_ERROR"
    shown = [event.details["decisions"] for event in desk.floor.progress() if event.type == "workflow:call"]
    assert shown == [[{"parts": parts}], [{"text": "ETH next"}]], "before the decision ends"
    await desk.call("agent.hold", key, **own, reason="done")
    (record,) = (await desk.call("agent.getHistory", key))["conversations"]
    assert record["toolCalls"][0]["metadata"]["decisions"] == [{"parts": parts}]
    async with desk.floor.database.connection() as conn:
        assert await conn.fetchval("SELECT text FROM notes WHERE model_id = 'scout'") == "ETH next"
    assert not (await verify(desk.floor.database, [])).findings


async def test_the_name_of_a_model_is_taken(desk: Desk, command: Command) -> None:
    await desk.floor.add("ada")
    assert "already" in await command("agents", "add", "ada", "--variant", "Apex", code=1)
    await desk.call("simulator.placeOrder", None, accountId="taken", symbol="BTC", side="buy", quantity=0.01)
    assert "and others traded it" in await command("agents", "add", "taken", "--variant", "Apex", code=1)


async def test_a_decision_is_an_invocation_like_any_other(desk: Desk, key: str) -> None:
    view = await desk.call("agent.getView", key)
    assert "Kelly" in view["prompt"] or "squeeze" in view["prompt"]
    assert set(view["view"]["now"]) == {"BTC", "ETH", "SOL"}
    assert (await desk.call("agent.getView", key)) == view
    placed = await desk.call("agent.placeOrder", key, **order_of(view))
    assert (placed["result"], placed["status"], placed["filledQuantity"]) == ("ok", "filled", "0.01")
    assert placed["account"]["positions"] == [{"symbol": "BTC", "side": "LONG", "quantity": "0.01"}]
    assert await desk.call("agent.placeOrder", key, **order_of(view)) == placed
    assert await desk.call("agent.placeOrder", key, 409, **order_of(view, quantity=0.02)) == "CONFLICT"
    moved = await desk.call("agent.setExitPlan", key, viewId=view["viewId"], symbol="btc", stop=91000)
    assert moved["exitPlan"]["stop"] == 91000
    assert (await desk.call("agent.note", key, viewId=view["viewId"], text="long now"))["noted"]
    candles = await desk.call("agent.getCandles", key, symbol="ETH", interval="15m")
    assert (candles["symbol"], candles["interval"]) == ("ETH", "15m")
    assert len((await desk.call("agent.getOrderBook", key, symbol="BTC"))["bids"]) >= 1
    closed = await desk.call("agent.closePosition", key, viewId=view["viewId"], symbol="BTC")
    assert (closed["side"], closed["account"]["positions"]) == ("sell", [])
    assert (await desk.call("agent.hold", key, viewId=view["viewId"], reason="done"))["holding"]
    assert await desk.call("agent.hold", key, 409, viewId=view["viewId"], reason="again") == "VIEW_DECIDED"
    assert await desk.call("agent.placeOrder", key, **order_of(view)) == placed | {"account": closed["account"]}
    (record,) = (await desk.call("agent.getHistory", key))["conversations"]
    assert (record["id"], record["status"], record["response"]) == (view["viewId"], "completed", "done")
    assert [call["type"] for call in record["toolCalls"]] == [
        "CREATE_POSITION", "UPDATE_EXIT_PLAN", "NOTE", "FETCH_INDICATORS", "FETCH_ORDER_BOOK", "CLOSE_POSITION",
        "HOLDING",
    ]  # fmt: skip
    kinds = [event.type for event in desk.floor.progress()]
    assert (kinds[0], kinds[-1], kinds.count("workflow:call")) == ("workflow:started", "workflow:complete", 7)
    assert not (await verify(desk.floor.database, [])).findings
    reproduced = await reproduce_invocation(desk.floor.database, UUID(record["id"]))
    assert all(finding.same is not False for _, finding in reproduced.calls), reproduced


async def test_the_guard_of_the_variant_judges_every_order(desk: Desk, key: str) -> None:
    view = await desk.call("agent.getView", key)

    async def rule(**changes: object) -> Any:
        refused = await desk.call("agent.placeOrder", key, **order_of(view, str(changes), **changes))
        assert refused["result"] == "rejected", refused
        return refused["rule"]

    assert await rule(exitPlan=None) == "stop"
    assert await rule(exitPlan={"stop": 95000}) == "stop"
    assert await rule(leverage=11) == "leverage"
    assert await rule(quantity=0.6, leverage=10) == "notional"
    assert await rule(reduceOnly=True) == "no position"
    resting = await desk.call(
        "agent.placeOrder", key, **order_of(view, "rests", type="limit", limitPrice=93000, quantity=0.5, leverage=10)
    )
    assert resting["status"] == "resting"
    assert await rule(quantity=0.1, leverage=10) == "notional"  # resting orders count
    cancelled = await desk.call("agent.cancelOrder", key, orderId=resting["orderId"])
    assert cancelled["order"]["status"] == "cancelled"
    assert (await desk.call("agent.placeOrder", key, **order_of(view, "small", quantity=0.1)))["result"] == "ok"


async def test_silence_is_a_missed_decision(desk: Desk, key: str) -> None:
    view = await desk.call("agent.getView", key)
    await desk.floor.see(after_s=121)
    assert await desk.call("agent.placeOrder", key, 409, **order_of(view)) == "VIEW_EXPIRED"
    assert (
        await desk.call("agent.hold", key, 404, viewId="6f1b9e0a-5d0c-5c11-8e0e-3f6f0b1f7a52", reason="x")
        == "VIEW_UNKNOWN"
    )
    assert await desk.call("agent.hold", key, 404, viewId="nothing", reason="x") == "VIEW_UNKNOWN"
    assert await desk.call("agent.hold", key, 400, viewId=view["viewId"]) == "VALIDATION_ERROR"
    (record,) = (await desk.call("agent.getHistory", key))["conversations"]
    assert record["status"] == "timeout"
    begins_late, cycle = timedelta(milliseconds=3), START.replace(minute=10, second=0)
    scout = desk.floor.models.by_id["scout"]
    external = desk.floor.agents.external
    for minute in range(-1, 3):
        await external.begin_cycle([scout], cycle + timedelta(minutes=minute) + begins_late)
    external.close()  # another process leads and counts in the meantime
    await external.begin_cycle([scout], cycle + timedelta(minutes=9) + begins_late)
    async with desk.floor.database.connection() as conn:
        counts = await conn.fetchrow("SELECT sum(finished), sum(failed), sum(missed) FROM invocation_counts")
        assert counts is not None
        assert tuple(counts) == (1, 1, 2)  # the first cycle of a process is incomplete
        assert await conn.fetchval("SELECT count(*) FROM order_requests") == 0


@pytest.mark.parametrize("span", [timedelta(hours=3), -timedelta(hours=3)])
async def test_a_clock_that_is_set_neither_ends_nor_prolongs_a_view(desk: Desk, key: str, span: timedelta) -> None:
    view = await desk.call("agent.getView", key)
    desk.floor.clock.set_by(span)
    await desk.floor.see()
    assert (await desk.call("agent.getView", key))["viewId"] == view["viewId"]
    await desk.floor.see(after_s=121)
    view = await desk.call("agent.getView", key)
    desk.floor.clock.set_by(-span)
    await desk.floor.see(after_s=121)
    assert await desk.call("agent.placeOrder", key, 409, **order_of(view)) == "VIEW_EXPIRED"


async def test_an_order_after_the_end_of_the_season_is_refused(desk: Desk, key: str, database: Database) -> None:
    rules = SeasonRules(
        name="Winter", start=START - timedelta(days=2), end=START, markets=["BTC"], capital=10_000, taker_fee_bps=5,
        maker_fee_bps=2, latency_ms=200, replicates=1, compare=["holdNothing"], alpha=0.05, stopping="end",
        disqualify=[],
    )  # fmt: skip
    opened = SeasonRecord(step="opened", season=1, number=0, at=START - timedelta(days=3), rules=rules)
    view = await desk.call("agent.getView", key)
    await desk.call("agent.placeOrder", key, **order_of(view))
    async with database.connection() as conn:
        await insert_season_record(conn, opened)
    assert await desk.call("agent.placeOrder", key, 409, **order_of(view, "two")) == "SEASON_OVER"
    assert (await desk.call("agent.placeOrder", key, **order_of(view)))["result"] == "ok"  # the first answer, repeated
    out = order_of(view, "out", side="sell", reduceOnly=True, exitPlan=None)
    assert (await desk.call("agent.placeOrder", key, **out))["account"]["positions"] == []
    async with database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM order_requests") == 2
        later = msgspec.structs.replace(rules, start=START, end=START + timedelta(days=9))
        await insert_season_record(conn, SeasonRecord(step="opened", season=2, number=0, at=START, rules=later))
    assert (await desk.call("agent.placeOrder", key, **order_of(view, "two")))["result"] == "ok"


async def test_a_missing_resource_has_a_code(desk: Desk, key: str) -> None:
    view = await desk.call("agent.getView", key)
    assert await desk.call("agent.getCandles", key, 400, symbol="DOGE", interval="1h") == "VALIDATION_ERROR"
    assert await desk.call("agent.cancelOrder", key, 404, orderId="6f1b9e0a-5d0c-5c11-8e0e-3f6f0b1f7a52") == "NOT_FOUND"
    placed = await desk.call("agent.placeOrder", key, **order_of(view, symbol="DOGE"))
    assert (placed["result"], "DOGE" in placed["error"]) == ("failed", True)


async def test_decisions_are_limited_by_the_minute(desk: Desk, command: Command, key: str) -> None:
    await command("agents", "limits", "scout", "--decisions", "1")
    view, external = await desk.call("agent.getView", key), desk.floor.agents.external
    external.close()
    await external.start(desk.floor.models.by_id)  # as after a restart
    await desk.call("agent.hold", key, viewId=view["viewId"], reason="waits")
    await desk.floor.see()  # in one moment, no second view would open anyway
    assert await desk.call("agent.getView", key, 429) == "TOO_MANY_REQUESTS"
    assert 1 <= int(desk.retry_after or 0) <= 60
    await desk.floor.see(after_s=int(desk.retry_after or 0))
    assert (await desk.call("agent.getView", key))["viewId"] != view["viewId"]


@pytest.mark.parametrize("is_lost", [True, False], ids=["answer lost", "order lost"])
async def test_a_restart_keeps_the_view_and_the_first_answer(
    desk: Desk, key: str, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = await desk.call("agent.getView", key)
    exchange, first = desk.floor.exchange, await desk.call("agent.placeOrder", key, **order_of(view, "before"))

    async def die(*orders: Order) -> Sequence[OrderAnswer]:
        if is_lost:
            await place(*orders)
        raise SystemExit  # the process ends between the order and its answer

    place = exchange.place_orders
    monkeypatch.setattr(exchange, "place_orders", die)
    decision = PlaceOrder(
        symbol="BTC", side="buy", quantity=0.02, client_order_id="dying", exit_plan=PlannedExit(stop=90000)
    )
    with pytest.raises(SystemExit):
        await desk.floor.agents.external.decide(desk.floor.models.by_id["scout"], view["viewId"], decision)
    monkeypatch.undo()
    monkeypatch.setattr(access, "READ_EVERY_S", 0.0)
    desk.floor.agents.external.close()
    await desk.floor.agents.start()
    assert (await desk.call("agent.getView", key)) == view
    asked = {"viewId": view["viewId"], "clientOrderId": "dying", "symbol": "BTC", "side": "buy", "quantity": 0.02}
    again = await desk.call("agent.placeOrder", key, **asked, exitPlan={"stop": 90000})
    assert (again["result"], again["filledQuantity"]) == ("ok", "0.02")
    assert await desk.call("agent.placeOrder", key, **asked, exitPlan={"stop": 90000}) == again
    assert (await desk.call("agent.placeOrder", key, **order_of(view, "before")))["orderId"] == first["orderId"]
    await desk.call("agent.hold", key, viewId=view["viewId"], reason="done")
    async with desk.floor.database.connection() as conn:
        assert await conn.fetchval("SELECT count(*) FROM order_requests WHERE account_id = 'scout'") == 2
        assert await conn.fetchval("SELECT sum(quantity) FROM fills WHERE account_id = 'scout'") == Decimal("0.03")
    assert not (await verify(desk.floor.database, [])).findings
    reproduced = await reproduce_invocation(desk.floor.database, UUID(view["viewId"]))
    assert [finding.same for _, finding in reproduced.calls][::2] == [True, True]  # the interrupted one is in between


async def test_a_leader_that_was_replaced_does_not_show_a_view_again(desk: Desk, key: str) -> None:
    await desk.call("agent.getView", key)
    async with desk.floor.database.connection() as conn:
        await conn.execute("UPDATE service_state SET term = term + 1")
    assert await desk.call("agent.getView", key, 503) == "SERVICE_UNAVAILABLE"


async def test_an_agent_that_declares_another_model_is_another_entrant(desk: Desk, command: Command, key: str) -> None:
    floor = desk.floor

    async def entrant_of(name: str, its_key: str) -> Any:
        await floor.clock.advance(timedelta(milliseconds=1))
        view = await desk.call("agent.getView", its_key)
        await desk.call("agent.hold", its_key, viewId=view["viewId"], reason="waits")
        async with floor.database.connection() as conn:
            return await conn.fetchrow(
                "SELECT number, fingerprint FROM entrants WHERE model_id = $1 ORDER BY number DESC LIMIT 1", name
            )

    said: dict[str, Any] = {"model": "lab/one", "version": "2", "promptDigest": "ab" * 32}
    assert "declared" not in await desk.call("agent.whoami", key)
    undeclared = await entrant_of("scout", key)
    who = await desk.call("agent.declare", key, **said)
    assert (who["model"], who["declared"]) == ("lab/one", said)
    declared = await entrant_of("scout", key)
    assert (undeclared["number"], declared["number"]) == (1, 2)
    rotated = (await command("agents", "rotate", "scout"))["key"]
    anew = await desk.call("agent.declare", rotated, **said)
    assert (anew["declared"], anew["keyFingerprint"] != who["keyFingerprint"]) == (said, True)
    assert await entrant_of("scout", rotated) == declared
    shown = {each["id"]: each.get("declared") for each in (await desk.call("models.getModels"))["models"]}
    assert shown["scout"] == said
    entries = (await desk.call("agent.getBoard", rotated, window="run"))["entries"]
    (board,) = (each for each in entries if each["modelId"] == "scout")
    assert (board["details"]["owner"], board["details"]["declared"]) == (None, said)
    entrants = (await desk.call("analytics.getRunInfo"))["entrants"]
    assert [each.get("declared") for each in entrants if each["modelId"] == "scout"][-1] == said
    twin = (await command("agents", "add", "twin", "--variant", "Apex", "--model", "lab/one", "--decisions", "9"))[
        "key"
    ]
    assert (await desk.call("agent.whoami", twin))["declared"] == {"model": "lab/one"}
    assert (await entrant_of("twin", twin))["fingerprint"] != declared["fingerprint"]
    await desk.call("agent.declare", twin, **said)
    assert tuple(await entrant_of("twin", twin)) == (2, declared["fingerprint"])
    for wrong in ({"model": ""}, {"model": "x", "promptDigest": "ab"}, {"model": "two\nlines"}):
        assert await desk.call("agent.declare", twin, 400, **wrong) == "VALIDATION_ERROR"


async def test_one_moment_allows_one_decision(desk: Desk, key: str) -> None:
    """At the same time, another view would have the id of the previous decision and leave no record."""
    view = await desk.call("agent.getView", key)
    await desk.call("agent.hold", key, viewId=view["viewId"], reason="waits")
    assert await desk.call("agent.getView", key, 429) == "TOO_MANY_REQUESTS"
    await desk.floor.clock.advance(timedelta(milliseconds=1))
    assert (await desk.call("agent.getView", key))["viewId"] != view["viewId"]


async def test_a_declaration_reaches_readers_that_started_before(desk: Desk, key: str) -> None:
    """Slow readers of the models do not restore an earlier declaration."""
    await desk.call("agent.declare", key, model="lab/one")
    async with desk.floor.database.transaction() as conn:
        await conn.execute("LOCK TABLE invocation_counts IN ACCESS EXCLUSIVE MODE")
        reading = asyncio.create_task(desk.call("models.getModels"))
        waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE relation = 'invocation_counts'::regclass AND NOT granted)"
        await until(lambda: conn.fetchval(waits))
        assert (await desk.call("agent.declare", key, model="lab/two"))["model"] == "lab/two"
    await reading
    view = await desk.call("agent.getView", key)
    await desk.call("agent.hold", key, viewId=view["viewId"], reason="waits")
    entrants = (await desk.call("analytics.getRunInfo"))["entrants"]
    assert [each["declared"]["model"] for each in entrants if each["modelId"] == "scout"] == ["lab/two"]


async def test_a_key_with_operate_halts_and_flattens_its_account(desk: Desk, command: Command, key: str) -> None:
    assert await desk.call("agent.flatten", key, 403, reason="lost") == "MISSING_SCOPE"
    await command("agents", "limits", "scout", "--scopes", "read,trade,operate")
    view = await desk.call("agent.getView", key)
    await desk.call("agent.placeOrder", key, **order_of(view))
    exchange, halts = desk.floor.exchange, desk.floor.halts
    limits = LossLimits(desk.floor.database, exchange, halts, desk.floor.settings)
    operators = OperatorCommands(desk.floor.database, exchange, halts, limits)
    operators.start()
    asked = await desk.call("agent.halt", key, reason="I lost my model")
    assert (asked["verb"], asked["by"]) == ("halt", "the agent scout")
    assert await desk.call("agent.halt", key, reason="again") == asked
    await operators.poll()
    refused = await desk.call("agent.placeOrder", key, **order_of(view, "after"))
    assert (refused["status"], "I lost my model" in str(refused)) == ("rejected", True)
    assert (await desk.call("agent.getAccount", key))["account"]["positions"]
    await desk.call("agent.flatten", key, reason="I am lost")
    async with asyncio.timeout(20):
        while (await desk.call("agent.getAccount", key))["account"]["positions"]:
            await operators.poll()
            await desk.floor.see()
    await operators.close()


async def test_a_manual_order_on_a_models_account_is_marked_and_ends_its_rank(desk: Desk, command: Command) -> None:
    await desk.floor.add("ada", "bob")
    desk.floor.provider.scripts["ada"] = [calling(opening()), hold()]
    await desk.floor.cycle()

    async def ranked() -> list[str]:
        analytics = Analytics(
            desk.floor.database, desk.floor.exchange, desk.floor.clock, CurrentRuns(desk.floor.database)
        )
        board = await analytics.leaderboard("run", "pnlPercent")
        return [entry.model.id for entry in board if entry.model.provider == "fake"]

    order: dict[str, Any] = {"symbol": "ETH", "side": "buy", "quantity": 0.1}
    assert set(await ranked()) == {"ada", "bob"}
    refused = await desk.call("simulator.placeOrder", accountId="bob", **{**order, "quantity": 1000})
    assert (refused["order"]["status"], refused["order"]["manual"]) == ("rejected", True)
    assert set(await ranked()) == {"ada", "bob"}  # it changed nothing
    assert "manual" not in (await desk.call("simulator.placeOrder", accountId="me", **order))["order"]
    placed = await desk.call("simulator.placeOrder", accountId="bob", clientOrderId="one", **order)
    assert placed["order"]["manual"]
    assert await desk.call("simulator.placeOrder", accountId="bob", clientOrderId="one", **order) == placed
    assert await ranked() == ["ada"]
    positions = {each["modelId"]: each.get("manual") for each in await desk.call("trading.getPositions")}
    assert positions == {"ada": None, "bob": True, "me": None}
    listed = {each["accountId"]: each["manual"] for each in (await command("show", "positions"))["positions"]}
    assert listed == {"ada": False, "bob": True, "me": False}
    since = {each["id"]: each.get("manualSince") for each in (await desk.call("models.getModels"))["models"]}
    assert (since["ada"], since["bob"]) == (None, placed["order"]["timestamp"])
    await desk.call("simulator.resetAccount", accountId="bob")
    assert set(await ranked()) == {"ada", "bob"}


async def test_manual_orders_can_be_refused(database: Database, aiohttp_client: AiohttpClient) -> None:
    async with open_floor(database, MANUAL_ORDERS="off") as floor:
        await floor.add("ada")
        await floor.agents.start()
        floor_parts = floor.settings, floor.clock, floor.market, floor.exchange
        agents = floor.agents, floor.agents.external
        context: Any = AgentContext(*floor_parts, floor.models, floor.invocations, *agents, None)
        desk = Desk(floor, await aiohttp_client(make_app(context=context, database=database)))
        order: dict[str, Any] = {"symbol": "BTC", "side": "buy", "quantity": 0.01}
        assert await desk.call("simulator.placeOrder", None, 403, accountId="ada", **order) == "MANUAL_ORDERS_OFF"
        assert (await desk.call("simulator.placeOrder", accountId="me", **order))["order"]["status"] == "filled"
