"""The command status: the state of the service and its database, its health report, alarms and budgets."""

import argparse
import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, NamedTuple, TypeVar

import aiohttp
import msgspec

from trader.api.schemas.health import AlarmFiring, HealthReport
from trader.commands.command import (
    EXIT_DONE,
    EXIT_FAILED,
    Result,
    command,
    moment,
    service_addresses,
)
from trader.commands.database import TargetDatabase, add_database_options, run_in_database
from trader.commands.models import show_budgets
from trader.core.clock import SystemClock
from trader.core.errors import SettingsError, SinkUnavailable, StartError, Unavailable
from trader.database.pool import Connection
from trader.database.relay import LeaderView, select_relay
from trader.exchange.domain.halts import Halt, scope
from trader.exchange.sql.halts import select_halts
from trader.live.approvals import Approvals
from trader.operations.domain.alarms import AlarmCause, Notice
from trader.operations.notifications import make_sinks
from trader.operations.sql.status import (
    SET_LOCK_TIMEOUT,
    ServiceFacts,
    select_alarms,
    select_obstacles,
    select_service_facts,
)
from trader.operations.supervisor import ServiceAddress
from trader.settings.settings import read_some

_SILENT: Final = timedelta(seconds=30)
"""A leader records its schedulers more often."""


ASK_S: Final = 3.0
"""How long the service may take to answer; it waits for its database for a second."""


_T = TypeVar("_T")


class Health(NamedTuple):
    """The health report of the service at `url`; without one, `problem` says why. `hangs`: no answer in time."""

    url: str | None
    report: HealthReport | None = None
    problem: str | None = None
    hangs: bool = False


def _arguments(parser: argparse.ArgumentParser) -> None:
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--budgets", action="store_true", help="show the models' costs and budgets of today instead")
    since = "list past notices of alarms instead: since a time (ISO 8601), or 90m, 24h or 7d ago"
    instead.add_argument("--since", type=_moment_argument, metavar="WHEN", help=since)
    test = "send a test notice to every sink of NOTIFY_URL instead"
    instead.add_argument("--test-notice", action="store_true", help=test)
    add_database_options(parser)


@command("status", example="trader status --since 24h", arguments=_arguments)
async def status(options: argparse.Namespace) -> Result:
    """Show the state of the service and of its database.

    Fails if no service is running, it is unhealthy, one of its schedulers is not running, an alarm is present, or
    trading is halted. The command requests the health report at HOST and PORT, then at SERVER_URL; without one, it
    shows the database and the alarms that the leader recorded there. It lists anything that the database does not
    return within two seconds, with the session that holds the lock.

    --budgets shows the budget of every model that has one, its cost today (UTC), and the remaining tokens. Costs that a
    provider did not report are estimated and marked with "~"; reservations of running invocations are not included.
    --since lists the notices of the last 90 days, including changes of the leader. --test-notice fails if a sink does
    not accept the notice or there is none.
    """
    if options.test_notice:
        return await _test_sinks(options)
    if options.budgets or options.since is not None:
        return await run_in_database(show_budgets if options.budgets else _list_past, options)
    health = await _find_health(options)
    try:
        return await run_in_database(partial(_describe_target, health), options)
    except (StartError, Unavailable) as error:
        if health.report is None:
            raise
        alarms = _alarm_troubles(health.report.alarms or [], health)
        troubles = [*_health_troubles(health), *alarms, f"the database cannot be read: {error}"]
        lines = [f"health      {_describe_health(health)}", *(f"NOT well    {trouble}" for trouble in troubles)]
        return Result({"troubles": troubles, "health": health, "status": None, "halts": None}, lines, EXIT_FAILED)


async def _describe_target(health: Health, options: argparse.Namespace, target: TargetDatabase) -> Result:
    halts, unread_halts = await _read(target, select_halts)
    facts, unread_facts = await _read(target, select_service_facts)
    alarms, unread_alarms = await _read_alarms(target, health)
    unread = list(dict.fromkeys([*unread_halts, *unread_facts, *unread_alarms]))
    troubles = [
        *_service_troubles(facts, target, health),
        *(_health_troubles(health) if target.is_served or target.is_read_only or health.hangs else ()),
        *_alarm_troubles(alarms, health),
        *_halt_troubles(halts, health),
        *(f"not read: {each}" for each in unread),
        *(["no model is active"] if facts is not None and facts.models_active == 0 else []),
    ]
    text = _describe_health(health)
    if health.report is not None and not target.is_served:
        text += ", but none leads on this database"
    known = [*_describe(facts), *await _describe_ladder(options, target)]
    lines = [f"health      {text}", *known, *(f"NOT well    {trouble}" for trouble in troubles)]
    value = {"troubles": troubles, "health": health, "status": facts, "halts": halts, "alarms": alarms}
    return Result(value, lines if troubles else [*lines, "all well"], EXIT_FAILED if troubles else EXIT_DONE)


async def _describe_ladder(options: argparse.Namespace, target: TargetDatabase) -> list[str]:
    """Return where each entrant stands on the ladder; nothing without LADDER_FILE."""
    try:
        file, venue = read_some(os.environ, options.env_file, "ladder_file", "venue")
        found = {} if file is None else await Approvals(target.database, file, venue).standings()
    except (SettingsError, Unavailable) as error:
        return [f"ladder      unknown: {error}"]
    return [f"ladder      {name} on {each.step}: {each}" for name, each in found.items()]


async def _read_alarms(target: TargetDatabase, health: Health) -> tuple[Sequence[AlarmFiring], list[str]]:
    """Return the present alarms: those that the service reports or, if none answers, that its leader recorded."""
    if health.report is not None:
        return health.report.alarms or [], []
    if not target.is_served:
        return [], []
    rows, unread = await _read(target, select_relay)
    view = msgspec.json.decode(rows[-1]["record"], type=LeaderView) if rows else None
    return [] if view is None else msgspec.json.decode(view.alarms, type=list[AlarmFiring]), unread


async def _read(target: TargetDatabase, select: Callable[[Connection], Awaitable[_T]]) -> tuple[_T | None, list[str]]:
    """Return the result of a query, or None and the problems: why the database did not answer, and who holds locks."""
    try:
        async with target.database.reading() as conn:
            await conn.execute(SET_LOCK_TIMEOUT)
            return await select(conn), []
    except Unavailable as error:
        problems = [str(error)]
    with suppress(Unavailable):
        async with target.database.connection() as conn:
            problems += [f"{each}." for each in await select_obstacles(conn)]
    return None, problems


async def _find_health(options: argparse.Namespace) -> Health:
    """Query the configured addresses in turn until a service answers."""
    try:
        addresses = service_addresses(options)
    except SettingsError as error:  # the database is shown anyway
        return Health(None, problem=f"unavailable: {error}")
    health = Health(None)
    for address in addresses:
        if (health := await _ask(address)).report is not None:
            break
    return health


async def _ask(address: ServiceAddress) -> Health:
    """Request the health report of the service at an address."""
    url = address.url
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ASK_S), headers=address.headers) as http,
            http.get(f"{url}/api/health", allow_redirects=False) as response,
        ):
            return Health(url, msgspec.json.decode(await response.read(), type=HealthReport))
    except msgspec.DecodeError:
        return Health(url, problem=f"something other than trader answers at {url}")
    except TimeoutError:
        return Health(url, problem=f"no service answers at {url} within {ASK_S:g} s", hangs=True)
    except aiohttp.ClientError as error:
        why = error.strerror if isinstance(error, aiohttp.ClientConnectorError) else error
        return Health(url, problem=f"no service answers at {url}: {why}")


def _service_troubles(facts: ServiceFacts | None, target: TargetDatabase, health: Health) -> Iterator[str]:
    if not target.is_served:
        yield f"the service is {target.service}"
    elif facts is None:
        return
    elif facts.heartbeat_at is None or facts.now - facts.heartbeat_at > _SILENT:
        or_what = "hangs" if health.report is None else "cannot write"
        yield f"the service has just started, or {or_what}: its last heartbeat was {moment(facts.heartbeat_at)}"
    else:
        yield from (f"{name} is not running" for name, runs in (facts.schedulers or {}).items() if not runs)


def _health_troubles(health: Health) -> Iterator[str]:
    if health.report is not None:
        yield from (f"unhealthy: {reason}" for reason in health.report.reasons or ())
    elif health.problem is not None and health.hangs:
        yield health.problem


def _alarm_troubles(alarms: Sequence[AlarmFiring], health: Health) -> Iterator[str]:
    """Yield the present alarms, except what is listed as a halt or a reason of the health report."""
    reasons = () if health.report is None else health.report.reasons or ()
    for each in alarms:
        if each.cause not in ("halt", "loss limit") and each.message not in reasons:
            with_it = f"; with it: {', '.join(each.consequences)}" if each.consequences else ""
            since = moment(datetime.fromisoformat(each.since)) + (", not sent" if each.state == "pending" else "")
            yield f"{each.cause} {each.subject}".rstrip() + f": {each.message}{with_it} (since {since})"


def _halt_troubles(halts: Sequence[Halt] | None, health: Health) -> Iterator[str]:
    """Yield the halts in force, from the database or, if it cannot be read, from the service's report."""
    if halts is not None:
        yield from (f"halted: {halt} (since {moment(halt.at)}, by {halt.by})" for halt in halts)
    elif health.report is not None:
        for each in health.report.halts or ():
            since = moment(datetime.fromisoformat(each.since))
            yield f"halted: {scope(each.account_id or None)}: {each.cause}: {each.reason} (since {since})"


def _describe_health(health: Health) -> str:
    return health.problem or "" if health.report is None else f"{health.report.status}, at {health.url}"


def _describe(facts: ServiceFacts | None) -> Iterator[str]:
    if facts is None:
        return
    yield f"market      {facts.market_identity or 'none yet'} ({facts.trading_mode or 'never started'})"
    yield f"heartbeat   {moment(facts.heartbeat_at)}"
    yield f"models      {facts.models_active} active of {facts.models}, {facts.invocations:,} invocations" + (
        "" if facts.cost_usd is None else f", {facts.cost_usd:.2f} USD"
    )
    yield f"accounts    {facts.accounts}, {facts.positions} positions, {facts.resting_orders} resting orders"
    yield f"trades      {facts.trades:,}" + (f", the last at {moment(facts.last_trade_at)}" if facts.trades else "")
    yield f"decided     {moment(facts.last_invocation_at)}"
    yield f"valued      {moment(facts.last_snapshot_at)}"
    yield f"database    {facts.size_bytes / 1e6:,.1f} MB, schema version {facts.schema_version}"
    if facts.open_commands:
        yield f"commands    {facts.open_commands} not finished"


def _moment_argument(text: str) -> datetime:
    if (match := re.fullmatch(r"(\d{1,6})([mhd])", text)) is not None:
        unit = {"m": "minutes", "h": "hours", "d": "days"}[match[2]]
        return SystemClock().now() - timedelta(**{unit: int(match[1])})
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a time such as 2026-11-25T18:00Z nor 90m, 24h or 7d"
        ) from None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


async def _list_past(options: argparse.Namespace, target: TargetDatabase) -> Result:
    async with target.database.reading() as conn:
        past = await select_alarms(conn, options.since)
    lines = [
        f"{moment(each.at)}  {each.state:8}  {each.cause} {each.subject}".rstrip()
        + f": {each.message}{f'; {each.impact}' if each.impact else ''}"
        + (f" [since {moment(each.since)}]" if each.state == "resolved" else "")
        + f" ({each.sender})"
        for each in past
    ]
    return Result({"notices": past}, lines or [f"nothing was reported since {moment(options.since)}"])


async def _test_sinks(options: argparse.Namespace) -> Result:
    addresses, port = read_some(os.environ, options.env_file, "notify_urls", "port")
    if not addresses:
        return Result({"sinks": []}, ["NOTIFY_URL is not set: alarms are not sent anywhere"], EXIT_FAILED)
    now = SystemClock().now()
    text = "a test, sent by `trader status --test-notice`"
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
