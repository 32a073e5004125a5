"""The commands audit, verify and reproduce: checks of the books, of the chain, and of one invocation."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from uuid import UUID

import msgspec

from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result
from trader.commands.database import TargetDatabase, database_command
from trader.domain.agents.chain import Anchor
from trader.errors import StartError
from trader.gateways.agents.anchor_sinks import AnchorLine
from trader.services.agents import chain
from trader.services.agents.reproduction import InvocationReproduction, reproduce_invocation
from trader.services.exchange import audit as books

LINES_MAX: Final = 200
WORDS: Final = {True: "same", False: "DIFFERENT", None: "unknown"}


@database_command("audit", example="trader audit")
async def audit(_: argparse.Namespace, target: TargetDatabase) -> Result:
    """Recompute every account from its fills, funding and insurance, and compare with the stored rows.

    Fills are compared with what the tools answered to the agents, and the hourly equity of accounts and baselines with
    the ledger and the candles of the market. In live trading fills are compared with the venue's trades that they were
    booked from, and equity is not: a trade may be learned of later.
    """
    report = await books.audit(target.database, _show_progress)
    counts = f"{report.runs} runs, {report.orders} orders, {report.entries} ledger entries"
    lines = [
        f"{counts}{f', {report.trades} trades of the venue' if report.trades else ''}, {report.hours} hours of equity",
        *_first(report.problems),
        "clean" if report.is_clean else f"NOT clean: {len(report.problems)} problems",
    ]
    value = {"isClean": report.is_clean, "audit": report}
    return Result(value, lines, EXIT_DONE if report.is_clean else EXIT_FAILED)


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{done} of {total} runs" + ("" if done < total else "\n"))
        sys.stderr.flush()


def _first(problems: list[str]) -> list[str]:
    more = [f"  and {len(problems) - LINES_MAX} more"] if len(problems) > LINES_MAX else []
    return [*(f"  {problem}" for problem in problems[:LINES_MAX]), *more]


def anchors_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--anchors", type=Path, metavar="FILE", help="anchors that were kept outside, as lines of JSON")


@database_command("verify", example="trader verify --anchors anchors.jsonl", arguments=anchors_argument)
async def verify(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Check whether decisions or results were changed, inserted, removed or cut off since they were recorded."""
    outside = [] if options.anchors is None else read_anchors(options.anchors)
    checked = await chain.verify(target.database, outside)
    lines = [
        f"{checked.links} invocations of the chain were checked, {checked.payloads} of them with their payloads, "
        f"against {checked.anchors} anchors, {len(outside)} of them from outside.",
        *_describe_results(checked),
    ]
    if checked.before_chain:
        lines.append(
            f"{checked.before_chain} invocations are from before the chain began: nothing can be said about them."
        )
    findings = [
        f"{finding.kind}{'' if finding.position is None else f' at position {finding.position}'}: {finding.text}"
        for finding in checked.findings
    ]
    lines += _first(findings)
    if not outside:
        lines.append("Without anchors from outside (--anchors) nobody can tell whether the whole chain was made anew.")
    lines.append("NOT intact." if findings else "Intact.")
    value = {"isIntact": not findings, "verification": checked}
    return Result(value, lines, EXIT_FAILED if findings else EXIT_DONE)


def _describe_results(checked: chain.Verification) -> Iterator[str]:
    yield f"{checked.records} records of results were compared with the tables, row by row: {checked.rows} rows."
    if not checked.has_results:
        yield "The chain of results begins when a service of this version leads on this database."
    if checked.accounts_before:
        yield (
            f"The ledger and hours of {checked.accounts_before} accounts from before an upgrade are in no record: "
            "nothing can be said about them."
        )
    if checked.waiting:
        yield f"The ledger of {checked.waiting} accounts goes on since the last record; the next minute records it."


def read_anchors(file: Path) -> list[Anchor]:
    """Return the anchors of a file.

    :raises StartError: it cannot be read, or a line is no anchor
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise StartError(f"{file}: {error.strerror}.") from None
    anchors = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            anchors.append(msgspec.json.decode(line, type=AnchorLine).anchor(f"{file.name}, line {number}"))
        except (msgspec.MsgspecError, ValueError) as error:
            raise StartError(f"{file}, line {number}: expected an anchor as the service sends it: {error}.") from None
    return anchors


def _invocation_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("invocation", type=UUID, help="the id of the invocation, as getInvocations returns it")


@database_command(
    "reproduce", example="trader reproduce 0f4c1f2e-8d0e-5b2a-9c55-3f0f6a1f9f10", arguments=_invocation_argument
)
async def reproduce(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Execute the recorded calls of an invocation again and report whether the books come out the same.

    Every call is decoded again from the model's raw arguments, judged again by the guard on the account and marks of
    that moment, and executed again by the rules of the exchange on the recorded order books; the result is compared
    with the recorded one and with the rows of the books, digit for digit. Nothing is written. A call that a venue
    executed in live trading cannot be executed again: only the guard's verdict is compared, and the result stays
    unknown. Fails when they are not the same, or when not all of it is recorded.
    """
    reproduction = await reproduce_invocation(target.database, options.invocation)
    value = {
        "invocationId": reproduction.invocation.id,
        "isSame": reproduction.is_same,
        "calls": [
            {"number": call.number, "same": comparison.same, "detail": comparison.detail}
            for call, comparison in reproduction.calls
        ],
    }
    return Result(value, _describe(reproduction), EXIT_DONE if reproduction.is_same else EXIT_FAILED)


def _describe(reproduction: InvocationReproduction) -> Iterator[str]:
    invocation = reproduction.invocation
    started_at = f"{invocation.started_at:%Y-%m-%d %H:%M:%S} UTC"
    yield f"{invocation.model_id}, {started_at}, {invocation.status}, {len(reproduction.calls)} calls"
    for call, comparison in reproduction.calls:
        name = call.type if call.metadata["raw"] is None else call.metadata["raw"]["name"]
        yield f"  {call.number}. {name} ({call.status}): {WORDS[comparison.same]}: {comparison.detail}"
    if reproduction.is_same:
        yield "The books come out the same."
    elif any(comparison.same is False for _, comparison in reproduction.calls):
        yield "The books do NOT come out the same."
    else:
        yield "Not all inputs of the invocation are recorded; the rest comes out the same."
