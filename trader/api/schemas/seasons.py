"""Seasons on the wire: their rules, digests and amendments."""

from datetime import datetime
from typing import Any

from trader.api.schemas.common import UNSET, Timestamp, UnsetType, Wire, iso
from trader.domain.portfolio.board import Reference
from trader.domain.portfolio.seasons import Change, Disqualification, Season, SeasonRules, SeasonState, Stopping


class Rules(Wire, kw_only=True):
    """The rules of a season that are in force. Fees are in basis points; `capital` is that of each account.

    `entrants` are models, or the ids that replicates have in common; empty: all. `lastEntry` is until when an entrant
    has to have begun to be ranked. `compare` is one family, which errs with probability `alpha` at most. `stopping`:
    `end`, or `decided` as soon as every comparison is.
    """

    name: str
    start: Timestamp
    end: Timestamp
    markets: list[str]
    capital: float
    taker_fee_bps: float
    maker_fee_bps: float
    latency_ms: int
    replicates: int
    entrants: list[str]
    last_entry: Timestamp
    compare: list[Reference]
    alpha: float
    stopping: Stopping
    disqualify: list[Disqualification]
    coverage_min_percent: float
    age_min_hours: int

    @classmethod
    def of(cls, rules: SeasonRules) -> "Rules":
        return cls.from_attributes(rules)


class RuleChange(Wire, kw_only=True):
    """A rule that an amendment changed; the name is that of the season file."""

    rule: str
    before: Any
    after: Any

    @classmethod
    def of(cls, change: Change) -> "RuleChange":
        before, after = (iso(each) if isinstance(each, datetime) else each for each in change[1:])
        return cls(rule=change.rule, before=before, after=after)


class AmendmentRow(Wire, kw_only=True):
    """An amendment: when and why, what it changed, and the SHA-256 of its record."""

    at: Timestamp
    reason: str
    changes: list[RuleChange]
    digest: str


class SeasonView(Wire, kw_only=True):
    """A season. `digest` is the SHA-256 of the record that opened it, at `openedAt` in real time.

    `rules` are those in force, after all `amendments`. `seedDigest` is the SHA-256 of the secret seed from which the
    market is drawn, in decimal digits; `seed` is that seed once the season is closed, or one that was never secret.
    """

    number: int
    state: SeasonState
    digest: str
    opened_at: Timestamp
    rules: Rules
    amendments: list[AmendmentRow]
    closed_at: Timestamp | UnsetType = UNSET
    seed_digest: str | UnsetType = UNSET
    seed: str | UnsetType = UNSET

    @classmethod
    def of(cls, season: Season, state: SeasonState) -> "SeasonView":
        return cls.from_attributes(
            season,
            state=state,
            digest=season.digest.hex(),
            opened_at=iso(season.records[0].at),
            rules=Rules.of(season.rules),
            amendments=[
                AmendmentRow(
                    at=iso(each.at),
                    reason=each.reason,
                    changes=[RuleChange.of(change) for change in each.changes],
                    digest=each.digest.hex(),
                )
                for each in season.amendments
            ],
        )


def shown_season(latest: tuple[Season, SeasonState] | None) -> SeasonView | UnsetType:
    """Return the season of the boards: one that has begun, and is not closed."""
    return UNSET if latest is None or latest[1] in {"announced", "closed"} else SeasonView.of(*latest)


class GetSeasonOutput(Wire, kw_only=True):
    """The latest season; absent before the first."""

    season: SeasonView | UnsetType = UNSET

    @classmethod
    def of(cls, latest: tuple[Season, SeasonState] | None) -> "GetSeasonOutput":
        return cls() if latest is None else cls(season=SeasonView.of(*latest))
