"""Reproduction of a recorded invocation: its calls executed again and compared with the record and the books."""

from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from trader.domain.agents.conversation import ToolRequest
from trader.domain.agents.guard import Refusal, judge
from trader.domain.agents.invocations import Invocation, ToolCall
from trader.domain.agents.messages import EXCHANGE, Outcome, decision_json
from trader.domain.agents.reproduction import CallInputs, Reproduced, reproduce
from trader.domain.agents.tools import ARGUMENTS_MAX, RECORDED_TOOLS, TOOLS, BadCall, Change, decode
from trader.domain.exchange.halts import is_of_halt
from trader.domain.market.markets import canonical_symbol
from trader.errors import NotFound
from trader.services.agents.payloads import unpacked
from trader.store.agents.invocations import (
    select_fills,
    select_invocation,
    select_payloads,
    select_tool_calls,
)
from trader.store.database.pool import Connection, Database
from trader.store.exchange.accounts import select_answer
from trader.store.exchange.audit import select_is_live


class CallFinding(NamedTuple):
    """Whether a call gave the same result again (None: its inputs are not recorded), and the reason in words."""

    same: bool | None
    detail: str


class InvocationReproduction(msgspec.Struct, frozen=True):
    """An invocation and its calls, each with the finding of its reproduction."""

    invocation: Invocation
    calls: tuple[tuple[ToolCall, CallFinding], ...]

    @property
    def is_same(self) -> bool:
        """Whether every call reproduced its recorded result and the ledger holds exactly that."""
        return all(finding.same is True for _, finding in self.calls)


async def reproduce_invocation(database: Database, invocation_id: UUID) -> InvocationReproduction:
    """Execute every recorded call of an invocation again. Nothing is written.

    :raises NotFound: there is no such invocation
    """
    async with database.reading() as conn:
        invocation = await select_invocation(conn, invocation_id)
        if invocation is None:
            raise NotFound(f"there is no invocation {invocation_id}")
        calls = (await select_tool_calls(conn, [invocation_id])).get(invocation_id, [])
        payloads = await select_payloads(conn, [invocation])
        inputs = {each.number: each for content in payloads.values() for each in unpacked(content).inputs}
        is_live = await select_is_live(conn)
        findings = [
            (call, await _compare(conn, invocation, call, inputs.get(call.number), is_live=is_live)) for call in calls
        ]
    return InvocationReproduction(invocation, tuple(findings))


async def _compare(
    conn: Connection, invocation: Invocation, call: ToolCall, inputs: CallInputs | None, *, is_live: bool
) -> CallFinding:
    raw, result = call.metadata["raw"], call.metadata["results"][0]
    if raw is None:
        return CallFinding(None, "the process died before the call was recorded; its order was found in the books")
    if len(raw["arguments"]) >= ARGUMENTS_MAX:
        return CallFinding(None, "its arguments were cut in the record")
    tools = RECORDED_TOOLS if call.metadata["decisions"] else TOOLS
    decision = decode(ToolRequest(id="", name=raw["name"], arguments=raw["arguments"]), tools)
    if isinstance(decision, BadCall):
        same = result == {"error": decision.error}
        return CallFinding(same, "it cannot be decoded, as recorded" if same else f"now: {decision.error}")
    if call.metadata["decisions"] != [decision_json(decision)]:
        return CallFinding(False, f"it is now decoded as {decision_json(decision)}")
    if not isinstance(decision, Change):
        return CallFinding(True, "it changes nothing in the books")
    return await _compare_change(conn, invocation, (call.status, result), decision, inputs, is_live=is_live)


async def _compare_change(
    conn: Connection,
    invocation: Invocation,
    recorded: Outcome,
    decision: Change,
    inputs: CallInputs | None,
    *,
    is_live: bool,
) -> CallFinding:
    """Compare a call that may change the books: with the verdict of the guard, and on paper with the books too."""
    status, result = recorded
    if status == "rejected" and is_of_halt(result.get("reason")):
        return CallFinding(True, f"rejected: {result['reason']}")
    if inputs is None and status == "failed" and not is_live:
        return CallFinding(True, "it failed before it reached the guard, and nothing was booked")
    if inputs is None:
        return CallFinding(None, "its inputs are not recorded, or no longer kept")
    symbol = canonical_symbol(decision.symbol)
    if not is_live or isinstance(judge(decision, symbol, inputs.context, inputs.limits), Refusal):
        reproduced = list(reproduce(inputs, decision, symbol, invocation.id))
        return await _compare_books(conn, invocation, recorded, reproduced)
    if status == "rejected" and result.get("rule", EXCHANGE) != EXCHANGE:
        return CallFinding(False, f"recorded: {result}; now the guard approves it")
    return CallFinding(None, "the guard approves it, as recorded; the venue executed it, which paper cannot")


async def _compare_books(
    conn: Connection, invocation: Invocation, recorded: Outcome, reproduced: Sequence[Reproduced]
) -> CallFinding:
    """Compare a call with its record, and the rows of its order with the books."""
    status, result = recorded
    if not reproduced:
        had_none = status == "rejected" and result.get("filledQuantity") == "0"
        return CallFinding(had_none, f"it met no book; recorded is: {result.get('reason')}")
    outcome, posting = next((each for each in reproduced if each.outcome == recorded), reproduced[0])
    if outcome != recorded:
        return CallFinding(False, f"recorded: {status} {result}; now: {outcome[0]} {outcome[1]}")
    if posting is None or posting.answer is None:  # an exit plan has no row of its own, and may have been replaced
        return CallFinding(True, f"refused: {result.get('reason')}" if posting is None else "the exit plan is set")
    answer = await select_answer(conn, invocation.model_id, posting.answer.id)
    fills = await select_fills(conn, invocation.model_id, [fill.sequence for fill in posting.fills])
    if (answer, fills) != (posting.answer, list(posting.fills)):
        now = _json([posting.answer, posting.fills])
        return CallFinding(False, f"the books hold {_json([answer, fills])}; now: {now}")
    if posting.answer.reason is not None and not fills:
        return CallFinding(True, f"rejected: {posting.answer.reason}")
    return CallFinding(True, f"{len(fills)} fills, to the last digit")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
