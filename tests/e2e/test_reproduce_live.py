"""Invocations of a running service, reproduced by the command: with a moving market and the latency of orders."""

from pathlib import Path
from typing import Any

import pytest
from support.calls import Call
from support.process import serving
from support.slow_provider import slow_provider
from support.waiting import until

from trader.agents.domain.models import Model
from trader.agents.sql.models import upsert_model
from trader.core.clock import SystemClock
from trader.core.variant_id import VariantId
from trader.database.pool import Database

pytestmark = pytest.mark.processes

MODELS = 6


async def test_invocations_reproduce_the_same_books(tmp_path: Path, database: Database, dsn: str, call: Call) -> None:
    now = SystemClock().now()
    async with database.connection() as conn:
        for number in range(MODELS):
            model = Model(
                id=f"m{number}", name=f"M{number}", variant=list(VariantId)[number % 4], provider="openai",
                router_model_name="slow/one", created_at=now,
            )  # fmt: skip
            await upsert_model(conn, model)
    async with (
        slow_provider(0.3) as url,
        serving(tmp_path, DATABASE_URL=dsn, OPENAI_BASE_URL=url, OPENAI_API_KEY="sk-any-0001") as service,
    ):

        async def all_answered() -> Any:
            runs = (await service.call("models.getInvocations"))["conversations"]
            answered = {each["modelId"] for each in runs if "responsePayload" in each}  # kept after the rows
            return len(answered) == MODELS and all("responsePayload" in each for each in runs) and runs

        # A model that saw no price in its first cycle decides in the next one.
        ended = await until(all_answered, within_s=120)
        assert len({each["modelId"] for each in ended}) == MODELS
        assert {each["status"] for each in ended} == {"completed"}
        assert all(each["responsePayload"] for each in ended)
        assert {each["costUsd"] for each in ended} == {0.004}
        stats = (await service.call("analytics.getModelStats", mode="advanced"))["advanced"]
        assert len(stats) == MODELS
        for each in stats:
            rounds = each["inputTokens"] // 18_000  # a second one if it was due meanwhile
            assert (each["inputTokens"], each["outputTokens"]) == (18_000 * rounds, 1_200 * rounds)
            assert rounds
            assert each["costUsd"] == pytest.approx(0.004 * rounds)
        results = [await call("reproduce", each["id"]) for each in ended[:3]]
    for said in results:
        assert said.code == 0, said
        assert "2. createPosition (ok): same: " in said.out
        assert said.out.endswith("The books are identical.\n")
