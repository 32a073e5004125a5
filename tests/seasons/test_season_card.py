"""The result of a season: its contents, and the detection of any change to it or to its data."""

import hashlib
import importlib.util
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Final

import jsonschema_rs
import msgspec
import pytest
from msgspec.structs import replace
from support.calls import Call
from support.published import (
    HOURS,
    NEVER,
    RULES,
    SEED,
    Rows,
    add_rows,
    fuzz,
    in_rows,
    lines_of,
    only_lines,
    open_season,
    play_season,
    read_table,
    rebuild,
    record_rows,
    swap_names,
    vouch,
    worse_verdict,
    write_anchors,
    write_lines,
    write_table,
)
from support.records import HOUR, MINUTE, START, add_run, make_run, make_snapshot
from support.reports import report_data
from support.run_profile import is_nightly

from trader.api.schemas.evidence import GetEvidenceOutput
from trader.commands.audit import read_anchors
from trader.core.clock import LockstepClock, iso
from trader.core.errors import SettingsError, StartError
from trader.database.pool import Database
from trader.portfolio.domain.seasons import SeasonRecord, SeasonResult, Stopping
from trader.portfolio.evidence import Evidence
from trader.portfolio.run_statistics import CurrentRuns
from trader.portfolio.seasons import close_season
from trader.portfolio.sql import snapshots as portfolio_store
from trader.portfolio.sql.seasons import insert_season_record, select_latest_season
from trader.portfolio.tables import Table, load_table
from trader.seasons.check import DerivedResult, check_result, compare_files, derive_result, differences


def _cell(name: str, row: int, column: str, value: str) -> Callable[[Path], None]:
    def change(rows: Rows) -> None:
        assert rows[row][rows[0].index(column)] != value
        rows[row][rows[0].index(column)] = value

    return in_rows(name, change)


def _without_bob(folder: Path) -> None:
    for file in folder.glob("*.csv"):
        rows = read_table(folder, file.stem)
        write_table(folder, file.stem, [row for row in rows if "bob" not in row])
    card = json.loads((folder / "card.json").read_bytes())
    card["accounts"] = [each for each in card["accounts"] if each["modelId"] != "bob"]
    (folder / "card.json").write_text(json.dumps(card))


def _in_record(before: str, after: str) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        lines = lines_of(folder)
        assert any(before in line for line in lines), before
        write_lines(folder, [line.replace(before, after) for line in lines])

    return forge


def _in_card(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def forge(folder: Path) -> None:
        card = json.loads((folder / "card.json").read_bytes())
        change(card)
        (folder / "card.json").write_text(json.dumps(card))

    return forge


def _in_report(folder: Path) -> None:
    text = (folder / "report.html").read_text()
    (folder / "report.html").write_text(text.replace("Model ada", "Model bob"))


def _discovery(card: Any) -> None:
    row = card["evidence"]["entrants"][1]["differences"][0]
    row.update(verdict="better", pValue=0.001, eValue=1e6, reason=None)


FORGED_FILES: Final[dict[str, Callable[[Path], None]]] = {
    "an entrant is deleted from all tables": _without_bob,
    "the names of models are swapped": in_rows("models", swap_names),
    "a provider is another": _cell("models", 1, "router_model", "rules/better"),
    "a cut-off is another": _cell("models", 1, "training_cutoff", "2020-01-01"),
    "coverage": _cell("entrants", 1, "due", "9.0"),
    "a reset": in_rows("past_runs", lambda rows: rows.insert(1, rows[1])),
    "traded by hand": _cell("entrants", 1, "manual_since", "2026-03-05T00:00:00.000Z"),
    "a hand is forgotten": _cell("entrants", 3, "manual_since", "NaT"),
    "a trade of a rival is invented": in_rows("positions", lambda rows: rows.append(rows[-1])),
    "a trade of a rival is dropped": in_rows("positions", lambda rows: rows.remove(rows[-1])),
    "equity": _cell("hours", 100, "equity", "99999.0"),
    "an hour is added": in_rows("hours", lambda rows: rows.append(["ada", "2026-03-20T00:00:00.000Z", *rows[1][2:]])),
    "a price": _cell("fills", 1, "price", "1.0"),
    "a capital": _cell("runs", 1, "capital", "5000.0"),
    "a close of the market": _cell("closes", 3, "close", "1.0"),
    "the report": _in_report,
    "a verdict": _in_card(worse_verdict),
    "the primary verdict": _in_card(lambda card: card["evidence"]["primary"].update(verdict="worse")),
    "another primary comparison": _in_card(lambda card: card["evidence"]["primary"].update(entrant="bob")),
    "the α of the primary comparison": _in_card(lambda card: card["evidence"]["primary"].update(alpha=0.5)),
    "no primary comparison": _in_card(lambda card: card["evidence"].pop("primary")),
    "a discovery": _in_card(_discovery),
    "an e value": _in_card(lambda card: card["evidence"]["entrants"][1]["differences"][0].update(eValue=1e6)),
    "a bound in the card": _in_card(lambda card: card["evidence"]["season"]["rules"].update(hourLossMaxPercent=4.0)),
    "fees": _in_card(lambda card: card["season"].update(takerFeeBps=0.0)),
    "the market": _in_card(lambda card: card["season"].update(marketIdentity="synthetic:8")),
    "the seed": _in_record('\\"seed\\":\\"7\\"', '\\"seed\\":\\"8\\"'),
    "the end": _in_record('\\"until\\":\\"2026-03-11T22:00:00.000Z\\"', '\\"until\\":\\"2026-03-10T22:00:00.000Z\\"'),
}  # fmt: skip
"""Forgeries that the record itself contradicts, so that finding them needs no anchor."""


FORGED_RECORDS: Final[dict[str, Callable[[Path], None]]] = {
    "the record is cut to its first link": lambda folder: write_lines(folder, lines_of(folder)[:1]),
    "the record ends before the closing": lambda folder: write_lines(folder, lines_of(folder)[:-1]),
    "an amendment is removed": only_lines(lambda line: "a typing error" not in line),
    "all rules are removed": only_lines(lambda line: '"kind":"season_records"' not in line),
    "α": _in_record('\\"alpha\\":0.05', '\\"alpha\\":0.5'),
    "the primary comparison in the record": _in_record('\\"entrant\\":\\"ada\\"}', '\\"entrant\\":\\"bob\\"}'),
    "its α in the record": _in_record('\\"alpha\\":0.05,\\"entrant\\"', '\\"alpha\\":0.5,\\"entrant\\"'),
    "a bound in the record": _in_record('\\"hour_loss_max_percent\\":20', '\\"hour_loss_max_percent\\":90'),
    "a decision": _in_record('"status":"completed"', '"status":"failed"'),
    "an equity in the record": _in_record('"leverage":"2.0"', '"leverage":"1.0"'),
    "a fill in the record": _in_record('"fee":"0.5"', '"fee":"0.05"'),
    "two links are swapped": lambda folder: write_lines(folder, [*lines_of(folder)[1::-1], *lines_of(folder)[2:]]),
    "an empty record": lambda folder: write_lines(folder, []),
    "the closing is repeated": lambda folder: write_lines(folder, [*lines_of(folder), lines_of(folder)[-1]]),
}
"""Forgeries that a rebuilt record hides from everyone without an anchor."""


RESULT = SeasonResult(until=iso(RULES.end), position=1, head="", card="", version="", code="")


@dataclass
class Published:
    folder: Path
    anchors: Path
    work: Path

    @property
    def card(self) -> Any:
        return json.loads((self.folder / "card.json").read_bytes())

    def copy(self, name: str = "forged") -> Path:
        shutil.rmtree(self.work / name, ignore_errors=True)
        return shutil.copytree(self.folder, self.work / name)

    async def derive(self, folder: Path | None = None) -> DerivedResult:
        return await derive_result(folder or self.folder, "csv", read_anchors(self.anchors))


@pytest.fixture
async def published(database: Database, call: Call, tmp_path: Path) -> Published:
    """The result of a season that was closed as the service does it, with the anchors of its closing."""
    await play_season(database)
    made = await call("season", "close", "result")
    assert made.code == 0, made.err
    await write_anchors(database, tmp_path / "anchors")
    return Published(tmp_path / "result", tmp_path / "anchors", tmp_path)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value other than objects and lists, and of every empty object or list."""
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


async def test_a_result_is_complete_and_of_the_season(published: Published, call: Call) -> None:
    checked = await call("season", "check", "result", "--anchors", "anchors")
    assert (checked.code, checked.out.splitlines()) == (
        0,
        [
            "Everything in result follows from its record: season 1 (Winter).",
            "Primary comparison, ada against holdNothing at α 0.05: better.",
        ],
    )
    card = published.card
    schema = json.loads((published.folder / "card.schema.json").read_bytes())
    jsonschema_rs.validate(schema, card)
    assert [record["step"] for record in card["season"]["records"]] == ["opened", "amended"]
    assert card["season"]["marketIdentity"].startswith("synthetic:sha256:")
    assert card["trials"] == {
        "models": 3, "contenders": 2, "runs": 3, "replicates": 2, "comparisons": 2, "alpha": 0.05,
    }  # fmt: skip
    assert [each["modelId"] for each in card["accounts"]] == ["ada", "bob", "cat"], "nobody beside the season"
    ada, _, cat = card["accounts"]
    assert (ada["fills"], ada["maker"], ada["fees"]) == (35, 100 * 8 / 35, 18)
    assert ada["funding"] == pytest.approx(-0.1)
    assert ada["traded"] == pytest.approx(3_500_000 + ada["equity"] - 10_000 + 18 + 0.1), "of 1 BTC, and what it gained"
    assert (ada["cyclesDecided"], ada["cyclesDue"]) == (2, 3), "one of three decisions and a missed cycle came before"
    assert card["period"] == {
        "startedAt": iso(RULES.start), "until": iso(RULES.end), "marketsTraded": ["BTC"],
    }  # fmt: skip
    entrant = next(each for each in card["evidence"]["entrants"] if each["modelId"] == "ada")
    assert {each["reference"]: each["verdict"] for each in entrant["differences"]} == {"holdNothing": "better"}
    assert {each["hours"] for each in card["evidence"]["entrants"]} == {180}
    assert "cat: the account was traded by hand" in json.dumps(card["evidence"])
    assert cat["equity"] != cat["initialCapital"]
    behaviour = {each["modelId"]: each["behaviour"] for each in card["behaviour"]}
    assert (behaviour["ada"]["plansChanged"], behaviour["bob"]["alike"]) == (1, 100)
    primary = card["evidence"]["primary"]
    assert (primary["entrant"], primary["against"], primary["alpha"]) == ("ada", "holdNothing", 0.05)
    assert (primary["verdict"], primary["hours"]) == ("better", 180)
    assert card["noiseFloor"]["smallestDifference"] is not None, "an hour loses 20 % at most, whatever the leverage"
    assert card["noiseFloor"]["ownNoise"] > 0
    assert card["decisions"] == {"UPDATE_EXIT_PLAN ok": 6}
    report = report_data(published.folder / "report.html")
    assert {model["account"]["name"] for model in report["models"]} == {"Model ada", "Model bob", "Model cat"}
    assert (report["start"], report["end"]) == ("2026-03-04T10:00:00.000Z", "2026-03-11T21:59:00.000Z")
    for account in (model["account"] for model in report["models"]):
        parts = {name: Decimal(account[name]) for name in ("gross", "unrealized", "funding", "insurance")}
        costs = Decimal(account["fees"]) + Decimal(account["liquidationFees"])
        gained = Decimal(account["equity"]) - Decimal(account["initialCapital"])
        assert gained == sum(parts.values()) - costs, "every part has its sign"
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


def forms_of(number: int) -> Sequence[bool]:
    """Return whether a card and a closing vouch for the forged file: no and yes, or one of them by day."""
    return (False, True) if is_nightly() else (number % 2 == 1,)


@pytest.mark.slow
async def test_every_forged_file_contradicts_the_record(published: Published) -> None:
    """As it is, and with a card and a closing that vouch for it."""
    accepted = []
    for number, (name, forge) in enumerate(FORGED_FILES.items()):
        for vouched in forms_of(number):
            folder = published.copy()
            forge(folder)
            if vouched:
                vouch(folder)
            if not (await check_result(folder)).differences:
                accepted.append((name, vouched))
    assert accepted == []


async def test_every_forged_record_contradicts_its_anchors(published: Published, call: Call) -> None:
    accepted = []
    for name, forge in FORGED_RECORDS.items():
        folder = published.copy()
        forge(folder)
        try:
            found = (await check_result(folder, read_anchors(published.anchors))).differences
        except SettingsError:
            continue
        if not any(each.field.startswith("anchor at position") for each in found):
            accepted.append(name)
    assert accepted == []
    cut = published.copy()
    FORGED_RECORDS["the record is cut to its first link"](cut)
    checked = await call("season", "check", "forged")
    assert checked.code == 1
    assert "no closing of a season at its end" in checked.out
    assert "No anchor covers the record (--anchors)" in checked.out


@pytest.mark.parametrize(("hour", "is_flat"), [(20, True), (21, False)])
async def test_the_equity_of_an_account_without_a_position_is_the_sum_of_its_fills_and_payments(
    published: Published, call: Call, hour: int, is_flat: bool
) -> None:
    """Even in a record that was rebuilt up to its closing."""
    folder, at = published.copy(), iso(START + hour * HOUR + 59 * MINUTE)
    lines = list(map(json.loads, lines_of(folder)))
    rows = (row for line in lines for row in line.get("rows", {}).get("portfolio_hourly", ()))
    row = next(row for row in rows if row["account_id"] == "bob" and row["hour"].startswith(at[:13]))
    given, row["last"] = row["last"], f"{Decimal(row['last']) + 1}"
    write_lines(folder, [json.dumps(line, sort_keys=True, separators=(",", ":")) for line in lines])
    rebuild(folder)
    checked = await call("season", "check", "forged")
    said = f"  equity of bob without a position at {at}: '{row['last']}'; by the record '{given}'"
    assert (said in checked.out.splitlines()) is is_flat
    assert "season.result.head" not in checked.out
    by_verifier = [each for each in _second_verifier().verify(folder, {}) if "fills and payments add up to" in each]
    assert len(by_verifier) == is_flat


@pytest.mark.slow
async def test_no_random_change_of_a_result_is_accepted(published: Published) -> None:
    derived, rng, accepted = await published.derive(), random.Random(5), []
    for _ in range(10_000 if is_nightly() else 30):
        folder = published.copy()
        what = fuzz(folder, published.folder, rng)
        if _is_same(folder, published.folder):
            continue
        try:
            if what.split()[2] == "record.jsonl":
                found = (await published.derive(folder)).differences
            else:
                found = compare_files(folder, "csv", derived)
        except SettingsError:
            continue
        if not found:
            accepted.append(what)
    assert accepted == []


def _linked(folder: Path) -> None:
    (folder / "hours.csv").rename(folder.with_name("hours.csv"))
    (folder / "hours.csv").symlink_to(folder.with_name("hours.csv"))


def _piped(folder: Path) -> None:
    (folder / "report.html").unlink()
    os.mkfifo(folder / "report.html")


def _nested(folder: Path) -> None:
    write_lines(folder, [*lines_of(folder), '{"a":' * 100_000 + "1" + "}" * 100_000])


FOREIGN: Final[dict[str, Callable[[Path], object]]] = {
    "forged/notes.txt does not belong to the result of a season": lambda it: (it / "notes.txt").write_text("x"),
    "forged/hours.csv is missing": lambda it: (it / "hours.csv").unlink(),
    "forged/hours.csv is not a regular file": _linked,
    "forged/report.html is not a regular file": _piped,
    "forged/card.json cannot be read: more than 50 lists and objects within each other": lambda it: (
        it / "card.json"
    ).write_text("[" * 100_000 + "]" * 100_000),
    "of the record is nested too deeply": _nested,
    "the record of season 1 contradicts itself: Expected `object | null`": _in_record(
        '"declared":null', '"declared":"1"'
    ),
    "hours.csv cannot be read": lambda it: (it / "hours.csv").write_bytes(b"\xff\xfe"),
}
"""The finding that each of these changes to a folder leads to."""


async def test_files_that_do_not_belong_to_a_result_are_refused_by_name(published: Published, call: Call) -> None:
    for said, forge in FOREIGN.items():
        forge(published.copy())
        checked = await call("season", "check", "forged")
        assert (checked.code, said in checked.err) == (2, True), checked.err


@pytest.mark.slow
async def test_tables_are_the_same_in_both_forms(database: Database, call: Call, tmp_path: Path) -> None:
    await play_season(database)
    assert (await call("season", "close", "columns", "--tables", "parquet")).code == 0
    assert (await call("season", "check", "columns")).code == 0
    for name in ("hours", "positions"):
        columns = load_table(tmp_path / "columns", name)
        columns.write(tmp_path, "csv")
        assert list(load_table(tmp_path, name).rows()) == list(columns.rows())


async def test_absent_values_are_read_as_none(tmp_path: Path) -> None:
    table = Table("positions")
    row = ("ada", "BTC", True, 1.5, 10.0, None, None, 0.1, None, None, None, 2.0, START, None, None, None)
    table.add(*row)
    for form in ("csv", "parquet"):
        table.write(tmp_path, form)
        assert list(load_table(tmp_path, "positions").rows()) == [row]
        (tmp_path / f"positions.{form}").unlink()


async def test_an_impossible_close_or_check_is_refused_with_the_reason(
    database: Database, call: Call, tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    refused = await call("season", "close", "taken")
    assert (refused.code, "taken exists already" in refused.err) == (1, True)
    refused = await call("season", "close", "result")
    assert (refused.code, "No season is open" in refused.err) == (1, True)
    await open_season(database)
    await add_rows(database)
    refused = await call("season", "close", "result")
    assert (refused.code, "has no hour of equity" in refused.err) == (1, True)
    assert not (tmp_path / "result").exists()
    refused = await call("season", "check", "taken")
    assert refused.code == 2
    assert "card.json is missing" in refused.err


async def test_a_season_is_closed_once_its_last_hours_are_recorded_and_publishes_its_seed(
    database: Database, call: Call, tmp_path: Path
) -> None:
    later = replace(RULES, end=NEVER)
    await play_season(database, later)
    refused = await call("season", "close", "early")
    assert refused.code == 1
    assert "season 1 (Winter) is open until 2200-01-01T00:00:00.000Z, or every comparison is decided" in refused.err
    assert not (tmp_path / "early").exists()
    async with database.connection() as conn:
        ends_later = replace(RULES, end=START + 300 * HOUR)
        for number, rules in ((2, ends_later), (3, RULES)):
            record = SeasonRecord(
                step="amended", season=1, number=number, at=START, rules=rules, reason="it is over", after_start=True
            )
            await insert_season_record(conn, record)
            if rules is ends_later:
                refused = await call("season", "close", "early")
                assert "results are only recorded up to 2026-03-12T08:00:00.000Z" in refused.err
    assert (await call("season", "close", "result")).code == 0
    closing = json.loads((tmp_path / "result" / "record.jsonl").read_text().splitlines()[-1])
    record = json.loads(closing["rows"]["season_records"][0]["record"])
    assert (record["step"], record["seed"], record["result"]["until"]) == ("closed", SEED, iso(RULES.end))
    assert (await call("season", "check", "result")).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["rows", "record", "snapshot"])
async def test_a_season_is_not_closed_before_the_results_of_its_last_hour_are_recorded(
    database: Database, call: Call, tmp_path: Path, missing: str
) -> None:
    """As when it ends during a downtime, within the minutes before an hour is recorded, or just before a snapshot."""
    end = {"rows": START + 202 * HOUR, "record": START + 190 * HOUR, "snapshot": START + 201 * HOUR}[missing]
    await play_season(database, replace(RULES, end=end), at=end + 4 * MINUTE)
    refused = await call("season", "close", "result")
    assert refused.code == 1
    assert f"season 1 (Winter) ended at {iso(end)}, but its results are only recorded up to" in refused.err
    assert not (tmp_path / "result").exists()
    async with database.connection() as conn:
        latest = await select_latest_season(conn)
        assert latest is not None
        assert (latest.closed_at, latest.seed) == (None, None)
        if missing != "record":
            late = [make_snapshot(name, end + MINUTE, "10000") for name in ("ada", "bob", "cat")]
            await portfolio_store.insert_snapshots(conn, late)
    await record_rows(database, end + 70 * MINUTE)
    assert (await call("season", "close", "result")).code == 0


async def test_a_season_that_was_amended_while_its_result_was_read_stays_open(database: Database) -> None:
    await open_season(database)
    await add_rows(database)
    async with database.connection() as conn:
        read = await select_latest_season(conn)
        assert read is not None
        amended = SeasonRecord(
            step="amended", season=1, number=2, at=START, rules=replace(RULES, alpha=0.1), reason="late"
        )
        await insert_season_record(conn, amended)
    with pytest.raises(StartError, match=r"season 1 \(Winter\) was changed while its result was read; close it again"):
        async with database.transaction() as conn:
            await close_season(conn, read, RESULT, is_decided=True)
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
    database: Database, call: Call, entrants: list[str], stopping: Stopping, code: int
) -> None:
    await play_season(database, replace(RULES, end=NEVER, entrants=entrants, stopping=stopping))
    assert (await call("season", "close", "result")).code == code
    if not code:
        assert (await call("season", "check", "result")).code == 0


async def test_the_card_of_a_season_matches_its_board_even_after_a_later_reset(
    database: Database, call: Call, tmp_path: Path
) -> None:
    rules = replace(RULES, entrants=["ada", "bob"], compare=["holdNothing", "bestOther"], alpha=0.2)
    await open_season(database, rules)
    await add_rows(database)
    clock = LockstepClock(START + HOURS * HOUR)
    report = await Evidence(database, CurrentRuns(database), clock).report("run")
    board = msgspec.to_builtins(GetEvidenceOutput.of("run", report))
    async with database.connection() as conn:
        await add_run(conn, "ada", make_run("ada", 2, at=RULES.end + HOUR))
        losses = [make_snapshot("ada", RULES.end + hour * HOUR, str(5000 - hour), number=2) for hour in (2, 3)]
        await portfolio_store.insert_snapshots(conn, losses)
    await record_rows(database)
    assert (await call("season", "close", "result")).code == 0
    assert (await call("season", "check", "result")).code == 0
    card = json.loads((tmp_path / "result" / "card.json").read_bytes())
    assert (card["trials"]["alpha"], card["trials"]["comparisons"]) == (0.2, 3)
    assert [each["modelId"] for each in board["entrants"]] == ["ada", "bob"]
    assert {each["reference"] for each in board["entrants"][0]["differences"]} == {"holdNothing", "bestOther"}
    assert board["entrants"][0]["rank"] == {"first": 1, "last": 1, "among": 2}
    assert list(differences(card["evidence"], board)) == []


# The second verifier, which shares nothing with the service


def _second_verifier() -> Any:
    file = Path(__file__).resolve().parents[2] / "docs" / "examples" / "verify_card.py"
    spec = importlib.util.spec_from_file_location("verify_card", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
async def test_the_documented_verifier_accepts_a_result_and_nothing_else(published: Published) -> None:
    verify = _second_verifier().verify
    lines = map(json.loads, published.anchors.read_text().splitlines())
    anchors = {anchor["position"]: anchor["digest"] for anchor in lines}
    assert verify(published.folder, anchors) == []
    assert verify(published.folder, {}) == []
    first = hashlib.sha256(bytes(32) + hashlib.sha256(lines_of(published.folder)[0].encode()).digest()).hexdigest()
    assert verify(published.folder, {1: first}) == [
        "no anchor covers the record after position 1: its end may have been rewritten"
    ]
    given = published.anchors.read_text()
    anchor = json.loads(given.splitlines()[0])
    published.anchors.write_text(given + json.dumps(anchor | {"digest": anchor["digest"][::-1]}) + "\n")
    assert "contradict each other" in _second_verifier().read_anchors(published.anchors)[1][0]
    with pytest.raises(StartError, match="has another digest for position"):
        read_anchors(published.anchors)
    accepted = []
    for number, (name, forge) in enumerate({**FORGED_FILES, **FORGED_RECORDS}.items()):
        for vouched in forms_of(number + 1):  # the other form
            folder = published.copy()
            forge(folder)
            if vouched:
                vouch(folder)
            known = anchors if name in FORGED_RECORDS else {}
            if name in ("the report", "a verdict") and vouched:  # nothing but the digest in the closing tells
                known = anchors
            if not verify(folder, known):
                accepted.append((name, vouched))
    rng = random.Random(6)
    for _ in range(1_000 if is_nightly() else 20):
        folder = published.copy()
        what = fuzz(folder, published.folder, rng)
        if not _is_same(folder, published.folder) and not verify(folder, anchors):
            accepted.append((what, False))
    assert accepted == []


@pytest.mark.parametrize("step", ["opened", "amended"])
async def test_a_step_recorded_after_the_start_cannot_be_dated_before_it(
    database: Database, call: Call, tmp_path: Path, step: str
) -> None:
    """Whoever may write rows can give a step any time; the record holds what was recorded before it."""
    if step == "amended":
        await open_season(database)
    await add_rows(database)
    await record_rows(database)
    if step == "opened":
        await open_season(database)
    else:
        amended = SeasonRecord(
            step="amended", season=1, number=2, at=START, rules=replace(RULES, alpha=0.01), reason="backdated"
        )
        async with database.connection() as conn:
            await insert_season_record(conn, amended)
    made = await call("season", "close", "result")
    assert made.code == 0, made.err
    checked = await call("season", "check", "result")
    assert checked.code == 1
    assert "before the start" in checked.out
    late = {"opened": ["record 0", "record 1"], "amended": ["record 2"]}[step]
    found = _second_verifier().verify(tmp_path / "result", {})
    assert found == [f"{each} of the season was made after its start, and does not say so" for each in late]


def _is_same(folder: Path, other: Path) -> bool:
    return all((folder / file.name).read_bytes() == file.read_bytes() for file in other.iterdir())
