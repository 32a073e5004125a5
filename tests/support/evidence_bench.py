"""Evidence over stored rows: models with trades and hourly equity, their baselines, and the clock of the service."""

from datetime import datetime
from decimal import Decimal

import numpy as np
from msgspec.structs import replace
from support.manual_clock import ManualClock
from support.records import HOUR, MINUTE, START, add_model, add_trade, make_run, make_snapshot
from support.scripted import make_settings

from trader.agents.domain.entrants import Entrant
from trader.agents.sql.entrants import insert_entrant
from trader.core.intervals import Returns
from trader.database.partitions import ensure_partitions
from trader.database.pool import Database
from trader.exchange.domain.ledger import unopened_account
from trader.portfolio.domain.baselines import Baseline, BaselineState
from trader.portfolio.evidence import EntrantEvidence, Evidence
from trader.portfolio.run_statistics import CurrentRuns
from trader.portfolio.sql import snapshots as baselines_store
from trader.portfolio.sql import snapshots as portfolio_store

HOURS = 200


class Bench:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.clock = ManualClock(START)
        self.settings = make_settings()
        self.runs = CurrentRuns(database)
        self.evidence = Evidence(database, self.runs, self.clock)

    async def curve(
        self, account_id: str, returns: Returns, leverage: float = 1.0, since: datetime = START, number: int = 1
    ) -> None:
        values = 10_000 * np.exp(np.cumsum(returns))
        rows = [
            replace(
                make_snapshot(
                    account_id, since + hour * HOUR + 59 * MINUTE, Decimal(str(round(float(value), 8))), number=number
                ),
                leverage=leverage,
            )
            for hour, value in enumerate(values)
        ]
        async with self.database.connection() as conn:
            await ensure_partitions(conn, START, rows[-1].created_at)
            await portfolio_store.insert_snapshots(conn, rows)

    async def baseline(self, baseline: Baseline, returns: Returns) -> None:
        account = unopened_account(baseline.id, Decimal(10_000), "USDT", START)
        state = BaselineState(
            account=type(account)(id=baseline.id, run=make_run(baseline.id), sequence=0, changed_at=START)
        )
        async with self.database.connection() as conn:
            await baselines_store.upsert_baselines(conn, [baselines_store.SavedBaseline(baseline, state, START)])
        await self.curve(baseline.id, returns)

    async def model(self, model_id: str, seed: int, drift: float, trades: int = 12) -> None:
        async with self.database.connection() as conn:
            await add_model(conn, model_id)
            for number in range(trades):
                await add_trade(conn, model_id, START + (number + 1) * 10 * HOUR, label=number)
        await self.curve(model_id, np.random.default_rng(seed).normal(drift, 0.004, HOURS))

    async def configure(self, model_id: str, fingerprint: str, number: int = 1, at: datetime = START) -> None:
        """Begin an entrant of a model."""
        entrant = Entrant(
            model_id=model_id, number=number, fingerprint=fingerprint * 64, configuration="{}", answered_by=None,
            began_at=at,
        )  # fmt: skip
        async with self.database.transaction() as conn:
            await insert_entrant(conn, entrant)

    async def report(self, **asked: object) -> dict[str, EntrantEvidence]:
        window = asked.pop("window", "run")
        report = await self.evidence.report(window, **asked)  # type: ignore[arg-type]
        return {f"{entrant.model.id}#{entrant.record.number}": entrant for entrant in report.entrants}
