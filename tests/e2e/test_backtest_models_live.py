"""AI models in a backtest against a replay in lockstep by a service: the same prompts and fills; and its database."""

import asyncio
import shutil
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import pytest
from support.candles import write_walk
from support.lockstep import replay
from support.trading_provider import trading_provider

from trader.__main__ import main
from trader.agents.domain.models import Model, ModelConfiguration
from trader.agents.sql.models import upsert_model
from trader.core.clock import iso
from trader.core.variant_id import VariantId
from trader.database.pool import Database

pytestmark = pytest.mark.processes

BEGIN = datetime(2025, 3, 1, 12, tzinfo=UTC)
MODELS = """
[[models]]
id = "one"
variant = "Apex"
provider = "openai"
router_model = "lab/one"
every = "5m"
"""


@pytest.fixture
def data(open_folder: Path) -> Path:
    folder = open_folder / "candles"
    folder.mkdir()
    (open_folder / "models.toml").write_text(MODELS)
    write_walk(folder / "BTCUSDT-1m.csv", BEGIN - timedelta(hours=12), 900, price=90_000, seed=1)
    write_walk(folder / "ETHUSDT-1m.csv", BEGIN - timedelta(hours=12), 900, price=2_200, seed=2)
    return folder


def backtest(data: Path, end: datetime, *options: str, code: int = 0) -> dict[str, Any]:
    """The result of a backtest in the folder `run`."""
    run = data.parent / "run"
    shutil.rmtree(run, ignore_errors=True)
    period = ("--from", iso(BEGIN), "--to", iso(end))
    assert main(["backtest", "--data", str(data), "--out", str(run), *period, *options]) == code
    result: dict[str, Any] = orjson.loads((run / "result.json").read_bytes())
    return result


async def add_model(dsn: str) -> None:
    """Add only the model: the service opens its account at the time of its market."""
    database = await Database.connect(dsn, size=1)
    model = Model(
        id="one", name="one", variant=VariantId.APEX, provider="openai", router_model_name="lab/one",
        created_at=BEGIN, configuration=ModelConfiguration(every="5m"),
    )  # fmt: skip
    async with database.transaction() as conn:
        await upsert_model(conn, model)
    await database.close()


async def fills_of(dsn: str) -> list[tuple[Any, ...]]:
    conn = await asyncpg.connect(dsn)
    try:
        return [tuple(row) for row in await conn.fetch("SELECT sequence, price, quantity, fee FROM fills ORDER BY 1")]
    finally:
        await conn.close()


def fills_of_backtest(data: Path) -> list[tuple[Any, ...]]:
    lines = (orjson.loads(line) for line in (data.parent / "run" / "ledger.jsonl").read_bytes().splitlines())
    return [
        (row["sequence"], *(Decimal(row[name]) for name in ("price", "quantity", "fee")))
        for row in (line["row"] for line in lines if line["table"] == "fills")
    ]


def test_a_model_sees_the_same_as_in_a_service(
    data: Path, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = BEGIN + timedelta(minutes=90)
    models = str(data.parent / "models.toml")
    with trading_provider() as provider:
        environ = {"OPENAI_BASE_URL": provider.url, "OPENAI_API_KEY": "sk-test-000000000000000001"}
        asyncio.run(add_model(dsn))
        market = {"MARKETS": "BTC,ETH", "REPLAY_THINKING": "off"}
        asyncio.run(replay(tmp_path / "service", dsn, data, iso(BEGIN), iso(end), **market, **environ))
        shown, provider.asked = provider.asked, []
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        backtest(data, end, "--models", models, "--budget-usd", "1", "--thinking", "off", "--no-database")
    assert len(shown) > 30
    assert provider.asked == shown
    recorded = asyncio.run(fills_of(dsn))
    assert len(recorded) > 10
    assert fills_of_backtest(data) == recorded
    backtest(data, end, "--models-from", dsn, "--no-database")
    assert fills_of_backtest(data) == recorded, "the decisions of the service, executed again"


def test_the_database_of_models_is_complete_and_its_decisions_can_be_replayed(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    end = BEGIN + timedelta(minutes=30)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    with trading_provider() as provider:
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test-000000000000000001")
        options = ("--models", str(data.parent / "models.toml"), "--cassette", str(data.parent / "kept"))
        backtest(data, end, *options, "--budget-usd", "0.006", code=1)
        with monkeypatch.context() as context:
            context.chdir(data.parent / "run")
            assert [main([name]) for name in ("audit", "verify", "trades")] == [0, 0, 0]
        assert "2 invocations of the chain were checked" in capsys.readouterr().out
        asked = backtest(data, end, *options, "--budget-usd", "1")
    run = data.parent / "run"
    monkeypatch.chdir(run)
    assert [main([name]) for name in ("audit", "verify", "trades")] == [0, 0, 0]
    assert "7 invocations of the chain were checked, 7 of them with their payloads" in capsys.readouterr().out
    run.rename(data.parent / "recorded")
    monkeypatch.chdir(data.parent)
    again = backtest(data, end, "--models-from", "recorded", "--no-database")
    figures = ("id", "equity", "trades", "fees", "funding")
    assert [[account[name] for name in figures] for account in again["accounts"]] == [
        [account[name] for name in figures] for account in asked["accounts"]
    ]
    assert again["accounts"][0]["trades"] > 0
