"""The commands status and alarms: the state of the service and its database, its health report, and its alarms."""

import argparse
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final, NamedTuple, TypeVar

import aiohttp
import msgspec

from trader.api.schemas.health import HealthReport, SchedulersReport
from trader.clock import SystemClock
from trader.commands.command import EXIT_DONE, EXIT_FAILED, Result, command, moment, print_result, run_to_end
from trader.commands.database import TargetDatabase, database_command
from trader.domain.exchange.halts import Halt
from trader.domain.operations.alarms import AlarmCause, Notice
from trader.dotenv import add_env_file_option
from trader.errors import SettingsError, SinkUnavailable, TraderError
from trader.gateways.operations.notifications import make_sinks
from trader.setting_checks import local_address
from trader.settings import read_some
from trader.store.operations.halts import select_halts
from trader.store.operations.status import ServiceFacts, select_service_facts

_SILENT: Final = timedelta(seconds=30)
"""A leader records its schedulers more often."""


ASK_S: Final = 3.0
"""How long the service may take to answer; it waits for its database for a second."""


_Report = TypeVar("_Report", HealthReport, SchedulersReport)


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
        urls = _addresses(options)
    except SettingsError as error:  # the database has been shown all the same
        return Health(None, problem=f"cannot be asked: {error}")
    problem: ServiceSilent | None = None
    for url in urls:
        try:
            return Health(url, await _ask(f"{url}/api/health", HealthReport))
        except ServiceSilent as error:
            problem = error
    return Health(urls[-1], problem=str(problem), hangs=problem is not None and problem.hangs)


def _addresses(options: argparse.Namespace) -> list[str]:
    """Return where the service may answer.

    :raises SettingsError: there is no address, or a setting of one is wrong
    """
    host, port, server_url = read_some(os.environ, options.env_file, "host", "port", "server_url")
    urls = [url for url in (local_address(host, port) if port else None, server_url) if url]
    if not urls:
        raise SettingsError(["PORT=0 is any free port, and SERVER_URL is not set"])
    return urls


class ServiceSilent(TraderError):
    """No service answers at an address. `hangs`: something listens there and did not answer in time."""

    def __init__(self, message: str, *, hangs: bool = False) -> None:
        super().__init__(message)
        self.hangs = hangs


async def _ask(url: str, answer: type[_Report]) -> _Report:
    """Return a report of the service.

    :raises ServiceSilent: there was no answer
    """
    host = url.partition("/api/")[0]
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S)) as http,
            http.get(url, allow_redirects=False) as response,
        ):
            return msgspec.json.decode(await response.read(), type=answer)
    except msgspec.DecodeError:
        problem = f"something else than trader answers at {host}"
    except TimeoutError:
        raise ServiceSilent(f"no service answers at {host} within {ASK_S:g} s", hangs=True) from None
    except aiohttp.ClientConnectorError as error:
        problem = f"no service answers at {host}: {error.strerror}"
    except aiohttp.ClientError as error:
        problem = f"no service answers at {host}: {error}"
    raise ServiceSilent(problem)


def _troubles(facts: ServiceFacts, halts: Sequence[Halt], target: TargetDatabase, health: Health) -> Iterator[str]:
    if not target.is_served:
        yield f"the service is {target.service}"
    elif facts.heartbeat_at is None or facts.now - facts.heartbeat_at > _SILENT:
        or_what = "hangs" if health.report is None else "cannot write"
        yield f"the service has just started, or {or_what}: its last heartbeat was {moment(facts.heartbeat_at)}"
    else:
        yield from (f"{name} does not run" for name, runs in (facts.schedulers or {}).items() if not runs)
    if health.report is not None and (target.is_served or target.is_read_only):
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


def _alarms_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=["list", "test"], default="list", help="default: list")
    add_env_file_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object, for programs")


@command("alarms", example="trader alarms test", arguments=_alarms_arguments)
def alarms(options: argparse.Namespace) -> int:
    """List the alarms that fire now, or send a test notice to every sink of NOTIFY_URL.

    The list is that of the service at HOST and PORT, or else at SERVER_URL; it needs no database. Fails when an alarm
    fires or no service answers; `test`, when a sink does not take the notice or there is none.
    """
    work = _test_sinks(options) if options.action == "test" else _list_alarms(options)
    return print_result(run_to_end(work), as_json=options.json)


async def _list_alarms(options: argparse.Namespace) -> Result:
    problems = []
    for url in _addresses(options):
        try:
            report = await _ask(f"{url}/api/health/schedulers", SchedulersReport)
        except ServiceSilent as error:
            problems.append(str(error))
            continue
        firing = report.alarms or []
        lines = [
            f"{moment(datetime.fromisoformat(each.since))}  {each.cause} {each.subject}".rstrip() + f": {each.message}"
            + (f"; with it: {', '.join(each.consequences)}" if each.consequences else "")
            for each in firing
        ]  # fmt: skip
        return Result({"url": url, "alarms": firing}, lines or ["no alarm fires"], EXIT_FAILED if firing else EXIT_DONE)
    raise ServiceSilent("; ".join(problems))


async def _test_sinks(options: argparse.Namespace) -> Result:
    addresses, port = read_some(os.environ, options.env_file, "notify_urls", "port")
    if not addresses:
        return Result({"sinks": []}, ["NOTIFY_URL is not set: alarms are not sent anywhere"], EXIT_FAILED)
    now = SystemClock().now()
    text = "a test, sent by `trader alarms test`"
    notice = Notice(state="event", cause=AlarmCause("test"), text=text, at=now, since=now)
    outcomes = {}
    for sink in make_sinks(addresses, f"trader {socket.gethostname()}:{port}"):
        try:
            await sink.send(notice)
            outcomes[sink.name] = "sent"
        except SinkUnavailable as error:
            outcomes[sink.name] = f"failed: {error}"
        finally:
            await sink.close()
    is_sent = all(outcome == "sent" for outcome in outcomes.values())
    value = {"sinks": [{"sink": name, "outcome": outcome} for name, outcome in outcomes.items()]}
    return Result(
        value, [f"{name}: {outcome}" for name, outcome in outcomes.items()], EXIT_DONE if is_sent else EXIT_FAILED
    )
