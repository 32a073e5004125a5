"""Seasons: rules fixed before the first decision, their amendments, and the digest of each.

    (none) ── open ──▶ announced ── start ──▶ running ── end ──▶ ended ── close ──▶ closed
                           │                     │                               (the next season may be opened)
                           └────── amend ────────┴─▶ the same, with an amendment that every board shows

A season consists of its records: `opened`, any number of `amended`, and `closed`. Each has a canonical form (RFC 8785)
and is identified by its SHA-256.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from trader.agents.domain.models import Line, Model, ModelId
from trader.core.canonical_json import canonical_json
from trader.core.clock import input_time, iso
from trader.core.errors import Issue
from trader.core.money import counted, format_decimal, from_number
from trader.core.statistics import grouped
from trader.portfolio.domain.board import AGE_MIN, BoardRules, PrimaryComparison, Reference

SeasonStep = Literal["opened", "amended", "closed"]
SeasonState = Literal["announced", "running", "ended", "closed"]
Stopping = Literal["end", "decided"]
Disqualification = Literal["reset", "change"]

BEST_HOURS_MIN_PERCENT: Final = 95.0
"""The best entrant of a season has at least this share of the hours of the oldest ranked one."""

FIXED_AT_START: Final = ("hour_loss_max_percent", "hour_gain_max_percent", "primary")
"""Rules that no amendment changes after the start: the verdicts on all its hours depend on them."""

_REFERENCES: Final = frozenset({"ruleAgent", "holdNothing", "buyAndHold"})
_HOUR: Final = timedelta(hours=1)


SeasonTime = Annotated[
    datetime,
    Meta(tz=True, extra_json_schema={"description": "a time with its offset, such as 2026-12-01T00:00:00Z"}),
]
Fee = Annotated[float, Meta(ge=-100, le=1000)]


class SeasonRules(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules of a season. The season file and the record have the same names.

    It lasts from `start` to `end`, both whole hours. `markets`, the fees in basis points and `latency_ms` must match
    the service; `capital` is each account's capital in the quote currency. `entrants` are model ids, or the common ids
    of replicates; empty: all models. Entrants that start after `entry_until` (None: the first hour) are listed but not
    ranked. `replicates` is the number of accounts per configuration. All of `compare` over all entrants are one family,
    which errs with probability `alpha` at most. `stopping` is `end`, or `decided`: the season may be closed as soon as
    every comparison is decided. `disqualify` lists what removes an account from the board; a manual order always does.
    For a rank an entrant needs `age_min_hours`, and `coverage_min_percent` of its due cycles decided.

    Before the equity of an entrant has fallen by `hour_loss_max_percent` within an hour, or risen by
    `hour_gain_max_percent`, the service closes its positions, and it may only reduce until the hour is over. Beside a
    `primary` comparison with a level of its own, all of `compare` are exploratory, with `alpha` as their false
    discovery rate.
    """

    name: Line
    start: SeasonTime
    end: SeasonTime
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
    entry_until: SeasonTime | None = None
    coverage_min_percent: Annotated[float, Meta(ge=0, le=100)] = 95.0
    age_min_hours: Annotated[int, Meta(ge=0)] = AGE_MIN
    hour_loss_max_percent: Annotated[float, Meta(gt=0, le=100)] = 20.0
    hour_gain_max_percent: Annotated[float, Meta(gt=0, le=1000)] = 20.0
    primary: PrimaryComparison | None = None

    @property
    def hours(self) -> int:
        return (self.end - self.start) // _HOUR

    @property
    def last_entry(self) -> datetime:
        """The latest start of a ranked entrant."""
        return self.entry_until or self.start + _HOUR

    @property
    def board(self) -> BoardRules:
        """The rules of its board."""
        bounds = self.hour_loss_max_percent / 100, self.hour_gain_max_percent / 100
        limits = self.age_min_hours, BEST_HOURS_MIN_PERCENT, self.hours
        return BoardRules(self.compare, self.alpha, *limits, *bounds, self.primary)

    def has(self, model: Model) -> bool:
        """Return whether a model may be an entrant."""
        return not self.entrants or bool({model.id, model.configuration.replicate_of} & {*self.entrants})


class ServiceTerms(NamedTuple):
    """The service's settings that the rules must match."""

    markets: Sequence[str]
    taker_fee_bps: Decimal
    maker_fee_bps: Decimal
    latency_ms: int


SETTINGS: Final[Mapping[str, str]] = {
    "taker_fee_bps": "SIM_TAKER_FEE_BPS",
    "maker_fee_bps": "SIM_MAKER_FEE_BPS",
    "latency_ms": "SIM_LATENCY_MS",
}
"""The setting that each of these rules must match; `markets` must match MARKETS."""


class MarketTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What the opening fixes of the service: the identity of its market, and whether trading is simulated or live."""

    identity: str
    trading_mode: str


class SeasonResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result that a closing publishes.

    It covers the season's hours before `until`, and is computed from the record up to the link at `position` with the
    digest `head`. `card` is the SHA-256 of its `card.json`, `version` the version of trader that made it, and `code`
    the SHA-256 of that program.
    """

    until: str
    position: int
    head: str
    card: str
    version: str
    code: str


class SeasonRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The record of a step of a season. `at` is its real time.

    `rules` apply from then on. `seed_digest` is the SHA-256 of the decimal digits of the market's secret seed; `seed`
    is that seed once the season is closed, or a seed that was public from the start. An opening has the `market`, a
    closing the `result`. `after_start`: the season had begun when it was amended.
    """

    step: SeasonStep
    season: int
    number: int
    at: datetime
    rules: SeasonRules | None = None
    reason: str | None = None
    seed_digest: str | None = None
    seed: str | None = None
    market: MarketTerms | None = None
    result: SeasonResult | None = None
    after_start: bool = False

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


class AmendedRule(NamedTuple):
    """A rule changed by an amendment."""

    rule: str
    before: Any
    after: Any


class Amendment(NamedTuple):
    """An amendment with its reason, its changes, and the digest of its record."""

    at: datetime
    reason: str
    changes: Sequence[AmendedRule]
    digest: bytes


class Season(NamedTuple):
    """A season built from its records; `digests` are the records' digests."""

    records: Sequence[SeasonRecord]
    digests: Sequence[bytes]

    @property
    def number(self) -> int:
        return self.records[0].season

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"season {self.number} ({self.rules.name})"

    @property
    def summary(self) -> str:
        """Its one-line summary on every board."""
        rules, count = self.rules, len(self.amendments)
        amended = f"{count} amendment{'' if count == 1 else 's'}" if count else "no amendment"
        return f"{self.title} from {iso(rules.start)} to {iso(rules.end)}, SHA-256 {self.digest.hex()}, {amended}"

    @property
    def rules(self) -> SeasonRules:
        """The rules in force."""
        return [record.rules for record in self.records if record.rules is not None][-1]

    @property
    def rules_before(self) -> SeasonRules | None:
        """The rules at its start, if an amendment since then did anything but make them stricter; None otherwise."""
        ruled = [record for record in self.records if record.rules is not None]
        at_start = [record.rules for record in ruled if record.rules and not record.after_start][-1]
        later = [record.rules for record in ruled if record.rules and record.after_start]
        is_stricter = all(makes_stricter(before, after) for before, after in pairwise([at_start, *later]))
        return None if is_stricter else at_start

    @property
    def digest(self) -> bytes:
        """The digest of its opening record."""
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
        """The digest of its market's seed, if the seed was secret at the opening."""
        return self.records[0].seed_digest

    @property
    def seed(self) -> str | None:
        """The seed of its market, if it is not secret."""
        return next((record.seed for record in self.records if record.seed is not None), None)

    def state(self, now: datetime) -> SeasonState:
        """Return its state at a market time."""
        if self.closed_at is not None:
            return "closed"
        if now < self.rules.start:
            return "announced"
        return "running" if now < self.rules.end else "ended"


def begun(season: Season | None, now: datetime) -> Season | None:
    """Return the season if it has started and is not closed yet."""
    return None if season is None or season.state(now) in {"announced", "closed"} else season


def makes_stricter(before: SeasonRules, after: SeasonRules) -> bool:
    """Return whether an amendment changes nothing else than to make rules stricter, so that no verdict is gained."""
    stricter = {
        "name": True,
        "alpha": after.alpha <= before.alpha,
        "coverage_min_percent": after.coverage_min_percent >= before.coverage_min_percent,
        "age_min_hours": after.age_min_hours >= before.age_min_hours,
        "entry_until": after.last_entry <= before.last_entry,
        "disqualify": {*after.disqualify} >= {*before.disqualify},
        "compare": {*after.compare} >= {*before.compare},
        "stopping": after.stopping == "end",
    }
    return all(stricter.get(change.rule, False) for change in changes(before, after))


def seed_digest(seed: str) -> str:
    """Return the digest that identifies a secret seed until it is published."""
    return hashlib.sha256(seed.encode()).hexdigest()


def changes(before: SeasonRules, after: SeasonRules) -> list[AmendedRule]:
    """Return the rules that differ."""
    pairs = ((name, getattr(before, name), getattr(after, name)) for name in SeasonRules.__struct_fields__)
    return [AmendedRule(*pair) for pair in pairs if pair[1] != pair[2]]


# What is wrong with rules


def rule_issues(rules: SeasonRules) -> Iterator[Issue]:
    """Yield the errors in the rules on their own."""
    if issues := list(_time_issues(rules)):
        yield from issues
    elif rules.end <= rules.start:
        yield Issue(("end",), f"{iso(rules.end)} is not after the start, {iso(rules.start)}")
    elif not rules.start <= rules.last_entry < rules.end:
        yield Issue(("entry_until",), f"{iso(rules.last_entry)} is not within the season")
    elif rules.age_min_hours > rules.hours:
        yield Issue(("age_min_hours",), f"{rules.age_min_hours} hours; the season has {rules.hours}")
    if rules.primary is not None and rules.primary.entrant == rules.primary.against:
        yield Issue(("primary", "against"), f"{rules.primary.against!r} would be compared with itself")
    for name in ("markets", "compare", "disqualify", "entrants"):
        values: list[str] = getattr(rules, name)
        for index, value in enumerate(values):
            if value in values[:index]:
                yield Issue((name, index), f"{value!r} is given twice")


def _time_issues(rules: SeasonRules) -> Iterator[Issue]:
    for name in ("start", "end", "entry_until"):
        moment: datetime | None = getattr(rules, name)
        try:
            if moment is not None and input_time(moment).timestamp() % _HOUR.total_seconds():
                yield Issue((name,), f"{iso(moment)} is not a whole hour")
        except ValueError as error:
            yield Issue((name,), str(error))


def term_issues(rules: SeasonRules, service: ServiceTerms) -> Iterator[Issue]:
    """Yield every rule that the service does not comply with."""
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
    """Yield every entrant that is not a model, or has a different capital or number of replicates than the rules.

    `capitals` are the capitals of the models' accounts in their current runs.
    """
    groups = grouped(models, lambda model: model.configuration.replicate_of or model.id)
    by_id = {model.id: [model] for model in models}
    known = ", ".join(sorted(groups)[:20]) or "none"
    named = list(enumerate(rules.entrants)) if rules.entrants else [(None, name) for name in groups]
    for index, name in named:
        path: tuple[str | int, ...] = ("entrants",) if index is None else ("entrants", index)
        group = groups.get(name) or by_id.get(name)
        if group is None:
            yield Issue(path, f"unknown model {name!r}; expected one of {known}")
            continue
        if name in groups and len(group) != rules.replicates:
            accounts = counted(len(group), "account")
            yield Issue(path, f"{name!r} has {accounts} of one configuration; replicates is {rules.replicates}")
        for model in group:
            capital = capitals.get(model.id)
            if capital is not None and capital != from_number(rules.capital):
                yield Issue(path, f"the account of {model.id!r} has a capital of {format_decimal(capital)}")
    yield from _primary_issues(rules, {*rules.entrants} or {*groups, *by_id})


def _primary_issues(rules: SeasonRules, entrants: Collection[str]) -> Iterator[Issue]:
    if rules.primary is None:
        return
    known = ", ".join(sorted(entrants)[:20])
    for place, allowed in (("entrant", entrants), ("against", {*entrants, *_REFERENCES})):
        name = getattr(rules.primary, place)
        if name not in allowed:
            yield Issue(("primary", place), f"{name!r} is not an entrant; the entrants are {known}")


def amendment_issues(before: SeasonRules, after: SeasonRules, now: datetime) -> Iterator[Issue]:
    """Yield the changes to the past, which no amendment may make. `now` is market time."""
    if not changes(before, after):
        yield Issue((), "these are the rules in force: nothing is changed")
    if {*after.entrants} != {*before.entrants} and before.start <= now:
        yield Issue(("entrants",), f"the season has begun at {iso(before.start)}; its entrants are fixed")
    for name in FIXED_AT_START:
        if getattr(after, name) != getattr(before, name) and before.start <= now:
            yield Issue((name,), f"the season has begun at {iso(before.start)}; this rule is fixed")
    if after.start != before.start and before.start <= now:
        yield Issue(("start",), f"the season has begun at {iso(before.start)}")
    if after.start != before.start and after.start <= now:
        yield Issue(("start",), f"{iso(after.start)} is in the past")
    if after.end != before.end and min(before.end, after.end) <= now:
        yield Issue(("end",), f"{iso(min(before.end, after.end))} is in the past")
