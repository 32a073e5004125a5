"""The command status: the service and its database at one moment."""

import argparse
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Final

from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result, moment
from trader.commands.database import FoundDatabase, database_command
from trader.domain.exchange.halts import Halt
from trader.store.operations.halts import select_halts
from trader.store.operations.status import ServiceFacts, select_service_facts

_SILENT: Final = timedelta(seconds=30)
"""A leader records its schedulers more often."""


@database_command("status", example="trader status")
async def status(_: argparse.Namespace, found: FoundDatabase) -> Result:
    """Show what the service does and what its database holds.

    Fails when no service runs, one of its schedulers does not, or trading is halted. GET /health of the running
    service also knows of its market data and its disk.
    """
    async with found.reading() as conn:
        facts, halts = await select_service_facts(conn), await select_halts(conn)
    troubles = list(_troubles(facts, halts, found))
    value = {"troubles": troubles, "status": facts, "halts": halts}
    return Result(value, _describe(facts, troubles), EXIT_FAILED if troubles else EXIT_DONE)


def _troubles(facts: ServiceFacts, halts: Sequence[Halt], found: FoundDatabase) -> Iterator[str]:
    if not found.is_served:
        yield f"the service is {found.service}"
    elif facts.heartbeat_at is None or facts.now - facts.heartbeat_at > _SILENT:
        yield f"the service has just started, or hangs: its last heartbeat was {moment(facts.heartbeat_at)}"
    else:
        yield from (f"{name} does not run" for name, runs in (facts.schedulers or {}).items() if not runs)
    yield from (f"halted: {halt}" for halt in halts)
    if facts.models_active == 0:
        yield "no model is active"


def _describe(facts: ServiceFacts, troubles: Sequence[str]) -> Iterator[str]:
    yield f"market      {facts.market_identity or 'none yet'} ({facts.trading_mode or 'never started'})"
    yield f"heartbeat   {moment(facts.heartbeat_at)}"
    yield f"models      {facts.models_active} active of {facts.models}, {facts.invocations:,} invocations" + (
        "" if facts.cost_usd is None else f", {facts.cost_usd:.2f} USD"
    )
    yield f"accounts    {facts.accounts}, {facts.positions} positions, {facts.resting_orders} resting orders"
    yield f"trades      {facts.trades:,}, the last at {moment(facts.last_trade_at)}"
    yield f"decided     {moment(facts.last_invocation_at)}"
    yield f"valued      {moment(facts.last_snapshot_at)}"
    yield f"database    {facts.size_bytes / 1e6:,.1f} MB, schema version {facts.schema_version}"
    if facts.open_commands:
        yield f"commands    {facts.open_commands} not finished"
    yield from (f"NOT well    {trouble}" for trouble in troubles)
    if not troubles:
        yield "all well"
