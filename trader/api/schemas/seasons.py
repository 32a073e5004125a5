"""Seasons on the wire: their rules, digests and amendments."""

from typing import Annotated, Any

from trader.api.schemas.common import UNSET, From, Timestamp, UnsetType, Wire
from trader.portfolio.domain.board import Reference
from trader.portfolio.domain.seasons import Disqualification, Season, SeasonState, Stopping


class PrimaryRule(Wire, kw_only=True):
    """The registered comparison: an entrant, and another one or `ruleAgent`, `holdNothing` or `buyAndHold`.

    Its verdict alone errs with probability `alpha` at most.
    """

    entrant: str
    against: str
    alpha: float


class Rules(Wire, kw_only=True):
    """The rules of a season in force. Fees are in basis points; `capital` is each account's capital.

    `entrants` are models, or the common ids of replicates; empty: all. `lastEntry` is the latest start of a ranked
    entrant. `compare` is one family, which errs with probability `alpha` at most. `stopping`: `end`, or `decided` as
    soon as every comparison is decided. Within an hour, an entrant cannot lose more than `hourLossMaxPercent` of its
    equity or gain more than `hourGainMaxPercent`: the service closes its positions before. Beside a `primary`
    comparison, all others are exploratory: `alpha` is their false discovery rate.
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
    hour_loss_max_percent: float
    hour_gain_max_percent: float
    primary: PrimaryRule | None


class RuleChange(Wire, kw_only=True):
    """A rule changed by an amendment, with its name in the season file."""

    rule: str
    before: Any
    after: Any


class AmendmentRow(Wire, kw_only=True):
    """An amendment: its time, reason and changes, and the SHA-256 of its record."""

    at: Timestamp
    reason: str
    changes: list[RuleChange]
    digest: str


class SeasonView(Wire, kw_only=True):
    """A season. `digest` is the SHA-256 of its opening record, made at `openedAt` in real time.

    `rules` are in force, after all `amendments`. `seedDigest` is the SHA-256 of the market's secret seed, in decimal
    digits; `seed` is that seed once the season is closed, or a seed that was never secret.
    """

    number: int
    state: SeasonState
    digest: str
    opened_at: Annotated[Timestamp, From("records", lambda records: records[0].at)]
    rules: Rules
    amendments: list[AmendmentRow]
    closed_at: Timestamp | UnsetType = UNSET
    seed_digest: str | UnsetType = UNSET
    seed: str | UnsetType = UNSET

    @classmethod
    def of(cls, season: Season, state: SeasonState) -> "SeasonView":
        return cls.from_attributes(season, state=state)


def shown_season(latest: tuple[Season, SeasonState] | None) -> SeasonView | UnsetType:
    """Return the season of the boards: one that has started and is not closed."""
    return UNSET if latest is None or latest[1] in {"announced", "closed"} else SeasonView.of(*latest)


class GetSeasonOutput(Wire, kw_only=True):
    """The latest season; absent before the first."""

    season: SeasonView | UnsetType = UNSET

    @classmethod
    def of(cls, latest: tuple[Season, SeasonState] | None) -> "GetSeasonOutput":
        return cls() if latest is None else cls(season=SeasonView.of(*latest))
