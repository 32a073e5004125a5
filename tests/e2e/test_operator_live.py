"""Operator commands, called in this process, against the running service, and across a kill."""

import stat
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from support.calls import Call
from support.process import ServiceProcess, run_command, serving
from support.waiting import becomes

pytestmark = pytest.mark.processes

QUICKLY = {"SIM_LATENCY_MS": "0"}


async def buy(service: ServiceProcess, account: str = "me", symbol: str = "BTC", **more: Any) -> dict[str, Any]:
    asked = {"accountId": account, "symbol": symbol, "side": "buy", "quantity": 0.02, "leverage": 5, **more}
    answer: dict[str, Any] = (await service.call("simulator.placeOrder", **asked))["order"]
    return answer


async def halts(service: ServiceProcess) -> list[dict[str, Any]]:
    status, report = await service.get("/health")
    assert (status, report["status"]) == (200, "healthy"), report
    shown = list(report.get("halts", []))
    _, details = await service.get("/health/schedulers")
    assert [halt for halt in details.get("halts", []) if halt in shown] == shown, "a later look shows them as well"
    return shown


async def test_halt_resume_and_flatten_a_running_service(tmp_path: Path, dsn: str, call: Call) -> None:
    async with serving(tmp_path, DATABASE_URL=dsn, **QUICKLY) as service:
        for symbol in ("BTC", "ETH"):
            assert (await buy(service, symbol=symbol))["status"] == "filled"
        resting = {"type": "limit", "limitPrice": 1000}
        assert (await buy(service, "other", "ETH", **resting))["status"] == "resting"
        assert await halts(service) == []

        output = await call("halt", "--reason", "strange prices")
        assert output.code == 0, output
        assert "cancelled: other: buy 0.02 ETH at 1000" in output.out
        assert "In force: all accounts: operator: strange prices" in output.out
        (halt,) = await halts(service)
        assert (halt["cause"], halt["reason"], "accountId" in halt) == ("operator", "strange prices", False)
        refused = await buy(service)
        assert refused["status"] == "rejected"
        assert "halted for all accounts (operator: strange prices)" in refused["reason"]
        sold = {"accountId": "me", "symbol": "BTC", "side": "sell", "quantity": 0.01, "reduceOnly": True}
        assert (await service.call("simulator.placeOrder", **sold))["order"]["status"] == "filled"

        output = await call("flatten", "--account", "me", "--dry-run")
        assert (output.code, "  close me: LONG 0.01 BTC at " in output.out) == (0, True)
        output = await call("flatten", "--account", "me")
        assert (output.code, "add --yes. Nothing was changed" in output.err) == (1, True)
        output = await call("flatten", "--yes", "--account", "me")
        assert output.code == 0, output
        assert "closed: me: LONG 0.01 BTC" in output.out
        assert "closed: me: LONG 0.02 ETH" in output.out
        assert "2 positions closed, 0 left" in output.out
        assert await service.call("trading.getPositions", modelId="me") == []
        trades = (await service.call("trading.getTrades", modelId="me"))["trades"]
        assert [trade["closeReason"] for trade in trades] == ["operator", "operator", "order"]

        assert (await call("resume")).code == 0
        assert (await buy(service, "other"))["status"] == "filled"
        assert (await buy(service))["status"] == "rejected", "this account is halted by itself"
        assert (await call("resume", "--account", "me")).code == 0
        assert await halts(service) == []
        assert (await buy(service))["status"] == "filled"
        assert service.traceback() == ""


async def test_a_halt_survives_a_kill_and_works_without_a_service(tmp_path: Path, dsn: str, call: Call) -> None:
    async with serving(tmp_path, DATABASE_URL=dsn, **QUICKLY) as service:
        assert (await buy(service))["status"] == "filled"
        assert (await call("halt", "--account", "me")).code == 0
        await service.kill()
    output = await call("flatten", "--yes")
    assert output.code == 1
    assert "No service is running. The next start applies the halt" in output.out
    assert "remains: me: LONG 0.02 BTC" in output.out
    assert "NOT closed: " in output.out
    async with serving(tmp_path, DATABASE_URL=dsn, **QUICKLY) as service:
        assert [halt.get("accountId") for halt in await halts(service)] == ["me", None]
        assert (await buy(service))["status"] == "rejected"
        assert (await buy(service, "new"))["status"] == "rejected"
        assert len(await service.call("trading.getPositions", modelId="me")) == 1, "nobody closes unasked"
        await service.kill()
    output = await call("resume")
    assert (output.code, "No service is running; it trades again from its next start." in output.out) == (0, True)
    async with serving(tmp_path, DATABASE_URL=dsn, **QUICKLY) as service:
        assert [halt.get("accountId") for halt in await halts(service)] == ["me"]
        assert (await buy(service, "new"))["status"] == "filled"


async def test_a_halt_while_its_tables_are_locked_is_in_force_at_once_and_survives_a_kill(
    tmp_path: Path, dsn: str, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await asyncpg.connect(dsn)
    try:
        async with serving(tmp_path, DATABASE_URL=dsn, **QUICKLY) as service, other.transaction():
            await other.execute("LOCK TABLE halts, commands")
            monkeypatch.setenv("PORT", service.url.rpartition(":")[2])
            output = await call("halt", "--reason", "strange prices")
            assert (output.code, output.err) == (0, "")
            assert output.out == (
                "Halted all accounts: the database does not accept it yet; a file keeps it through a restart of this "
                "service on this machine.\n"
            )
            assert "halted for all accounts (operator: strange prices)" in (await buy(service))["reason"]
            await becomes(service.status, 503)

            async def names_the_table() -> bool:
                (reason,) = (await service.get("/health"))[1]["reasons"]
                assert reason.startswith("The database cannot be used now: locked.")
                return "Table halts is locked by pid" in reason

            await becomes(names_the_table, True)
            _, report = await service.get("/health")
            assert [halt["reason"] for halt in report["halts"]] == ["strange prices"]
            elsewhere = await call("flatten", "--yes")
            assert elsewhere.code == 1
            assert "NOT flattened, trading continues. The database cannot be used now: locked. Table" in elsewhere.err
            await service.kill()
        async with serving(tmp_path, DATABASE_URL=dsn, **QUICKLY) as service:
            assert [halt["reason"] for halt in await halts(service)] == ["strange prices"]
            assert (await buy(service))["status"] == "rejected"
            assert list((tmp_path / ".trader").glob("halts*")) == [], "the database keeps it now"
            wrong = {"reason": "mine", "place": "127.0.0.1:1/other"}
            assert (await service.try_call("operations.halt", **wrong))[0] == 412
            assert (await service.try_call("operations.halt", reason="typo", accountId="nobody"))[0] == 404
    finally:
        await other.close()


async def test_a_shell_that_knows_only_the_folder_halts_under_locked_tables(tmp_path: Path, dsn: str) -> None:
    other = await asyncpg.connect(dsn)
    try:
        async with serving(tmp_path, DATABASE_URL=dsn, API_TOKEN="a-token-of-sixteen", **QUICKLY) as service:
            (file,) = (tmp_path / ".trader").glob("service-*.json")
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            async with other.transaction():
                await other.execute("LOCK TABLE halts, commands")
                code, value = await run_command(tmp_path, "halt")
            assert (code, value["keptIn"]) == (0, "file"), value
            code, value = await run_command(tmp_path, "halt", "--account", "nobody")
            assert code == 1
            assert "halted for all accounts" in (await buy(service, key="a-token-of-sixteen"))["reason"]
            await service.kill()
            code, value = await run_command(tmp_path, "status")
            assert code == 1, "what a killed service left behind leads nowhere"
        async with serving(tmp_path, DATABASE_URL=dsn, **QUICKLY) as service:
            assert await service.stop() == 0
        assert list((tmp_path / ".trader").glob("service-*.json")) == [file], "only the killed one left its own"
    finally:
        await other.close()


async def test_commands_work_on_the_embedded_database(open_folder: Path) -> None:
    async with serving(open_folder, **QUICKLY) as service:
        assert (await buy(service))["status"] == "filled"
        code, value = await run_command(open_folder, "flatten", "--yes")
        closed = [(fill["accountId"], fill["quantity"]) for fill in value["outcome"]["closed"]]
        assert (code, ("me", 0.02) in closed) == (0, True), value
        assert await service.stop() == 0
    code, value = await run_command(open_folder, "resume")
    assert (code, value["halts"]) == (0, []), value
    async with serving(open_folder, **QUICKLY) as service:
        assert (await buy(service))["status"] == "filled"


@pytest.mark.parametrize(
    ("arguments", "code", "output"),
    [
        (("halt", "--account", "nobody"), 1, "There is no account 'nobody'. Nothing was changed."),
        (("resume",), 1, "No halt of all accounts."),
        (("flatten", "me"), 2, "unrecognized arguments: me"),
        (("halt", "--reason", " "), 2, "argument --reason: expected 1 to 500 characters"),
    ],
)
async def test_impossible_commands_are_reported(call: Call, arguments: tuple[str, ...], code: int, output: str) -> None:
    outcome = await call(*arguments)
    assert (outcome.code, output in outcome.out + outcome.err) == (code, True), outcome
