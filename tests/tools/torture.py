"""Kill the service repeatedly during an order storm, and check the books after every restart.

Each round starts the service, lets clients place, cancel, reset and trigger as fast as they can, and kills it with
SIGKILL at a random moment. After each kill, the next service is checked: every acknowledged order is in the database
once, the memory equals the rows, and the audit is clean. An external agent also trades; after the restart it repeats
its last request with the same `clientOrderId`, which must give one order and one answer. The exit code is 0 only if all
checks passed after every kill. With `--clients 0` the agent is alone, so every kill falls within its decision.
"""

import argparse
import asyncio
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
from support.process import ServiceProcess, run_command
from support.waiting import becomes

from trader.core.ownership import EMBEDDED_FOLDER
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.pool import Database
from trader.exchange.domain.account import Account
from trader.exchange.sql.accounts import select_accounts
from trader.portfolio.audit import audit

ACCOUNTS = [f"storm-{n}" for n in range(12)]
MARKETS = {"BTC": 0.01, "ETH": 0.3, "SOL": 4.0}


AGENT = "agent"


@dataclass
class Agent:
    """An external agent: its key, and the order that it last requested."""

    key: str
    number: int = 0
    asked: dict[str, Any] = field(default_factory=dict)
    has_view: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Tally:
    """Results of all rounds. `acknowledged` maps (account, client order id) to the order's id."""

    kills: int = 0
    acknowledged: dict[tuple[str, str], str] = field(default_factory=dict)
    lost: int = 0
    doubled: int = 0
    unanswered: int = 0
    """Orders of the agent that a kill left without an answer."""
    answered_anew: int = 0
    """Orders of the agent whose repetition got a different answer."""
    memory_differs: int = 0
    audit_problems: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.doubled or self.answered_anew or self.memory_differs or self.audit_problems)

    def __str__(self) -> str:
        return (
            f"kills {self.kills}, acknowledged orders {len(self.acknowledged)}, lost {self.lost}, "
            f"duplicated {self.doubled}, an agent's orders: {self.unanswered} interrupted, {self.answered_anew} "
            f"answered differently, memory mismatches {self.memory_differs}, "
            f"audit {'clean' if not self.audit_problems else 'NOT clean'}"
        )


async def _storm(service: ServiceProcess, account_id: str, rng: Random, tally: Tally, round_number: int) -> None:
    """Trade as one client until the service ends."""
    prices = {price["symbol"]: price["price"] for price in (await service.call("trading.getCryptoPrices"))["prices"]}
    for number in range(10_000):
        symbol = rng.choice(list(MARKETS))
        client_order_id = f"{round_number}-{number}"
        action = rng.random()
        if action < 0.02:
            await service.call("simulator.resetAccount", accountId=account_id)
            continue
        if action < 0.08:
            account = (await service.call("simulator.getAccount", accountId=account_id))["account"]
            for order in account["openOrders"][:1]:
                await service.try_call("simulator.cancelOrder", accountId=account_id, orderId=order["id"])
            continue
        order = _order(rng, symbol, prices[symbol])
        status, body = await service.try_call(
            "simulator.placeOrder", accountId=account_id, clientOrderId=client_order_id, **order
        )
        assert status in {200, 503}, (status, body)
        # Refusals before the account is open leave no row.
        if status == 200 and body["order"]["status"] != "rejected":
            tally.acknowledged[account_id, client_order_id] = body["order"]["id"]


async def _decide(service: ServiceProcess, agent: Agent, tally: Tally) -> None:
    """Trade as the external agent until the service ends: open, close, and hold after twenty of each."""
    prices = {price["symbol"]: price["price"] for price in (await service.call("trading.getCryptoPrices"))["prices"]}
    opening = {"side": "buy", "exitPlan": {"stop": prices["BTC"] * 0.9}}
    closing = {"side": "sell", "reduceOnly": True}
    while True:
        status, view = await service.try_call("agent.getView", agent.key)
        assert status in {200, 503}, (status, view)
        if status == 200:
            agent.has_view.set()
        for _ in range(20 if status == 200 else 0):
            for way in (opening, closing):
                agent.number += 1
                what = {"symbol": "BTC", "quantity": MARKETS["BTC"], **way}
                agent.asked = {"viewId": view["viewId"], "clientOrderId": str(agent.number), **what}
                await _ask(service, agent, tally)
        if status == 200:
            await service.try_call("agent.hold", agent.key, viewId=view["viewId"], reason="traded")


async def _ask(service: ServiceProcess, agent: Agent, tally: Tally) -> int:
    """Request the agent's order, and record its id. Return the status of the answer."""
    status, answer = await service.try_call("agent.placeOrder", agent.key, **agent.asked)
    assert status in {200, 503}, (status, answer)
    if status == 200:
        assert "orderId" in answer, (agent.asked, answer)
        order_id = answer["orderId"]
        tally.answered_anew += (
            tally.acknowledged.setdefault((AGENT, agent.asked["clientOrderId"]), order_id) != order_id
        )
    return status


async def _ask_again(service: ServiceProcess, agent: Agent, tally: Tally) -> None:
    """Repeat the agent's last request, which may have been interrupted, twice, and end its decision."""
    tally.unanswered += (AGENT, agent.asked["clientOrderId"]) not in tally.acknowledged
    for _ in range(2):
        await becomes(lambda: _ask(service, agent, tally), 200)  # once the service leads
    await service.try_call("agent.hold", agent.key, viewId=agent.asked["viewId"], reason="killed")


def _order(rng: Random, symbol: str, price: float) -> dict[str, Any]:
    """A market or limit order, often with an exit plan so close that it fires within seconds."""
    side = rng.choice(["buy", "sell"])
    order: dict[str, Any] = {
        "symbol": symbol, "side": side, "quantity": MARKETS[symbol] * rng.choice([0.5, 1, 2]), "leverage": 10,
        "reduceOnly": rng.random() < 0.2,
    }  # fmt: skip
    if rng.random() < 0.3:
        order |= {"type": "limit", "limitPrice": price * (1 + rng.uniform(-0.0005, 0.0005))}
    elif rng.random() < 0.5:
        away = price * 0.0004 * (1 if side == "buy" else -1)
        order["exitPlan"] = {"stop": price - away, "target": price + away}
    return order


async def _storm_and_kill(
    service: ServiceProcess, accounts: list[str], rng: Random, tally: Tally, agent: Agent
) -> None:
    """Let all clients trade, and kill the service meanwhile."""
    agent.has_view.clear()
    deciding = asyncio.create_task(_decide(service, agent, tally))
    seeing = asyncio.create_task(agent.has_view.wait())  # the first view of a process reads weeks of candles
    await asyncio.wait([seeing, deciding], return_when=asyncio.FIRST_COMPLETED)
    seeing.cancel()
    clients = [
        asyncio.create_task(_storm(service, account_id, Random(rng.random()), tally, tally.kills))
        for account_id in accounts
    ]
    clients.append(deciding)
    await asyncio.sleep(rng.uniform(0.3, 2.5))  # the moment of the kill is random
    await service.kill()
    tally.kills += 1
    for outcome in await asyncio.gather(*clients, return_exceptions=True):
        if isinstance(outcome, BaseException) and not isinstance(outcome, aiohttp.ClientError | OSError):
            raise outcome


async def _check_after_kill(
    service: ServiceProcess, folder: Path, accounts: list[str], tally: Tally, agent: Agent
) -> None:
    if agent.asked:
        await _ask_again(service, agent, tally)
    async with EmbeddedPostgres(folder / EMBEDDED_FOLDER).attach() as server:
        database = await Database.connect(server.dsn((await server.databases())[0]), size=2)
        try:
            await _check(service, database, accounts, tally)
        finally:
            await database.close()


async def _add_agent(folder: Path) -> str:
    """Add the external agent, without limits that it could reach. Return its key."""
    limits = ("--requests", "60000", "--decisions", "60000")
    code, added = await run_command(folder, "agents", "add", AGENT, "--variant", "Apex", *limits)
    assert code == 0, added
    return str(added["key"])


async def _check(service: ServiceProcess, database: Database, accounts: list[str], tally: Tally) -> None:
    async with database.connection() as conn:
        rows = await conn.fetch("SELECT account_id, client_order_id, id::text FROM order_requests")
        ids: dict[tuple[str, str], list[str]] = {}
        for account_id, client_order_id, order_id in rows:
            ids.setdefault((account_id, client_order_id), []).append(order_id)
    tally.lost += sum(order_id not in ids.get(key, []) for key, order_id in tally.acknowledged.items())
    tally.doubled += sum(len(order_ids) > 1 for order_ids in ids.values())
    tally.memory_differs += sum([await _differs(service, database, account_id) for account_id in accounts])
    tally.audit_problems += (await audit(database)).problems


async def _differs(service: ServiceProcess, database: Database, account_id: str) -> bool:
    """Whether the service's answer differs from the rows. The market may move in between, so repeat."""
    for _ in range(5):
        shown = (await service.call("simulator.getAccount", accountId=account_id))["account"]
        async with database.connection() as conn:
            stored = await select_accounts(conn, account_id)
        if account_id not in stored or _shown_as(shown) == _in_rows(stored[account_id]):
            return False
    return True


def _shown_as(account: dict[str, Any]) -> object:
    return (
        account["runId"],
        account["cashBalance"],
        {p["symbol"]: (p["side"], p["quantity"], p["margin"]) for p in account["positions"]},
        {o["id"]: o["remaining"] for o in account["openOrders"]},
    )


def _in_rows(account: Account) -> object:
    return (
        str(account.run.id),
        float(account.cash),
        {p.symbol: (p.side, float(p.quantity), float(p.margin)) for p in account.positions.values()},
        {str(o.id): float(o.remaining) for o in account.resting},
    )


async def torture(rounds: int, seed: int, folder: Path, clients: int = len(ACCOUNTS)) -> Tally:
    """Run the rounds in a folder, printing the tally after each."""
    tally, rng, accounts = Tally(), Random(seed), ACCOUNTS[:clients]
    environ = {"SIM_LATENCY_MS": "0", "AI_ATTEMPT_TIMEOUT_S": "600"}  # views stay open across a restart
    async with aiohttp.ClientSession() as http:
        service = await ServiceProcess.start(folder, http, **environ)
        agent = Agent(await _add_agent(folder))
        for number in range(1, rounds + 1):
            await _storm_and_kill(service, accounts, rng, tally, agent)
            service = await ServiceProcess.start(folder, http, **environ)
            await _check_after_kill(service, folder, accounts, tally, agent)
            print(f"round {number} of {rounds}: {tally}", flush=True)
            if not tally.is_clean:
                break
        await service.kill()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/torture", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often to storm and kill (default 5)")
    parser.add_argument(
        "--clients", type=int, default=len(ACCOUNTS), help="in addition to the agent, at most 12 (default 12)"
    )
    parser.add_argument("--seed", type=int, default=1, help="for the orders and the times of the kills (default 1)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="trader-torture-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # as root, the server runs as `nobody`, which must have access
        tally = asyncio.run(torture(options.rounds, options.seed, folder, options.clients))
    for problem in tally.audit_problems[:20]:
        print(f"  {problem}")
    return 0 if tally.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
