"""Cost of the chain when writing invocations, speed of its verification, and cost of results per minute.

    scripts/benchmark chain [--rounds 60] [--invocations 24]

Each invocation is written as in the service, to a durable embedded PostgreSQL: opened, two steps with a call each, its
end, and its payload, with the concurrency of the service. The reference is the same without the link: short rounds with
and without it alternate in a changing order, and are judged by processor time, which other processes disturb least.
Then the results of 100 accounts are recorded as by the leader once a minute, without locking an account: first the
results of an hour, then none.
"""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

from benchmarks.figures import Figures, temporary_folder
from support.records import make_model
from support.scripted import START, make_settings

from trader.agents import record as invocation_record
from trader.agents.domain.conversation import ModelAnswer, ToolRequest
from trader.agents.domain.invocations import Invocation
from trader.agents.domain.tools import Holding
from trader.agents.entrants import Entrants
from trader.agents.payloads import PayloadPacker
from trader.agents.recorder import InvocationRecorder, RecorderServices
from trader.agents.sql.invocations import update_invocation
from trader.agents.sql.models import upsert_model
from trader.agents.verification import verify
from trader.core.events import EventBus
from trader.database.embedded.server import EmbeddedPostgres
from trader.database.partitions import ensure_partitions
from trader.database.pool import Connection, Database
from trader.database.schema import apply_schema
from trader.record.results import record_results

PARALLEL = 8
PRICE_PERCENT_MAX = 3.0
REASON = "BTC: range with ADX 18.6, 1.9 deviations from VWAP 87407.4, RSI 70.4; no entry without a confirmed turn."


async def _no_order_to_settle(account_id: str) -> None:
    """Return at once: these invocations place no orders."""


class Writer:
    """Writes invocations of one model at a time, as the workflow does."""

    def __init__(self, database: Database, models: int) -> None:
        self._database = database
        entrants = Entrants(database, make_settings())
        self._recorders = RecorderServices(database, EventBus(), PayloadPacker(), entrants, _no_order_to_settle)
        self._models = [make_model(f"model-{number}") for number in range(models)]
        self._written = 0

    async def prepare(self) -> None:
        async with self._database.connection() as conn:
            await ensure_partitions(conn, START)
            for model in self._models:
                await upsert_model(conn, model)

    async def write(self, count: int) -> None:
        """Write this many invocations, `PARALLEL` at a time."""
        numbers = iter(range(self._written, self._written + count))
        self._written += count

        async def work() -> None:
            for number in numbers:
                await self._write_one(number)

        await asyncio.gather(*(work() for _ in range(PARALLEL)))

    async def _write_one(self, number: int) -> None:
        at = START + timedelta(seconds=number // len(self._models))
        model = self._models[number % len(self._models)]
        record = InvocationRecorder(self._recorders, model, at)
        assert await record.open()
        record.note_messages([{"role": "user", "content": REASON * 100}])
        for step in range(2):
            self._add_step(record, f"call {step}", at)
            await record.save()
        record.close("completed", None, REASON, at + timedelta(seconds=2))
        await record.save()

    def _add_step(self, record: InvocationRecorder, name: str, at: datetime) -> None:
        request = ToolRequest(name, "holding", f'{{"reason": "{REASON}"}}')
        answer = ModelAnswer(
            text=None, calls=(request,), message={}, model="lab/one", raw=REASON * 10, input_tokens=6000
        )
        record.add_step("lab", answer, at)
        record.add_call(record.next_call(), request, Holding(reason=REASON), "ok", {"holding": True}, at)


async def _close(conn: Connection, invocation: Invocation, *_: object) -> bool:
    """Close an invocation without a link: the reference."""
    await update_invocation(conn, invocation)
    return True


def without_chain() -> AbstractContextManager[object]:
    return patch.multiple(
        invocation_record, update_invocation_closed=_close, record_digest=lambda *_: b"", encoded_digest=lambda _: None,
    )  # fmt: skip


RESULT_ACCOUNTS = 100
RESULT_ROWS = 24
"""Funding payments of each account, and hours of its equity."""

INSERT_RESULTS = f"""
WITH made AS (
    INSERT INTO accounts (id, sequence, created_at, changed_at)
    SELECT 'account-' || n, {RESULT_ROWS}, $1, $1 FROM generate_series(1, {RESULT_ACCOUNTS}) n RETURNING id
), begun AS (
    INSERT INTO runs (id, account_id, number, initial_capital, quote_currency, started_at)
    SELECT gen_random_uuid(), id, 1, 10000, 'USDT', $1 FROM made RETURNING id, account_id
), held AS (
    INSERT INTO orders (id, account_id, run_id, symbol, side, status, quantity, entry_notional, margin, leveraged, fees,
                        funding, opened_at, funded_until)
    SELECT gen_random_uuid(), account_id, id, 'BTC', 'LONG', 'OPEN', 0.1, 9400, 9400, false, 1, 0, $1, $1 FROM begun
    RETURNING id, account_id, run_id
), paid AS (
    INSERT INTO funding_payments (account_id, sequence, run_id, order_id, symbol, boundary, quantity, mark, rate,
                                  amount, created_at)
    SELECT account_id, n, run_id, id, 'BTC', $1 + n * interval '1 hour', 0.1, 94000, 0.0000125, -0.1175,
           $1 + n * interval '1 hour'
    FROM held, generate_series(1, {RESULT_ROWS}) n
)
INSERT INTO portfolio_hourly (account_id, hour, run_id, total, count, last, last_at, leverage)
SELECT account_id, $1 + n * interval '1 hour', run_id, 600000, 60, 10000.25, $1 + n * interval '1 hour', 0.94
FROM held, generate_series(0, {RESULT_ROWS} - 1) n
"""


async def _show_results(database: Database, figures: Figures) -> None:
    """Show the cost of recording results, and of finding that there are none."""
    async with database.transaction() as conn:
        await conn.execute(
            "INSERT INTO service_state (market_identity, trading_mode) VALUES ('benchmark', 'simulated')"
        )
        await conn.execute(INSERT_RESULTS, START.replace(minute=0, second=0, microsecond=0))
    now = START + timedelta(hours=RESULT_ROWS + 2)
    spent = await _spent(database, lambda: record_results(database, 0, now))
    rows = 2 * RESULT_ACCOUNTS * RESULT_ROWS
    figures.show("results recorded", rows / spent.real, "/s")
    figures.show("the hour of 100 accounts, processor time", 1000 * spent.processor * 2 * RESULT_ACCOUNTS / rows, "ms")
    spent = await _spent(database, lambda: record_results(database, 0, now))
    figures.show("a minute without results, 100 accounts", 1000 * spent.real, "ms")


class Spent(NamedTuple):
    """Seconds of a round: elapsed, and processor time of this process and the server's together."""

    real: float
    processor: float


async def _spent(database: Database, write: Callable[[], Awaitable[object]]) -> Spent:
    began_s, cpu_s = time.perf_counter(), await _processor_s(database)
    await write()
    return Spent(time.perf_counter() - began_s, await _processor_s(database) - cpu_s)


async def _processor_s(database: Database) -> float:
    """Return the processor time of this process and of the server's processes that serve it."""
    async with database.connection() as conn:
        pids = [row["pid"] for row in await conn.fetch("SELECT pid FROM pg_stat_activity ORDER BY pid")]
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def _database(folder: Path) -> AsyncIterator[Database]:
    async with EmbeddedPostgres(folder / "postgres") as server:
        database = await Database.connect(await server.ensure_database("trader_benchmark"))
        try:
            await apply_schema(database)
            yield database
        finally:
            await database.close()


async def measure(folder: Path, rounds: int, count: int) -> int:
    figures = Figures()
    async with _database(folder) as database:
        writer = Writer(database, models=20)
        await writer.prepare()
        await writer.write(count)  # the first rounds pay for empty caches
        linked: list[Spent] = []
        plain: list[Spent] = []
        for number in range(rounds):
            for is_linked in (number % 2 == 0, number % 2 == 1):
                with nullcontext() if is_linked else without_chain():
                    spent = await _spent(database, lambda: writer.write(count))
                (linked if is_linked else plain).append(spent)
        each_ms, plain_ms = (1000 * median(amount.real for amount in spent) / count for spent in (linked, plain))
        figures.show(f"an invocation, {PARALLEL} at once", each_ms, "ms", reference=("no chain", plain_ms))
        each_ms, plain_ms = (
            1000 * sum(amount.processor for amount in spent) / count / rounds for spent in (linked, plain)
        )
        figures.show("processor time of an invocation", each_ms, "ms", reference=("no chain", plain_ms))
        figures.show("price of the chain", 100 * (each_ms / plain_ms - 1), "%", at_most=PRICE_PERCENT_MAX)
        await _show_results(database, figures)
        began_s = time.perf_counter()
        report = await verify(database, [])
        kinds = {finding.kind for finding in report.findings}
        assert kinds <= {"inserted"}, "only the reference's invocations are not in the chain"
        figures.show("verification", (report.links + report.rows) / (time.perf_counter() - began_s), "/s")
    return figures.exit_code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--invocations", type=int, default=24)
    options = parser.parse_args()
    with temporary_folder() as folder:
        return asyncio.run(measure(folder, options.rounds, options.invocations))


if __name__ == "__main__":
    sys.exit(main())
