"""A recorded run, executed again on what it met, and compared with what the books say."""

from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from trader.domain.agents.conversation import ToolRequest
from trader.domain.agents.guard import Refusal
from trader.domain.agents.invocations import Invocation, ToolCall
from trader.domain.agents.messages import decision_json
from trader.domain.agents.outcomes import EXCHANGE, Outcome
from trader.domain.agents.reproduction import CallInputs, Change, Reproduced, judge, reproduce
from trader.domain.agents.tools import ARGUMENTS_MAX, BadCall, Decision, decode
from trader.domain.exchange.halts import is_of_halt
from trader.domain.exchange.ledger import Posting
from trader.domain.market.markets import canonical_symbol
from trader.errors import NotFound
from trader.services.agents.recorder import Payload, unpacked
from trader.store.agents.invocations import select_payload, select_tool_calls
from trader.store.agents.reproduction import select_fills, select_invocation
from trader.store.database.pool import Connection, Database
from trader.store.exchange.accounts import select_answer_of_client
from trader.store.exchange.audit import select_is_live


class CallReproduction(NamedTuple):
    """One call, executed again. `same` is None when what it met is not recorded; then and when not, `told` says why."""

    number: int
    name: str
    status: str
    same: bool | None
    told: str


class InvocationReproduction(NamedTuple):
    """A run, executed again. `is_same`: every call came to what is recorded, and the books hold just that."""

    invocation: Invocation
    calls: tuple[CallReproduction, ...]

    @property
    def is_same(self) -> bool:
        return all(call.same is True for call in self.calls)


async def reproduce_invocation(database: Database, invocation_id: UUID) -> InvocationReproduction:
    """Execute every recorded call of a run again. Nothing is written.

    :raises NotFound: there is no such run
    """
    async with database.connection() as conn:
        invocation = await select_invocation(conn, invocation_id)
        if invocation is None:
            raise NotFound(f"there is no run {invocation_id}")
        calls = (await select_tool_calls(conn, [invocation_id])).get(invocation_id, [])
        content = await select_payload(conn, invocation_id)
        payload = Payload() if content is None else unpacked(content)
        meetings = {meeting.number: meeting for meeting in payload.meetings}
        is_live = await select_is_live(conn)
        reruns = [await _compare(conn, invocation, call, meetings, is_live=is_live) for call in calls]
    return InvocationReproduction(invocation, tuple(reruns))


Finding = tuple[bool | None, str]
"""Whether a call came to the same, and in words."""


async def _compare(
    conn: Connection, invocation: Invocation, call: ToolCall, meetings: Mapping[int, CallInputs], *, is_live: bool
) -> CallReproduction:
    raw = call.metadata["raw"]
    name = call.type if raw is None else raw["name"]
    if raw is None:
        found: Finding = (None, "the process died before it was recorded; its order was found in the books")
    elif len(raw["arguments"]) >= ARGUMENTS_MAX:
        found = (None, "its arguments were cut in the record")
    else:
        decision = decode(ToolRequest(id="", name=raw["name"], arguments=raw["arguments"]))
        refusal = call.metadata["results"][0].get("reason")
        if call.status == "rejected" and is_of_halt(refusal):
            found = (True, f"rejected: {refusal}")
        elif isinstance(decision, Change):
            meeting = meetings.get(call.number)
            at_venue = _compare_at_venue(call, decision, meeting) if is_live else None
            found = at_venue or await _compare_change(conn, invocation, call, decision, meeting)
        else:
            found = _compare_words(call, decision)
    return CallReproduction(call.number, name, call.status, *found)


def _compare_words(call: ToolCall, decision: Decision | BadCall) -> Finding:
    """Of a call that cannot be read, or that changes nothing."""
    if isinstance(decision, BadCall):
        same = call.metadata["results"] == [{"error": decision.error}]
        return same, "it cannot be read, as recorded" if same else f"now: {decision.error}"
    same = call.metadata["decisions"] == [decision_json(decision)]
    return same, "it changes nothing in the books" if same else f"it now reads {decision_json(decision)}"


def _compare_at_venue(call: ToolCall, decision: Change, meeting: CallInputs | None) -> Finding | None:
    """Of a call in live trading: what a venue does nobody can do again. None for what never went there."""
    if meeting is None:
        return (None, "what it met at the venue is not recorded") if call.status == "failed" else None
    verdict = judge(decision, canonical_symbol(decision.symbol), meeting.situation, meeting.limits)
    if isinstance(verdict, Refusal):
        return None
    if call.status == "rejected" and call.metadata["results"][0].get("rule", EXCHANGE) != EXCHANGE:
        return False, f"recorded: {call.metadata['results'][0]}; now the guard lets it through"
    return None, "the guard lets it through, as recorded; the venue executed it, which paper cannot"


async def _compare_change(
    conn: Connection, invocation: Invocation, call: ToolCall, decision: Change, meeting: CallInputs | None
) -> Finding:
    recorded: Outcome = (call.status, call.metadata["results"][0])
    if call.metadata["decisions"] != [decision_json(decision)]:
        return False, f"it now reads {decision_json(decision)}"
    if meeting is None:
        if call.status == "failed":
            return True, "it failed before it reached the guard, and nothing was booked"
        return None, "what it met is not recorded, or no longer kept"
    found = _closest(meeting, decision, invocation.id, recorded)
    if found is None:
        none_met = call.status == "rejected" and recorded[1].get("filledQuantity") == "0"
        return none_met, f"it met no book; recorded is: {recorded[1].get('reason')}"
    if found.outcome != recorded:
        return False, f"recorded: {recorded[0]} {recorded[1]}; now: {found.outcome[0]} {found.outcome[1]}"
    difference = await _difference(conn, invocation, call.number, found.posting)
    return difference is None, difference or _summary(found)


def _closest(meeting: CallInputs, decision: Change, invocation_id: UUID, recorded: Outcome) -> Reproduced | None:
    """The re-execution that comes to what is recorded, else the likeliest one; None when no book was met."""
    symbol = canonical_symbol(decision.symbol)
    tried = list(reproduce(meeting, decision, symbol, invocation_id))
    return next((each for each in tried if each.outcome == recorded), tried[0] if tried else None)


async def _difference(conn: Connection, invocation: Invocation, number: int, posting: Posting | None) -> str | None:
    """Where the rows differ from the booking of an order; None when they do not.

    An exit plan leaves no row of its own: its position may have got others since.
    """
    if posting is None or posting.answer is None:
        return None
    account_id = invocation.model_id
    answer = await select_answer_of_client(conn, account_id, f"{invocation.id}:{number}")
    if answer != posting.answer:
        return f"the books answered {_plain(answer)}; now: {_plain(posting.answer)}"
    fills = await select_fills(conn, account_id, [fill.sequence for fill in posting.fills])
    if fills != list(posting.fills):
        return f"the books hold the fills {_plain(fills)}; now: {_plain(posting.fills)}"
    return None


def _summary(again: Reproduced) -> str:
    posting = again.posting
    if posting is None:
        return f"refused: {again.outcome[1].get('reason')}"
    if posting.answer is None:
        return "the exit plan is set"
    if posting.answer.reason is not None and not posting.fills:
        return f"rejected: {posting.answer.reason}"
    return f"{len(posting.fills)} fills, to the last digit"


def _plain(value: Any) -> str:
    return msgspec.json.encode(value).decode()
