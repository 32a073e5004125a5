"""SQL for chart candles: minutes, and the hours that they add up to."""

from collections.abc import Sequence
from datetime import datetime, timedelta

from trader.database.pool import Connection, columns_of
from trader.market.domain.markets import Candle

SELECT_LAST_MINUTES = """
SELECT s.symbol, last.open_time
FROM unnest($1::text[]) AS s (symbol)
CROSS JOIN LATERAL (
    SELECT open_time FROM candles WHERE minutes = 1 AND symbol = s.symbol ORDER BY open_time DESC LIMIT 1
) last
"""


async def select_last_minutes(conn: Connection, symbols: Sequence[str]) -> dict[str, datetime]:
    """Return the open time of the latest minute of each market that has one."""
    return {row["symbol"]: row["open_time"] for row in await conn.fetch(SELECT_LAST_MINUTES, symbols)}


# Only new minutes are added to their hours, so repeating an insert changes nothing. Minutes come in ascending order.
INSERT_MINUTES = """
WITH added AS (
    INSERT INTO candles (minutes, symbol, open_time, open, high, low, close, volume)
    SELECT 1, minute.* FROM unnest(
        $1::text[], $2::timestamptz[], $3::float8[], $4::float8[], $5::float8[], $6::float8[], $7::float8[]
    ) AS minute
    ON CONFLICT DO NOTHING
    RETURNING *
)
INSERT INTO candles AS hours (minutes, symbol, open_time, open, high, low, close, volume)
SELECT 60, symbol, date_trunc('hour', open_time, 'UTC') AS hour, (array_agg(open ORDER BY open_time))[1], max(high),
       min(low), (array_agg(close ORDER BY open_time DESC))[1], sum(volume)
FROM added GROUP BY symbol, hour
ON CONFLICT (minutes, symbol, open_time) DO UPDATE
SET high = greatest(hours.high, excluded.high), low = least(hours.low, excluded.low), close = excluded.close,
    volume = hours.volume + excluded.volume
"""


async def insert_minutes(conn: Connection, candles: Sequence[tuple[str, Candle]]) -> None:
    """Add closed minutes of markets, ascending, and add them to their hours. Existing minutes stay unchanged.

    Every leader reads the same minutes from the source, so the term is not checked.
    """
    rows = ((symbol, *candle) for symbol, candle in candles)
    await conn.execute(INSERT_MINUTES, *columns_of(rows, 7))


DELETE_MINUTES = """
DELETE FROM candles
WHERE minutes = 1 AND open_time < least($1, (SELECT min(open_time) + interval '7 days' FROM candles WHERE minutes = 1))
"""


async def delete_minutes(conn: Connection, before: datetime) -> None:
    """Delete the minutes before a time, at most the oldest week of them; their hours stay."""
    await conn.execute(DELETE_MINUTES, before)


SELECT_CANDLES = """
SELECT date_bin($2, open_time, 'epoch') AS bin_time, (array_agg(open ORDER BY open_time))[1] AS open,
       max(high) AS high, min(low) AS low, (array_agg(close ORDER BY open_time DESC))[1] AS close, sum(volume) AS volume
FROM candles
WHERE minutes = CASE WHEN $2 < interval '1 hour' THEN 1 ELSE 60 END AND symbol = $1
  AND open_time >= $3 AND open_time < $4
GROUP BY 1 ORDER BY 1 DESC LIMIT $5
"""


async def select_candles(
    conn: Connection, symbol: str, span: timedelta, start: datetime, end: datetime, limit: int
) -> list[Candle]:
    """Return the latest candles of a length with `start <= open_time < end`, ascending, at most `limit`.

    They are joined from minutes, or from hours if they are an hour or longer.
    """
    rows = await conn.fetch(SELECT_CANDLES, symbol, span, start, end, limit)
    return [
        Candle(row["bin_time"], row["open"], row["high"], row["low"], row["close"], row["volume"])
        for row in reversed(rows)
    ]


SELECT_EXTREMES = """
SELECT min(low) AS low, max(high) AS high
FROM candles WHERE minutes = $2 AND symbol = $1 AND open_time >= $3 AND open_time < $4
"""


async def select_extremes(
    conn: Connection, symbol: str, minutes: int, start: datetime, end: datetime
) -> tuple[float, float] | None:
    """Return the lowest and highest price of the candles that open within [start, end); None without candles."""
    row = await conn.fetchrow(SELECT_EXTREMES, symbol, minutes, start, end)
    assert row is not None  # an aggregate without GROUP BY has one row
    return None if row["low"] is None else (row["low"], row["high"])
