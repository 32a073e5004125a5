"""Seasons: opening and amending them, each a record that is made before anything is decided under it."""

import re
from datetime import datetime
from typing import NamedTuple

from trader.clock import iso
from trader.domain.portfolio.seasons import (
    Season,
    SeasonRecord,
    SeasonRules,
    ServiceTerms,
    amendment_issues,
    seed_digest,
    term_issues,
)
from trader.errors import InvalidInput, Issue, SettingsError, StartError
from trader.settings import Settings
from trader.store.database.pool import Connection, Database
from trader.store.exchange.accounts import select_identity, select_processed_until, select_seed
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
    season = await open_one(conn)
    if issues := list(amendment_issues(season.rules, rules, await market_now(conn, at))):
        raise InvalidInput(*issues)
    number = len(season.records)
    return await _add(
        conn, SeasonRecord(step="amended", season=season.number, number=number, at=at, rules=rules, reason=reason)
    )


async def close_season(conn: Connection, *, is_decided: bool) -> Season:
    """Close the open season, which publishes the seed of its market.

    `is_decided` says whether every comparison is decided.

    :raises StartError: no season is open, or this one does not end yet
    """
    at = await lock_seasons(conn)
    season = await open_one(conn)
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


async def open_one(conn: Connection) -> Season:
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
    await insert_season_record(conn, record)
    season = await select_latest_season(conn)
    assert season is not None, "a record was inserted"
    return season
