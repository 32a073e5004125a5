"""The result card of a season: what it says, and that nothing in it or under it can be changed unseen."""

import csv
import json
import shutil
from collections.abc import Callable, Iterator
from copy import deepcopy
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from support.calls import Call
from support.records import (
    HOUR,
    MINUTE,
    START,
    add_invocation,
    add_model,
    add_run,
    add_trade,
    id_of,
    make_run,
    make_snapshot,
)

from trader.api.schemas.evidence import GetEvidenceOutput
from trader.clock import LockstepClock, iso
from trader.domain.agents.entrants import Entrant
from trader.domain.agents.invocations import ToolCall
from trader.domain.exchange.ledger import unopened_account
from trader.domain.market.markets import Candle
from trader.domain.portfolio.baselines import BUY_AND_HOLD, BaselineState
from trader.domain.portfolio.seasons import SeasonRecord, SeasonRules, Stopping, seed_digest
from trader.errors import StartError
from trader.reports.season_bundle import read_bundle
from trader.reports.season_card import differences, make_card
from trader.results import Table, load_table
from trader.services.agents.results import record_results
from trader.services.portfolio.evidence import Evidence
from trader.services.portfolio.luck import NoLuck
from trader.services.portfolio.run_statistics import CurrentRuns
from trader.services.portfolio.seasons import close_season
from trader.store.agents.entrants import insert_entrant
from trader.store.agents.invocations import insert_tool_call
from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Connection, Database
from trader.store.exchange.accounts import DatabaseIdentity, upsert_service_state
from trader.store.market.candles import insert_minutes
from trader.store.portfolio import baselines as baselines_store
from trader.store.portfolio import snapshots as portfolio_store
from trader.store.portfolio.seasons import insert_season_record, select_latest_season

HOURS = 200

INSERT_FILL = """
INSERT INTO fills (account_id, sequence, run_id, order_id, symbol, side, quantity, price, fee, liquidation_fee, maker,
                   cause, created_at)
VALUES ($1, $2, $3, $4, 'BTC', 'buy', 0.01, 100000, 1, 0, $5, 'order', $6)
"""


WHOLE = "The card is that of its files, and no row contradicts the record."
NEVER = datetime(2200, 1, 1, tzinfo=UTC)
RULES = SeasonRules(
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
)


async def open_season(database: Database, rules: SeasonRules) -> None:
    opened = SeasonRecord(step="opened", season=1, number=0, at=START, rules=rules, seed_digest=seed_digest("7"))
    async with database.connection() as conn:
        await conn.execute("INSERT INTO market_seed (seed) VALUES ('7')")
        await insert_season_record(conn, opened)


async def add_curve(conn: Connection, account_id: str, seed: int, drift: float) -> None:
    returns = np.random.default_rng(seed).normal(drift, 0.004, HOURS)
    rows = [
        replace(make_snapshot(account_id, START + hour * HOUR + 59 * MINUTE, f"{value:.6f}"), leverage=1 + hour % 3)
        for hour, value in enumerate(10_000 * np.exp(np.cumsum(returns)))
    ]
    await portfolio_store.insert_snapshots(conn, rows)


async def add_entrant(conn: Connection, model_id: str, seed: int, drift: float) -> None:
    """A model with an entrant, 12 trades and their fills, 200 hours, and a plan that it changed."""
    await add_model(conn, model_id)
    fingerprint = ("a" if model_id == "ada" else "b") * 64
    await insert_entrant(
        conn,
        Entrant(
            model_id=model_id, number=1, fingerprint=fingerprint, configuration="{}", answered_by=None, began_at=START
        ),
    )
    for number in range(12):
        trade_id = await add_trade(conn, model_id, START + (number + 1) * 10 * HOUR, label=number)
        run_id = id_of("run", model_id, 1)
        await conn.execute(INSERT_FILL, model_id, number + 1, run_id, trade_id, number % 2 == 0, START + number * HOUR)
    await add_curve(conn, model_id, seed, drift)
    invocation = await add_invocation(conn, model_id, START + 9 * HOUR)
    call = ToolCall(
        id=id_of("call", model_id),
        invocation_id=invocation,
        number=1,
        type="UPDATE_EXIT_PLAN",
        status="ok",
        metadata={"raw": None, "decisions": [{"symbol": "BTC"}], "results": [{}]},
        created_at=START + 9.5 * HOUR,
    )
    await insert_tool_call(conn, call)


@pytest.fixture
async def season(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three models, two of them replicates, and a baseline over 200 hours."""
    monkeypatch.setenv("MARKET_SOURCE", "synthetic")
    account = unopened_account(BUY_AND_HOLD.id, Decimal(10_000), "USDT", START)
    state = BaselineState(account=replace(account, run=make_run(BUY_AND_HOLD.id), sequence=0, changed_at=START))
    async with database.connection() as conn:
        await ensure_partitions(conn, START, START + HOURS * HOUR)
        await upsert_service_state(conn, DatabaseIdentity("synthetic:7", "simulated"))
        await add_entrant(conn, "ada", 1, 0.03)
        await add_entrant(conn, "bob", 2, 0.0)
        await add_entrant(conn, "cat", 3, 0.0)
        await baselines_store.upsert_baselines(conn, [baselines_store.SavedBaseline(BUY_AND_HOLD, state, START)])
        await add_curve(conn, BUY_AND_HOLD.id, 4, 0.0)
        closes = [100_000.0 + hour % 7 for hour in range(-25, HOURS)]
        candles = [Candle(START + n * HOUR, close, close, close, close, 0) for n, close in enumerate(closes, -25)]
        await insert_minutes(conn, [("BTC", candle) for candle in candles])


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value that is no object and no list, and of every empty one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not inner or not value:
        yield path
    else:
        for name, each in inner:
            yield from leaves(each, (*path, name))


def changed(value: Any) -> Any:
    """Return another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value * 1.0001 + 0.0001
        case str():
            return f"{value}x"
        case dict():
            return {"more": 1}
        case list():
            return [1]
        case _:
            return 1


def change_row(folder: Path, name: str) -> None:
    """Change one number, flag or letter of the first row of a table."""
    file = folder / f"{name}.csv"
    heads, first, *rows = csv.reader(file.read_text().splitlines())
    table = load_table(folder, name)
    numbers = [place for place, head in enumerate(heads) if table[head].dtype == np.float64 and first[place] != "nan"]
    place = numbers[-1] if numbers else 0
    first[place] = repr(float(first[place]) * 1.5 + 1) if numbers else f"{first[place]}x"
    with file.open("w", newline="") as lines:
        csv.writer(lines).writerows([heads, first, *rows])


async def test_a_result_is_complete_and_every_change_of_it_is_found(season: None, call: Call, tmp_path: Path) -> None:
    made = await call("season", "close", "result", "--json")
    assert made.code == 0, made.err
    folder = tmp_path / "result"
    assert (await call("season", "check", "result")).out.splitlines() == [
        "Rows in no record: 36 of fills, 796 of hours, 4 of runs.",
        WHOLE,
    ]
    card = json.loads((folder / "card.json").read_bytes())

    jsonschema_rs.validate(json.loads((folder / "card.schema.json").read_bytes()), card)
    assert card["season"]["records"] == []
    assert card["trials"] == {
        "models": 3, "contenders": 2, "runs": 3, "replicates": 2, "comparisons": 7, "alpha": 0.05,
    }  # fmt: skip
    (ada, *_) = card["accounts"]
    assert (ada["fills"], ada["maker"], ada["traded"], ada["fees"], ada["funding"]) == (12, 50, 12_000, 12, 0)
    entrant = next(each for each in card["evidence"]["entrants"] if each["modelId"] == "ada")
    assert {each["reference"]: each["verdict"] for each in entrant["differences"]}["holdNothing"] == "better"
    behaviour = {each["modelId"]: each["behaviour"] for each in card["behaviour"]}
    assert (behaviour["ada"]["plansChanged"], behaviour["bob"]["alike"]) == (1, 100)
    assert card["noiseFloor"]["smallestDifference"] > 0
    assert card["noiseFloor"]["ownNoise"] > 0
    assert card["decisions"] == {"UPDATE_EXIT_PLAN ok": 3}

    for path in leaves(card):
        other = deepcopy(card)
        inner = other
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = changed(inner[path[-1]])
        (difference,) = differences(other, card)
        assert str(path[-1]) in difference.field
        del inner[path[-1]]
        assert list(differences(other, card)), f"{path} can be left out"
        if path[0] in {"noiseFloor", "digests"}:
            (folder / "card.json").write_text(json.dumps(other))
            assert (await call("season", "check", "result")).code == 1


Rows = list[list[Any]]


def equity_raised(rows: Rows) -> None:
    rows[50][2] *= 1.2


def last_hour_added(rows: Rows) -> None:
    rows.insert(HOURS, ["ada", START + HOURS * HOUR, 99_999.0, START + HOURS * HOUR, 1.0])


def price_changed(rows: Rows) -> None:
    rows[0][5] -= 1


def fill_left_out(rows: Rows) -> None:
    del rows[3]


def fill_doubled(rows: Rows) -> None:
    rows.insert(3, rows[3])


def capital_lowered(rows: Rows) -> None:
    rows[0][4] /= 2


def entry_moved(rows: Rows) -> None:
    rows[0][3] += 5 * HOUR


FORGERIES: list[tuple[str, Callable[[Rows], None], int]] = [
    ("hours", equity_raised, 1),
    ("hours", last_hour_added, 0),
    ("fills", price_changed, 2),
    ("fills", fill_left_out, 1),
    ("fills", fill_doubled, 1),
    ("runs", capital_lowered, 1),
    ("entrants", entry_moved, 1),
]


async def write_card(folder: Path) -> dict[str, Any]:
    """Write the card of whatever is in the folder, as who forges a result would."""
    card = msgspec.to_builtins(await make_card(read_bundle(folder)))
    (folder / "card.json").write_bytes(msgspec.json.encode(card))
    return dict(card)


async def test_a_result_that_was_forged_with_its_card_contradicts_the_record(
    season: None, database: Database, call: Call, tmp_path: Path
) -> None:
    async with database.connection() as conn:
        await conn.execute("UPDATE accounts SET sequence = 12")
        term = await conn.fetchval("SELECT term FROM service_state")
    await record_results(database, term, START + (HOURS + 1) * HOUR)
    assert (await call("season", "close", "result")).code == 0
    head = read_bundle(tmp_path / "result").facts.record
    assert head is not None
    anchor = {"position": head.position, "digest": head.digest, "anchoredAt": iso(START)}
    (tmp_path / "anchors").write_text(json.dumps(anchor))
    checked = await call("season", "check", "result", "--anchors", "anchors")
    assert (checked.code, checked.out) == (0, f"{WHOLE}\n")
    card = json.loads((tmp_path / "result" / "card.json").read_bytes())
    assert card["unrecorded"] == {"fills": 0, "hours": 0, "runs": 0, "entrants": 0}

    for name, change, count in FORGERIES:
        folder = shutil.copytree(tmp_path / "result", tmp_path / change.__name__)
        rows = [list(row) for row in load_table(folder, name).rows()]
        change(rows)
        table = Table(name)
        for row in rows:
            table.add(*row)
        table.write(folder, "csv")
        forged = await write_card(folder)
        assert forged["unrecorded"][name] == (0 if count else 1), "what is newer than the record is counted"
        checked = await call("season", "check", change.__name__, "--json")
        fields = [each["field"] for each in json.loads(checked.out)["differences"]]
        assert (len(fields), {field.partition(" ")[0] for field in fields}) == (count, {name} if count else set())

    folder = shutil.copytree(tmp_path / "result", tmp_path / "rebuilt")
    lines = (folder / "record.jsonl").read_text()
    (folder / "record.jsonl").write_text(lines.replace('"price":"100000"', '"price":"100001"'))
    await write_card(folder)
    assert "season.record" in (await call("season", "check", "rebuilt")).out
    assert "anchor at position" in (await call("season", "check", "rebuilt", "--anchors", "anchors")).out


@pytest.mark.parametrize("name", ["hours", "positions"])
async def test_tables_are_the_same_in_both_forms(season: None, call: Call, name: str, tmp_path: Path) -> None:
    assert (await call("season", "close", "text")).code == 0
    assert (await call("season", "close", "columns", "--tables", "parquet")).code == 0
    assert (await call("season", "check", "columns")).code == 0
    text, columns = load_table(tmp_path / "text", name), load_table(tmp_path / "columns", name)
    assert list(text.rows()) == list(columns.rows())


async def test_a_changed_row_of_any_table_is_found(season: None, call: Call, tmp_path: Path) -> None:
    assert (await call("season", "close", "result")).code == 0
    files = sorted((tmp_path / "result").iterdir())
    assert len(files) == 16
    for file in files:
        shutil.rmtree(tmp_path / "other", ignore_errors=True)
        shutil.copytree(tmp_path / "result", tmp_path / "other")
        if file.suffix == ".csv":
            change_row(tmp_path / "other", file.stem)
        else:
            (tmp_path / "other" / file.name).write_bytes(file.read_bytes().replace(b"a", b"e", 1))
        checked = await call("season", "check", "other")
        assert checked.code in {1, 2}, file.name
        assert "differ" in checked.out or "other" in checked.err, file.name


async def test_absent_values_come_back_as_none(tmp_path: Path) -> None:
    table = Table("positions")
    row = ("ada", "BTC", True, 1.5, 10.0, None, None, 0.1, None, None, None, 2.0, START, None, None, None)
    table.add(*row)
    for form in ("csv", "parquet"):
        table.write(tmp_path, form)
        assert list(load_table(tmp_path, "positions").rows()) == [row]
        (tmp_path / f"positions.{form}").unlink()


async def test_what_cannot_be_closed_or_checked_is_refused_with_the_reason(
    season: None, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    refused = await call("season", "close", "taken")
    assert refused.code == 1
    assert "taken exists already" in refused.err
    refused = await call("season", "check", "taken")
    assert refused.code == 2
    assert "season.json cannot be read" in refused.err


async def test_a_season_is_closed_once_it_has_ended_and_publishes_the_seed_of_its_market(
    season: None, database: Database, call: Call, tmp_path: Path
) -> None:
    later = replace(RULES, end=NEVER)
    await open_season(database, later)
    refused = await call("season", "close", "early")
    assert refused.code == 1
    assert "season 1 (Winter) is open until 2200-01-01T00:00:00.000Z, or every comparison is decided" in refused.err
    assert not (tmp_path / "early").exists()
    async with database.connection() as conn:
        await insert_season_record(
            conn, SeasonRecord(step="amended", season=1, number=1, at=START, rules=RULES, reason="it is over")
        )
    assert (await call("season", "close", "result")).code == 0
    card = json.loads((tmp_path / "result" / "card.json").read_bytes())
    assert [record["step"] for record in card["season"]["records"]] == ["opened", "amended", "closed"]
    assert card["season"]["records"][-1]["seed"] == "7"
    assert (card["evidence"]["season"]["seed"], card["evidence"]["season"]["state"]) == ("7", "closed")
    assert card["period"]["until"] == iso(RULES.end)
    assert {each["hours"] for each in card["evidence"]["entrants"]} == {180}
    assert (await call("season", "check", "result")).code == 0


async def test_a_season_that_was_amended_while_its_result_was_read_stays_open(season: None, database: Database) -> None:
    await open_season(database, RULES)
    async with database.connection() as conn:
        read = await select_latest_season(conn)
        assert read is not None
        amended = SeasonRecord(
            step="amended", season=1, number=1, at=START, rules=replace(RULES, alpha=0.1), reason="late"
        )
        await insert_season_record(conn, amended)
    with pytest.raises(StartError, match=r"season 1 \(Winter\) was changed while its result was read; close it again"):
        async with database.transaction() as conn:
            await close_season(conn, read, is_decided=True)
    async with database.connection() as conn:
        still = await select_latest_season(conn)
    assert still is not None
    assert still.closed_at is None


@pytest.mark.parametrize(
    ("entrants", "stopping", "code"),
    [(["ada"], "decided", 0), (["ada", "bob"], "decided", 1), (["ada"], "end", 1)],
    ids=["all are decided", "one is not", "nothing but the end ends it"],
)
async def test_a_season_may_be_closed_before_its_end_once_every_comparison_is_decided(
    season: None, database: Database, call: Call, entrants: list[str], stopping: Stopping, code: int
) -> None:
    await open_season(database, replace(RULES, end=NEVER, entrants=entrants, stopping=stopping))
    assert (await call("season", "close", "result")).code == code


async def test_the_card_of_a_season_says_what_its_board_says_also_after_a_reset_since_its_end(
    season: None, database: Database, call: Call, tmp_path: Path
) -> None:
    rules = replace(RULES, entrants=["ada", "bob"], compare=["holdNothing", "bestOther"], alpha=0.2, replicates=1)
    await open_season(database, rules)
    clock = LockstepClock(START + HOURS * HOUR)
    report = await Evidence(database, CurrentRuns(database), NoLuck(), clock).report("run")
    board = msgspec.to_builtins(GetEvidenceOutput.of("run", report))
    async with database.connection() as conn:
        await add_run(conn, "ada", make_run("ada", 2, at=RULES.end + HOUR))
        losses = [make_snapshot("ada", RULES.end + hour * HOUR, str(5000 - hour), number=2) for hour in (2, 3)]
        await portfolio_store.insert_snapshots(conn, losses)
    assert (await call("season", "close", "result")).code == 0
    assert (await call("season", "check", "result")).code == 0
    card = json.loads((tmp_path / "result" / "card.json").read_bytes())
    assert (card["trials"]["alpha"], card["trials"]["comparisons"]) == (0.2, 3)
    assert [each["modelId"] for each in board["entrants"]] == ["ada", "bob"]
    assert {each["reference"] for each in board["entrants"][0]["differences"]} == {"holdNothing", "bestOther"}
    assert board["entrants"][0]["rank"] == {"first": 1, "last": 1, "among": 2}
    assert {each.field for each in differences(card["evidence"], board)} == {
        "season.state", "season.closedAt", "season.seed",
    }  # fmt: skip
