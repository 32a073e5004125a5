"""Bundle of a season: the rows and facts that its card is computed from, as files, and back as the runs they are of.

Numbers are doubles and times whole milliseconds, so a card is computed from what was written, not from what was read.
"""

import hashlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

import trader
from trader.api.schemas.common import Timestamp, Wire, iso
from trader.domain.agents.entrants import EntrantRecord, canonical_json
from trader.domain.models import Model, ModelConfiguration, VariantId
from trader.domain.portfolio.behaviour import PlanChange, PositionPart
from trader.domain.portfolio.seasons import Season, SeasonRecord
from trader.errors import SettingsError, StartError
from trader.results import Format, Table, load_table
from trader.services.portfolio.behaviour import first_close
from trader.services.portfolio.run_statistics import CurrentRuns, RunStatistics
from trader.services.portfolio.seasons import AccountPast
from trader.settings import Settings
from trader.store.agents.chain import select_head
from trader.store.agents.models import select_models
from trader.store.database.pool import Connection, Database
from trader.store.exchange.accounts import select_identity
from trader.store.exchange.trades import RunTrade
from trader.store.portfolio import behaviour as behaviour_store
from trader.store.portfolio.analytics import (
    AccountRun,
    CurrentRun,
    InvocationTotals,
    PastEntrant,
    RunEntrant,
    select_account_runs,
    select_past_entrants,
)
from trader.store.portfolio.export import select_exported
from trader.store.portfolio.snapshots import HourlyValue

FACTS: Final = "season.json"
CARD: Final = "card.json"
RECORD: Final = "record.jsonl"
TABLES: Final = (
    "models", "runs", "past_runs", "past_entrants", "entrants", "hours", "positions", "plan_changes",
    "closes", "fills", "decisions",
)  # fmt: skip


class RecordHead(Wire, kw_only=True):
    """The last link of the record when the bundle was made, and one digest of the answers of all its invocations."""

    position: int
    digest: str
    answers: str


class CodeDigest(Wire, kw_only=True):
    """The version of trader, and the SHA-256 of the names and contents of its Python files."""

    version: str
    digest: str


class SeasonFacts(Wire, kw_only=True):
    """What the rows do not say. `records` are those of the season, as they were recorded; none: it was never opened.

    Without a season everything until the last whole hour counts.
    """

    name: str
    records: list[dict[str, Any]]
    until: Timestamp
    market_identity: str
    trading_mode: str
    markets: list[str]
    taker_fee_bps: float
    maker_fee_bps: float
    latency_ms: int
    record: RecordHead | None
    code: CodeDigest

    @property
    def end(self) -> datetime:
        return datetime.fromisoformat(self.until)

    @property
    def season(self) -> Season | None:
        """The season as its records say; None without one."""
        if not self.records:
            return None
        digests = [hashlib.sha256(canonical_json(record)).digest() for record in self.records]
        return Season([msgspec.convert(record, SeasonRecord) for record in self.records], digests)


class Bundle(NamedTuple):
    """The facts, the tables and the record of a folder, and the digest of each of its files but the card, by name.

    `record` has a line for each link of the chain (`trader.reports.season_record`).
    """

    facts: SeasonFacts
    tables: Mapping[str, Table]
    record: Sequence[str]
    digests: Mapping[str, str] = MappingProxyType({})


# From the database


async def read_facts(
    conn: Connection, settings: Settings, name: str, season: Season | None, until: datetime
) -> SeasonFacts:
    """Return the facts of the current runs, or of a season.

    :raises StartError: no service has started on this database yet
    """
    identity = await select_identity(conn)
    if identity is None:
        raise StartError("No service has started on this database yet.")
    head = await select_head(conn)
    return SeasonFacts(
        name=name,
        records=[] if season is None else records_of(season),
        until=iso(until),
        market_identity=identity.market_identity,
        trading_mode=identity.trading_mode,
        markets=list(settings.markets),
        taker_fee_bps=float(settings.taker_fee_bps),
        maker_fee_bps=float(settings.maker_fee_bps),
        latency_ms=settings.latency_ms,
        record=None
        if head is None
        else RecordHead(position=head.position, digest=head.digest.hex(), answers=head.answers_digest.hex()),
        code=digest_code(),
    )


def records_of(season: Season) -> list[dict[str, Any]]:
    """Return the records of a season as JSON values."""
    return [msgspec.json.decode(record.canonical) for record in season.records]


def digest_code() -> CodeDigest:
    """Return the digest of the program that runs."""
    root = Path(trader.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return CodeDigest(version=trader.__version__, digest=digest.hexdigest())


async def read_tables(database: Database, season: Season | None, until: datetime) -> dict[str, Table]:
    """Return the rows of the current runs before a time, of the baselines beside them, and of all fills of models.

    Once a season has ended the runs are those of its end. What an account did before its run is that of the season.
    """
    has_ended = season is not None and until >= season.rules.end
    current = CurrentRuns(database, until if has_ended else None)
    runs = await current.refresh()
    tables = {name: Table(name) for name in TABLES}
    async with database.reading() as conn:
        for name, listed in _rows_of(current, runs, await select_models(conn), until):
            for row in listed:
                tables[name].add(*row)
        period = (None, None) if season is None else (season.rules.start, season.rules.end)
        for past in await select_account_runs(conn, *period):
            tables["past_runs"].add(*past)
        for entrant in await select_past_entrants(conn, *period):
            tables["past_entrants"].add(*entrant)
        async for name, values in _rows_beside(conn, runs, until):
            tables[name].add(*values)
    return tables


def _rows_of(
    current: CurrentRuns, runs: Mapping[str, RunStatistics], models: Sequence[Model], until: datetime
) -> Iterable[tuple[str, Iterable[Sequence[Any]]]]:
    for each in models:
        if each.id in runs:
            extra = each.configuration
            cutoff = None if extra.training_cutoff is None else extra.training_cutoff.isoformat()
            names = (each.id, each.name, each.variant, each.provider, each.router_model_name)
            yield "models", [(*names, extra.owner, extra.replicate_of, cutoff, each.created_at)]
    for is_baseline, group in ((False, runs), (True, current.baselines)):
        for account_id, run in group.items():
            row = run.run
            number = (row.number, row.initial_capital, row.started_at, row.totals.cost_usd)
            yield "runs", [(account_id, row.run_id, is_baseline, *number)]
            hours = [each for each in run.hours if each.hour < until]
            yield "hours", [(account_id, each.hour, each.last, each.last_at, each.leverage) for each in hours]
            yield "entrants", [(account_id, *_entrant_row(period.entrant)) for period in run.periods]


def _entrant_row(entrant: RunEntrant) -> tuple[Any, ...]:
    number, fingerprint, began_at, decided, due, manual_since, declared = entrant.record
    said = None if declared is None else msgspec.json.encode(declared, order="sorted").decode()
    return number, fingerprint, began_at, entrant.ended_at, entrant.equity, decided, due, manual_since, said


async def _rows_beside(
    conn: Connection, runs: Mapping[str, RunStatistics], until: datetime
) -> AsyncIterator[tuple[str, Iterable[Any]]]:
    """Yield the positions, plans, prices, fills and decisions of runs."""
    since = min((run.run.started_at for run in runs.values()), default=until)
    account_of = {run.run.run_id: account_id for account_id, run in runs.items()}
    symbols = set()
    for run_id, parts in (await behaviour_store.select_position_parts(conn, list(account_of))).items():
        for part in (each for each in parts if each.opened_at < until):
            symbols.add(part.symbol)
            yield "positions", (account_of[run_id], *part)
    for account_id, changes in (await behaviour_store.select_plan_changes(conn, list(runs), since)).items():
        for change in changes:
            yield "plan_changes", (account_id, *change)
    closes = await behaviour_store.select_hourly_closes(conn, sorted(symbols), first_close(since), until)
    for symbol, by_hour in closes.items():
        for hour, close in by_hour.items():
            yield "closes", (symbol, hour, close)
    for name in ("fills", "decisions"):
        async for row in select_exported(conn, name, since, None):
            at, account_id, *_ = row
            if account_id in runs and at < until:
                yield name, row


# As files


def write_bundle(folder: Path, bundle: Bundle, form: Format) -> None:
    """Write facts, tables and record into a new folder. Raises `OSError`, and `SettingsError` without pyarrow."""
    folder.mkdir(parents=True)
    (folder / FACTS).write_bytes(msgspec.json.format(msgspec.json.encode(bundle.facts)))
    (folder / RECORD).write_bytes("".join(f"{line}\n" for line in bundle.record).encode())
    for table in bundle.tables.values():
        table.write(folder, form)


def read_bundle(folder: Path) -> Bundle:
    """Return what is in a folder.

    :raises SettingsError: it has no bundle, or a file of it cannot be read
    """
    try:
        facts = msgspec.json.decode((folder / FACTS).read_bytes(), type=SeasonFacts)
        files = sorted(each for each in folder.iterdir() if each.name != CARD)
        digests = {each.name: hashlib.sha256(each.read_bytes()).hexdigest() for each in files}
        facts.season  # noqa: B018 - records that are none of a season are refused
        record = (folder / RECORD).read_bytes().decode().split("\n")[:-1]
        return Bundle(facts, {name: load_table(folder, name) for name in TABLES}, record, digests)
    except OSError as error:
        raise SettingsError([f"{error.filename or folder} cannot be read: {error.strerror}"]) from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise SettingsError([f"{folder} is no bundle of a season: {error}"]) from None


# As runs


class SeasonRows(NamedTuple):
    """The entrants of a bundle with their runs, the baselines, the past of each account, and what they traded on."""

    models: Mapping[str, Model]
    runs: Mapping[str, RunStatistics]
    baselines: Mapping[str, RunStatistics]
    accounts: Mapping[str, AccountPast]
    parts: Mapping[str, Sequence[PositionPart]]
    changes: Mapping[str, Sequence[PlanChange]]
    closes: Mapping[str, Mapping[datetime, float]]


def rows_of(bundle: Bundle) -> SeasonRows:
    """Return the rows of a bundle as the statistics of a service have them; of a season, those of its entrants."""
    tables, until, season = bundle.tables, bundle.facts.end, bundle.facts.season
    parts = {key: [PositionPart(*row) for row in rows] for key, rows in _grouped(tables["positions"]).items()}
    hours, entrants = _grouped(tables["hours"]), _grouped(tables["entrants"])
    runs: dict[str, RunStatistics] = {}
    baselines: dict[str, RunStatistics] = {}
    for account_id, run_id, is_baseline, number, capital, started_at, cost in tables["runs"].rows():
        described = [_entrant(account_id, *row) for row in entrants.get(account_id, ())]
        record = described[-1].record if described else EntrantRecord(0, None, None, 0, 0)
        totals = InvocationTotals(cost_usd=None if cost is None else Decimal(str(cost)))
        run = RunStatistics(
            CurrentRun(account_id, UUID(run_id), Decimal(str(capital)), started_at, totals, record, int(number))
        )
        run.set_entrants(described)
        run.set_hours([_hour(account_id, *row) for row in hours.get(account_id, ())])
        run.add_trades(_trades(parts.get(account_id, ()), until))
        (baselines if is_baseline else runs)[account_id] = run
    models = {row[0]: _model(*row) for row in tables["models"].rows()}
    if unknown := sorted(runs.keys() - models.keys()):
        raise SettingsError([f"runs has accounts that are not in models: {', '.join(unknown)}"])
    closes: dict[str, dict[datetime, float]] = {}
    for symbol, hour, close in tables["closes"].rows():
        closes.setdefault(symbol, {})[hour] = close
    return SeasonRows(
        models=models,
        runs={key: run for key, run in runs.items() if season is None or season.rules.has(models[key])},
        baselines=baselines,
        accounts=_accounts(tables),
        parts=parts,
        changes={key: [PlanChange(*row) for row in rows] for key, rows in _grouped(tables["plan_changes"]).items()},
        closes=closes,
    )


def _accounts(tables: Mapping[str, Table]) -> dict[str, AccountPast]:
    entrants = {
        key: [PastEntrant(key, int(run_number), int(number), *row) for run_number, number, *row in rows]
        for key, rows in _grouped(tables["past_entrants"]).items()
    }
    runs = {
        key: [AccountRun(key, at, Decimal(str(first)), Decimal(str(last)), manual) for at, first, last, manual in rows]
        for key, rows in _grouped(tables["past_runs"]).items()
    }
    return {key: AccountPast.of(rows, entrants.get(key, ())) for key, rows in runs.items()}


def _grouped(table: Table) -> dict[str, list[tuple[Any, ...]]]:
    """Return the rows of a table by their first column, without it."""
    groups: dict[str, list[tuple[Any, ...]]] = {}
    for key, *row in table.rows():
        groups.setdefault(key, []).append(tuple(row))
    return groups


def _entrant(
    account_id: str,
    number: float,
    fingerprint: str | None,
    began_at: datetime | None,
    ended_at: datetime | None,
    equity: float | None,
    decided: float,
    due: float,
    manual_since: datetime | None,
    declared: str | None,
) -> RunEntrant:
    said = None if declared is None else msgspec.json.decode(declared, type=dict[str, str])
    record = EntrantRecord(int(number), fingerprint, began_at, int(decided), int(due), manual_since, said)
    worth = None if equity is None else Decimal(str(equity))
    return RunEntrant(account_id, record, ended_at, worth, InvocationTotals())


def _hour(account_id: str, hour: datetime, equity: float, at: datetime, leverage: float | None) -> HourlyValue:
    return HourlyValue(account_id, hour, Decimal(str(equity)), at, leverage)


def _trades(parts: Iterable[PositionPart], until: datetime) -> list[RunTrade]:
    """Return the parts that were closed before a time as trades, in order of closing."""
    closed = [part for part in parts if part.closed_at is not None and part.closed_at < until]
    trades = [
        RunTrade(
            id=number,
            net_pnl=Decimal(str(part.net)),
            entry_notional=Decimal(str(part.entry_notional)),
            is_long=part.is_long,
            confidence=None,
            opened_at=part.opened_at,
            closed_at=part.closed_at or until,
            symbol=part.symbol,
        )
        for number, part in enumerate(closed)
    ]
    return sorted(trades, key=lambda trade: (trade.closed_at, trade.id))


def _model(
    model_id: str,
    name: str,
    variant: str,
    provider: str,
    router_model: str,
    owner: str | None,
    replicate_of: str | None,
    cutoff: str | None,
    created_at: datetime | None,
) -> Model:
    return Model(
        id=model_id,
        name=name,
        variant=VariantId(variant),
        provider=provider,
        router_model_name=router_model,
        created_at=created_at or datetime.min.replace(tzinfo=UTC),
        configuration=ModelConfiguration(
            owner=owner,
            replicate_of=replicate_of,
            training_cutoff=None if cutoff is None else date.fromisoformat(cutoff),
        ),
    )
