"""A backtest against a replay of the same candles in lockstep: the same rows, digit for digit; and its database."""

import asyncio
import io
import itertools
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import msgspec
import orjson
import pytest
from support.candles import write_part, write_walk
from support.lockstep import replay
from support.process import serving
from support.run_profile import is_nightly

from trader.__main__ import main
from trader.agents.record import InvocationRecord
from trader.backtest.advance import Journal
from trader.backtest.market import BacktestMarket
from trader.backtest.output import LedgerLines
from trader.backtest.run import Backtest, rule_models
from trader.backtest.values import AccountValues
from trader.core.clock import epoch_second, iso, moment_of
from trader.core.ownership import EMBEDDED_FOLDER
from trader.core.variant_id import VariantId
from trader.database.embedded.server import EmbeddedPostgres
from trader.market.domain.markets import INTERVALS
from trader.market.sources.book_recording import BookRecording
from trader.market.sources.recorder import Recorder, find_recording
from trader.market.sources.replay import ReplaySource
from trader.portfolio.domain.baselines import BaselineState
from trader.portfolio.domain.histories import Snapshot
from trader.settings.settings import Settings

pytestmark = pytest.mark.processes

MARKETS = ("BTC", "ETH", "SOL")
KEYS = {
    "runs": ("id",),
    "orders": ("id",),
    "order_requests": ("id",),
    "limit_orders": ("id",),
    "fills": ("account_id", "sequence"),
    "funding_payments": ("account_id", "sequence"),
    "insurance_payments": ("account_id", "sequence"),
}
"""The tables of the ledger, and the columns by which their rows are found."""

Rows = dict[tuple[str, ...], dict[str, Any]]

RECORDED = datetime(2025, 1, 14, 12, tzinfo=UTC)
BEGIN = datetime(2025, 1, 15, 1, 30, tzinfo=UTC)
GAPS = {
    "BTC": [(5, 9), (90, 135)],
    "ETH": [(90, 135), (141, 142)],
    "SOL": [(28, 31), (90, 135), (146, 150)],
}
"""Minutes after the beginning without candles, of one market or of all of them, an hour's funding within; SOL ends."""


def part_of_recording(candles: Path, folder: Path, minutes: int) -> Path:
    """Write half a day before the beginning and `minutes` after it, with gaps, and a funding file of one market."""
    first = epoch_second(BEGIN) // 60
    gaps = {symbol: [range(first + a, first + b) for a, b in each] for symbol, each in GAPS.items()}
    write_part(folder, candles, RECORDED, BEGIN + timedelta(minutes=minutes), gaps)
    midnight = epoch_second(BEGIN.replace(hour=0, minute=0)) * 1000
    rates = [(0, 8, "0.00123"), (2, 4, "0.0008"), (3, 1, "-0.0004"), (6, 8, "0.0002")]
    rows = (f"{midnight + hour * 3_600_000 + 4},{interval},{rate}\n" for hour, interval, rate in rates)
    (folder / "ETHUSDT-fundingRate-2025-01.csv").write_text(
        f"calc_time,funding_interval_hours,last_funding_rate\n{''.join(rows)}"
    )
    return folder


async def books_of_recording(candles: Path, folder: Path, minutes: int) -> Path:
    """Record the books of a replay of candles, with the candles that agents read before the beginning."""
    end = BEGIN + timedelta(minutes=minutes)
    source = ReplaySource(candles, MARKETS, seed=0, start=BEGIN, end=end)
    await source.open()
    recorder = Recorder(folder, source)
    recorder.open()
    for symbol, interval in itertools.product(MARKETS, INTERVALS):
        past = await source.candles(symbol, interval, RECORDED, BEGIN)
        recorder.record_candles(symbol, interval, past, BEGIN)
    recorder.begin(BEGIN)
    async for tick in source.history(BEGIN - timedelta(seconds=1), end):
        recorder.record(tick)
    recorder.close()
    return folder


class Snapshots(list[Snapshot], Journal):
    """A journal of only the snapshots."""

    def snapshots(self, values: AccountValues) -> None:
        self += values.snapshots()


class Done(NamedTuple):
    """The last state of every row of the ledger, the snapshots, the saved baselines, and the records."""

    rows: Rows
    snapshots: Snapshots
    baselines: dict[str, BaselineState]
    records: list[InvocationRecord]


async def backtest(candles: Path, begin: str, end: str, **environ: str) -> Done:
    times = datetime.fromisoformat(begin), datetime.fromisoformat(end)
    settings = Settings.load({"SIM_SEED": "0", "MARKET_SOURCE": f"replay:{candles}", **environ}, None, demo=True)
    kind = BookRecording if find_recording(candles) else ReplaySource
    source = kind(candles, MARKETS, start=times[0], end=times[1])
    await source.open()
    market = await BacktestMarket.open(source, ("15m", "1h"))
    file = io.BytesIO()
    ledger, snapshots = LedgerLines(file), Snapshots()
    models = rule_models(list(VariantId), None, moment_of(market.span.start), {})
    run = Backtest.fresh(market, settings, models, [ledger, snapshots])
    for account in run.accounts:
        account.finished = []
    for _ in run.run():
        pass
    ledger.flush()
    baselines = {followed.baseline.id: followed.state.saved() for followed in run.baselines}
    records = [record for account in run.accounts for record in account.finished or ()]
    return Done(rows_of_lines(file.getvalue()), snapshots, baselines, records)


def rows_of_lines(lines: bytes) -> Rows:
    """The last state of every row of a ledger."""
    rows: Rows = {}
    for line in lines.splitlines():
        content = orjson.loads(line)
        table, row = content["table"], content["row"]
        key = (table, *(str(row[column]) for column in KEYS[table]))
        rows[key] = rows.get(key, {}) | row
    return rows


async def rows_of(conn: asyncpg.Connection) -> Rows:
    """The ledger of a database."""
    result: Rows = {}
    for table, columns in KEYS.items():
        for record in await conn.fetch(f"SELECT * FROM {table}"):
            row = {name: as_json(value) for name, value in record.items()}
            if "answer" in row:
                row["answer"] = orjson.loads(row["answer"])
            result[table, *(str(row[column]) for column in columns)] = row
    return result


def as_json(value: object) -> Any:
    """A column in the format of the lines."""
    match value:
        case datetime():
            return f"{value:%Y-%m-%dT%H:%M:%S}{f'.{value:%f}' if value.microsecond else ''}Z"
        case bool() | int() | Decimal() | None:
            return value
        case _:
            return str(value)


def read_as(row: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """The row of a line with its columns in the types of a database: amounts as numbers, and lists as text."""

    def read(value: Any, wanted: Any) -> Any:
        if isinstance(value, list):
            return msgspec.json.encode(value).decode()
        return Decimal(value) if isinstance(wanted, Decimal) and value is not None else value

    return {name: read(value, expected.get(name)) for name, value in row.items()}


async def assert_records_are_those_of(conn: asyncpg.Connection, records: list[InvocationRecord]) -> None:
    """Assert that the invocations with a decision other than a hold, their steps and calls equal a database."""
    ids = [record.id for record in records]
    acted = await conn.fetch("SELECT DISTINCT invocation_id FROM tool_calls WHERE type <> 'HOLDING'")
    assert sorted(ids) == sorted(row["invocation_id"] for row in acted)
    assert len(ids) > 3
    for table, key, rows in (
        ("invocations", "id", [record.invocation for record in records]),
        ("invocation_steps", "invocation_id", [step for record in records for step in record.steps]),
        ("tool_calls", "invocation_id", [call for record in records for call in record.calls]),
    ):
        recorded = [dict(row) for row in await conn.fetch(f"SELECT * FROM {table} WHERE {key} = ANY($1)", ids)]
        names = recorded[0].keys() & {*rows[0].__struct_fields__} - {"entrant"}  # which the database's journal sets
        expected, present = (
            sorted(comparable({name: row[name] for name in names}) for row in each)
            for each in (recorded, map(msgspec.structs.asdict, rows))
        )
        assert present == expected, table


def comparable(row: dict[str, Any]) -> bytes:
    """A row as canonical JSON; a column of JSON comes from a database as text."""
    decoded = {**row, "metadata": orjson.loads(row["metadata"])} if isinstance(row.get("metadata"), str) else row
    return orjson.dumps(decoded, option=orjson.OPT_SORT_KEYS, default=str)


@pytest.mark.parametrize(
    ("of_books", "latency_ms"),
    [(False, "200"), (True, "200"), *([(False, "0"), (True, "0")] if is_nightly() else [])],
)
async def test_a_backtest_has_the_rows_of_a_replay_in_lockstep(
    tmp_path: Path, dsn: str, candles: Path, of_books: bool, latency_ms: str
) -> None:
    if is_nightly() and not of_books:
        folder, minutes = candles, 24 * 60
    else:
        minutes = 150
        folder = part_of_recording(candles, tmp_path / "candles", minutes)
    if of_books:
        folder = await books_of_recording(folder, tmp_path / "books", minutes)
    begin, end = iso(BEGIN), iso(BEGIN + timedelta(minutes=minutes))
    environ = {"SIM_LATENCY_MS": latency_ms, "LOG_LEVEL": "info"}
    _, done = await asyncio.gather(
        replay(tmp_path / "service", dsn, folder, begin, end, **environ), backtest(folder, begin, end, **environ)
    )
    conn = await asyncpg.connect(dsn)
    try:
        expected = await rows_of(conn)
        assert done.rows.keys() == expected.keys()
        for key, row in expected.items():
            assert read_as(done.rows[key], row) == row, key
        tables = [key[0] for key in expected]
        assert tables.count("fills") > 5
        assert "funding_payments" in tables
        recorded = await conn.fetch("SELECT * FROM portfolio_snapshots")
        assert {tuple(row) for row in recorded} == {msgspec.structs.astuple(followed) for followed in done.snapshots}
        assert len(recorded) == len(done.snapshots)
        await assert_records_are_those_of(conn, done.records)
        baselines = {
            row["id"]: msgspec.json.decode(row["state"], type=BaselineState)
            for row in await conn.fetch("SELECT id, state FROM baselines")
        }
        assert done.baselines == {key: state.saved() for key, state in baselines.items()}
        assert len(baselines) == 6
        assert any(state.trade_count for state in baselines.values())
    finally:
        await conn.close()


def interrupt_after(monkeypatch: pytest.MonkeyPatch, minutes: int) -> None:
    """Simulate Ctrl+C while a backtest runs."""
    whole = Backtest.run

    def interrupted(run: Backtest) -> Iterator[datetime]:
        for number, reached in enumerate(whole(run)):
            if number == minutes:
                signal.raise_signal(signal.SIGINT)
            yield reached

    monkeypatch.setattr(Backtest, "run", interrupted)


class Recorded(NamedTuple):
    """The content of a backtest's database: the ledger, the time of its completeness, snapshots and invocations."""

    rows: Rows
    until: datetime
    snapshots: list[tuple[Any, ...]]
    invocations: int


async def state_of(run: Path) -> Recorded:
    """The content of the embedded database in a folder."""
    async with EmbeddedPostgres(run / EMBEDDED_FOLDER).attach() as server:
        (name,) = await server.databases()
        conn = await asyncpg.connect(server.dsn(name))
        try:
            snapshots = await conn.fetch("SELECT * FROM portfolio_snapshots ORDER BY account_id, created_at")
            return Recorded(
                await rows_of(conn),
                await conn.fetchval("SELECT processed_until FROM service_state"),
                [tuple(row) for row in snapshots],
                await conn.fetchval("SELECT count(*) FROM invocations"),
            )
        finally:
            await conn.close()


async def shown_of(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """The leaderboard, the evidence and the page shown by a service in the folder of a backtest."""
    async with serving(run) as service:
        board = await service.call("analytics.getLeaderboard", window="run", details=True)
        evidence = await service.call("analytics.getEvidence", window="run")
        async with service.http.get(f"{service.url}/") as response:
            html = await response.text()
        assert await service.stop() == 0
        assert not service.traceback()
    return board["entries"], evidence, html


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_the_database_of_a_backtest_is_complete_and_a_service_shows_it(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
) -> None:
    candles, run = open_folder / "candles of a walk", open_folder / "run"
    candles.mkdir()
    write_walk(candles / "BTCUSDT-1m.csv", BEGIN, 1_320, price=90_000, seed=5)
    write_walk(candles / "ETHUSDT-1m.csv", BEGIN, 1_320, price=2_200, seed=6)
    monkeypatch.setattr("trader.backtest.output.BATCH", 300)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    if is_interrupted:
        interrupt_after(monkeypatch, 500)
    options = ("--from", iso(BEGIN + timedelta(hours=12)), "--capital", "5000", "--seed", "3")
    code = main(["backtest", "--data", str(candles), "--out", str(run), *options])
    assert code == (130 if is_interrupted else 0)
    result = orjson.loads((run / "result.json").read_bytes())
    equity = sorted((account["id"], Decimal(str(account["equity"]))) for account in result["accounts"])

    before = asyncio.run(state_of(run))
    lines = rows_of_lines((run / "ledger.jsonl").read_bytes())
    assert lines.keys() == before.rows.keys()
    assert all(read_as(lines[key], row) == row for key, row in before.rows.items())
    assert [key[0] for key in before.rows].count("fills") > 5
    assert iso(before.until) == result["to"]
    monkeypatch.chdir(run)
    assert [main(name.split()) for name in ("audit", "audit chain", "show board", "report")] == [0, 0, 0, 0]

    shown, evidence, html = asyncio.run(shown_of(run))
    assert f'data-ends="{result["to"]}"' in html, "the page says that nothing is traded any more"
    assert evidence == result["evidence"]
    assert [len(row["fingerprint"]) for row in result["evidence"]["entrants"]] == 4 * [64]
    assert len(result["baselines"]) == 6
    assert sorted((entry["modelId"], Decimal(str(entry["endValue"]))) for entry in shown) == equity
    assert [entry["rank"] for entry in shown] == [1, 2, 3, 4]
    after = asyncio.run(state_of(run))
    assert after._replace(until=before.until) == before, "a service that shows a backtest neither trades nor records"
