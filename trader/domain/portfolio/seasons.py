"""Seasons: rules that are fixed before the first decision, their amendments, and the digest of each.

    (none) ── open ──▶ announced ── start ──▶ running ── end ──▶ ended ── close ──▶ closed
                           │                     │                               (the next season may be opened)
                           └────── amend ────────┴─▶ the same, with an amendment that every board shows

A season is its records: `opened`, any number of `amended`, and `closed`. Each has a canonical form (RFC 8785) and is
named by the SHA-256 of that.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from trader.clock import iso
from trader.domain.agents.entrants import EntrantRecord, canonical_json
from trader.domain.models import Line, Model, ModelId
from trader.domain.money import format_decimal, from_number
from trader.domain.portfolio.board import AGE_MIN, BoardRules, Reference
from trader.domain.portfolio.returns import ReturnSeries
from trader.errors import Issue

Step = Literal["opened", "amended", "closed"]
SeasonState = Literal["announced", "running", "ended", "closed"]
Stopping = Literal["end", "decided"]
Disqualification = Literal["reset", "change"]

_HOUR: Final = timedelta(hours=1)


Moment = Annotated[
    datetime,
    Meta(tz=True, extra_json_schema={"description": "a time with its offset, such as 2026-12-01T00:00:00Z"}),
]
Fee = Annotated[float, Meta(ge=-100, le=1000)]


class SeasonRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules of a season. The season file and the record have the same names.

    It lasts from `start` to `end`, whole hours. `markets`, the fees in basis points and `latency_ms` are those of the
    service, and `capital` is that of each account, in the quote currency. `entrants` are ids of models, or the ids that
    replicates have in common; none: all models. Who begins after `entry_until` (None: the first hour) is listed, and
    not ranked. Each configuration has so many `replicates`. All of `compare` over all entrants are one family, which
    errs with probability `alpha` at most. `stopping`: `end`, or `decided`: it may be closed as soon as every comparison
    is decided. `disqualify` says what takes an account off the board, as an order by hand always does. For a rank an
    entrant needs `age_min_hours`, and to have decided `coverage_min_percent` of its due cycles.
    """

    name: Line
    start: Moment
    end: Moment
    markets: Annotated[list[Annotated[str, Meta(pattern="^[A-Z0-9]{1,20}$")]], Meta(min_length=1)]
    capital: Annotated[float, Meta(gt=0, le=1e9)]
    taker_fee_bps: Fee
    maker_fee_bps: Fee
    latency_ms: Annotated[int, Meta(ge=0)]
    replicates: Annotated[int, Meta(ge=1, le=100)]
    compare: Annotated[list[Reference], Meta(min_length=1)]
    alpha: Annotated[float, Meta(gt=0, le=0.5)]
    stopping: Stopping
    disqualify: list[Disqualification]
    entrants: list[ModelId] = []
    entry_until: Moment | None = None
    coverage_min_percent: Annotated[float, Meta(ge=0, le=100)] = 95.0
    age_min_hours: Annotated[int, Meta(ge=0)] = AGE_MIN

    @property
    def hours(self) -> int:
        return (self.end - self.start) // _HOUR

    @property
    def last_entry(self) -> datetime:
        """When an entrant has to have begun to be ranked."""
        return self.entry_until or self.start + _HOUR

    @property
    def board(self) -> BoardRules:
        """What its board compares, and how."""
        return BoardRules(self.compare, self.alpha, self.age_min_hours, has_common_hours=True)

    def has(self, model: Model) -> bool:
        """Return whether a model may be an entrant."""
        return not self.entrants or bool({model.id, model.configuration.replicate_of} & {*self.entrants})


class ServiceTerms(NamedTuple):
    """What the rules say of the service, as its settings have it."""

    markets: Sequence[str]
    taker_fee_bps: Decimal
    maker_fee_bps: Decimal
    latency_ms: int


SETTINGS: Final[Mapping[str, str]] = {
    "taker_fee_bps": "SIM_TAKER_FEE_BPS",
    "maker_fee_bps": "SIM_MAKER_FEE_BPS",
    "latency_ms": "SIM_LATENCY_MS",
}
"""The setting that each of these rules has to agree with; `markets` with MARKETS."""


class SeasonRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of a season, as it is recorded. `at` is when it was made, in real time.

    `rules` are those from then on. `seed_digest` is the SHA-256 of the secret seed (its decimal digits) from which the
    market is drawn; `seed` is that seed when the season is closed, or one that everybody knew.
    """

    step: Step
    season: int
    number: int
    at: datetime
    rules: SeasonRules | None = None
    reason: str | None = None
    seed_digest: str | None = None
    seed: str | None = None

    @property
    def canonical(self) -> str:
        """The record as canonical JSON."""
        value = msgspec.to_builtins(self)
        value["at"] = iso(self.at)
        if self.rules is not None:
            until = self.rules.entry_until
            value["rules"] |= {"start": iso(self.rules.start), "end": iso(self.rules.end)}
            value["rules"] |= {"entry_until": None if until is None else iso(until)}
        return canonical_json(value).decode()


class Change(NamedTuple):
    """A rule that an amendment changed."""

    rule: str
    before: Any
    after: Any


class Amendment(NamedTuple):
    """An amendment with its reason, what it changed, and the digest of its record."""

    at: datetime
    reason: str
    changes: Sequence[Change]
    digest: bytes


class Season(NamedTuple):
    """A season as its records say; `digests` are those of the records."""

    records: Sequence[SeasonRecord]
    digests: Sequence[bytes]

    @property
    def number(self) -> int:
        return self.records[0].season

    @property
    def title(self) -> str:
        """How messages name it."""
        return f"season {self.number} ({self.rules.name})"

    @property
    def summary(self) -> str:
        """What every board says of it in a line."""
        rules, count = self.rules, len(self.amendments)
        amended = f"{count} amendment{'' if count == 1 else 's'}" if count else "no amendment"
        return f"{self.title} from {iso(rules.start)} to {iso(rules.end)}, SHA-256 {self.digest.hex()}, {amended}"

    @property
    def rules(self) -> SeasonRules:
        """The rules in force."""
        return [record.rules for record in self.records if record.rules is not None][-1]

    @property
    def digest(self) -> bytes:
        """The digest of the record that opened it."""
        return self.digests[0]

    @property
    def amendments(self) -> list[Amendment]:
        """Its amendments, in order."""
        made, before = [], self.records[0].rules
        for record, digest in zip(self.records, self.digests, strict=True):
            if record.step == "amended" and record.rules is not None and before is not None:
                made.append(Amendment(record.at, record.reason or "", changes(before, record.rules), digest))
                before = record.rules
        return made

    @property
    def closed_at(self) -> datetime | None:
        return self.records[-1].at if self.records[-1].step == "closed" else None

    @property
    def seed_digest(self) -> str | None:
        """The digest of the seed of its market, when that was secret at its opening."""
        return self.records[0].seed_digest

    @property
    def seed(self) -> str | None:
        """The seed of its market, when it is not secret."""
        return next((record.seed for record in self.records if record.seed is not None), None)

    def state(self, now: datetime) -> SeasonState:
        """Return its state at a moment of the market."""
        if self.closed_at is not None:
            return "closed"
        if now < self.rules.start:
            return "announced"
        return "running" if now < self.rules.end else "ended"


def begun(season: Season | None, now: datetime) -> Season | None:
    """Return the season when it has begun, and is not closed yet."""
    return None if season is None or season.state(now) in {"announced", "closed"} else season


def seed_digest(seed: str) -> str:
    """Return the digest by which a secret seed is known until it is published."""
    return hashlib.sha256(seed.encode()).hexdigest()


def changes(before: SeasonRules, after: SeasonRules) -> list[Change]:
    """Return the rules that differ."""
    pairs = ((name, getattr(before, name), getattr(after, name)) for name in SeasonRules.__struct_fields__)
    return [Change(*pair) for pair in pairs if pair[1] != pair[2]]


def season_part(series: ReturnSeries | None, rules: SeasonRules | None) -> ReturnSeries | None:
    """Return the part of a series that is in the season; all of it without one."""
    return series if series is None or rules is None else series.within(rules.start, rules.end)


class Participation(NamedTuple):
    """How an account has taken part in the season: its runs and entrants in it, and when a hand traded it."""

    runs: int
    entrants: int
    manual_since: datetime | None = None


def absence(rules: SeasonRules, record: EntrantRecord, began_at: datetime, account: Participation) -> str | None:
    """Return why the present entrant of an account has no place on the board; None when it may have one."""
    if account.manual_since is not None:
        return f"the account was traded by hand at {iso(account.manual_since)}"
    if "reset" in rules.disqualify and account.runs > 1:
        return f"disqualified: the account is in its run {account.runs} of the season"
    if "change" in rules.disqualify and account.entrants > 1:
        return f"disqualified: the account has had {account.entrants} configurations in the season"
    if began_at > rules.last_entry:
        return f"it began at {iso(began_at)}; entry was until {iso(rules.last_entry)}"
    covered = record.coverage_percent
    if covered is not None and covered < rules.coverage_min_percent:
        return f"it decided {covered:.1f} % of its due cycles; a rank needs {rules.coverage_min_percent:g} %"
    return None


# What is wrong with rules


def rule_issues(rules: SeasonRules) -> Iterator[Issue]:
    """Yield what is wrong with the rules by themselves."""
    for name in ("start", "end", "entry_until"):
        moment: datetime | None = getattr(rules, name)
        if moment is not None and moment.timestamp() % _HOUR.total_seconds():
            yield Issue((name,), f"{iso(moment)} is not a whole hour")
    if rules.end <= rules.start:
        yield Issue(("end",), f"{iso(rules.end)} is not after the start, {iso(rules.start)}")
    elif not rules.start <= rules.last_entry < rules.end:
        yield Issue(("entry_until",), f"{iso(rules.last_entry)} is not within the season")
    elif rules.age_min_hours > rules.hours:
        yield Issue(("age_min_hours",), f"{rules.age_min_hours} hours; the season has {rules.hours}")
    for name in ("markets", "compare", "disqualify", "entrants"):
        values: list[str] = getattr(rules, name)
        for index, value in enumerate(values):
            if value in values[:index]:
                yield Issue((name, index), f"{value!r} is given twice")


def term_issues(rules: SeasonRules, service: ServiceTerms) -> Iterator[Issue]:
    """Yield every rule that the service does not keep."""
    listed = ", ".join(service.markets)
    for index, symbol in enumerate(rules.markets):
        if symbol not in service.markets:
            yield Issue(("markets", index), f"{symbol!r} has no source of prices; MARKETS names {listed}")
    if missing := [symbol for symbol in service.markets if symbol not in rules.markets]:
        yield Issue(("markets",), f"the service trades {', '.join(missing)} too; MARKETS names {listed}")
    for name, setting in SETTINGS.items():
        given, own = from_number(getattr(rules, name)), Decimal(getattr(service, name))
        if given != own:
            yield Issue((name,), f"{format_decimal(given)}; the service has {format_decimal(own)} ({setting})")


def entrant_issues(rules: SeasonRules, models: Collection[Model], capitals: Mapping[str, Decimal]) -> Iterator[Issue]:
    """Yield every entrant that is no model, has another capital, or not as many replicates as the rules say.

    `capitals` are those of the models' accounts in their present runs.
    """
    groups: dict[str, list[Model]] = {}
    for model in models:
        groups.setdefault(model.configuration.replicate_of or model.id, []).append(model)
    by_id = {model.id: [model] for model in models}
    known = ", ".join(sorted(groups)[:20]) or "none"
    named = list(enumerate(rules.entrants)) if rules.entrants else [(None, name) for name in groups]
    for index, name in named:
        path: tuple[str | int, ...] = ("entrants",) if index is None else ("entrants", index)
        group = groups.get(name) or by_id.get(name)
        if group is None:
            yield Issue(path, f"there is no model {name!r}; there are {known}")
            continue
        if name in groups and len(group) != rules.replicates:
            accounts = "1 account" if len(group) == 1 else f"{len(group)} accounts"
            yield Issue(path, f"{name!r} has {accounts} of one configuration; replicates is {rules.replicates}")
        for model in group:
            capital = capitals.get(model.id)
            if capital is not None and capital != from_number(rules.capital):
                yield Issue(path, f"the account of {model.id!r} has a capital of {format_decimal(capital)}")


def amendment_issues(before: SeasonRules, after: SeasonRules, now: datetime) -> Iterator[Issue]:
    """Yield what no amendment may change: the past. `now` is the time of the market."""
    if not changes(before, after):
        yield Issue((), "these are the rules in force: nothing is changed")
    if after.start != before.start and before.start <= now:
        yield Issue(("start",), f"the season has begun at {iso(before.start)}")
    if after.start != before.start and after.start <= now:
        yield Issue(("start",), f"{iso(after.start)} is over already")
    if after.end != before.end and min(before.end, after.end) <= now:
        yield Issue(("end",), f"{iso(min(before.end, after.end))} is over already")
