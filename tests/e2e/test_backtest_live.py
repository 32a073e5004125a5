"""A backtest against a replay of the same candles in lockstep: the same rows, digit for digit."""

import asyncio
import gzip
import io
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import pytest
from support.lockstep import replay
from support.nightly import is_nightly

from trader.clock import epoch_second, iso, moment_of
from trader.domain.models import VariantId
from trader.gateways.market.files import find_files
from trader.gateways.market.replay import ReplaySource
from trader.services.backtest.ledger import LedgerLines
from trader.services.backtest.market import BacktestMarket
from trader.services.backtest.participant import Participant
from trader.services.backtest.run import Backtest, rule_models
from trader.settings import Settings

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
BEGIN = datetime(2025, 1, 15, tzinfo=UTC)
GAPS = {
    "BTC": [(95, 99), (180, 225)],
    "ETH": [(180, 225), (231, 232)],
    "SOL": [(118, 121), (180, 225)],
}
"""Minutes of the day without candles, of one market or of all of them, an hour's funding within."""


def part_of_recording(candles: Path, folder: Path, minutes: int) -> Path:
    """Write half a day before the beginning and `minutes` after it, with gaps, and a funding file of one market."""
    folder.mkdir()
    first, last, zero = (epoch_second(at) // 60 for at in (RECORDED, BEGIN + timedelta(minutes=minutes), BEGIN))
    for symbol, (path,) in find_files(candles).items():
        kept = ["open_time,open,high,low,close,volume"]
        with gzip.open(path, "rt") as lines:
            for line in list(lines)[1:]:
                minute = int(line.partition(",")[0]) // 60_000
                if first <= minute <= last and not any(a <= minute - zero < b for a, b in GAPS[symbol]):
                    kept.append(line.strip())
        (folder / f"{symbol}USDT-1m.csv").write_text("\n".join(kept))
    midnight = epoch_second(BEGIN) * 1000
    (folder / "ETHUSDT-fundingRate-2025-01.csv").write_text(
        f"calc_time,funding_interval_hours,last_funding_rate\n{midnight},8,0.00123\n{midnight + 28_800_000},8,-0.0004\n"
    )
    return folder


async def backtest(candles: Path, begin: str, end: str, **environ: str) -> tuple[Rows, list[Participant], str]:
    """The last state of every row of the ledger, the participants, and the digest."""
    times = datetime.fromisoformat(begin), datetime.fromisoformat(end)
    settings = Settings.load({"MARKET_SOURCE": f"replay:{candles}", **environ}, None, demo=True)
    source = ReplaySource(candles, MARKETS, start=times[0], end=times[1])
    await source.open()
    market = await BacktestMarket.open(source, ("15m", "1h"))
    file = io.BytesIO()
    ledger = LedgerLines(file)
    run = Backtest(market, settings, rule_models(list(VariantId), None, moment_of(market.span.start)), [ledger])
    for _ in run.run():
        pass
    digest = ledger.digest()
    rows: Rows = {}
    for line in file.getvalue().splitlines():
        content = orjson.loads(line)
        table, row = content["table"], content["row"]
        key = (table, *(str(row[column]) for column in KEYS[table]))
        rows[key] = rows.get(key, {}) | row
    return rows, run.participants, digest


async def rows_of(conn: asyncpg.Connection) -> Rows:
    """The ledger of a database."""
    found: Rows = {}
    for table, columns in KEYS.items():
        for record in await conn.fetch(f"SELECT * FROM {table}"):
            row = {name: as_json(value) for name, value in record.items()}
            if "answer" in row:
                row["answer"] = orjson.loads(row["answer"])
            found[table, *(str(row[column]) for column in columns)] = row
    return found


def as_json(value: object) -> Any:
    """A column as the lines have it."""
    match value:
        case datetime():
            return f"{value:%Y-%m-%dT%H:%M:%S}{f'.{value:%f}' if value.microsecond else ''}Z"
        case bool() | int() | Decimal() | None:
            return value
        case _:
            return str(value)


def read_as(row: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """The row of a line with its columns as those of a database: amounts as numbers."""
    return {
        name: Decimal(value) if isinstance(expected.get(name), Decimal) and value is not None else value
        for name, value in row.items()
    }


@pytest.mark.parametrize("latency_ms", ["200", "0"] if is_nightly() else ["200"])
async def test_a_backtest_has_the_rows_of_a_replay_in_lockstep(
    tmp_path: Path, dsn: str, candles: Path, latency_ms: str
) -> None:
    if is_nightly():
        folder, minutes = candles, 24 * 60
    else:
        minutes = 4 * 60
        folder = part_of_recording(candles, tmp_path / "candles", minutes)
    begin, end = iso(BEGIN), iso(BEGIN + timedelta(minutes=minutes))
    environ = {"SIM_LATENCY_MS": latency_ms, "LOG_LEVEL": "info"}
    _, (rows, participants, digest) = await asyncio.gather(
        replay(tmp_path / "service", dsn, folder, begin, end, **environ), backtest(folder, begin, end, **environ)
    )
    conn = await asyncpg.connect(dsn)
    try:
        expected = await rows_of(conn)
        assert rows.keys() == expected.keys()
        for key, row in expected.items():
            assert read_as(rows[key], row) == row, key
        tables = [key[0] for key in expected]
        assert tables.count("fills") > 5
        assert tables.count("funding_payments") > 1
        for one in participants:
            recorded = await conn.fetch(
                "SELECT hour, last FROM portfolio_hourly WHERE account_id = $1 ORDER BY hour", one.model.id
            )
            assert [tuple(hour) for hour in one.curve.hours] == [tuple(hour) for hour in recorded]
    finally:
        await conn.close()
    assert digest == (await backtest(folder, begin, end, **environ))[2]
