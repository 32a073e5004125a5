"""The commands audit and verify: whether the books add up, and whether the record of decisions is as it was written."""

import argparse
import sys
from pathlib import Path
from typing import Final

import msgspec

from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result
from trader.commands.database import FoundDatabase, database_command
from trader.domain.agents.chain import Anchor
from trader.errors import StartError
from trader.gateways.agents.anchor_sinks import AnchorLine
from trader.services.agents import chain
from trader.services.exchange import audit as books

LINES_MAX: Final = 200


@database_command("audit", example="trader audit")
async def audit(_: argparse.Namespace, found: FoundDatabase) -> Result:
    """Recompute every account from its fills, funding and insurance, and compare with the stored rows.

    In live trading, fills are also compared with the venue's trades that they were booked from.
    """
    report = await books.audit(found.database, _show_progress)
    counts = f"{report.runs} runs, {report.orders} orders, {report.entries} ledger entries"
    lines = [
        f"{counts}{f', {report.trades} trades of the venue' if report.trades else ''}",
        *_first(report.problems),
        "clean" if report.is_clean else f"NOT clean: {len(report.problems)} problems",
    ]
    value = {"isClean": report.is_clean, "audit": report}
    return Result(value, lines, EXIT_DONE if report.is_clean else EXIT_FAILED)


def _show_progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done} of {total} runs", end="" if done < total else "\n", file=sys.stderr, flush=True)


def _first(problems: list[str]) -> list[str]:
    more = [f"  and {len(problems) - LINES_MAX} more"] if len(problems) > LINES_MAX else []
    return [*(f"  {problem}" for problem in problems[:LINES_MAX]), *more]


def _anchors_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--anchors", type=Path, metavar="FILE", help="anchors that were kept outside, as lines of JSON")


@database_command("verify", example="trader verify --anchors anchors.jsonl", arguments=_anchors_argument)
async def verify(options: argparse.Namespace, found: FoundDatabase) -> Result:
    """Check whether decisions were changed, inserted, removed or cut off since they were recorded."""
    outside = [] if options.anchors is None else _read_anchors(options.anchors)
    checked = await chain.verify(found.database, outside)
    lines = [
        f"{checked.links} invocations of the chain were checked, {checked.payloads} of them with their payloads, "
        f"against {checked.anchors} anchors, {len(outside)} of them from outside."
    ]
    if checked.before_chain:
        lines.append(
            f"{checked.before_chain} invocations are from before the chain began: nothing can be said about them."
        )
    findings = [
        f"{one.kind}{'' if one.position is None else f' at position {one.position}'}: {one.text}"
        for one in checked.findings
    ]
    lines += _first(findings)
    if not outside:
        lines.append("Without anchors from outside (--anchors) nobody can tell whether the whole chain was made anew.")
    lines.append("NOT intact." if findings else "Intact.")
    value = {"isIntact": not findings, "verification": checked}
    return Result(value, lines, EXIT_FAILED if findings else EXIT_DONE)


def _read_anchors(file: Path) -> list[Anchor]:
    """Return the anchors of a file.

    :raises StartError: it cannot be read, or a line is no anchor
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise StartError(f"{file}: {error.strerror}.") from None
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=AnchorLine).anchor(f"{file.name}, line {number}"))
        except (msgspec.MsgspecError, ValueError) as error:
            raise StartError(f"{file}, line {number}: expected an anchor as the service sends it: {error}.") from None
    return found
