"""The command status: the state of the service and its database, and the service's health report."""

import argparse
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Final, NamedTuple

import aiohttp
import msgspec

from trader.api.schemas.health import HealthReport
from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result, moment
from trader.commands.database import TargetDatabase, database_command
from trader.domain.exchange.halts import Halt
from trader.errors import SettingsError
from trader.settings import local_address, read_some
from trader.store.operations.halts import select_halts
from trader.store.operations.status import ServiceFacts, select_service_facts

_SILENT: Final = timedelta(seconds=30)
"""A leader records its schedulers more often."""


ASK_S: Final = 3.0
"""How long the service may take to answer; it waits for its database for a second."""


class Health(NamedTuple):
    """The health report of the service at `url`; without one, `problem` says why. `hangs`: no answer in time."""

    url: str | None
    report: HealthReport | None = None
    problem: str | None = None
    hangs: bool = False


@database_command("status", example="trader status")
async def status(options: argparse.Namespace, target: TargetDatabase) -> Result:
    """Show the state of the service and of its database.

    Fails when no service runs, it is unhealthy, one of its schedulers does not run, or trading is halted. The service
    is asked for its health at HOST and PORT, then at SERVER_URL; where none answers, the database alone is shown.
    """
    async with target.reading() as conn:
        facts, halts = await select_service_facts(conn), await select_halts(conn)
    health = await _find_health(options)
    troubles = list(_troubles(facts, halts, target, health))
    value = {"troubles": troubles, "health": health, "status": facts, "halts": halts}
    return Result(
        value, _describe(facts, _describe_health(health, target), troubles), EXIT_FAILED if troubles else EXIT_DONE
    )


async def _find_health(options: argparse.Namespace) -> Health:
    """Query the configured addresses in turn until a service answers."""
    try:
        host, port, server_url = read_some(os.environ, options.env_file, "host", "port", "server_url")
    except SettingsError as error:  # the database has been shown all the same
        return Health(None, problem=f"cannot be asked: {error}")
    urls = [url for url in (local_address(host, port) if port else None, server_url) if url]
    if not urls:
        return Health(None, problem="cannot be asked: PORT=0 is any free port, and SERVER_URL is not set")
    for url in urls:
        health = await _ask(url)
        if health.report is not None:
            break
    return health


async def _ask(url: str) -> Health:
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as http,
            http.get(f"{url}/api/health", allow_redirects=False) as response,
        ):
            return Health(url, msgspec.json.decode(await response.read(), type=HealthReport))
    except msgspec.DecodeError:
        return Health(url, problem=f"something else than trader answers at {url}")
    except TimeoutError:
        return Health(url, problem=f"no service answers at {url} within {ASK_S:g} s", hangs=True)
    except aiohttp.ClientConnectorError as error:
        return Health(url, problem=f"no service answers at {url}: {error.strerror}")
    except aiohttp.ClientError as error:
        return Health(url, problem=f"no service answers at {url}: {error}")


def _troubles(facts: ServiceFacts, halts: Sequence[Halt], target: TargetDatabase, health: Health) -> Iterator[str]:
    if not target.is_served:
        yield f"the service is {target.service}"
    elif facts.heartbeat_at is None or facts.now - facts.heartbeat_at > _SILENT:
        or_what = "hangs" if health.report is None else "cannot write"
        yield f"the service has just started, or {or_what}: its last heartbeat was {moment(facts.heartbeat_at)}"
    else:
        yield from (f"{name} does not run" for name, runs in (facts.schedulers or {}).items() if not runs)
    if target.is_served and health.report is not None:
        yield from (f"unhealthy: {reason}" for reason in health.report.reasons or ())
    elif health.problem is not None and health.hangs:
        yield health.problem
    yield from (f"halted: {halt}" for halt in halts)
    if facts.models_active == 0:
        yield "no model is active"


def _describe_health(health: Health, target: TargetDatabase) -> str:
    if health.report is None:
        return health.problem or ""
    text = f"{health.report.status}, at {health.url}"
    return text if target.is_served else f"{text}, but none leads on this database"


def _describe(facts: ServiceFacts, health: str, troubles: Sequence[str]) -> Iterator[str]:
    yield f"market      {facts.market_identity or 'none yet'} ({facts.trading_mode or 'never started'})"
    yield f"heartbeat   {moment(facts.heartbeat_at)}"
    yield f"health      {health}"
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
