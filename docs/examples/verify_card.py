"""Verify the result of a season without trader, with nothing but Python: verify_card.py FOLDER ANCHORS

It follows the record in the folder, compares it with the anchors, derives the tables again, and compares the card with
them and with the digest in the closing. The exit code is 1 when something is wrong. docs/record.md says
what a result and a record have.
"""

import csv
import hashlib
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

TABLES = (
    "models", "runs", "past_runs", "past_entrants", "entrants", "hours", "positions", "plan_changes", "closes", "fills",
    "payments", "decisions",
)  # fmt: skip
FILES = {"card.json", "card.schema.json", "record.jsonl", "report.html", *(f"{name}.csv" for name in TABLES)}
ORDERS = ("CREATE_POSITION", "CLOSE_POSITION", "UPDATE_EXIT_PLAN")
CENT, FLAT_FOR = Decimal("0.01"), timedelta(minutes=2)
EARLY, LATE = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)

Row = dict[str, Any]


class Record:
    """The rows of the record that a result is made of."""

    def __init__(self) -> None:
        self.states: dict[str, dict[tuple[Any, ...], Row]] = defaultdict(dict)
        self.rows: dict[str, list[Row]] = defaultdict(list)
        self.decisions: list[Row] = []
        self.seen_until = EARLY
        self.late: set[tuple[int, int]] = set()

    def add(self, content: Row) -> None:
        if "kind" not in content:
            self.decisions.append(content)
            self.seen_until = max(self.seen_until, moment(content["startedAt"]))
            return
        if content["kind"] == "removed":
            for name, rows in self.rows.items():
                self.rows[name] = [row for row in rows if row.get("account_id") != content["account_id"]]
            runs = self.states["runs"]
            self.states["runs"] = {key: row for key, row in runs.items() if key[0] != content["account_id"]}
        keys = {
            "models": ("id",), "runs": ("account_id", "number"), "baselines": ("id", "run_id"),
            "entrants": ("model_id", "number"), "season_records": ("season", "number"),
        }  # fmt: skip
        for name, rows in content.get("rows", {}).items():
            for row in rows:
                if name == "portfolio_hourly":
                    self.seen_until = max(self.seen_until, moment(row["last_at"]))
                if name == "season_records" and (row["season"], row["number"]) not in self.states[name]:
                    self.read_step(row)
                if name in keys:
                    key = tuple(row[column] for column in keys[name])
                    if content["kind"] != "begin" or key not in self.states[name]:
                        self.states[name][key] = row
                elif name != "invocation_counts" or content["kind"] == name:
                    self.rows[name].append({**row, "table": name})

    def read_step(self, row: Row) -> None:
        """Note a step of a season that was recorded after a market time at or after its start."""
        steps = [each for key, each in self.states["season_records"].items() if key[0] == row["season"]]
        starts = [json.loads(each["record"]).get("rules", {}).get("start") for each in (*steps, row)]
        if any(start is not None and moment(start) <= self.seen_until for start in starts):
            self.late.add((row["season"], row["number"]))


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


NUMERAL = r"[-+]?\d+(\.\d+)?([eE][-+]?\d+)?"


def cell(value: Any) -> str:
    """Return a value as a table has it: a text that a spreadsheet would execute is after an apostrophe."""
    if isinstance(value, datetime):
        milliseconds = round((value - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(milliseconds=1))
        return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%dT%H:%M:%S}.{milliseconds % 1000:03}Z"
    if isinstance(value, bool):
        return str(int(value))
    if isinstance(value, int | float | Decimal):
        return repr(float(value))
    is_formula = re.match(r"[-=+@\t\r\n'＝＋－＠]", value or "") and not re.fullmatch(NUMERAL, value)
    return f"'{value}" if is_formula else value or ""


NUMBER, TIME = math.nan, "NaT"


class Season:
    """A season as the record has it, and its tables."""

    def __init__(self, record: Record, number: int, until: datetime) -> None:
        steps = [row for key, row in sorted(record.states["season_records"].items()) if key[0] == number]
        self.steps = [json.loads(row["record"]) for row in steps]
        self.rules = [step["rules"] for step in self.steps if "rules" in step][-1]
        self.start, self.until, self.record = moment(self.rules["start"]), until, record
        self.tables: dict[str, list[list[Any]]] = {name: [] for name in TABLES}
        self.symbols: set[str] = set()
        for (model_id,), row in sorted(record.states["models"].items()):
            run = next((each for each in reversed(self.runs(model_id)) if self.is_open(each)), None)
            named = {model_id, row["replicate_of"]} & {*self.rules["entrants"]}
            if run is not None and (named or not self.rules["entrants"]):
                self.add_model(row, run)
        baselines: dict[str, list[Row]] = defaultdict(list)
        for (name, _), row in record.states["baselines"].items():
            baselines[name] += [row] if moment(row["started_at"]) < until else []
        for name, runs in sorted(baselines.items()):
            if runs:
                last = max(runs, key=lambda run: moment(run["started_at"]))
                self.add_run(name, {**last, "id": last["run_id"], "number": 1}, None, is_baseline=True)
        for candle in record.rows["candles"]:
            if (
                candle["symbol"] in self.symbols
                and self.start - timedelta(hours=25) <= moment(candle["open_time"]) < until
            ):
                self.tables["closes"].append([candle["symbol"], moment(candle["open_time"]), float(candle["close"])])

    def runs(self, account: str) -> list[Row]:
        runs = self.record.states["runs"]
        return [row for key, row in sorted(runs.items()) if key[0] == account]

    def is_open(self, run: Row) -> bool:
        return moment(run["started_at"]) < self.until and (
            run["ended_at"] is None or moment(run["ended_at"]) >= self.until
        )

    def is_in(self, at: datetime) -> bool:
        return self.start <= at < self.until

    def hours(self, account: str, run: Row) -> list[Row]:
        rows = self.record.rows["portfolio_hourly"]
        return [row for row in rows if (row["account_id"], row["run_id"]) == (account, run["id"])]

    def ledger(self, account: str, run: Row) -> list[Row]:
        names = ("fills", "funding_payments", "insurance_payments")
        rows = [row for name in names for row in self.record.rows[name] if row["account_id"] == account]
        own = [row for row in rows if row["run_id"] == run["id"] and moment(row["created_at"]) < self.until]
        return sorted(own, key=lambda row: row["sequence"])

    def add_run(self, account: str, run: Row, cost: Decimal | None, *, is_baseline: bool = False) -> datetime:
        hours = self.hours(account, run)
        before = [row for row in hours if moment(row["hour"]) < self.start]
        capital = Decimal(before[-1]["last"] if before else run["initial_capital"])
        known = [float(row["leverage"]) for row in before if row["leverage"] is not None]
        leverage = 1.0 if not before else max(1.0, *known) if known else 5.0
        started_at = max(moment(run["started_at"]), self.start)
        spent = NUMBER if cost is None else cost
        self.tables["runs"].append(
            [account, run["id"], is_baseline, run["number"], capital, started_at, leverage, spent]
        )
        for row in hours:
            if self.is_in(moment(row["hour"])):
                leverage = NUMBER if row["leverage"] is None else float(row["leverage"])
                at = moment(row["last_at"])
                self.tables["hours"].append([account, moment(row["hour"]), Decimal(row["last"]), at, leverage])
        return started_at

    def add_model(self, row: Row, run: Row) -> None:
        account, names = row["id"], ("name", "variant", "provider", "router_model_name", "owner", "replicate_of")
        identity = [account, *(row[name] for name in names), row["training_cutoff"], moment(row["created_at"])]
        self.tables["models"].append(identity)
        decisions = [
            each for each in self.record.decisions if each["model"] == account and self.is_in(moment(each["startedAt"]))
        ]
        ends = [moment(each["started_at"]) for each in self.runs(account) if each["number"] == run["number"] + 1]
        end = min(ends, default=LATE)
        own = [each for each in decisions if moment(run["started_at"]) <= moment(each["startedAt"]) < end]
        costs = [Decimal(each["costUsd"]) for each in own if each["costUsd"] is not None]
        started_at = self.add_run(account, run, sum(costs, Decimal(0)) if costs else None)
        self.add_entrants(account, run, started_at, own)
        self.add_past(account)
        for call in (call for each in decisions for call in each["calls"] if call["type"] in ORDERS):
            what, at = call["metadata"], moment(call["at"])
            decision, result = (next(iter(what[name]), None) or {} for name in ("decisions", "results"))
            tool, symbol = (what["raw"] or {}).get("name", call["type"]), decision.get("symbol")
            reason = result.get("reason") or result.get("error")
            self.tables["decisions"].append([at, account, tool, symbol, call["status"], result.get("rule"), reason])
            if (call["type"], call["status"]) == ("UPDATE_EXIT_PLAN", "ok"):
                self.tables["plan_changes"].append([account, symbol, at])
        self.add_ledger(account, run)

    def entrants(self, account: str) -> list[tuple[Row, datetime, datetime | None]]:
        rows = [row for key, row in sorted(self.record.states["entrants"].items()) if key[0] == account]
        began = [moment(row["began_at"]) for row in rows]
        return list(zip(rows, began, [*began[1:], None], strict=True))

    def add_entrants(self, account: str, run: Row, started_at: datetime, decisions: list[Row]) -> None:
        hand = [moment(row["created_at"]) for row in self.ledger(account, run) if row.get("manual")]
        missed = [
            row["entrant"]
            for row in self.record.rows["invocation_counts"]
            if (row["model_id"], row["run_number"]) == (account, run["number"]) and self.is_in(moment(row["missed_at"]))
        ]
        listed: list[tuple[Row, datetime | None, datetime | None]] = [
            (row, began_at, None if ended_at is None or ended_at >= self.until else ended_at)
            for row, began_at, ended_at in self.entrants(account)
            if began_at < self.until and (ended_at is None or ended_at > started_at)
        ]
        for row, began_at, ended_at in listed or [({"number": 0, "fingerprint": None, "declared": None}, None, None)]:
            own = [each for each in decisions if (each["entrant"] or 0) == row["number"]]
            done = sum(each["status"] == "completed" for each in own)
            counts = [len(own), done, len(own) + missed.count(row["number"])]
            times = [began_at or TIME, ended_at or TIME]
            self.tables["entrants"].append(
                [account, row["number"], row["fingerprint"], *times, *counts, min(hand, default=TIME), row["declared"]]
            )

    def add_past(self, account: str) -> None:
        for run in self.runs(account):
            started_at, ended_at = moment(run["started_at"]), moment(run["ended_at"]) if run["ended_at"] else LATE
            if started_at >= self.until or ended_at <= self.start:
                continue
            hours, ledger = self.hours(account, run), self.ledger(account, run)
            first = last = Decimal(run["initial_capital"])
            for row in hours:
                first = Decimal(row["last"]) if moment(row["hour"]) < self.start else first
                last = Decimal(row["last"]) if moment(row["hour"]) < self.until else last
            if ended_at < self.until:
                last = Decimal(run["initial_capital"]) + sum(cash(row) for row in ledger)
            hand = min((moment(row["created_at"]) for row in ledger if row.get("manual")), default=TIME)
            self.tables["past_runs"].append([account, max(started_at, self.start), first, last, hand])
            for row, began_at, next_at in self.entrants(account):
                begin, end = max(started_at, began_at, self.start), min(ended_at, next_at or LATE)
                if row["fingerprint"] is not None and begin < min(end, self.until):
                    over = end if end < self.until else TIME
                    named = [run["number"], row["number"], row["fingerprint"]]
                    self.tables["past_entrants"].append([account, *named, begin, over])

    def add_ledger(self, account: str, run: Row) -> None:
        ledger = self.ledger(account, run)
        for row in ledger:
            at = moment(row["created_at"])
            if at < self.start:
                continue
            if row["table"] != "fills":
                kind = row["table"].removesuffix("_payments")
                self.tables["payments"].append([at, account, kind, row.get("symbol"), Decimal(row["amount"])])
                continue
            fee, penalty = Decimal(row["fee"]), Decimal(row["liquidation_fee"])
            amounts = [Decimal(row["quantity"]), Decimal(row["price"]), fee + penalty]
            order = [row["symbol"], row["side"], *amounts, row["maker"], row["cause"]]
            self.tables["fills"].append([at, account, *order])
            if penalty:
                self.tables["payments"].append([at, account, "liquidation", row["symbol"], -penalty])
        extremes = {row["order_id"]: row for row in self.record.rows["price_extremes"]}
        for part in positions(ledger, extremes):
            if part[-3] == TIME or part[-3] >= self.start:
                self.symbols.add(part[0])
                self.tables["positions"].append([account, *part])


def cash(row: Row) -> Decimal:
    """Return what a row of the ledger adds to an account without positions."""
    if row["table"] != "fills":
        return Decimal(row["amount"])
    value = Decimal(row["quantity"]) * Decimal(row["price"])
    return (value if row["side"] == "sell" else -value) - Decimal(row["fee"]) - Decimal(row["liquidation_fee"])


def positions(ledger: list[Row], extremes: dict[str, Row]) -> list[list[Any]]:
    """Return the parts of positions by the average-cost method: a closed part takes its share of entry and fees."""
    held: dict[str, Row] = {}
    closed: dict[str, Row] = {}
    for row in ledger:
        if row["table"] == "funding_payments" and row["symbol"] in held:
            held[row["symbol"]]["funding"] += Decimal(row["amount"])
        if row["table"] != "fills":
            continue
        quantity, value = Decimal(row["quantity"]), Decimal(row["quantity"]) * Decimal(row["price"])
        fees, at = Decimal(row["fee"]) + Decimal(row["liquidation_fee"]), moment(row["created_at"])
        own = held.get(row["symbol"])
        if own is None:
            zero = dict.fromkeys(("quantity", "entry", "fees", "funding"), Decimal(0))
            own = held[row["symbol"]] = {**zero, "symbol": row["symbol"], "side": row["side"], "opened_at": at}
        if own["side"] == row["side"]:
            own["quantity"], own["entry"], own["fees"] = (
                own["quantity"] + quantity,
                own["entry"] + value,
                own["fees"] + fees,
            )
            continue
        part = closed.setdefault(
            row["order_id"], {**own, "quantity": 0, "entry": 0, "fees": 0, "funding": 0, "exit": 0}
        )
        share = quantity / own["quantity"]
        for name in ("entry", "fees", "funding"):
            taken = own[name] * share
            part[name], own[name] = part[name] + taken, own[name] - taken
        part |= {
            "quantity": part["quantity"] + quantity,
            "exit": part["exit"] + value,
            "fees": part["fees"] + fees,
            "row": row,
        }
        own["quantity"] -= quantity
        if own["quantity"] <= 0:
            del held[row["symbol"]]
    parts = []
    for part in (*closed.values(), *held.values()):
        is_long, row = part["side"] == "buy", part.get("row") or {}
        known = [part["symbol"], is_long, part["quantity"], part["entry"]]
        if not row:
            open_part = [
                NUMBER,
                NUMBER,
                part["fees"],
                NUMBER,
                None,
                NUMBER,
                NUMBER,
                part["opened_at"],
                TIME,
                NUMBER,
                NUMBER,
            ]
            parts.append([*known, *open_part])
            continue
        gross = (part["exit"] - part["entry"]) * (1 if is_long else -1)
        plan = [NUMBER if row[name] is None else Decimal(row[name]) for name in ("stop", "target")]
        seen = extremes.get(row["order_id"], {"lowest": NUMBER, "highest": NUMBER})
        times = [part["opened_at"], moment(row["created_at"])]
        net = gross - part["fees"] + part["funding"]
        ends = [*times, float(seen["lowest"]), float(seen["highest"])]
        parts.append([*known, part["exit"], gross, part["fees"], net, row["cause"], *plan, *ends])
    return parts


def is_same(written: str, derived: Any) -> bool:
    if written == (text := cell(derived)):
        return True
    try:
        return not isinstance(derived, datetime) and math.isclose(float(written), float(text), rel_tol=1e-12)
    except ValueError:
        return False


def table_problems(folder: Path, name: str, derived: list[list[Any]]) -> Iterator[str]:
    with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as lines:
        _, *written = csv.reader(lines)

    def key(row: list[str]) -> list[str]:
        return [text for text in row if not text.replace(".", "").replace("-", "").replace("e", "").isdigit()]

    if len(written) != len(derived):
        yield f"{name}: {len(written)} rows, and {len(derived)} by the record"
        return
    pairs = zip(
        sorted(written, key=key), sorted(derived, key=lambda row: key([cell(each) for each in row])), strict=True
    )
    for row, other in pairs:
        if len(row) != len(other) or not all(map(is_same, row, other)):
            yield f"{name}: {row}, and {[cell(each) for each in other]} by the record"


def card_problems(card: Row, season: Season, result: Row, number: int) -> Iterator[str]:
    rules, market, said = season.rules, season.steps[0].get("market") or {}, card["season"]
    expected = {
        "name": rules["name"], "number": number, "records": season.steps, "until": result["until"],
        "marketIdentity": market.get("identity"), "tradingMode": market.get("trading_mode"),
        "markets": rules["markets"], "takerFeeBps": rules["taker_fee_bps"], "makerFeeBps": rules["maker_fee_bps"],
        "latencyMs": rules["latency_ms"], "record": {"position": result["position"], "digest": result["head"]},
        "code": {"version": result["version"], "digest": result["code"]},
    }  # fmt: skip
    for name in sorted(expected.keys() | said.keys()):
        if said.get(name) != expected.get(name):
            yield f"card: season.{name} is {said.get(name)!r}, and {expected.get(name)!r} by the record"
    entrants = [row[0] for row in season.tables["models"]]
    if [each["modelId"] for each in card["accounts"]] != entrants:
        yield f"card: accounts has other entrants than {entrants}"
        return
    for account in card["accounts"]:
        own = {name: [row for row in rows if account["modelId"] in row[:2]] for name, rows in season.tables.items()}
        fills, counts = own["fills"], own["entrants"]
        capital, values = float(own["runs"][0][4]), [float(row[2]) for row in own["hours"]]
        figures = {
            "initialCapital": capital, "equity": values[-1] if values else capital, "fills": len(fills),
            "traded": math.fsum(float(row[4]) * float(row[5]) for row in fills),
            "cyclesDecided": sum(row[6] for row in counts), "cyclesDue": sum(row[7] for row in counts),
        }  # fmt: skip
        for name, figure in figures.items():
            if not math.isclose(account[name], figure, rel_tol=1e-9):
                yield f"card: {name} of {account['modelId']} is {account[name]}, and {figure} by the record"


def camel(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def evidence_problems(card: Row, season: Season) -> Iterator[str]:
    """Yield where verdicts do not follow from the rules, their own figures, or the hours of the tables."""
    rules, evidence = season.rules, card["evidence"]
    shown = {camel(name): value for name, value in rules.items() if name != "entry_until"}
    shown["lastEntry"] = rules["entry_until"] or cell(season.start + timedelta(hours=1))
    if evidence["season"]["rules"] != shown:
        yield f"card: evidence.season.rules is {evidence['season']['rules']}, and {shown} by the record"
    primary, named = evidence.get("primary"), rules["primary"]
    if (primary is None) != (named is None):
        yield f"card: evidence.primary is {primary}, and {named} was registered"
    elif primary is not None:
        if {name: primary[name] for name in named} != named:
            yield f"card: evidence.primary is {primary}, and {named} was registered"
        yield from verdict_problems("evidence.primary", primary, primary["alpha"])
    rows = [(each["modelId"], row) for each in evidence["entrants"] for row in each["differences"]]
    for model_id, row in rows:
        yield from verdict_problems(f"a difference of {model_id}", row, rules["alpha"])
    if named is not None:
        yield from discovery_problems(rows, card["trials"]["comparisons"])
    yield from bound_problems(evidence, season)


def verdict_problems(what: str, row: Row, level: float) -> Iterator[str]:
    value, difference = row["pValue"], row["differencePercent"]
    is_decided = row["verdict"] != "not distinguishable yet"
    if value is not None and is_decided != (value <= level):
        yield f"card: {what} is {row['verdict']!r} with p {value} at α {level}"
    if is_decided and difference is not None and (row["verdict"] == "better") != (difference > 0):
        yield f"card: {what} is {row['verdict']!r} with a difference of {difference} %"


def discovery_problems(rows: list[tuple[str, Row]], family: int) -> Iterator[str]:
    """Compare the p values with e-BH: family / (k · the k-th largest e value), or the smallest such rate after it."""
    best = [row["referenceId"] for _, row in rows if row["reference"] == "bestOther"]
    mirrored = max(best, key=best.count, default=None)  # the best one's own row is that of the second one, reversed
    own = [
        row
        for model_id, row in rows
        if row["reference"] != "bestOther" or model_id != mirrored or row["referenceId"] in (None, mirrored)
    ]
    decided = [row["pValue"] is None and row["verdict"] != "not distinguishable yet" for row in own]
    known = [1e12 if sure else row["eValue"] or 0 for sure, row in zip(decided, own, strict=True)]
    rate = 1.0
    for rank, place in reversed(list(enumerate(sorted(range(len(own)), key=lambda each: -known[each]), 1))):
        rate = min(rate, family / (rank * known[place])) if known[place] else rate
        value = own[place]["pValue"]
        if value is not None and not math.isclose(value, rate, rel_tol=1e-9):
            yield f"card: a difference has the false discovery rate {value}, and {rate} by its e value"


def bound_problems(evidence: Row, season: Season) -> Iterator[str]:
    """Yield the verdicts that an hour beyond its bound should have withdrawn: of single entrants, against nothing."""
    lowest, highest = (season.rules[f"hour_{name}_max_percent"] / 100 for name in ("loss", "gain"))
    for each in evidence["entrants"]:
        tables, model_id = season.tables, each["modelId"]
        counts = [row for row in tables["entrants"] if row[0] == model_id]
        if "replicates" in each or len(counts) != 1 or season.start < counts[0][3]:
            continue
        (capital,) = (float(row[4]) for row in tables["runs"] if row[0] == model_id)
        hours = [(row[1], float(row[2])) for row in tables["hours"] if row[0] == model_id]
        before, at, words = capital, hours[0][0] - timedelta(hours=1) if hours else season.start, set[str]()
        for hour, value in hours:
            passed, move = (hour - at) / timedelta(hours=1), value / before - 1 if before > 0 else 0
            words |= {"better"} if -move > lowest * passed + 1e-9 else set()
            words |= {"worse"} if move > highest * passed + 1e-9 else set()
            before, at = value, hour
        for row in each["differences"]:
            if row["reference"] == "holdNothing" and row["verdict"] in words and row["pValue"] is not None:
                yield f"card: {model_id} is {row['verdict']!r}, though an hour moved beyond its bound"


def equity_problems(season: Season) -> Iterator[str]:
    """Yield the hours that ended without a position and with another equity than fills and payments add up to."""
    is_live = season.steps[0].get("market", {}).get("trading_mode") == "live"  # its venue may report a trade late
    for account in [] if is_live else [row[0] for row in season.tables["models"]]:
        for run in season.runs(account):
            ledger, place = season.ledger(account, run), 0
            equity, held = Decimal(run["initial_capital"]), defaultdict[str, Decimal](Decimal)
            for hour in season.hours(account, run):
                at = moment(hour["last_at"])
                while place < len(ledger) and moment(ledger[place]["created_at"]) <= at:
                    row, place = ledger[place], place + 1
                    equity += cash(row)
                    if row["table"] == "fills":
                        held[row["symbol"]] += Decimal(row["quantity"]) * (1 if row["side"] == "buy" else -1)
                is_near = any(abs(moment(row["created_at"]) - at) < FLAT_FOR for row in ledger[max(0, place - 1) :][:2])
                if (
                    at < season.until
                    and not is_near
                    and not any(held.values())
                    and abs(equity - Decimal(hour["last"])) > CENT
                ):
                    yield f"{account} was flat at {at} with {hour['last']}, and fills and payments add up to {equity}"


def late_problems(season: Season, late: set[int]) -> Iterator[str]:
    """Yield what was opened or changed after decisions or hours of the season were recorded."""
    rules: Row = {}
    for number, step in enumerate(season.steps):
        is_late = number in late
        if is_late and not step.get("after_start"):
            yield f"record {number} of the season was made after its start, and does not say so"
        for name in ("hour_loss_max_percent", "hour_gain_max_percent", "primary"):
            if rules and (is_late or step.get("after_start")) and step["rules"][name] != rules[name]:
                yield f"record {number} of the season changes {name} after its start"
        rules = step.get("rules", rules)


def problems(folder: Path, anchors: dict[int, str]) -> Iterator[str]:
    names = {file.name for file in folder.iterdir() if file.is_file() and not file.is_symlink()}
    if names != FILES or len(list(folder.iterdir())) != len(FILES):
        yield f"the folder does not have exactly the files of a result: {names ^ FILES}"
        return
    lines = (folder / "record.jsonl").read_bytes().decode().split("\n")
    if lines.pop():
        yield "the record does not end with a whole line"
    closing = json.loads(lines[-1])["rows"]["season_records"][0] if lines else {"record": "{}"}
    step = json.loads(closing["record"])
    if step.get("step") != "closed":
        yield "the record does not end with the closing of a season"
        return
    result, record, digest, season = step["result"], Record(), bytes(32), None
    for position, line in enumerate(lines, 1):
        digest = hashlib.sha256(digest + hashlib.sha256(line.encode()).digest()).digest()
        if anchors.get(position, digest.hex()) != digest.hex():
            yield f"position {position}: the record is not the one that was anchored"
        record.add(json.loads(line))
        if position == result["position"]:
            season = Season(record, step["season"], moment(result["until"]))
            if digest.hex() != result["head"]:
                yield f"position {position}: the closing names another head"
    if lines.count(lines[-1]) > 1:
        yield "the closing of the season is in the record twice"
    if anchors and max(anchors) < len(lines):
        yield f"no anchor covers the record after position {max(anchors)}: its end may have been rewritten"
    if beyond := sorted(position for position in anchors if position > len(lines)):
        yield f"the record ends at position {len(lines)}, before the anchor at {beyond[0]}"
    if season is None:
        yield "the record ends before the head that its closing names"
        return
    opened = season.steps[0]
    if "seed_digest" in opened and hashlib.sha256(step.get("seed", "").encode()).hexdigest() != opened["seed_digest"]:
        yield "the published seed does not have the digest of the opening"
    yield from equity_problems(season)
    yield from late_problems(season, {number for name, number in record.late if name == step["season"]})
    yield from file_problems(folder, season, result, step["season"])
    until = f"{result['until']}: {len(season.tables['models'])} entrants, {len(lines)} links"
    print(f"season {step['season']} ({season.rules['name']}) until {until}")


def file_problems(folder: Path, season: Season, result: Row, number: int) -> Iterator[str]:
    content = (folder / "card.json").read_bytes()
    if hashlib.sha256(content).hexdigest() != result["card"]:
        yield "card.json is not the card of the closing"
    card = json.loads(content)
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in FILES}
    if card["digests"] != {name: each for name, each in digests.items() if name not in ("card.json", "record.jsonl")}:
        yield "card.json has other digests than the files"
    for name, derived in season.tables.items():
        yield from table_problems(folder, name, derived)
    yield from card_problems(card, season, result, number)
    yield from evidence_problems(card, season)


def read_anchors(file: Path) -> tuple[dict[int, str], list[str]]:
    """Return the digests by position, and the positions for which the file has two."""
    anchors: dict[int, str] = {}
    found = [
        f"the anchors contradict each other at position {anchor['position']}"
        for anchor in map(json.loads, filter(str.strip, file.read_text().splitlines()))
        if "register" not in anchor  # of an exam
        and anchors.setdefault(anchor["position"], anchor["digest"]) != anchor["digest"]
    ]
    return anchors, found or ([] if anchors else ["no anchor covers the record"])


def verify(folder: Path, anchors: dict[int, str]) -> list[str]:
    """Return everything that is wrong with a result. `anchors` are the known digests by position."""
    try:
        return list(problems(folder, anchors))
    except (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        return [f"the result cannot be read: {error!r}"]


if __name__ == "__main__":
    anchored, found = read_anchors(Path(sys.argv[2]))
    found += verify(Path(sys.argv[1]), anchored)
    print("\n".join(found) or "intact")
    sys.exit(bool(found))
