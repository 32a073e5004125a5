"""Growth of the database per model and day, by table, as rule agents trade by the service's own workflow.

  scripts/benchmark growth                   4 models, a day, a decision every 30 minutes
  scripts/benchmark growth --cycle 1         the same with a decision a minute, which takes minutes

Snapshots are written every minute. The last column says for how long the rows of a table are kept.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import asyncpg

from trader.database.embedded.server import EmbeddedPostgres
from trader.database.partitions import PARTITIONED_TABLES

MODELS: Final = 4
DAYS: Final = 1

KEPT: Final = {
    **dict.fromkeys(PARTITIONED_TABLES, "SNAPSHOT_RETENTION_DAYS"),
    "candles": "CANDLE_RETENTION_DAYS, hours for good",
    "alarm_history": "90 days",
}
"""For how long the rows of a table are kept; of the others, for good."""

SELECT_SIZES: Final = """
SELECT coalesce(i.inhparent::regclass, c.oid::regclass)::text AS name, sum(pg_total_relation_size(c.oid)) AS bytes
FROM pg_class c LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' GROUP BY 1
"""


async def sizes(dsn: str) -> dict[str, int]:
    """Return the bytes of each table, its partitions and its indexes."""
    conn = await asyncpg.connect(dsn)
    try:
        return {row["name"]: int(row["bytes"]) for row in await conn.fetch(SELECT_SIZES)}
    finally:
        await conn.close()


async def seed(dsn: str, *words: str) -> None:
    """Add the models, and with `words` the history that they trade."""
    command = [sys.executable, "-P", "-m", "trader", "models", "add", "--demo", "--models", str(MODELS), *words]
    process = await asyncio.create_subprocess_exec(*command, "--database-url", dsn, stdout=subprocess.DEVNULL)
    if await process.wait():
        raise RuntimeError("the models were not added")


async def main(cycle: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)  # as root, the server runs as another user, which must have access
        async with EmbeddedPostgres(Path(name) / "server", durable=False) as server:
            empty, full = await server.ensure_database("empty"), await server.ensure_database("full")
            await seed(empty)
            await seed(full, "--history", str(DAYS), "--cycle", str(cycle))
            before, after = await sizes(empty), await sizes(full)
    grown = {table: (after[table] - before.get(table, 0)) / MODELS / DAYS / 1000 for table in after}
    decisions = 24 * 60 / cycle
    print(f"{'table':24} {'kB per model and day':>22} {'kB per decision':>16}  kept for")
    for table, size in sorted(grown.items(), key=lambda pair: -pair[1]):
        if size >= 1:
            print(f"{table:24} {size:22.1f} {size / decisions:16.2f}  {KEPT.get(table, 'good')}")
    print(f"{'together':24} {sum(grown.values()):22.1f} {sum(grown.values()) / decisions:16.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="scripts/benchmark growth", description=__doc__)
    parser.add_argument("--cycle", type=int, default=30, metavar="MINUTES", help="minutes between decisions")
    asyncio.run(main(parser.parse_args().cycle))
