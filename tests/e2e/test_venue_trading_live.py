"""The real process with TRADING_MODE=live and the venue's unmodified SDK: a model trades through a power cut.

Needs the extra `live`, which conflicts with the extra `test`, so it runs in a separate environment.
"""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from support.fake_exchange import CREATE, GONE_AFTER, GROUP, FakeExchange
from support.fake_hyperliquid import ADDRESS, FakeHyperliquid
from support.fake_ledger import ACCOUNT, KEY_INDEX
from support.fake_venue import IDS
from support.live import LADDER
from support.process import ServiceProcess
from support.waiting import becomes, until

from trader.agents.domain.models import Model
from trader.agents.sql.models import select_models, upsert_model
from trader.core.clock import SystemClock
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.exchange.sql.accounts import select_accounts
from trader.live.domain.ladder import LadderFigures
from trader.live.ladder import read_ladder
from trader.portfolio.audit import audit

sdk = pytest.importorskip("lighter.signer_client", reason="the extra `live` is not installed")
pytestmark = [pytest.mark.sdk, pytest.mark.processes]

D = Decimal
BTC = 1
RUN_S = 90
"""The first run of a process may come before the first price; the next one comes with the full minute."""

HOLD = ("holding", {"reason": "enough for now"})
OPEN = (
    "createPosition",
    {
        "symbol": "BTC", "side": "LONG", "quantity": 0.05, "leverage": 2, "stop": 90000, "target": 99000,
        "invalidation": "never", "confidence": 50,
    },
)  # fmt: skip
CLOSE = ("closePosition", {"symbol": "BTC"})


class ScriptedModel:
    """A provider whose model makes the calls of the test, one per step, and then holds."""

    def __init__(self) -> None:
        self.script: list[tuple[str, dict[str, Any]]] = []
        self.said: list[list[dict[str, Any]]] = []
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.said.append(orjson.loads(await request.read())["messages"])
        name, arguments = self.script.pop(0) if self.script else HOLD
        function = {"name": name, "arguments": orjson.dumps(arguments).decode()}
        calls = [{"id": f"call_{len(self.said)}", "type": "function", "function": function}]
        message = {"role": "assistant", "content": "as told", "tool_calls": calls}
        usage = {"prompt_tokens": 10, "completion_tokens": 5}
        return web.json_response({"model": "scripted", "choices": [{"message": message}], "usage": usage})


@pytest.fixture
async def model() -> AsyncIterator[ScriptedModel]:
    scripted = ScriptedModel()
    app = web.Application(client_max_size=16 * 1024 * 1024)
    app.router.add_post("/v1/chat/completions", scripted.answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    scripted.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield scripted
    await runner.cleanup()


@pytest.fixture
async def venue() -> AsyncIterator[FakeExchange]:
    venue = FakeExchange()
    await venue.start()
    yield venue
    await venue.stop()


@asynccontextmanager
async def serving(folder: Path, **environ: str) -> AsyncIterator[ServiceProcess]:
    async with aiohttp.ClientSession() as http:
        service = await ServiceProcess.start(folder, http, "trader", command=(sys.executable, "-P", "-m"), **environ)
        try:
            yield service
        finally:
            if service.process.returncode is None:
                await service.kill()


def environ_of(venue: FakeExchange, model: ScriptedModel, dsn: str) -> dict[str, str]:
    key, public, error = sdk.create_api_key()
    assert error is None
    venue.ledger.keys[KEY_INDEX] = public
    return {
        "TRADING_MODE": "live", "LIVE_CONFIRM": str(ACCOUNT), "VENUE_ACCOUNT_INDEX": str(ACCOUNT),
        "VENUE_API_KEY": key, "VENUE_API_KEY_INDEX": str(KEY_INDEX), "VENUE_URL": venue.url,
        "LIVE_REHEARSAL": "override:the tests",
        "MARKETS": "BTC,ETH", "DATABASE_URL": dsn, "OPENAI_BASE_URL": model.url,
    }  # fmt: skip


async def add_scripted_model(database: Database) -> None:
    """Add the trading model, and an inactive one, which needs no account at the venue."""
    async with database.transaction() as conn:
        for model_id, is_active in (("scripted", True), ("idle", False)):
            made = Model(
                id=model_id, name=model_id.title(), variant=VariantId.SOVEREIGN, provider="openai",
                router_model_name="scripted", created_at=await conn.fetchval("SELECT now()"), active=is_active,
            )  # fmt: skip
            await upsert_model(conn, made)


async def books_equal_the_venues(database: Database, venue: FakeExchange) -> None:
    async with database.connection() as conn:
        account = (await select_accounts(conn))["scripted"]
        unknown = await conn.fetchval("SELECT count(*) FROM venue_orders WHERE status = 'SENT'")
    held = {
        IDS[position.symbol]: position.side.direction * position.quantity for position in account.positions.values()
    }
    assert (held, unknown) == (venue.positions(), 0)
    assert abs(account.cash - venue.ledger.collateral) < D("0.01")
    assert (await audit(database)).problems == []


async def test_a_model_trades_live_through_a_power_cut_in_the_middle_of_an_order(
    tmp_path: Path, dsn: str, database: Database, venue: FakeExchange, model: ScriptedModel
) -> None:
    await add_scripted_model(database)
    environ = environ_of(venue, model, dsn)

    # The first run opens a position, with a stop and a target at the venue.
    model.script = [OPEN]
    async with serving(tmp_path, **environ) as service:
        log = b"".join(service.log).decode()
        assert f"LIVE: orders go to {venue.url}" in log
        assert f"LIVE: scripted trades account {ACCOUNT} in BTC, ETH; balance 10000.25" in log
        assert environ["VENUE_API_KEY"] not in log
        await until(lambda: len(venue.ledger.standing(BTC)) == 2, within_s=RUN_S)
        assert venue.positions() == {BTC: D("0.0500")}
        status, answer = await service.try_call("simulator.getAccount")
        assert (status, answer["code"]) == (412, "PRECONDITION_FAILED")

        async def entry() -> list[Any]:
            positions = await service.call("trading.getPositions")
            return [
                (entry["symbol"], entry["quantity"], entry["entryPrice"], entry["exitPlan"]["stop"])
                for entry in positions
            ]

        await becomes(entry, [("BTC", "0.05", "94000", 90000)])
        status, report = await service.get("/health")
        assert (status, report["status"]) == (200, "healthy")
        await service.kill()
    await books_equal_the_venues(database, venue)

    # The second closes it; the answer is lost, no read succeeds any more, and the power fails: a frame of the account's
    # stream may have told the books, or not.
    model.script, before = [CLOSE], len(venue.sent)
    venue.send_faults = [GONE_AFTER]
    async with serving(tmp_path, **environ) as service:
        await until(lambda: len(venue.sent) > before, within_s=RUN_S)
        await service.kill()
    assert venue.positions() == {}

    # The third resolves this first, so its run sees the true state.
    venue.read_faults.clear()
    async with serving(tmp_path, **environ) as service:
        await until(lambda: not venue.ledger.standing(BTC), within_s=RUN_S)
        await books_equal_the_venues(database, venue)
        trades = (await service.call("trading.getTrades"))["trades"]
        assert [(trade["symbol"], trade["quantity"], trade["closeReason"]) for trade in trades] == [
            ("BTC", 0.05, "order")
        ]
        assert service.traceback() == ""
        assert await service.stop() == 0
    kinds = [kind for kind, sent in venue.sent if kind == GROUP or (kind == CREATE and sent["Type"] == 1)]
    assert kinds == [GROUP, CREATE], "one to open, with its stop and target, one to close"


async def test_a_paper_service_signs_the_orders_of_shadow_for_hyperliquid(
    tmp_path: Path, dsn: str, database: Database, model: ScriptedModel
) -> None:
    """With the real libraries, and nothing but paper and the venue's public data."""
    await add_scripted_model(database)
    (file := tmp_path / "ladder.toml").write_text(LADDER)
    async with database.connection() as conn:
        entrant = next(each for each in await select_models(conn) if each.id == "scripted")
    ladder = read_ladder(file)
    ladder.write(ladder.certify(entrant, "shadow", LadderFigures(), "a person", SystemClock().now()))
    venue = FakeHyperliquid()
    await venue.start()
    environ = {
        "MARKET_SOURCE": "venue:hyperliquid", "VENUE_URL": venue.url, "VENUE_ACCOUNT_INDEX": ADDRESS,
        "VENUE_API_KEY": "ab" * 32, "LADDER_FILE": str(file), "MARKETS": "BTC,ETH", "DATABASE_URL": dsn,
        "OPENAI_BASE_URL": model.url,
    }  # fmt: skip
    try:
        model.script = [OPEN]
        async with serving(tmp_path, **environ) as service, database.connection() as conn:
            await until(lambda: conn.fetchval("SELECT count(*) FROM shadow_drift"), within_s=RUN_S)
            assert service.traceback() == ""
            assert await service.stop() == 0
    finally:
        await venue.stop()
    assert venue.sent == []


async def test_an_unexplained_difference_is_visible_to_operators(
    tmp_path: Path, dsn: str, database: Database, venue: FakeExchange, model: ScriptedModel
) -> None:
    await add_scripted_model(database)
    async with serving(tmp_path, **environ_of(venue, model, dsn)) as service:
        for procedure in (
            "models.getModels", "analytics.getModelStats", "analytics.getLeaderboard", "analytics.getRunInfo",
            "variants.getVariantStats", "variants.getVariantHistory", "trading.getPortfolioHistory",
            "trading.getPositions", "analytics.getFailures", "models.getInvocations",
        ):  # fmt: skip
            assert (await service.try_call(procedure))[0] == 200, procedure
        venue.ledger.deposit += 50

        async def seen() -> tuple[int, list[str]]:
            status, report = await service.get("/health")
            return status, list(report.get("reconciliation", {}))

        # What the model read of its first prompt may leave nothing of a minute's limit for comparisons.
        await becomes(seen, (503, ["scripted"]), within_s=RUN_S)
        venue.ledger.deposit -= 50
        await becomes(seen, (200, []), within_s=RUN_S)
    await books_equal_the_venues(database, venue)
