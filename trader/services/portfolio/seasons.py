"""Seasons: opening and amending them, each a record that is made before anything is decided under it."""

import math
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import NamedTuple

from trader.clock import iso
from trader.domain.agents.entrants import EntrantRecord
from trader.domain.models import Model
from trader.domain.portfolio.board import NO_SEASON, BoardRules
from trader.domain.portfolio.seasons import (
    Participation,
    Season,
    SeasonRecord,
    SeasonRules,
    ServiceTerms,
    absence,
    amendment_issues,
    begun,
    seed_digest,
    term_issues,
)
from trader.errors import InvalidInput, Issue, SettingsError, StartError
from trader.services.portfolio.run_statistics import RunStatistics
from trader.settings import Settings
from trader.store.agents.chain import insert_anchor
from trader.store.database.pool import Connection, Database
from trader.store.exchange.accounts import select_identity, select_processed_until, select_seed
from trader.store.portfolio.analytics import AccountRun, PastEntrant, select_account_runs, select_past_entrants
from trader.store.portfolio.seasons import (
    insert_season_record,
    lock_seasons,
    select_latest_season,
    select_seasons,
)


class MarketSeed(NamedTuple):
    """The seed of a database's market: `digest` while it is secret, else its `value`; both None: a real market."""

    digest: str | None = None
    value: str | None = None


async def read_market_seed(conn: Connection) -> MarketSeed:
    """Return the seed; one that an earlier season has published is known.

    :raises StartError: the service has not started on this database yet
    """
    identity = await select_identity(conn)
    if identity is None:
        raise StartError("No service has started on this database yet; start it once, so that its market is known.")
    if known := re.search(r":([0-9]+)$", identity.market_identity):
        return MarketSeed(value=known[1])
    _, _, digest = identity.market_identity.rpartition(":sha256:")
    if digest == identity.market_identity:
        return MarketSeed()
    published = {seed_digest(season.seed): season.seed for season in await select_seasons(conn) if season.seed}
    return MarketSeed(value=published[digest]) if digest in published else MarketSeed(digest=digest)


async def open_season(conn: Connection, rules: SeasonRules) -> Season:
    """Open a season with rules that were checked.

    :raises StartError: another season is open, or no service has started on this database yet
    :raises InvalidInput: it would have begun already
    """
    at = await lock_seasons(conn)
    latest = await select_latest_season(conn)
    if latest is not None and latest.closed_at is None:
        raise StartError(f"{latest.title} is open until it is closed; there is one season at a time.")
    seed = await read_market_seed(conn)
    now = await market_now(conn, at)
    if rules.start <= now:
        raise InvalidInput(Issue(("start",), f"{iso(rules.start)} is over already: the market is at {iso(now)}"))
    return await _add(
        conn,
        SeasonRecord(
            step="opened",
            season=1 if latest is None else latest.number + 1,
            number=0,
            at=at,
            rules=rules,
            seed_digest=seed.digest,
            seed=seed.value,
        ),
    )


async def amend_season(conn: Connection, rules: SeasonRules, reason: str) -> Season:
    """Change the rules of the open season, which every board shows from then on.

    :raises StartError: no season is open
    :raises InvalidInput: nothing is changed, or the past would be
    """
    at = await lock_seasons(conn)
    season = await _require_open(conn)
    if issues := list(amendment_issues(season.rules, rules, await market_now(conn, at))):
        raise InvalidInput(*issues)
    number = len(season.records)
    return await _add(
        conn, SeasonRecord(step="amended", season=season.number, number=number, at=at, rules=rules, reason=reason)
    )


async def close_season(conn: Connection, read: Season, *, is_decided: bool) -> Season:
    """Close the open season, which publishes the seed of its market.

    `read` is the season that the result was made of; `is_decided` says whether every comparison of it is decided.

    :raises StartError: no season is open, this one does not end yet, or it has other records by now
    """
    at = await lock_seasons(conn)
    season = await _require_open(conn)
    if season != read:
        raise StartError(f"{season.title} was changed while its result was read; close it again.")
    rules = season.rules
    now = await market_now(conn, at)
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
        ),
    )


async def _require_open(conn: Connection) -> Season:
    """Return the season that is open.

    :raises StartError: none is
    """
    season = await select_latest_season(conn)
    if season is None or season.closed_at is not None:
        raise StartError("No season is open. `trader season open season.toml` opens one.")
    return season


def terms_of(settings: Settings) -> ServiceTerms:
    """Return what the rules of a season say of a service with these settings."""
    return ServiceTerms(settings.markets, settings.taker_fee_bps, settings.maker_fee_bps, settings.latency_ms)


async def require_terms(database: Database, settings: Settings) -> None:
    """Check that the settings are those of the open season, if there is one.

    :raises SettingsError: they are not; with every difference
    """
    async with database.connection() as conn:
        season = await select_latest_season(conn)
    if season is None or season.closed_at is not None:
        return
    if issues := list(term_issues(season.rules, terms_of(settings))):
        how = "keep to its rules, or change them with `trader season amend`"
        raise SettingsError([f"{season.title}: {issue.path[0]}: {issue.message}; {how}" for issue in issues])


async def market_now(conn: Connection, real: datetime) -> datetime:
    """Return the time of the market at a real time: that of a replay is the time that it has reached."""
    identity, processed = await select_identity(conn), await select_processed_until(conn)
    is_replay = identity is not None and identity.market_identity.startswith("replay")
    if processed is None:
        return datetime.min.replace(tzinfo=real.tzinfo) if is_replay else real
    return processed if is_replay else max(processed, real)


async def _add(conn: Connection, record: SeasonRecord) -> Season:
    """Add a record to the chain, and anchor it in the same transaction, so before anything is decided under it."""
    await insert_season_record(conn, record)
    await insert_anchor(conn)
    season = await select_latest_season(conn)
    assert season is not None, "a record was inserted"
    return season


# The past of accounts


class AccountPast(NamedTuple):
    """What an account has made over all its runs, in percent, whatever was reset or configured anew in between.

    In a season these are the runs and the entrants of the season. `entrants` are in order, the present one last.
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
        """Return why the account's present entrant has no place on the board of a season; None when it may have one."""
        part = Participation(self.runs, len({each.number for each in self.entrants}), self.manual_since)
        return absence(rules, record, began_at, part)


async def read_accounts(
    conn: Connection, since: datetime | None = None, until: datetime | None = None
) -> dict[str, AccountPast]:
    """Return the past of every model's account in the hours from `since` to `until` (None: all)."""
    entrants: dict[str, list[PastEntrant]] = {}
    for entrant in await select_past_entrants(conn, since, until):
        entrants.setdefault(entrant.model_id, []).append(entrant)
    runs = await select_account_runs(conn, since, until)
    return {
        account_id: AccountPast.of(list(rows), entrants.get(account_id, ()))
        for account_id, rows in groupby(runs, key=lambda run: run.account_id)
    }


class Standing(NamedTuple):
    """The season that has begun, if one has, and the past of each account in it.

    `ended_at` is the end of one that is over: until it is closed, the boards are those of then.
    """

    season: Season | None
    accounts: Mapping[str, AccountPast]
    ended_at: datetime | None = None

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
        """Return why the present entrant of a run has no place on the board; None when it may have one."""
        past = self.accounts.get(run.run.model_id)
        if past is None or self.rules is None:
            return None
        return past.absence(self.rules, run.run.entrant, run.entrant_since)


async def read_standing(conn: Connection, now: datetime) -> Standing:
    """Return the season at a moment of the market; it may have ended, and is not closed yet."""
    season = begun(await select_latest_season(conn), now)
    if season is None:
        return Standing(None, {})
    start, end = season.rules.start, season.rules.end
    return Standing(season, await read_accounts(conn, start, end), end if now >= end else None)
