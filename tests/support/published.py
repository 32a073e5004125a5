"""A small season with everything that its result shows, and forgeries of its result."""

import csv
import hashlib
import json
import random
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray
from support.records import (
    HOUR,
    MINUTE,
    START,
    add_invocation,
    add_model,
    add_trade,
    id_of,
    make_run,
    make_snapshot,
)

from trader.agents.domain.entrants import Entrant
from trader.agents.domain.invocations import ToolCall
from trader.agents.sql.entrants import insert_entrant, upsert_missed_cycles
from trader.agents.sql.invocations import insert_tool_call
from trader.agents.verification import append_interrupted
from trader.core.clock import iso
from trader.core.money import ZERO
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database
from trader.exchange.domain.ledger import unopened_account
from trader.exchange.sql.accounts import DatabaseIdentity, upsert_service_state
from trader.market.domain.markets import Candle
from trader.market.sql.candles import insert_minutes
from trader.portfolio.domain.baselines import BUY_AND_HOLD, BaselineState
from trader.portfolio.domain.board import PrimaryComparison
from trader.portfolio.domain.seasons import MarketTerms, SeasonRecord, SeasonRules, seed_digest
from trader.portfolio.sql import snapshots as baselines_store
from trader.portfolio.sql import snapshots as portfolio_store
from trader.portfolio.sql.seasons import insert_season_record
from trader.record.results import record_results
from trader.record.sql.chain import select_anchors

HOURS: Final = 200
RECORDED_AT = START + (HOURS + 1) * HOUR
SEED: Final = "7"
FEE: Final = Decimal("0.5")
NEVER: Final = datetime(2200, 1, 1, tzinfo=UTC)
RULES: Final = SeasonRules(
    name="Winter",
    start=START + 10 * HOUR,
    end=START + 190 * HOUR,
    markets=["BTC", "ETH", "SOL"],
    capital=10_000,
    taker_fee_bps=5,
    maker_fee_bps=2,
    latency_ms=200,
    replicates=1,
    compare=["holdNothing"],
    alpha=0.05,
    stopping="decided",
    disqualify=[],
    entrants=["ada", "bob", "cat"],
    coverage_min_percent=50,
    primary=PrimaryComparison(entrant="ada", against="holdNothing", alpha=0.05),
)

INSERT_FILL = """
INSERT INTO fills (account_id, sequence, run_id, order_id, request_id, symbol, side, quantity, price, fee,
                   liquidation_fee, maker, cause, created_at)
VALUES ($1, $2, $3, $4, $5, 'BTC', $6, 1, $7, 0.5, 0, $8, 'order', $9)
"""
INSERT_FUNDING = """
INSERT INTO funding_payments (account_id, sequence, run_id, order_id, symbol, boundary, quantity, mark, rate, amount,
                              created_at)
VALUES ($1, 2, $2, $3, 'BTC', $4, 1, 100000, 0.0001, -0.1, $4)
"""
INSERT_REQUEST = """
INSERT INTO order_requests (id, account_id, run_id, created_at, answer)
VALUES ($1, $2, $3, $4, '{"manual": true, "status": "filled"}')
"""


async def open_season(database: Database, rules: SeasonRules = RULES) -> None:
    """Open a season with a secret seed, and amend a larger α before it starts."""
    opened = SeasonRecord(
        step="opened", season=1, number=0, at=START, rules=replace(rules, alpha=0.5), seed_digest=seed_digest(SEED),
        market=MarketTerms(identity=f"synthetic:sha256:{seed_digest(SEED)}", trading_mode="simulated"),
    )  # fmt: skip
    amended = SeasonRecord(step="amended", season=1, number=1, at=START, rules=rules, reason="a typing error")
    async with database.transaction() as conn:
        await conn.execute("INSERT INTO market_seed (seed) VALUES ($1)", SEED)
        await insert_season_record(conn, opened)
        await insert_season_record(conn, amended)


async def add_curve(conn: Connection, account_id: str, values: Iterable[Decimal]) -> None:
    """Add the equity near the end of each hour."""
    rows = [
        replace(make_snapshot(account_id, START + hour * HOUR + 59 * MINUTE, value), leverage=1 + hour % 3)
        for hour, value in enumerate(values)
    ]
    await portfolio_store.insert_snapshots(conn, rows)


def returns(seed: int, drift: float) -> NDArray[np.float64]:
    return np.random.default_rng(seed).normal(drift, 0.004, HOURS)


async def _add_trades(conn: Connection, model_id: str, seed: int, drift: float, *, by_hand: bool) -> None:
    """Add 18 round trips of 1 BTC, each in nine of ten hours, and the equity that follows from their fills.

    The first pays funding, the eighth may be a person's.
    """
    run_id, moves = id_of("run", model_id, 1), returns(seed, drift)
    cash, curve = Decimal(10_000), list[Decimal]()
    for number in range(18):
        closed_at, hour = START + (number + 1) * 10 * HOUR, 10 * number + 1
        gains = [round(cash * Decimal(gain), 2) for gain in np.expm1(np.cumsum(moves[hour : hour + 9]))]
        curve += [cash, *(cash - FEE + gain for gain in gains)]
        held, gross, funding = 9 * HOUR - 5 * MINUTE, gains[-1], ZERO if number else Decimal("-0.1")
        trade_id = await add_trade(
            conn, model_id, closed_at, label=number, held=held,
            gross=f"{gross}", funding=f"{funding}", notional="100000", quantity="1",
        )  # fmt: skip
        request: UUID | None = None
        if by_hand and number == 7:
            request = id_of("request", model_id)
            await conn.execute(INSERT_REQUEST, request, model_id, run_id, closed_at)
        fill = (run_id, trade_id, request)
        first = 3 * number + 1
        await conn.execute(INSERT_FILL, model_id, first, *fill, "buy", 100_000, number % 2 == 0, closed_at - held)
        if not number:
            await conn.execute(INSERT_FUNDING, model_id, run_id, trade_id, closed_at)
        await conn.execute(INSERT_FILL, model_id, first + 2, *fill, "sell", 100_000 + gross, False, closed_at)
        cash += gross - 2 * FEE + funding
    await conn.execute("UPDATE accounts SET sequence = 54 WHERE id = $1", model_id)
    await add_curve(conn, model_id, [*curve, *[cash] * (HOURS - len(curve))])


async def _add_decisions(conn: Connection, model_id: str, entrant: Entrant) -> None:
    """Add a decision before the season and two in it, which move a stop, and a missed cycle before and in it.

    The first of each in the season are of its very start.
    """
    for at in (START + 5 * HOUR, RULES.start, START + 59.5 * HOUR):
        invocation = await add_invocation(conn, model_id, at)
        call = ToolCall(
            id=id_of("call", model_id, at), invocation_id=invocation, number=1, type="UPDATE_EXIT_PLAN", status="ok",
            metadata={"raw": None, "decisions": [{"symbol": "BTC"}], "results": [{}]}, created_at=at,
        )  # fmt: skip
        await insert_tool_call(conn, call)
        await conn.execute("UPDATE invocations SET entrant = 1 WHERE id = $1", invocation)
        await append_interrupted(conn, invocation)
    for at in (START + 6 * HOUR, RULES.start):
        await upsert_missed_cycles(conn, [entrant], at)


async def add_entrant(conn: Connection, model_id: str, seed: int, drift: float, *, by_hand: bool = False) -> None:
    """Add a model that trades for 200 hours; `bob` and `cat` are replicates."""
    await add_model(conn, model_id)
    fingerprint = {"ada": "a", "dan": "d"}.get(model_id, "b") * 64
    entrant = Entrant(
        model_id=model_id, number=1, fingerprint=fingerprint, configuration="{}", answered_by=None, began_at=START
    )
    await insert_entrant(conn, entrant)
    await _add_trades(conn, model_id, seed, drift, by_hand=by_hand)
    await _add_decisions(conn, model_id, entrant)


async def add_rows(database: Database) -> None:
    """Add three entrants, two of them replicates and one traded by hand, a model beside the season, and a baseline."""
    account = unopened_account(BUY_AND_HOLD.id, Decimal(10_000), "USDT", START)
    state = BaselineState(account=replace(account, run=make_run(BUY_AND_HOLD.id), sequence=0, changed_at=START))
    async with database.transaction() as conn:
        await ensure_partitions(conn, START, START + HOURS * HOUR)
        await upsert_service_state(conn, DatabaseIdentity(f"synthetic:sha256:{seed_digest(SEED)}", "simulated"))
        await add_entrant(conn, "ada", 1, 0.02)
        await add_entrant(conn, "bob", 2, 0.0)
        await add_entrant(conn, "cat", 3, 0.0, by_hand=True)
        await add_entrant(conn, "dan", 5, 0.0)
        await baselines_store.upsert_baselines(conn, [baselines_store.SavedBaseline(BUY_AND_HOLD, state, START)])
        held = 10_000 * np.exp(np.cumsum(returns(4, 0.0)))
        await add_curve(conn, BUY_AND_HOLD.id, [round(Decimal(value), 6) for value in held])
        closes = [100_000.0 + hour % 7 for hour in range(-40, HOURS + 1)]
        candles = [Candle(START + n * HOUR, close, close, close, close, 0) for n, close in enumerate(closes, -40)]
        await insert_minutes(conn, [("BTC", candle) for candle in candles])


async def record_rows(database: Database, at: datetime = RECORDED_AT) -> None:
    """Add the rows to the record as at a time; by default all of them."""
    async with database.connection() as conn:
        term = await conn.fetchval("SELECT term FROM service_state")
    await record_results(database, term, at)


async def play_season(database: Database, rules: SeasonRules = RULES, at: datetime = RECORDED_AT) -> None:
    """Open a season, add its rows, and record them as at a time."""
    await open_season(database, rules)
    await add_rows(database)
    await record_rows(database, at)


async def write_anchors(database: Database, file: Path) -> None:
    """Write the anchors that were made when the season was closed."""
    async with database.connection() as conn:
        anchors = await select_anchors(conn)
    lines = [
        json.dumps({"position": each.position, "digest": each.digest.hex(), "anchoredAt": iso(START)})
        for each in anchors
    ]
    file.write_text("".join(f"{line}\n" for line in lines))


# Forgeries

Rows = list[list[str]]


def read_table(folder: Path, name: str) -> Rows:
    return list(csv.reader((folder / f"{name}.csv").read_text().splitlines()))


def write_table(folder: Path, name: str, rows: Rows) -> None:
    with (folder / f"{name}.csv").open("w", newline="") as lines:
        csv.writer(lines).writerows(rows)


def lines_of(folder: Path) -> list[str]:
    return (folder / "record.jsonl").read_text().splitlines()


def write_lines(folder: Path, lines: list[str]) -> None:
    (folder / "record.jsonl").write_text("".join(f"{line}\n" for line in lines))


def vouch(folder: Path) -> None:
    """Make the card vouch for the files as they are, and the closing for the card."""
    card = json.loads((folder / "card.json").read_bytes())
    for name in card["digests"]:
        card["digests"][name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    encoded = json.dumps(card, indent=2).encode()
    (folder / "card.json").write_bytes(encoded)
    _close_again(folder, card=hashlib.sha256(encoded).hexdigest())


def rebuild(folder: Path) -> None:
    """Make the closing name the digest of the record before it."""
    digest = bytes(32)
    for line in lines_of(folder)[:-1]:
        digest = hashlib.sha256(digest + hashlib.sha256(line.encode()).digest()).digest()
    _close_again(folder, head=digest.hex())


def _close_again(folder: Path, **result: str) -> None:
    """Change the result in the closing, if the record ends with one."""
    lines = lines_of(folder)
    if lines and '\\"step\\":\\"closed\\"' in lines[-1]:
        closing = json.loads(lines[-1])
        row = closing["rows"]["season_records"][0]
        record = json.loads(row["record"])
        record["result"] |= result
        row["record"] = json.dumps(record, sort_keys=True, separators=(",", ":"))
        row["digest"] = hashlib.sha256(row["record"].encode()).hexdigest()
        write_lines(folder, [*lines[:-1], json.dumps(closing, sort_keys=True, separators=(",", ":"))])


def in_rows(name: str, change: Callable[[Rows], None]) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        rows = read_table(folder, name)
        change(rows)
        write_table(folder, name, rows)

    return forge


def only_lines(keep: Callable[[str], bool]) -> Callable[[Path], None]:
    return lambda folder: write_lines(folder, [line for line in lines_of(folder) if keep(line)])


def worse_verdict(card: Any) -> None:
    card["evidence"]["entrants"][0]["differences"][0]["verdict"] = "worse"


def swap_names(rows: Rows) -> None:
    rows[1][1], rows[2][1] = rows[2][1], rows[1][1]


def fuzz(folder: Path, original: Path, rng: random.Random) -> str:
    """Change one thing in a copy of a result: a row, a cell, a file, a link or a digit. Return what was changed."""
    files = sorted(file.name for file in original.iterdir())
    name = rng.choice(files)
    content = (original / name).read_bytes()
    lines = content.splitlines(keepends=True)
    at, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    what = rng.choice(["cut", "add", "swap", "cell", "byte", "digit", "file", "end"])
    if what == "cut":
        del lines[at]
    elif what == "add":
        lines.insert(other, lines[at])
    elif what == "swap":
        lines[at], lines[other] = lines[other], lines[at]
    elif what == "cell":
        cells, others = (lines[place].split(b",") for place in (at, other))
        cells[rng.randrange(len(cells))] = others[rng.randrange(len(others))]
        lines[at] = b",".join(cells)
    elif what == "digit":
        places = [place for place, byte in enumerate(lines[at]) if chr(byte).isdigit()]
        if places:
            place = rng.choice(places)
            lines[at] = lines[at][:place] + str(rng.randrange(10)).encode() + lines[at][place + 1 :]
    elif what == "byte":
        place = rng.randrange(len(lines[at]))
        lines[at] = lines[at][:place] + bytes([rng.randrange(32, 127)]) + lines[at][place + 1 :]
    elif what == "file":
        lines = (original / rng.choice(files)).read_bytes().splitlines(keepends=True)
    else:
        lines = lines[:at]
    (folder / name).write_bytes(b"".join(lines))
    return f"{what} of {name} at {at}, {other}"
