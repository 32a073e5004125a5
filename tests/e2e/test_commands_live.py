"""Commands next to a running service, compared with its answers, and after its end."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from support.calls import Call
from support.process import run_command, serving

pytestmark = pytest.mark.processes


async def test_commands_show_the_state_of_the_service_and_act_through_it(
    open_folder: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(open_folder)
    monkeypatch.delenv("DATABASE_URL")

    async def run(*arguments: str) -> tuple[int, Any]:
        said = await call(*arguments, "--json")
        return said.code, said.value

    async with serving(open_folder, SIM_LATENCY_MS="0") as service:
        for side in ("buy", "sell"):
            order = {"accountId": "me", "symbol": "BTC", "side": side, "quantity": 0.02}
            assert (await service.call("simulator.placeOrder", **order))["order"]["status"] == "filled"
        await service.call("simulator.placeOrder", accountId="me", symbol="ETH", side="buy", quantity=0.5)
        monkeypatch.setenv("PORT", service.url.rpartition(":")[2])
        async with asyncio.timeout(60):  # until the first heartbeat
            while (outcome := await run("status"))[0] != 0:
                assert outcome[1]["database"]["service"] == "running"
        assert (outcome[1]["troubles"], outcome[1]["health"]["report"]["status"]) == ([], "healthy")
        _, trades = await run("show", "trades", "--account", "me")
        assert trades["trades"] == (await service.call("trading.getTrades", modelId="me"))["trades"]
        _, shown = await run("accounts", "show", "me")
        account = (await service.call("simulator.getAccount", accountId="me"))["account"]
        for name in ("accountId", "cashBalance", "totalFees", "totalRealizedPnl"):
            assert shown["account"][name] == account[name]
        assert [position["symbol"] for position in shown["account"]["positions"]] == ["ETH"]
        code, reset = await run("accounts", "reset", "me", "--yes")
        assert (code, reset["outcome"]["left"]) == (0, []), reset
        account = (await service.call("simulator.getAccount", accountId="me"))["account"]
        assert (account["equity"], account["positions"]) == (10000, [])
        resting = {"symbol": "BTC", "side": "buy", "quantity": 0.02, "type": "limit", "limitPrice": 1000}
        resting |= {"accountId": "typo", "clientOrderId": "first"}
        assert (await service.call("simulator.placeOrder", **resting))["order"]["status"] == "resting"
        code, removed = await run("accounts", "remove", "typo", "--yes")
        assert (code, removed["outcome"]["left"]) == (0, []), removed
        assert (await run("accounts", "show", "typo"))[0] == 1
        anew = await service.call("simulator.placeOrder", **{**resting, "limitPrice": 2000})
        assert anew["order"]["status"] == "resting", "the client order id of before is free"
        code, refused = await run("accounts", "remove", "me", "--yes")
        assert (code, "has 4 fills" in str(refused)) == (1, True), refused
        assert await service.stop() == 0
    code, status = await run_command(open_folder, "status")
    assert (code, status["database"]["service"]) == (1, "not running")
    _, shown = await run_command(open_folder, "accounts", "show", "me")
    assert (shown["account"]["run"]["number"], shown["account"]["equity"]) == (2, 10000)
    code, reset = await run_command(open_folder, "accounts", "reset", "me", "--yes")
    assert (code, reset["outcome"]) == (1, None), "only a service can close positions at the market's prices"
