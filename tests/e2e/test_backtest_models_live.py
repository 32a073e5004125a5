"""AI models in a backtest against a replay in lockstep by a service: the same prompts and fills; and its database."""

import asyncio
import shutil
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import orjson
import pytest
from support.candles import write_walk
from support.lockstep import replay
from support.trading_provider import trading_provider

from trader.__main__ import main
from trader.agents.domain.models import Model, ModelConfiguration
from trader.agents.sql.models import upsert_model
from trader.agents.strategy_files import load_strategy
from trader.agents.variants import VARIANTS
from trader.backtest.accounts import DecisionSource
from trader.backtest.market import BacktestMarket
from trader.backtest.output import TableJournal
from trader.backtest.run import Backtest
from trader.backtest.sources import RecordingStrategySource
from trader.core.clock import iso
from trader.core.variant_id import VariantId
from trader.database.pool import Database
from trader.market.domain.markets import INTERVALS
from trader.market.sources.replay import ReplaySource
from trader.settings.settings import Settings

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
            assert [main(name.split()) for name in ("audit", "audit chain", "show trades")] == [0, 0, 0]
        assert "2 invocations of the chain were checked" in capsys.readouterr().out
        asked = backtest(data, end, *options, "--budget-usd", "1")
    run = data.parent / "run"
    monkeypatch.chdir(run)
    assert [main(name.split()) for name in ("audit", "audit chain", "show trades")] == [0, 0, 0]
    assert "7 invocations of the chain were checked, 7 of them with their payloads" in capsys.readouterr().out
    run.rename(data.parent / "recorded")
    monkeypatch.chdir(data.parent)
    again = backtest(data, end, "--models-from", "recorded", "--no-database")
    figures = ("id", "equity", "trades", "fees", "funding")
    assert [[account[name] for name in figures] for account in again["accounts"]] == [
        [account[name] for name in figures] for account in asked["accounts"]
    ]
    assert again["accounts"][0]["trades"] > 0


WATCHER = '''
import hashlib
from decimal import Decimal

import msgspec

from trader.strategies import (
    CancelOrder, ClosePosition, CreatePosition, Holding, PlaceOrder, PlacePair, PlannedExit, PlannedTarget, Side,
    Strategy, UpdateExitPlan,
)


class Watcher(Strategy):
    """Trades in every way, and keeps the digest of each field of each view."""

    intervals = ("1m", "5m", "15m", "1h", "4h")
    history = 310

    def __init__(self):
        self.seen, self.told = {}, []

    def on_fill(self, fill):
        self.told.append(fill.sequence)

    def decide(self, view):
        shown = msgspec.to_builtins(view, builtin_types=(Decimal,), enc_hook=dict)
        fields = {name: value for name, value in shown.items() if name != "markets"}
        fields |= {f"account {name}": value for name, value in fields.pop("account").items()}
        fields["told"] = self.told
        for symbol, market in shown["markets"].items():
            fields |= {f"{symbol} {name}": value for name, value in market.items()}
        self.seen[shown["at"]] = {name: digest(value) for name, value in fields.items()}
        minute, price = view.at.minute, view.markets["BTC"].price
        for order in view.orders:
            if minute % 10 == 4:
                yield CancelOrder(symbol=order.symbol, order_id=str(order.id))
        if minute % 10 in (1, 7):
            yield PlaceOrder(
                symbol="BTC", side="buy", quantity=0.01, type="limit", limit_price=float(price) * 0.9996, leverage=2,
                client_order_id=f"bid-{view.at:%H%M}", post_only=minute % 10 == 7,
                exit_plan=PlannedExit(
                    stop=float(price) * 0.99, trailing_distance=float(price) * 0.001,
                    targets=[PlannedTarget(price=float(price) * far, fraction=0.3) for far in (1.0002, 1.0006, 1.1)],
                ),
            )
        if minute % 7 == 2 and view.position("ETH") is None:
            price = view.markets["ETH"].price
            yield Holding(reason="the reason comes before the order")
            yield CreatePosition(symbol="ETH", side=Side.LONG, quantity=1, leverage=3, stop=price * 98 / 100,
                                 invalidation="none", confidence=50,
                                 targets=[PlannedTarget(price=float(price) * 1.0004, fraction=0.5)])
        if minute % 7 == 3:
            for held in view.positions:
                yield UpdateExitPlan(symbol=held.symbol, stop=float(held.mark) * 0.98,
                                     trailing_distance=float(held.mark) * 0.0005)
        if minute % 7 == 5:
            yield ClosePosition(symbol="ETH")
        if minute % 7 == 6:
            yield PlacePair(
                first=PlaceOrder(symbol="BTC", side="buy", quantity=0.02, exit_plan=PlannedExit(stop=50_000)),
                second=PlaceOrder(symbol="ETH", side="sell", quantity=0.5, exit_plan=PlannedExit(stop=4_000)),
            )
        if minute % 7 == 1:
            yield PlacePair(
                first=PlaceOrder(symbol="BTC", side="sell", quantity=1, reduce_only=True),
                second=PlaceOrder(symbol="ETH", side="buy", quantity=1, reduce_only=True),
            )
        if minute % 7 == 4:
            yield PlacePair(
                first=PlaceOrder(symbol="BTC", side="buy", quantity=0.01, exit_plan=PlannedExit(stop=50_000)),
                second=PlaceOrder(symbol="ETH", side="buy", quantity=0.1, reduce_only=True),
            )
        if minute % 9 == 8:
            yield Holding(reason=f"{len(view.orders)} orders rest")

    def save(self):
        return self.seen


class Sparing(Watcher):
    """Decides only at times at which it lets a backtest show it the view."""

    def may_act(self, peek):
        return self.acts(peek.now)

    def acts(self, at):
        return at.minute % 7 in (2, 5)

    def decide(self, view):
        return super().decide(view) if self.acts(view.at) else ()


def plain(value):
    """Numbers without the digits that a database adds or drops."""
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def digest(value):
    return hashlib.sha256(repr(plain(value)).encode()).hexdigest()[:12]
'''


PAIRS = """
SELECT status, jsonb_array_length(metadata -> 'results') FROM tool_calls
WHERE metadata -> 'raw' ->> 'name' = 'placePair'
"""

WATCHED_FROM = BEGIN + timedelta(hours=5, minutes=40)
"""An hour's candle closes while the strategies watch, and the earliest indicators of 4 hours are of a midnight."""

WATCHED_GAPS = (("BTC", -9, 9), ("BTC", 6, 8), ("ETH", 10, 9), ("ETH", 24, 1))
"""Minutes after `WATCHED_FROM` from which a market has no candles, and for how many minutes."""


async def add_watchers(dsn: str, file: Path) -> list[Model]:
    database = await Database.connect(dsn, size=1)
    models = [
        Model(
            id=name, name=name, variant=VariantId.APEX, provider="strategy", router_model_name=f"{file}:{name}",
            created_at=BEGIN,
        )
        for name in ("Watcher", "Sparing")
    ]  # fmt: skip
    async with database.transaction() as conn:
        for model in models:
            await upsert_model(conn, model)
    await database.close()
    return models


def write_watched_candles(data: Path) -> None:
    """Write candles, with gaps, of as long as the earliest indicators go back."""
    for symbol, price in (("BTC", 90_000), ("ETH", 2_200)):
        file, before = data / f"{symbol}USDT-1m.csv", timedelta(hours=48)
        write_walk(file, WATCHED_FROM - before, 49 * 60, price=price, seed=price)
        head, *lines = file.read_text().splitlines()
        for gap, minute, count in WATCHED_GAPS:
            if gap == symbol:
                first = before // timedelta(minutes=1) + minute
                lines[first : first + count] = [""] * count
        file.write_text("\n".join([head, *filter(None, lines)]))


class Watched(NamedTuple):
    """The states of strategies, the fills of all of them, and the invocation, number and name of each step."""

    states: dict[str, Any]
    fills: list[tuple[Any, ...]]
    steps: set[tuple[Any, ...]]


async def watch(models: list[Model], data: Path, end: datetime) -> Watched:
    """Backtest the strategies of models."""
    source = ReplaySource(data, ("BTC", "ETH"), start=WATCHED_FROM, end=end)
    await source.open()
    market = await BacktestMarket.open(source, INTERVALS, 310)
    settings = Settings.load({"SIM_SEED": "0", "MARKET_SOURCE": f"replay:{data}"}, None, demo=True)
    strategies = {model.id: load_strategy(model.router_model_name, {}) for model in models}
    sources: list[tuple[Model, DecisionSource]] = []
    for model in models:
        strategies[model.id].limits = VARIANTS[model.variant].limits
        sources.append((model, RecordingStrategySource(model, strategies[model.id])))
    tables = TableJournal()
    run = Backtest.fresh(market, settings, sources, [tables])
    for followed in run.accounts:
        followed.finished = []
    for _ in run.run():
        pass
    assert run.failure is None
    steps = [step for followed in run.accounts for record in followed.finished or () for step in record.steps]
    return Watched(
        {name: strategy.save() for name, strategy in strategies.items()},
        list(tables.results.fills.rows()),
        {(step.invocation_id, step.number, step.model) for step in steps},
    )


STEPS_OF_CALLS = """
SELECT invocation_id, number, model FROM invocation_steps
WHERE invocation_id IN (SELECT invocation_id FROM tool_calls WHERE type <> 'HOLDING')
"""


def test_a_strategy_sees_the_same_as_in_a_service_in_every_field(data: Path, dsn: str, tmp_path: Path) -> None:
    end = WATCHED_FROM + timedelta(minutes=35)
    file = data.parent / "watcher.py"
    file.write_text(WATCHER)
    write_watched_candles(data)

    async def both() -> tuple[dict[str, Any], dict[str, Any]]:
        models = await add_watchers(dsn, file)
        environ = {"MARKETS": "BTC,ETH", "REPLAY_THINKING": "off"}
        await replay(tmp_path / "service", dsn, data, iso(WATCHED_FROM), iso(end), **environ)
        conn = await asyncpg.connect(dsn)
        try:
            states = {row["model_id"]: orjson.loads(row["state"]) for row in await conn.fetch("TABLE strategy_states")}
            steps = {tuple(row) for row in await conn.fetch(STEPS_OF_CALLS)}
            pairs = await conn.fetch(PAIRS)
        finally:
            await conn.close()
        seen, fills, own_steps = await watch(models, data, end)
        assert own_steps == steps
        assert sorted((float(price), float(quantity)) for _, price, quantity, _ in await fills_of(dsn)) == sorted(
            (price, quantity) for *_, quantity, price, _, _, _ in fills
        )
        assert {cause for *_, cause in fills} >= {"limit", "order", "stop", "target"}
        assert {tuple(pair) for pair in pairs} == {("ok", 2), ("rejected", 1), ("rejected", 2)}, "by guard and exchange"
        return states, seen

    states, own = asyncio.run(both())
    assert [main([name, "--database-url", dsn]) for name in ("audit", "verify")] == [0, 0]
    for name, count in (("Watcher", 30), ("Sparing", 9)):
        live, seen = states[name]["state"], own[name]["state"]
        assert len(live) > count
        assert live.keys() == seen.keys()
        differing = {
            field: [at for at in live if live[at].get(field) != seen[at].get(field)]
            for field in sorted({field for each in (*live.values(), *seen.values()) for field in each})
        }
        assert {field: times[:3] for field, times in differing.items() if times} == {}, name
    live = states["Watcher"]["state"]
    changing = {field for field in live[max(live)] if len({live[at][field] for at in live}) > 1}
    assert changing >= {
        "positions",
        "orders",
        "fills",
        "told",
        "trades",
        "memory",
        "stats",
        "BTC change24hPercent",
        "BTC indicatorHistory",
    }
