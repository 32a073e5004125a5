"""Scripted entrants that read the prompt as a model does: what it says of candles and trades ends repeated entries."""

from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.candles import FOLDER, write_part

from trader.agents.domain.conversation import ModelAnswer, ToolRequest, Turn
from trader.agents.domain.models import Model
from trader.agents.domain.view import Shown
from trader.agents.variants import VARIANTS
from trader.backtest.market import BacktestMarket
from trader.backtest.output import TableJournal
from trader.backtest.run import Backtest
from trader.backtest.sources import WorkflowSource
from trader.core.variant_id import VariantId
from trader.market.domain.markets import INTERVALS
from trader.market.sources.replay import ReplaySource
from trader.settings.settings import Settings

START, SPAN = datetime(2025, 1, 8, 17, 15, tzinfo=UTC), timedelta(hours=2)
"""Squeezes of all three markets are released at 17:00, 17:15 and 17:30; each may be traded for 75 minutes."""

STOP_ATRS = 0.5


class Entrant:
    """Enters every release by Apex's rules, with a near stop. If it `counts_candles`, it reads `candlesAgo`, too."""

    is_remote = True

    def __init__(self, name: str, *, counts_candles: bool) -> None:
        self.name = name
        self.counts_candles = counts_candles
        self.entries: Counter[tuple[str, datetime]] = Counter()
        """Entries by market and time of the release."""

    def left_out(self, model: Model) -> Collection[str]:
        return ()

    async def shown(self, model: Model) -> Shown:
        return Shown(VARIANTS[model.variant].intervals)

    async def close(self) -> None:
        pass

    async def answer(self, turn: Turn) -> ModelAnswer:
        data = orjson.loads(turn.messages[1]["content"])
        orders = [] if turn.number > 1 else [order for order in map(self.order, range(3), [data] * 3) if order]
        calls = [("createPosition", order) for order in orders] or [("holding", {"reason": "nothing new"})]
        requests = (ToolRequest(f"{n}", name, orjson.dumps(given).decode()) for n, (name, given) in enumerate(calls))
        return ModelAnswer(text=None, calls=tuple(requests), message={"role": "assistant"}, model="scripted")

    def order(self, place: int, data: dict[str, Any]) -> dict[str, Any] | None:
        symbol = list(data["markets"])[place]
        names = "squeezeOn", "squeezeReleased", "momentum", "atr"
        is_on, released, momentum, atr = (data["15m"]["indicators"][name][place][-1] for name in names)
        vwap, now = data["session"]["vwap"][place][-1], data["now"][symbol]
        if None in (released, momentum, atr, vwap) or is_on or released > 5:
            return None
        side = 1 if momentum > 0 else -1
        is_held = symbol in (row[0] for row in data["positions"][1:])
        last = now["lastAction"]
        is_spent = self.counts_candles and last is not None and last["candlesAgo"] <= released
        if is_held or is_spent or (now["price"] - vwap) * side <= 0:
            return None
        candle = datetime.fromisoformat(data["candleCloses"]["15m"]["next"]) - INTERVALS["15m"]
        self.entries[symbol, candle - released * INTERVALS["15m"]] += 1
        return {
            "symbol": symbol, "side": "LONG" if side > 0 else "SHORT", "quantity": round(1000 / now["price"], 5),
            "leverage": 2, "stop": now["price"] - side * STOP_ATRS * atr, "confidence": 50,
            "target": now["price"] + side * 2 * STOP_ATRS * atr, "invalidation": "the release fails",
        }  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not FOLDER.is_dir(), reason=f"there are no recorded candles in {FOLDER}")
async def test_a_release_is_traded_once_by_an_entrant_that_counts_candles(tmp_path: Path) -> None:
    settings = Settings.load({"REPLAY_THINKING": "off"}, None, demo=True)
    candles = write_part(tmp_path / "candles", FOLDER, START - timedelta(days=2), START + SPAN)
    source = ReplaySource(candles, ("BTC", "ETH", "SOL"), speed=0, seed=0, start=START, end=START + SPAN)
    await source.open()
    market = await BacktestMarket.open(source, set(INTERVALS))
    entrants = [Entrant("plain", counts_candles=False), Entrant("counting", counts_candles=True)]
    models = [
        Model(
            id=each.name,
            name=each.name,
            variant=VariantId.APEX,
            provider=each.name,
            router_model_name="-",
            created_at=START,
        )
        for each in entrants
    ]
    sources = [WorkflowSource(*pair, settings, START + SPAN) for pair in zip(models, entrants, strict=True)]
    run = Backtest.fresh(
        market, settings, list(zip(models, sources, strict=True)), [TableJournal()], has_baselines=False
    )
    for _ in run.run():
        if run.engine.is_due:
            await run.engine.invoke()
    plain, counting = (each.entries for each in entrants)
    assert counting.keys() == plain.keys()
    assert len(plain) == 3
    assert set(counting.values()) == {1}
    assert sum(plain.values()) >= 5 * sum(counting.values())
