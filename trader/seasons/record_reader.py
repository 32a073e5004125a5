"""Rows of a season, derived from nothing but the record.

`RecordReader` reads the record's texts, first to last; `season_tables` returns everything that they say about a season,
and nothing else. A published result and its check are both made of these tables.
"""

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from trader.agents.domain.models import Model, ModelConfiguration
from trader.core.errors import SettingsError
from trader.core.money import ZERO
from trader.exchange.domain.audit import LedgerEntry, recompute
from trader.exchange.domain.orders import Fill, FundingPayment, InsurancePayment
from trader.portfolio.behaviour import first_close
from trader.portfolio.domain.behaviour import PositionPart
from trader.portfolio.domain.equity_audit import EquityMismatch, compare_with_books
from trader.portfolio.domain.histories import HourlyValue
from trader.portfolio.domain.seasons import Season, SeasonRecord, SeasonRules
from trader.portfolio.seasons import scope_of
from trader.portfolio.sql.analytics import AccountRun, CurrentRun, InvocationTotals, Worth
from trader.portfolio.tables import Table
from trader.record.domain.chain import GENESIS, link_digest
from trader.record.domain.results import BEGIN, REMOVED, STATE_TABLES, ResultRow, forget_removed

TABLES: Final = (
    "models", "runs", "past_runs", "past_entrants", "entrants", "hours", "positions", "plan_changes", "closes", "fills",
    "payments", "decisions",
)  # fmt: skip

SETTLING: Final = timedelta(minutes=2)
_HOUR: Final = timedelta(hours=1)
_ORDERS: Final = ("CREATE_POSITION", "CLOSE_POSITION", "UPDATE_EXIT_PLAN")
_LEDGER: Final = {
    "fills": Fill, "funding_payments": FundingPayment, "insurance_payments": InsurancePayment
}  # fmt: skip


class SeasonDecision(NamedTuple):
    """A finished invocation. `calls` are those of tools that trade, with the columns of the table `decisions`, and
    `kind` as their type."""

    model_id: str
    entrant: int
    started_at: datetime
    is_completed: bool
    cost_usd: Decimal | None
    calls: Sequence[Mapping[str, Any]]


class SeasonRun(msgspec.Struct, frozen=True):
    """A run of an account, or of a baseline, which never ends."""

    id: str
    number: int
    initial_capital: Decimal
    started_at: datetime
    ended_at: datetime | None = None

    def is_open_at(self, moment: datetime) -> bool:
        return self.started_at < moment and (self.ended_at is None or self.ended_at >= moment)


class RecordReader:
    """Reads the texts of the record, first to last, and keeps the rows that make up seasons.

    `position` and `digest` identify the last link read, and `seen_until` is the latest market time of a decision or
    an equity. `late` are the records of seasons, by season and number, whose rules had begun before them.
    """

    def __init__(self) -> None:
        self.position = 0
        self.digest = GENESIS
        self.seen_until = datetime.min.replace(tzinfo=UTC)
        self.late: set[tuple[int, int]] = set()
        self.seasons: dict[int, list[SeasonRecord]] = defaultdict(list)
        self.season_digests: dict[int, list[bytes]] = defaultdict(list)
        self.states: dict[str, dict[tuple[Any, ...], ResultRow]] = {table: {} for table in STATE_TABLES}
        self.baselines: dict[str, dict[str, SeasonRun]] = defaultdict(dict)
        self.ledger: dict[str, list[ResultRow]] = defaultdict(list)
        self.hours: dict[str, list[ResultRow]] = defaultdict(list)
        self.closes: dict[str, dict[datetime, float]] = defaultdict(dict)
        self.extremes: dict[str, tuple[float, float]] = {}
        self.missed: list[ResultRow] = []
        self.decisions: dict[str, list[SeasonDecision]] = defaultdict(list)

    def read(self, text: str) -> None:
        """Read the text of the next link.

        :raises SettingsError: it is not a record
        """
        self.digest = link_digest(self.digest, hashlib.sha256(text.encode()).digest())
        self.position += 1
        try:
            content = msgspec.json.decode(text, type=dict[str, Any])
            if "kind" in content:
                self._read_results(content)
            else:
                self._read_decision(content)
        except (msgspec.MsgspecError, ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            raise SettingsError([f"position {self.position} of the record is not a record: {error!r}"]) from None
        except RecursionError:
            raise SettingsError([f"position {self.position} of the record is nested too deeply"]) from None

    def _read_decision(self, content: Mapping[str, Any]) -> None:
        cost = content["costUsd"]
        decision = SeasonDecision(
            content["model"],
            content["entrant"] or 0,
            datetime.fromisoformat(content["startedAt"]),
            content["status"] == "completed",
            None if cost is None else Decimal(cost),
            [_call(content["model"], call) for call in content["calls"] if call["type"] in _ORDERS],
        )
        self.decisions[decision.model_id].append(decision)
        self.seen_until = max(self.seen_until, decision.started_at)

    def _read_results(self, content: Mapping[str, Any]) -> None:
        if content["kind"] == REMOVED:
            forget_removed(self.states, content)
            for kept in (self.ledger, self.hours):
                kept.pop(content.get("account_id", ""), None)
        rows = content.get("rows", {})
        for table in STATE_TABLES.keys() & rows.keys():
            for row in rows[table]:
                self._read_state(table, row, is_first=content["kind"] == BEGIN)
        for table in _LEDGER:
            for row in rows.get(table, ()):
                self.ledger[row["account_id"]].append({**row, "table": table})
        for row in rows.get("portfolio_hourly", ()):
            self.hours[row["account_id"]].append(row)
            self.seen_until = max(self.seen_until, _moment(row["last_at"]))
        for row in rows.get("price_extremes", ()):
            self.extremes[row["order_id"]] = float(row["lowest"]), float(row["highest"])
        for row in rows.get("candles", ()):
            self.closes[row["symbol"]][_moment(row["open_time"])] = float(row["close"])

    def _read_state(self, table: str, row: ResultRow, *, is_first: bool) -> None:
        key = tuple(row[column] for column in STATE_TABLES[table])
        if is_first and key in self.states[table]:
            return  # the earlier record stands
        if table == "season_records":
            if key in self.states[table]:
                raise ValueError(f"record {row['number']} of season {row['season']} is there twice")
            records = self.seasons[row["season"]]
            records.append(msgspec.json.decode(row["record"], type=SeasonRecord))
            if any(record.rules is not None and record.rules.start <= self.seen_until for record in records):
                self.late.add(key)
            self.season_digests[row["season"]].append(hashlib.sha256(row["record"].encode()).digest())
        if table == "baselines":
            run = msgspec.convert({**row, "id": row["run_id"], "number": 1}, SeasonRun)
            self.baselines[row["id"]][run.id] = run
        if table == "invocation_counts" and not is_first:
            self.missed.append(row)
        self.states[table][key] = row

    def season(self, number: int) -> Season:
        """Return a season with the records read so far."""
        return Season([*self.seasons[number]], [*self.season_digests[number]])

    def runs_of(self, account_id: str) -> list[SeasonRun]:
        """Return the runs of a model's account, in order."""
        rows = [row for key, row in self.states["runs"].items() if key[0] == account_id]
        return sorted(msgspec.convert(rows, list[SeasonRun]), key=lambda run: run.number)

    def hours_of(self, account_id: str, run_id: str) -> list[HourlyValue]:
        """Return the hours of a run."""
        rows = [row for row in self.hours[account_id] if row["run_id"] == run_id]
        return msgspec.convert(rows, list[HourlyValue], strict=False)  # an infinite leverage is a text

    def entries(self, account_id: str, run_id: str, until: datetime) -> list[ResultRow]:
        """Return the ledger of a run before a time, in order."""
        rows = [row for row in self.ledger[account_id] if row["run_id"] == run_id]
        return sorted((row for row in rows if _moment(row["created_at"]) < until), key=lambda row: row["sequence"])

    def equity_mismatches(self, account_id: str, run: SeasonRun, until: datetime) -> Iterator[EquityMismatch]:
        """Yield the hours of a run that end without a position and with another equity than its ledger adds up to.

        Hours that end within `SETTLING` of a row of the ledger are left out, since their equity may precede it.
        """
        ledger, hours = self.entries(account_id, run.id, until), list[HourlyValue]()
        times = [_moment(row["created_at"]) for row in ledger]
        for hour in self.hours_of(account_id, run.id):
            place = bisect_right(times, hour.last_at)
            is_near = any(abs(at - hour.last_at) < SETTLING for at in times[max(0, place - 1) : place + 1])
            if hour.last_at < until and not is_near:
                hours.append(msgspec.structs.replace(hour, sequence=ledger[place - 1]["sequence"] if place else 0))
        yield from compare_with_books(run.initial_capital, map(_entry, ledger), hours, lambda _symbol, _at: None)

    def models(self, rules: SeasonRules, until: datetime) -> dict[str, Model]:
        """Return the entrants of a season: the models that it has, with an account that was open at a moment."""
        models = map(read_model, self.states["models"].values())
        return {
            model.id: model
            for model in sorted(models, key=lambda model: model.id)
            if rules.has(model) and any(run.is_open_at(until) for run in self.runs_of(model.id))
        }

    def complete_until(self, rules: SeasonRules) -> datetime | None:
        """Return the time until which the record has the equity of every entrant of a season; None if it has none."""
        hours = [self.hours[key] for key in self.models(rules, rules.end)]
        return min((_moment(rows[-1]["hour"]) + _HOUR for rows in hours if rows), default=None)


def season_tables(record: RecordReader, season: Season, until: datetime) -> dict[str, Table]:
    """Return everything that the record says about a season before a time, by table."""
    made = _Tables(record, season, until)
    for model in record.models(season.rules, until).values():
        made.add_model(model)
    for baseline_id in sorted(record.baselines):
        made.add_baseline(baseline_id)
    made.add_closes()
    return made.tables


class _Tables:
    def __init__(self, record: RecordReader, season: Season, until: datetime) -> None:
        self.tables = {name: Table(name) for name in TABLES}
        self._record = record
        self._scope = scope_of(season, until)
        self._start, self._until = season.rules.start, until
        self._symbols: set[str] = set()

    def add_model(self, model: Model) -> None:
        runs, extra = self._record.runs_of(model.id), model.configuration
        run = next(run for run in reversed(runs) if run.is_open_at(self._until))
        cutoff = None if extra.training_cutoff is None else extra.training_cutoff.isoformat()
        names = (model.id, model.name, model.variant, model.provider, model.router_model_name)
        self.tables["models"].add(*names, extra.owner, extra.replicate_of, cutoff, model.created_at)
        decisions = [each for each in self._record.decisions[model.id] if self._start <= each.started_at < self._until]
        following = [other.started_at for other in runs if other.number == run.number + 1]
        own = [each for each in decisions if run.started_at <= each.started_at < min(following, default=self._until)]
        costs = [each.cost_usd for each in own if each.cost_usd is not None]
        cut = self._add_run(model.id, run, sum(costs, ZERO) if costs else None)
        self._add_entrants(model.id, cut, own)
        self._add_past(model.id, runs)
        self._add_ledger(model.id, cut)
        for call in (call for each in decisions for call in each.calls):
            self.tables["decisions"].add_row(call)
            if call["kind"] == "UPDATE_EXIT_PLAN" and call["status"] == "ok":
                self.tables["plan_changes"].add(call["account"], call["symbol"], call["at"])

    def add_baseline(self, baseline_id: str) -> None:
        runs = [run for run in self._record.baselines[baseline_id].values() if run.started_at < self._until]
        if runs:
            self._add_run(baseline_id, max(runs, key=lambda run: run.started_at), None)

    def add_closes(self) -> None:
        for symbol in sorted(self._symbols):
            for hour, close in sorted(self._record.closes[symbol].items()):
                if first_close(self._start) <= hour < self._until:
                    self.tables["closes"].add(symbol, hour, close)

    def _add_run(self, account_id: str, run: SeasonRun, cost: Decimal | None) -> CurrentRun:
        """Add the part of a run in the season, with its hours."""
        hours = self._record.hours_of(account_id, run.id)
        before = [value for value in hours if value.hour < self._start]
        leverages = [value.leverage for value in before if value.leverage is not None]
        whole = CurrentRun(account_id, UUID(run.id), run.initial_capital, run.started_at, number=run.number)
        worth = Worth(before[-1].last, max(leverages, default=None)) if before else None
        cut = self._scope.cut(msgspec.structs.replace(whole, totals=InvocationTotals(cost_usd=cost)), worth)
        is_baseline = account_id in self._record.baselines
        self.tables["runs"].add(
            account_id, run.id, is_baseline, run.number, cut.initial_capital, cut.started_at, cut.leverage, cost
        )
        for value in hours:
            if self._start <= value.hour < self._until:
                self.tables["hours"].add(account_id, value.hour, value.last, value.last_at, value.leverage)
        return cut

    def _add_entrants(self, model_id: str, run: CurrentRun, decisions: Sequence[SeasonDecision]) -> None:
        manual = [
            _moment(row["created_at"])
            for row in self._record.entries(model_id, str(run.run_id), self._until)
            if row["table"] == "fills" and row["manual"]
        ]
        missed = [
            row["entrant"]
            for row in self._record.missed
            if (row["model_id"], row["run_number"]) == (model_id, run.number)
            and self._start <= _moment(row["missed_at"]) < self._until
        ]
        entrants = [each for each in self._entrants(model_id) if each[0] < self._until]
        listed: list[tuple[ResultRow | None, datetime | None]] = [
            (row, ended_at)
            for (_, row), ended_at in zip(entrants, [*(began_at for began_at, _ in entrants[1:]), None], strict=True)
            if ended_at is None or ended_at > run.started_at
        ]
        for row, ended_at in listed or [(None, None)]:
            number = 0 if row is None else row["number"]
            own = [each for each in decisions if each.entrant == number]
            due = len(own) + missed.count(number)
            counts = (len(own), sum(each.is_completed for each in own), due)
            named = (None, None) if row is None else (row["fingerprint"], _moment(row["began_at"]))
            declared = None if row is None else row["declared"]
            self.tables["entrants"].add(
                model_id, number, *named, ended_at, *counts, min(manual, default=None), declared
            )

    def _entrants(self, model_id: str) -> list[tuple[datetime, ResultRow]]:
        rows = [row for key, row in self._record.states["entrants"].items() if key[0] == model_id]
        return [(_moment(row["began_at"]), row) for row in sorted(rows, key=lambda row: row["number"])]

    def _add_past(self, model_id: str, runs: Sequence[SeasonRun]) -> None:
        """Add the runs of an account within the season, and the entrants in each of them."""
        entrants = self._entrants(model_id)
        ends = [*(began_at for began_at, _ in entrants[1:]), None]
        for run in runs:
            ended_at = run.ended_at if run.ended_at is not None and run.ended_at < self._until else None
            if run.started_at >= self._until or (ended_at is not None and ended_at <= self._start):
                continue
            past = self._account_run(model_id, run, is_over=ended_at is not None)
            self.tables["past_runs"].add_row({"account": model_id, **msgspec.structs.asdict(past)})
            for (began_at, row), next_began_at in zip(entrants, ends, strict=True):
                over = [each for each in (ended_at, next_began_at) if each is not None and each < self._until]
                first = max(run.started_at, began_at, self._start)
                if row["fingerprint"] is not None and first < min([*over, self._until]):
                    named = row["number"], row["fingerprint"]
                    self.tables["past_entrants"].add(model_id, run.number, *named, first, min(over, default=None))

    def _account_run(self, model_id: str, run: SeasonRun, *, is_over: bool) -> AccountRun:
        hours = self._record.hours_of(model_id, run.id)
        before = [value.last for value in hours if value.hour < self._start]
        known = [value.last for value in hours if value.hour < self._until]
        entries = self._record.entries(model_id, run.id, self._until)
        first, last = (values[-1] if values else run.initial_capital for values in (before, known))
        if is_over:  # its positions are closed, so its books give its value
            orders = recompute(map(_entry, entries))
            last = run.initial_capital + sum(
                ((each.gross_pnl or ZERO) - each.fees + each.funding + each.insurance for each in orders), ZERO
            )
        manual = [_moment(row["created_at"]) for row in entries if row.get("manual")]
        return AccountRun(model_id, max(run.started_at, self._start), first, last, min(manual, default=None))

    def _add_ledger(self, model_id: str, run: CurrentRun) -> None:
        rows = self._record.entries(model_id, str(run.run_id), self._until)
        for row in rows:
            at = _moment(row["created_at"])
            if at < self._start:
                continue
            if row["table"] != "fills":
                kind = row["table"].removesuffix("_payments")
                self.tables["payments"].add(at, model_id, kind, row.get("symbol"), Decimal(row["amount"]))
                continue
            fee, penalty = Decimal(row["fee"]), Decimal(row["liquidation_fee"])
            order = (row["symbol"], row["side"], row["quantity"], row["price"], fee + penalty)
            self.tables["fills"].add(at, model_id, *order, row["maker"], row["cause"])
            if penalty:
                self.tables["payments"].add(at, model_id, "liquidation", row["symbol"], -penalty)
        for part in position_parts(rows, self._record.extremes):
            if part.closed_at is None or part.closed_at >= self._start:
                self._symbols.add(part.symbol)
                self.tables["positions"].add_row({"account": model_id, **msgspec.structs.asdict(part)})


def position_parts(rows: Sequence[ResultRow], extremes: Mapping[str, tuple[float, float]]) -> list[PositionPart]:
    """Return the positions and their closed parts that follow from the ledger of a run."""
    opened: dict[str, datetime] = {}
    closings: dict[str, ResultRow] = {}
    began: dict[str, datetime] = {}
    held: dict[str, tuple[str, Decimal]] = {}
    for row in (row for row in rows if row["table"] == "fills"):
        symbol, order_id, at = row["symbol"], row["order_id"], _moment(row["created_at"])
        side, quantity = held.get(symbol, (row["side"], ZERO))
        if not quantity:
            opened[symbol], side = at, row["side"]
        if side == row["side"]:
            held[symbol] = side, quantity + Decimal(row["quantity"])
        else:
            held[symbol] = side, quantity - Decimal(row["quantity"])
            closings[order_id] = row
        began[order_id] = opened[symbol]
    parts = []
    for order in recompute(map(_entry, rows)):
        closing = closings.get(str(order.id)) if order.exit_notional is not None else None
        lowest, highest = extremes.get(str(order.id), (None, None)) if closing is not None else (None, None)
        gross = None if closing is None or order.gross_pnl is None else order.gross_pnl
        parts.append(
            PositionPart(
                symbol=order.symbol,
                is_long=order.side == "LONG",
                quantity=float(order.quantity),
                entry_notional=float(order.entry_notional),
                exit_notional=None if order.exit_notional is None else float(order.exit_notional),
                gross=None if gross is None else float(gross),
                fees=float(order.fees),
                net=None if gross is None else float(gross - order.fees + order.funding),
                reason=None if closing is None else closing["cause"],
                stop=_price(closing, "stop"),
                target=_price(closing, "target"),
                opened_at=began[str(order.id)],
                closed_at=None if closing is None else _moment(closing["created_at"]),
                lowest=lowest,
                highest=highest,
            )
        )
    return sorted(
        parts, key=lambda part: (part.opened_at, part.symbol, part.closed_at is None, part.closed_at or part.opened_at)
    )


def _price(closing: ResultRow | None, name: str) -> float | None:
    return None if closing is None or closing[name] is None else float(closing[name])


def _entry(row: ResultRow) -> LedgerEntry:
    entry: LedgerEntry = msgspec.convert({**row, "at": row["created_at"]}, _LEDGER[row["table"]])
    return entry


def _call(model_id: str, call: Mapping[str, Any]) -> dict[str, Any]:
    metadata = call["metadata"]
    decision, result = (next(iter(metadata[name]), None) or {} for name in ("decisions", "results"))
    return {
        "at": datetime.fromisoformat(call["at"]),
        "account": model_id,
        "tool": (metadata["raw"] or {}).get("name", call["type"]),
        "symbol": decision.get("symbol"),
        "status": call["status"],
        "rule": result.get("rule"),
        "reason": result.get("reason") or result.get("error"),
        "kind": call["type"],
    }


def read_model(row: ResultRow) -> Model:
    """Return the model of a row, with the part of its configuration that a result tells."""
    told = {name: row[name] for name in ("owner", "replicate_of", "training_cutoff") if row[name] is not None}
    return msgspec.convert({**row, "configuration": msgspec.convert(told, ModelConfiguration)}, Model)


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)
