"""Reproduction of a recorded invocation: executes its calls again, and compares them with the record and the books."""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from trader.agents.domain.call_inputs import CallInputs
from trader.agents.domain.conversation import ToolRequest
from trader.agents.domain.guard import GuardRefusal, judge, orders_of_call
from trader.agents.domain.invocations import Invocation, ToolCall
from trader.agents.domain.messages import EXCHANGE, Outcome, decisions_json, results_json
from trader.agents.domain.tools import ARGUMENTS_MAX, RECORDED_TOOLS, TOOLS, BadCall, Change, decode
from trader.agents.execute import RulesEnvironment, execute_change, run_at_once
from trader.agents.payloads import unpacked
from trader.agents.sql.invocations import (
    select_fills,
    select_invocation,
    select_payloads,
    select_tool_calls,
)
from trader.core.errors import MarketUnavailable, NotFound
from trader.core.money import counted
from trader.database.pool import Connection, Database
from trader.exchange.domain.account import Account
from trader.exchange.domain.halts import refusal_to_open
from trader.exchange.domain.ledger import Posting
from trader.exchange.domain.tick_rules import Moment, apply_tick
from trader.exchange.session import Decide, Session
from trader.exchange.sql.accounts import select_answer
from trader.exchange.sql.audit import select_is_live
from trader.exchange.sql.halts import select_halts
from trader.market.domain.markets import canonical_symbol

MOMENTS_MAX: Final = 8
"""Maximum number of moments tried for one call, the latest first."""


class CallFinding(NamedTuple):
    """Whether a call gave the same result again (None: its inputs are not recorded), and an explanation."""

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
    raw, (result, *_) = call.metadata["raw"], call.metadata["results"]
    if raw is None:
        return CallFinding(None, "the process died before the call was recorded; its order was found in the books")
    if len(raw["arguments"]) >= ARGUMENTS_MAX:
        return CallFinding(None, "its arguments are truncated in the record")
    tools = RECORDED_TOOLS if call.metadata["decisions"] else TOOLS
    decision = decode(ToolRequest(id="", name=raw["name"], arguments=raw["arguments"]), tools)
    if isinstance(decision, BadCall):
        same = result == {"error": decision.error}
        return CallFinding(same, "it cannot be decoded, as recorded" if same else f"now: {decision.error}")
    if call.metadata["decisions"] != decisions_json(decision):
        return CallFinding(False, f"it is now decoded as {decisions_json(decision)}")
    if not isinstance(decision, Change):
        return CallFinding(True, "it changes nothing in the books")
    return await _compare_change(conn, invocation, call, decision, inputs, is_live=is_live)


async def _compare_change(
    conn: Connection,
    invocation: Invocation,
    call: ToolCall,
    decision: Change,
    inputs: CallInputs | None,
    *,
    is_live: bool,
) -> CallFinding:
    """Compare a call that may change the books with the guard's verdict and, on paper, also with the books."""
    status, (result, *_) = call.status, call.metadata["results"]
    if status == "rejected":
        halts = await select_halts(conn, lifted=True)
        if result["reason"] in {refusal_to_open([halt], invocation.model_id) for halt in halts}:
            return CallFinding(True, f"rejected: {result['reason']}")
    if inputs is None and status == "failed" and not is_live:
        return CallFinding(True, "it failed before it reached the guard, so nothing was booked")
    if inputs is None:
        return CallFinding(None, "its inputs are not recorded, or no longer kept")
    symbol = canonical_symbol(decision.symbol)
    if not is_live or isinstance(judge(decision, symbol, inputs.context, inputs.limits), GuardRefusal):
        reproduced = list(_reproduce(inputs, decision, invocation))
        return await _compare_books(conn, invocation, call, reproduced)
    if status == "rejected" and result.get("rule", EXCHANGE) != EXCHANGE:
        return CallFinding(False, f"recorded: {result}; now the guard approves it")
    return CallFinding(None, "the guard approves it, as recorded; its execution at the venue cannot be reproduced")


def _reproduce(
    inputs: CallInputs, decision: Change, invocation: Invocation
) -> Iterator[tuple[Outcome, Posting | None]]:
    """Yield what the call does at the moment of its answer, then at each earlier moment that it may have met.

    An update within the milliseconds of the commit may have come before or after it; nothing else is uncertain.
    """
    rates = {(symbol, boundary): rate for symbol, boundary, rate in inputs.rates}
    account_id, number = inputs.context.account.id, inputs.number
    orders = partial(orders_of_call, account_id=account_id, invocation_id=invocation.id, number=number)
    for account, moment in reversed(list(_moments(inputs, rates))[-MOMENTS_MAX:]):
        postings: list[Posting | None] = []
        session = _session_at(account, moment, inputs, rates, postings)
        environment = RulesEnvironment(inputs.context, inputs.limits, account, session, orders)
        try:
            outcome = run_at_once(execute_change(decision, environment))
        except MarketUnavailable:
            continue
        yield outcome, next(iter(postings), None)


def _session_at(
    account: Account,
    moment: Moment,
    inputs: CallInputs,
    rates: dict[tuple[str, datetime], Decimal],
    postings: list[Posting | None],
) -> Session:
    """Return a session at a recorded moment. Its `wait` raises `MarketUnavailable` if a book is not after the latency.

    It accepts every recorded price: the time at which its age was judged is not recorded.
    """
    latency = timedelta(milliseconds=inputs.latency_ms)

    async def wait(symbols: Sequence[str]) -> None:
        for quote in map(moment.quotes.get, symbols):
            if quote is None or (latency and quote.at < inputs.context.now + latency):
                raise MarketUnavailable("no book came after the latency")

    async def change(_account_id: str, decide: Decide) -> Posting | None:
        postings.append(decide(account))
        return postings[-1]

    return Session(
        rules=inputs.rules,
        rate_of_hour=lambda *key: rates[key],
        moment=lambda: moment,
        wait=wait,
        refusal_of_price=lambda _symbol, _moment: None,
        change=change,
    )


def _moments(inputs: CallInputs, rates: dict[tuple[str, datetime], Decimal]) -> Iterator[tuple[Account, Moment]]:
    """Yield the account and the markets at the time of the answer, before the first update and after each one."""
    account = inputs.context.account
    quotes = {recorded.symbol: recorded.quote() for recorded in inputs.quotes}
    marks = dict(inputs.context.marks)
    yield account, Moment(inputs.answered_at, dict(quotes), dict(marks))
    for update in inputs.updates:
        new = {recorded.symbol: recorded.quote() for recorded in update.quotes}
        quotes.update(new)
        before = dict(marks)
        marks.update({symbol: quote.mark for symbol, quote in new.items()})
        moment = Moment(update.at, dict(quotes), dict(marks), frozenset(new), before)
        posting = apply_tick(account, moment, inputs.rules, lambda *key: rates[key])
        if posting is not None:
            account = posting.account
        yield account, Moment(inputs.answered_at, moment.quotes, moment.marks)


async def _compare_books(
    conn: Connection, invocation: Invocation, call: ToolCall, reproduced: Sequence[tuple[Outcome, Posting | None]]
) -> CallFinding:
    """Compare a call with its record, and the rows of its orders with the books."""
    status, results = recorded = call.status, call.metadata["results"]
    result = results[0]
    if not reproduced:
        had_none = status == "rejected" and result.get("filledQuantity") == "0"
        return CallFinding(had_none, f"it met no order book; recorded: {result.get('reason')}")
    made = [((status, results_json(results)), posting) for (status, results), posting in reproduced]
    outcome, posting = next((each for each in made if each[0] == recorded), made[0])
    if outcome != recorded:
        return CallFinding(False, f"recorded: {status} {results}; now: {outcome[0]} {outcome[1]}")
    if posting is None or not posting.answers:  # an exit plan has no separate row, and may have been replaced
        return CallFinding(True, f"refused: {result.get('reason')}" if posting is None else "the exit plan is set")
    answers = [await select_answer(conn, invocation.model_id, answer.id) for answer in posting.answers]
    fills = await select_fills(conn, invocation.model_id, [fill.sequence for fill in posting.fills])
    if (answers, fills) != (list(posting.answers), list(posting.fills)):
        now = _json([posting.answers, posting.fills])
        return CallFinding(False, f"the books hold {_json([answers, fills])}; now: {now}")
    if posting.answers[0].reason is not None and not fills:
        return CallFinding(True, f"rejected: {posting.answers[0].reason}")
    return CallFinding(True, f"{counted(len(fills), 'fill')}, to the last digit")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
