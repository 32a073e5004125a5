"""Seasons: opening, amending and closing them, each recorded before any decision under the new rules."""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from trader.agents.domain.entrants import EntrantRecord
from trader.agents.domain.models import Model
from trader.core.clock import Clock, iso
from trader.core.errors import InvalidInput, Issue, SeasonOver, SettingsError, StartError
from trader.core.statistics import grouped
from trader.database.pool import Connection, Database
from trader.exchange.sql.accounts import select_identity, select_processed_until, select_seed
from trader.portfolio.domain.board import NO_SEASON, BoardRules
from trader.portfolio.domain.seasons import (
    MarketTerms,
    Season,
    SeasonRecord,
    SeasonResult,
    SeasonRules,
    ServiceTerms,
    amendment_issues,
    begun,
    seed_digest,
    term_issues,
)
from trader.portfolio.run_statistics import NO_SCOPE, RunScope, RunStatistics
from trader.portfolio.sql.analytics import AccountRun, PastEntrant, select_account_runs, select_past_entrants
from trader.portfolio.sql.seasons import (
    insert_season_record,
    lock_seasons,
    select_latest_season,
    select_seasons,
)
from trader.record.sql.chain import insert_anchor
from trader.settings.settings import Settings


async def _read_seed(conn: Connection, market_identity: str) -> tuple[str | None, str | None]:
    """Return the digest of a market's seed while it is secret, else the seed; neither for a real market.

    It is public once an earlier season has published it.
    """
    if known := re.search(r":([0-9]+)$", market_identity):
        return None, known[1]
    _, _, digest = market_identity.rpartition(":sha256:")
    if digest == market_identity:
        return None, None
    published = {seed_digest(season.seed): season.seed for season in await select_seasons(conn) if season.seed}
    return (None, published[digest]) if digest in published else (digest, None)


async def open_season(conn: Connection, rules: SeasonRules) -> Season:
    """Open a season with validated rules.

    :raises StartError: another season is open, or no service has started on this database yet
    :raises InvalidInput: its start is in the past
    """
    at = await lock_seasons(conn)
    latest = await select_latest_season(conn)
    if latest is not None and latest.closed_at is None:
        raise StartError(f"{latest.title} is still open; close it before you open another season.")
    if (identity := await select_identity(conn)) is None:
        raise StartError("No service has started on this database yet; start it once, so that it records its market.")
    digest, seed = await _read_seed(conn, identity.market_identity)
    now = await market_now(conn, at)
    if rules.start <= now:
        raise InvalidInput(Issue(("start",), f"{iso(rules.start)} is in the past: the market is at {iso(now)}"))
    return await _add(
        conn,
        SeasonRecord(
            step="opened",
            season=1 if latest is None else latest.number + 1,
            number=0,
            at=at,
            rules=rules,
            seed_digest=digest,
            seed=seed,
            market=MarketTerms(identity=identity.market_identity, trading_mode=identity.trading_mode),
        ),
    )


async def amend_season(conn: Connection, rules: SeasonRules, reason: str) -> Season:
    """Change the rules of the open season, which every board shows from then on.

    :raises StartError: no season is open
    :raises InvalidInput: the amendment changes nothing, or changes the past
    """
    at = await lock_seasons(conn)
    season = await require_open(conn)
    now = await market_now(conn, at)
    if issues := list(amendment_issues(season.rules, rules, now)):
        raise InvalidInput(*issues)
    return await _add(
        conn,
        SeasonRecord(
            step="amended",
            season=season.number,
            number=len(season.records),
            at=at,
            rules=rules,
            reason=reason,
            after_start=season.rules.start <= now,
        ),
    )


async def close_season(conn: Connection, read: Season, result: SeasonResult, *, is_decided: bool) -> Season:
    """Close the open season with its result, and publish the seed of its market.

    `read` is the season that the result is based on; `is_decided` says whether all its comparisons are decided.

    :raises StartError: no season is open, it cannot end yet, or it has new records
    """
    at = await lock_seasons(conn)
    season = await require_open(conn)
    if season != read:
        raise StartError(f"{season.title} was changed while its result was read; close it again.")
    rules = season.rules
    now, until = await market_now(conn, at), datetime.fromisoformat(result.until)
    if until < rules.end <= now:
        raise StartError(
            f"{season.title} ended at {iso(rules.end)}, but its results are only recorded up to {iso(until)}. The "
            "service records an hour within six minutes of its end, once it has caught up with the market; close the "
            "season after that."
        )
    if now < rules.end and not (rules.stopping == "decided" and is_decided):
        early = ", or every comparison is decided" if rules.stopping == "decided" else ""
        raise StartError(f"{season.title} is open until {iso(rules.end)}{early}; the market is at {iso(now)}.")
    seed = None if season.seed is not None else await select_seed(conn)
    return await _add(
        conn,
        SeasonRecord(
            step="closed",
            season=season.number,
            number=len(season.records),
            at=at,
            seed=None if seed is None else str(seed),
            result=result,
        ),
    )


async def require_open(conn: Connection) -> Season:
    """Return the open season.

    :raises StartError: no season is open
    """
    season = await select_latest_season(conn)
    if season is None or season.closed_at is not None:
        raise StartError("No season is open. `trader season open season.toml` opens one.")
    return season


def terms_of(settings: Settings) -> ServiceTerms:
    """Return the terms of a service with these settings that a season's rules must match."""
    return ServiceTerms(settings.markets, settings.taker_fee_bps, settings.maker_fee_bps, settings.latency_ms)


async def require_terms(database: Database, settings: Settings) -> None:
    """Check that the settings match the open season, if there is one.

    :raises SettingsError: they differ; lists every difference
    """
    async with database.connection() as conn:
        season = await select_latest_season(conn)
    if season is None or season.closed_at is not None:
        return
    if issues := list(term_issues(season.rules, terms_of(settings))):
        how = "keep to its rules, or change them with `trader season amend`"
        raise SettingsError([f"{season.title}: {issue.path[0]}: {issue.message}; {how}" for issue in issues])


async def require_running(database: Database, clock: Clock, model: Model) -> None:
    """Check that the latest season, if it includes the model, is still running.

    :raises SeasonOver: it has ended, so orders may only reduce
    """
    async with database.connection() as conn:
        season = await select_latest_season(conn)
    if season is not None and season.rules.has(model) and season.state(clock.now()) in ("ended", "closed"):
        raise SeasonOver(f"{season.title} is over; until another one starts, orders may only reduce (reduceOnly)")


async def market_now(conn: Connection, real: datetime) -> datetime:
    """Return market time for a real time: in a replay, the time that it has reached."""
    identity, processed = await select_identity(conn), await select_processed_until(conn)
    is_replay = identity is not None and identity.market_identity.startswith("replay")
    if processed is None:
        return datetime.min.replace(tzinfo=real.tzinfo) if is_replay else real
    return processed if is_replay else max(processed, real)


async def _add(conn: Connection, record: SeasonRecord) -> Season:
    """Add a record to the chain and anchor it in the same transaction, before any decision under it."""
    await insert_season_record(conn, record)
    await insert_anchor(conn)
    season = await select_latest_season(conn)
    assert season is not None, "a record was inserted"
    return season


# The past of accounts


class AccountPast(NamedTuple):
    """An account's return over all its runs, in percent, across resets and configuration changes.

    In a season these are the season's runs and entrants. `entrants` are in order, the current one last.
    """

    runs: int
    started_at: datetime
    return_percent: float
    entrants: Sequence[PastEntrant] = ()
    manual_since: datetime | None = None

    @classmethod
    def of(cls, runs: Sequence[AccountRun], entrants: Sequence[PastEntrant] = ()) -> "AccountPast":
        growth = math.prod(float(run.last / run.first) for run in runs if run.first > 0)
        manual = min((run.manual_since for run in runs if run.manual_since), default=None)
        return cls(len(runs), runs[0].started_at, 100 * growth - 100, entrants, manual)

    def absence(self, rules: SeasonRules, record: EntrantRecord, began_at: datetime) -> str | None:
        """Return why the account's current entrant is excluded from a season's board; None if it is not."""
        if self.manual_since is not None:
            return f"the account was traded by hand at {iso(self.manual_since)}"
        if "reset" in rules.disqualify and self.runs > 1:
            return f"disqualified: the account is in its run {self.runs} of the season"
        if "change" in rules.disqualify and (entrants := len({each.number for each in self.entrants})) > 1:
            return f"disqualified: the account has had {entrants} configurations in the season"
        if began_at > rules.last_entry:
            return f"it began at {iso(began_at)}; entry was until {iso(rules.last_entry)}"
        covered = record.coverage_percent
        if covered is not None and covered < rules.coverage_min_percent:
            return f"it decided {covered:.1f} % of its due cycles; a rank needs {rules.coverage_min_percent:g} %"
        return None


async def read_accounts(
    conn: Connection, since: datetime | None = None, until: datetime | None = None
) -> dict[str, AccountPast]:
    """Return the past of every model's account in the hours from `since` to `until` (None: all)."""
    entrants = grouped(await select_past_entrants(conn, since, until), lambda entrant: entrant.model_id)
    runs = grouped(await select_account_runs(conn, since, until), lambda run: run.account_id)
    return {account_id: AccountPast.of(rows, entrants.get(account_id, ())) for account_id, rows in runs.items()}


class SeasonStanding(NamedTuple):
    """The season that has started, if any, and the past of each account in it.

    `ended_at` is the end of a season that is over: until it is closed, the boards show that time.
    """

    season: Season | None
    accounts: Mapping[str, AccountPast]
    ended_at: datetime | None = None

    @property
    def scope(self) -> RunScope:
        """The part of the runs that its boards show."""
        return NO_SCOPE if self.season is None else scope_of(self.season, self.ended_at)

    @property
    def rules(self) -> SeasonRules | None:
        return None if self.season is None else self.season.rules

    @property
    def board(self) -> BoardRules:
        return NO_SEASON if self.season is None else self.season.rules.board

    def has(self, model: Model) -> bool:
        """Return whether a model is on the boards."""
        return self.season is None or self.season.rules.has(model)

    def absence_of(self, run: RunStatistics) -> str | None:
        """Return why the current entrant of a run is excluded from the board; None if it is not."""
        past = self.accounts.get(run.run.model_id)
        if past is None or self.rules is None:
            return None
        return past.absence(self.rules, run.run.entrant, run.entrant_since)


def scope_of(season: Season, at: datetime | None) -> RunScope:
    """Return the scope of a season as of a moment (None: now)."""
    return RunScope(at, season.number, season.rules.start, at or season.rules.end)


async def read_standing(conn: Connection, now: datetime) -> SeasonStanding:
    """Return the season at a market time; it may have ended, but is not closed yet."""
    season = begun(await select_latest_season(conn), now)
    if season is None:
        return SeasonStanding(None, {})
    start, end = season.rules.start, season.rules.end
    return SeasonStanding(season, await read_accounts(conn, start, end), end if now >= end else None)
