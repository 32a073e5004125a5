"""A year of 50 models for benchmarks, made by the database itself: books that balance, in seconds."""

from typing import Final

from trader.store.database.partitions import ensure_partitions
from trader.store.database.pool import Database
from trader.store.database.schema import apply_schema

MODELS: Final = 50
TRADES_PER_MODEL: Final = 2920
"""One every three hours of a year."""
RAW_DAYS: Final = 8

# One round trip of every three hours, each with its two fills; funding and requests are left out.
TRADES: Final = """
CREATE TEMP TABLE season ON COMMIT DROP AS
SELECT m, n, gen_random_uuid() AS id, format('model-%s', m) AS account_id,
       CASE WHEN (m + n) % 2 = 0 THEN 'LONG' ELSE 'SHORT' END AS side,
       round((50000 + (n * 7 + m * 13) % 5000) * 0.01, 4) AS entry,
       round((50000 + (n * 7 + m * 13) % 5000 + (n * 31 + m * 17) % 201 - 99) * 0.01, 4) AS exit,
       date_trunc('hour', now()) - n * interval '3 hours' AS opened_at
FROM generate_series(1, $MODELS) m CROSS JOIN generate_series(1, $TRADES) n;

INSERT INTO models (id, name, variant, provider, router_model_name, active, created_at)
SELECT format('model-%s', m), format('Model %s', m),
       (enum_range(NULL::variant_id))[1 + m % 4], 'rules', format('rules/%s', m), false, now() - interval '1 year'
FROM generate_series(1, $MODELS) m;
INSERT INTO accounts (id, sequence, created_at, changed_at, last_order_at)
SELECT id, 2 * $TRADES + 2, created_at, now(), now() FROM models;
INSERT INTO runs (id, account_id, number, initial_capital, quote_currency, started_at)
SELECT gen_random_uuid(), id, 1, 10000, 'USDT', created_at FROM models;

INSERT INTO orders (id, account_id, run_id, symbol, side, status, quantity, entry_notional, margin, leveraged,
                    exit_notional, gross_pnl, fees, funding, net_pnl, close_reason, confidence, opened_at, funded_until,
                    closed_at)
SELECT s.id, s.account_id, r.id, 'BTC', s.side, 'CLOSED', 0.01, s.entry, s.entry, true, s.exit,
       CASE s.side WHEN 'LONG' THEN s.exit - s.entry ELSE s.entry - s.exit END, 0.02, 0,
       CASE s.side WHEN 'LONG' THEN s.exit - s.entry ELSE s.entry - s.exit END - 0.02,
       'order', 50 + n % 50, s.opened_at, s.opened_at, s.opened_at + interval '1 hour'
FROM season s JOIN runs r ON r.account_id = s.account_id;
INSERT INTO fills (account_id, sequence, run_id, order_id, symbol, side, quantity, price, fee, liquidation_fee, maker,
                   cause, created_at)
SELECT o.account_id, row_number() OVER (PARTITION BY o.account_id ORDER BY o.opened_at, leg), o.run_id, o.id,
       'BTC', CASE WHEN (o.side = 'LONG') = (leg = 1) THEN 'buy' ELSE 'sell' END, 0.01,
       (CASE leg WHEN 1 THEN o.entry_notional ELSE o.exit_notional END) * 100, 0.01, 0, false, 'order',
       CASE leg WHEN 1 THEN o.opened_at ELSE o.closed_at END
FROM orders o CROSS JOIN generate_series(1, 2) leg
WHERE o.status = 'CLOSED';

INSERT INTO orders (id, account_id, run_id, symbol, side, status, quantity, entry_notional, margin, leveraged, fees,
                    funding, confidence, opened_at, funded_until)
SELECT gen_random_uuid(), r.account_id, r.id, symbol, 'LONG', 'OPEN', 0.001, price * 0.001, price * 0.001, true, 0.01,
       0, 70, now() - interval '10 minutes', now()
FROM runs r CROSS JOIN (VALUES ('BTC', 95000), ('ETH', 3300)) p (symbol, price);
INSERT INTO fills (account_id, sequence, run_id, order_id, symbol, side, quantity, price, fee, liquidation_fee, maker,
                   cause, created_at)
SELECT account_id, 2 * $TRADES + row_number() OVER (PARTITION BY account_id ORDER BY symbol), run_id, id, symbol, 'buy',
       0.001, entry_notional * 1000, 0.01, 0, false, 'order', opened_at
FROM orders WHERE status = 'OPEN';

INSERT INTO portfolio_snapshots (account_id, run_id, net_portfolio, cash, unrealized_pnl, created_at)
SELECT account_id, id, 10000 + gain, 10000, gain, t
FROM (
    SELECT r.account_id, r.id, t, round((random() * 1000)::numeric, 4) AS gain
    FROM runs r CROSS JOIN generate_series(date_trunc('minute', now()) - interval '$DAYS days', now(), '1 minute') t
) s;
INSERT INTO portfolio_hourly (account_id, hour, run_id, total, count, last, last_at)
SELECT account_id, hour, id, 60 * value, 60, value, hour + interval '59 minutes'
FROM (
    SELECT r.account_id, r.id, hour, 10000 + round((random() * 1000)::numeric, 4) AS value
    FROM runs r CROSS JOIN
         generate_series(date_trunc('hour', now()) - interval '1 year', date_trunc('hour', now()), '1 hour') hour
) s;
INSERT INTO variant_hourly (hour, variant, total, count)
SELECT hour, variant, sum(total), sum(count)
FROM portfolio_hourly JOIN models ON models.id = account_id GROUP BY hour, variant;
"""


async def write_season(dsn: str) -> None:
    """Make the schema and fill it; the database must be empty."""
    database = await Database.connect(dsn, size=2, command_timeout_s=300)
    await apply_schema(database)
    async with database.connection() as conn:
        now = await conn.fetchval("SELECT now()")
        oldest = await conn.fetchval(f"SELECT now() - interval '{RAW_DAYS} days'")
        await ensure_partitions(conn, oldest, now)
    script = TRADES.replace("$MODELS", str(MODELS)).replace("$TRADES", str(TRADES_PER_MODEL))
    async with database.transaction() as conn:
        await conn.execute(script.replace("$DAYS", str(RAW_DAYS)))
    async with database.connection() as conn:
        await conn.execute("ANALYZE")
    await database.close()
