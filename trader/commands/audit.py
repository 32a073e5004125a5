"""The commands audit and reproduce: checks of the books, of the chain, and of one invocation."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from uuid import UUID

from trader.agents import verification as chain
from trader.agents.reproduction import InvocationReproduction, reproduce_invocation
from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result, first
from trader.commands.database import TargetDatabase, database_command
from trader.core.errors import ArgumentsError, StartError
from trader.core.files import BYTES_MAX, decode_json, read_lines
from trader.core.money import counted
from trader.operations.sql.status import MaintenanceTask, upsert_maintenance
from trader.portfolio import audit as books
from trader.record.anchors import AnchorLine
from trader.record.domain.chain import Anchor

WORDS: Final = {True: "same", False: "DIFFERENT", None: "unknown"}


def add_record_option(parser: argparse.ArgumentParser) -> None:
    """Add the option of a command that runs on a schedule."""
    record = "record the result in the database, for the alarms and metrics of the service"
    parser.add_argument("--record", action="store_true", help=record)


async def record_run(target: TargetDatabase, task: MaintenanceTask, problems: int) -> None:
    """Record the result of a scheduled command.

    :raises Unavailable: the database did not accept it
    """
    async with target.database.writing() as conn:
        await upsert_maintenance(conn, task, problems)


async def _audit_books(options: argparse.Namespace, target: TargetDatabase) -> Result:
    report = await books.audit(target.database, _show_progress)
    counts = f"{report.runs} runs, {report.orders} positions, {report.entries} ledger entries"
    lines = [
        f"{counts}{f', {report.trades} trades of the venue' if report.trades else ''}, {report.hours} hours of equity",
        *first([f"  {problem}" for problem in report.problems]),
        "clean" if report.is_clean else f"NOT clean: {counted(len(report.problems), 'problem')}",
    ]
    value = {"isClean": report.is_clean, "audit": report}
    if options.record:
        await record_run(target, "audit", len(report.problems))
    return Result(value, lines, EXIT_DONE if report.is_clean else EXIT_FAILED)


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{done} of {total} runs" + ("" if done < total else "\n"))
        sys.stderr.flush()


def anchors_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--anchors", type=Path, metavar="FILE", help="external anchors, as lines of JSON")


def _audit_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=["books", "chain"], help="check only this; default: both")
    anchors_argument(parser)
    add_record_option(parser)


@database_command("audit", example="trader audit --anchors anchors.jsonl", arguments=_audit_arguments, compares=True)
async def audit(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Check the books against the ledger, and decisions and results against their chain.

    The audit of the books recomputes every account from its fills, funding and insurance. It also compares fills with
    the results of the agents' tool calls, and the hourly equity of accounts and baselines with the ledger and the
    candles of the market. In live trading it compares fills with the venue's trades from which they were booked, and
    skips equity, because the venue may report a trade later.

    The chain shows whether decisions or results were changed, inserted, removed or cut off since they were recorded.
    """
    if options.what == "books" and options.anchors:
        raise ArgumentsError("--anchors is for the chain")
    parts = {"books": _audit_books, "chain": _verify_chain}
    results = [await part(options, target) for what, part in parts.items() if options.what in (None, what)]
    return Result(
        {name: value for result in results for name, value in result.value.items()},
        [line for result in results for line in result.lines],
        max(result.code for result in results),
    )


async def _verify_chain(options: argparse.Namespace, target: TargetDatabase) -> Result:
    outside = [] if options.anchors is None else read_anchors(options.anchors)
    checked = await chain.verify(target.database, outside)
    lines = [
        f"{checked.links} invocations of the chain were checked, {checked.payloads} of them with their payloads, "
        f"against {checked.anchors} anchors, {len(outside)} of them from outside.",
        *_describe_results(checked),
    ]
    if checked.before_chain:
        lines.append(f"{checked.before_chain} invocations are older than the chain and cannot be checked.")
    findings = [
        f"  {finding.kind}{'' if finding.position is None else f' at position {finding.position}'}: {finding.text}"
        for finding in checked.findings
    ]
    lines += first(findings)
    if not outside:
        lines.append("Without external anchors (--anchors) a rebuilt chain cannot be detected.")
    lines.append("NOT intact." if findings else "Intact.")
    value = {"isIntact": not findings, "verification": checked}
    if options.record:
        await record_run(target, "verify", len(findings))
    return Result(value, lines, EXIT_FAILED if findings else EXIT_DONE)


def _describe_results(checked: chain.Verification) -> Iterator[str]:
    yield f"{checked.records} records of results were compared with the tables, row by row: {checked.rows} rows."
    if not checked.has_results:
        yield "The chain of results begins when a service of this version leads on this database."
    if checked.waiting:
        yield f"The ledger of {checked.waiting} accounts has rows since the last record; the next minute records them."


def read_anchors(file: Path, *, of_exams: bool = False) -> list[Anchor]:
    """Return the anchors of the chain, or those of exams, in a file.

    :raises StartError: the file cannot be read, a line is not an anchor, or two have other digests for one position
    """
    number, anchors, known = 0, list[Anchor](), dict[tuple[str | None, int], Anchor]()
    try:
        for number, line in enumerate(read_lines(file, BYTES_MAX), 1):
            if line.strip():
                anchors.append(anchor := decode_json(line, AnchorLine).anchor(f"{file.name}, line {number}"))
                if (other := known.setdefault((anchor.register, anchor.position), anchor)).digest != anchor.digest:
                    raise ValueError(f"{other.source} has another digest for position {anchor.position}")
    except OSError as error:
        raise StartError(f"{file}: {error.strerror}.") from None
    except ValueError as error:  # includes errors of msgspec
        raise StartError(f"{file}, line {number}: expected an anchor as the service sends it: {error}.") from None
    return [anchor for anchor in anchors if (anchor.register is not None) == of_exams]


def _invocation_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("invocation", type=UUID, help="the id of the invocation, as getInvocations returns it")


@database_command(
    "reproduce",
    example="trader lab reproduce 0f4c1f2e-8d0e-5b2a-9c55-3f0f6a1f9f10",
    arguments=_invocation_argument,
    compares=True,
)
async def reproduce(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Re-execute the recorded calls of an invocation and compare the books.

    The command decodes every call from the model's raw arguments, runs the guard on the account and marks of that
    moment, executes the call by the rules of the exchange on the recorded order books, and compares the result with the
    recorded one and with the rows of the books, digit for digit. It writes nothing. For a call that a venue executed in
    live trading, it compares only the guard's verdict; the result stays unknown. It fails if anything differs or is not
    recorded.
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
    yield f"{invocation.model_id}, {started_at}, {invocation.status}, {counted(len(reproduction.calls), 'call')}"
    for call, comparison in reproduction.calls:
        name = call.type if call.metadata["raw"] is None else call.metadata["raw"]["name"]
        yield f"  {call.number}. {name} ({call.status}): {WORDS[comparison.same]}: {comparison.detail}"
    if reproduction.is_same:
        yield "The books are identical."
    elif any(comparison.same is False for _, comparison in reproduction.calls):
        yield "The books are NOT identical."
    else:
        yield "Not all inputs of the invocation are recorded; everything else is identical."
