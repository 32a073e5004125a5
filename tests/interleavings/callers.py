"""External agents with keys of their own, which call processes over HTTP."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

from support.served import Client, make_app, served
from support.waiting import until

from trader.core.errors import TraderError, Unavailable
from trader.database.pool import Database
from trader.operations.access import issue
from trader.operations.domain.credentials import AGENT_MARK
from trader.operations.sql.credentials import insert_credential

if TYPE_CHECKING:
    from interleavings.arena import Process

ORDER: Final = {"symbol": "BTC", "side": "buy", "quantity": 0.05, "exitPlan": {"stop": 90_000}}
PLACED: Final = (
    "SELECT account_id, client_order_id, id::text FROM order_requests WHERE starts_with(client_order_id, 'by ')"
)
RECORDED: Final = """
SELECT i.model_id, count(*) FROM tool_calls c JOIN invocations i ON i.id = c.invocation_id
WHERE c.type = 'CREATE_POSITION' AND c.status = 'ok' AND i.model_id = ANY($1) GROUP BY 1
"""


class Refused(TraderError):
    """The answer to a call was an error of the caller, with this code."""


class Callers:
    """Two agents, the key of each, and the first answer to each one's order."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._keys: dict[str, str] = {}
        self._clients: dict[Process, Client] = {}
        self._stack = AsyncExitStack()
        self.views: dict[str, str] = {}
        """The view of each agent that has called; empty until it is answered."""

        self.placed: dict[str, str] = {}

    async def add(self, agent: str, process: Process) -> None:
        """Give an agent a key."""
        self._keys[agent], credential = issue(
            AGENT_MARK,
            agent,
            process.arena.clock.now(),
            ("read", "trade"),
            account_id=agent,
            requests_per_minute=1000,
            decisions_per_minute=1000,
        )
        async with self._database.transaction() as conn:
            await insert_credential(conn, credential)

    async def serve(self, process: Process) -> None:
        """Have a process listen; the requests that it gets belong to the process of the caller."""
        app = make_app(context=process.context, database=self._database)
        self._clients[process] = await self._stack.enter_async_context(served(app))

    async def decide(self, agent: str, process: Process) -> None:
        """Place the agent's order on its view, the same one each time, and hold."""
        self.views.setdefault(agent, "")
        view = self.views[agent] = (await self._call(agent, process, "getView"))["viewId"]
        order = {"viewId": view, "clientOrderId": f"by {agent}", **ORDER}
        answer = await self._call(agent, process, "placeOrder", **order)
        assert self.placed.setdefault(agent, answer["orderId"]) == answer["orderId"], f"{agent}'s order has two answers"
        with suppress(Refused):
            await self._call(agent, process, "hold", viewId=view, reason="bought")

    async def decide_for(self, other: str, agent: str, process: Process) -> str:
        """Place an order on another agent's view, and return the code of the refusal."""
        try:
            order = {"viewId": self.views[other], "clientOrderId": f"by {agent} for {other}", **ORDER}
            await self._call(agent, process, "placeOrder", **order)
        except Refused as refusal:
            return str(refusal)
        return "none"

    async def idle(self, process: Process) -> None:
        """Wait for the requests whose callers have left."""
        await until(lambda: not len(self._clients[process].server))

    async def problems(self) -> list[str]:
        """Every order is in the account of its key, once, as acknowledged, and in the record of its agent."""
        async with self._database.reading() as conn:
            placed = sorted(tuple(row) for row in await conn.fetch(PLACED))
            recorded = {row[0]: row[1] for row in await conn.fetch(RECORDED, [*self._keys])}
        expected = sorted((agent, f"by {agent}", order_id) for agent, order_id in self.placed.items())
        problems = [] if placed == expected else [f"the keys placed {expected}, and the books have {placed}"]
        if recorded != dict.fromkeys(self.placed, 1):
            problems.append(f"the keys placed {[*self.placed]}, and the record has {recorded}")
        return problems

    async def close(self) -> None:
        await self._stack.aclose()

    async def _call(self, agent: str, process: Process, name: str, **fields: object) -> Any:
        headers = {"Authorization": f"Bearer {self._keys[agent]}", "Connection": "close"}
        async with self._clients[process].post(f"/api/rpc/agent.{name}", json=fields, headers=headers) as response:
            answer = await response.json()
        if response.status == 503:
            raise Unavailable(answer["code"])
        if response.status != 200:
            raise Refused(answer["code"])
        return answer
