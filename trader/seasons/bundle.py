"""Bundle of a season: the folder of a published result, and the rows behind its card as runs.

Everything in it is made of the record (`trader.seasons.record_reader`). Numbers are doubles, times whole milliseconds.
"""

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

import trader
from trader.agents.domain.entrants import NO_RECORD, EntrantRecord
from trader.agents.domain.models import Model
from trader.api.schemas.common import Timestamp, Wire, iso
from trader.core import files
from trader.core.errors import SettingsError
from trader.exchange.sql.trades import RunTrade
from trader.portfolio.domain.behaviour import PlanChange, PositionPart
from trader.portfolio.domain.histories import HourlyValue
from trader.portfolio.domain.seasons import Season
from trader.portfolio.run_statistics import RunStatistics
from trader.portfolio.seasons import AccountPast
from trader.portfolio.sql.analytics import AccountRun, CurrentRun, InvocationTotals, PastEntrant, RunEntrant
from trader.portfolio.tables import Format, Table
from trader.seasons.record_reader import TABLES, read_model

T = TypeVar("T")

CARD: Final = "card.json"
SCHEMA: Final = "card.schema.json"
RECORD: Final = "record.jsonl"
REPORT: Final = "report.html"
_ENTRIES_MAX: Final = 100
"""Files of a folder that are looked at; a bundle has fewer."""


class CardHead(Wire, kw_only=True):
    """The last link of the record that the card is made of."""

    position: int
    digest: str


class CodeDigest(Wire, kw_only=True):
    """The version of trader, and the SHA-256 of the names and contents of its Python files."""

    version: str
    digest: str


class SeasonFacts(Wire, kw_only=True):
    """A season and where its figures come from. `records` are its records before its closing, unchanged.

    Its hours before `until` count.
    """

    name: str
    number: int
    records: list[dict[str, Any]]
    until: Timestamp
    market_identity: str | None
    trading_mode: str | None
    markets: list[str]
    taker_fee_bps: float
    maker_fee_bps: float
    latency_ms: int
    record: CardHead
    code: CodeDigest


class Basis(NamedTuple):
    """All that a result is made of: the season, its end, the record's head, the program, and the rows by table."""

    season: Season
    until: datetime
    head: CardHead
    code: CodeDigest
    tables: Mapping[str, Table]

    @property
    def facts(self) -> SeasonFacts:
        rules, market = self.season.rules, self.season.records[0].market
        return SeasonFacts(
            name=rules.name,
            number=self.season.number,
            records=[msgspec.json.decode(record.canonical) for record in self.season.records],
            until=iso(self.until),
            market_identity=None if market is None else market.identity,
            trading_mode=None if market is None else market.trading_mode,
            markets=rules.markets,
            taker_fee_bps=rules.taker_fee_bps,
            maker_fee_bps=rules.maker_fee_bps,
            latency_ms=rules.latency_ms,
            record=self.head,
            code=self.code,
        )


def digest_code() -> CodeDigest:
    """Return the digest of the running program."""
    root = Path(trader.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return CodeDigest(version=trader.__version__, digest=digest.hexdigest())


# As a folder


def schema_file(card: type[msgspec.Struct]) -> bytes:
    """Return the file with the JSON Schema (2020-12) of a card."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(card)}
    return msgspec.json.format(msgspec.json.encode(schema))


def table_files(form: Format) -> list[str]:
    """Return the names of the files of the tables."""
    return [f"{name}.{form}" for name in TABLES]


def list_bundle(folder: Path) -> Format:
    """Check that a folder has the files of a bundle and nothing else, and return the format of its tables.

    :raises SettingsError: a file is missing, is not a regular file, or does not belong there; lists every one
    """
    try:
        with os.scandir(folder) as entries:
            modes = {entry.name: entry.stat(follow_symlinks=False).st_mode for entry in islice(entries, _ENTRIES_MAX)}
    except OSError as error:
        raise SettingsError([f"{folder} cannot be read: {error.strerror}"]) from None
    form: Format = "parquet" if f"{TABLES[0]}.parquet" in modes else "csv"
    expected = [CARD, SCHEMA, RECORD, REPORT, *table_files(form)]
    irregular = [name for name in expected if not stat.S_ISREG(modes.get(name, stat.S_IFREG))]
    problems = [
        *(f"{folder / name} is missing" for name in expected if name not in modes),
        *(f"{folder / name} does not belong to the result of a season" for name in sorted(modes.keys() - {*expected})),
        *(f"{folder / name} is not a regular file" for name in irregular),
    ]
    if problems:
        raise SettingsError(problems)
    return form


def read_lines(folder: Path) -> Iterator[str]:
    """Yield the texts of the record in a folder.

    :raises SettingsError: it cannot be read, or its last line has no end
    """
    try:
        for number, line in enumerate(files.read_lines(folder / RECORD), 1):
            if not line.endswith(b"\n"):
                raise SettingsError([f"line {number} of {folder / RECORD} has no end"])
            yield line[:-1].decode()
    except OSError as error:
        raise SettingsError([f"{folder / RECORD} cannot be read: {error.strerror}"]) from None
    except UnicodeDecodeError as error:
        raise SettingsError([f"{folder / RECORD} is not text: {error.reason}"]) from None


def digest_files(folder: Path, form: Format) -> dict[str, str]:
    """Return the SHA-256 of each file of a bundle that its card vouches for."""
    names = sorted([SCHEMA, REPORT, *table_files(form)])
    return {name: hashlib.sha256(files.read_regular(folder / name)).hexdigest() for name in names}


# As runs


class SeasonRows(NamedTuple):
    """The entrants of a season with their runs, the baselines, the past of each account, and the market's rows."""

    models: Mapping[str, Model]
    runs: Mapping[str, RunStatistics]
    baselines: Mapping[str, RunStatistics]
    accounts: Mapping[str, AccountPast]
    parts: Mapping[str, Sequence[PositionPart]]
    changes: Mapping[str, Sequence[PlanChange]]
    closes: Mapping[str, Mapping[datetime, float]]


def rows_of(basis: Basis) -> SeasonRows:
    """Return the rows of a season in the form of a service's statistics."""
    tables, until, season = basis.tables, basis.until, basis.season
    parts = _grouped(tables["positions"], PositionPart)
    hours = _grouped(tables["hours"], HourlyValue, account_id="account", last="equity", last_at="at")
    entrants = {key: list(map(_entrant, rows)) for key, rows in _grouped(tables["entrants"], dict[str, Any]).items()}
    past_entrants = _grouped(tables["past_entrants"], PastEntrant, model_id="account")
    past_runs = _grouped(tables["past_runs"], AccountRun, account_id="account")
    runs: dict[str, RunStatistics] = {}
    baselines: dict[str, RunStatistics] = {}
    for row in tables["runs"].records():
        account_id, described = row["account"], entrants.get(row["account"], [])
        totals = {"finished": sum(each.totals.finished for each in described), "cost_usd": row["cost_usd"]}
        own = {"model_id": account_id, "run_id": row["run"], "initial_capital": row["capital"]}
        current = msgspec.convert({**row, **own, "season": season.number, "until": until}, CurrentRun, strict=False)
        run = RunStatistics(
            msgspec.structs.replace(
                current,
                totals=msgspec.convert(totals, InvocationTotals),
                entrant=described[-1].record if described else NO_RECORD,
            )
        )
        run.set_entrants(described)
        run.set_hours(hours.get(account_id, ()))
        run.add_trades(_trades(parts.get(account_id, ()), until))
        run.open = [
            (part.entry_notional, part.opened_at) for part in parts.get(account_id, ()) if part.closed_at is None
        ]
        (baselines if row["is_baseline"] else runs)[account_id] = run
    closes: dict[str, dict[datetime, float]] = {}
    for row in tables["closes"].records():
        closes.setdefault(row["symbol"], {})[row["hour"]] = row["close"]
    return SeasonRows(
        models={
            row["account"]: read_model({**row, "id": row["account"], "router_model_name": row["router_model"]})
            for row in tables["models"].records()
        },
        runs=runs,
        baselines=baselines,
        accounts={key: AccountPast.of(rows, past_entrants.get(key, ())) for key, rows in past_runs.items()},
        parts=parts,
        changes=_grouped(tables["plan_changes"], PlanChange),
        closes=closes,
    )


def _grouped(table: Table, kind: type[T], **columns: str) -> dict[str, list[T]]:
    """Return the rows of a table by account. A field has the column of its name, or the one given for it."""
    groups: dict[str, list[T]] = {}
    for row in table.records():
        named = row | {field: row[column] for field, column in columns.items()}
        groups.setdefault(row["account"], []).append(msgspec.convert(named, kind, strict=False))
    return groups


def _entrant(row: Mapping[str, Any]) -> RunEntrant:
    declared = None if row["declared"] is None else msgspec.json.decode(row["declared"])
    own = {"declared": declared, "cycles_decided": row["decided"], "cycles_due": row["due"]}
    record = msgspec.convert({**row, **own}, EntrantRecord, strict=False)
    return RunEntrant(row["account"], record, row["ended_at"], None, InvocationTotals(finished=int(row["finished"])))


def _trades(parts: Iterable[PositionPart], until: datetime) -> list[RunTrade]:
    """Return the parts closed before a time as trades, in closing order."""
    closed = [part for part in parts if part.closed_at is not None and part.closed_at < until]
    trades = [
        msgspec.convert(
            {
                **msgspec.structs.asdict(part),
                "id": number,
                "net_pnl": part.net,
                "confidence": None,
                "close_reason": part.reason,
            },
            RunTrade,
        )
        for number, part in enumerate(closed)
    ]
    return sorted(trades, key=lambda trade: (trade.closed_at, trade.id))
