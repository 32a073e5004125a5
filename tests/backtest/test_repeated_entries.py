"""Scripted entrants that read the prompt as a model does: what it says of candles and trades ends repeated entries."""

from collections import Counter
from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.candles import FOLDER, write_part
from support.prompts import data_of

from trader.agents.domain.conversation import ModelAnswer, ToolRequest, Turn
from trader.agents.domain.models import Model
from trader.agents.domain.prompt import INDICATORS_SHOWN, json_text, view_data
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
        places = range(3 if turn.number == 1 else 0)
        data = data_of(turn.messages[1]["content"])
        orders = [order for order in (self.order(place, data, *lean_figures(place, data)) for place in places) if order]
        objects = orjson.loads(json_text(view_data(turn.view)))
        same = [self.order(place, objects, *object_figures(place, objects)) for place in places]
        assert [figures_of(order) for order in same if order] == [pytest.approx(figures_of(each)) for each in orders]
        self.entries.update(order.pop("release") for order in orders)
        calls = [("createPosition", order) for order in orders] or [("holding", {"reason": "nothing new"})]
        requests = (ToolRequest(f"{n}", name, orjson.dumps(given).decode()) for n, (name, given) in enumerate(calls))
        return ModelAnswer(text=None, calls=tuple(requests), message={"role": "assistant"}, model="scripted")

    def order(
        self, place: int, data: dict[str, Any], figures: list[Any], vwap: float | None, closes_at: str
    ) -> dict[str, Any] | None:
        symbol, (is_on, released, momentum, atr) = list(data["markets"])[place], figures
        now = data["now"][symbol]
        if None in (released, momentum, atr, vwap) or is_on or released > 5:
            return None
        side = 1 if momentum > 0 else -1
        is_held = symbol in (row[0] for row in data.get("positions", [])[1:])
        last = now.get("lastAction")
        is_spent = self.counts_candles and last is not None and last["candlesAgo"] <= released
        if is_held or is_spent or (now["price"] - vwap) * side <= 0:
            return None
        candle = datetime.fromisoformat(closes_at) - INTERVALS["15m"]
        return {
            "release": (symbol, candle - released * INTERVALS["15m"]),
            "symbol": symbol, "side": "LONG" if side > 0 else "SHORT", "quantity": round(1000 / now["price"], 5),
            "leverage": 2, "stop": now["price"] - side * STOP_ATRS * atr, "confidence": 50,
            "target": now["price"] + side * 2 * STOP_ATRS * atr, "invalidation": "the release fails",
        }  # fmt: skip


NAMES = "squeezeOn", "squeezeReleased", "momentum", "atr"


def lean_figures(place: int, data: dict[str, Any]) -> tuple[list[Any], float | None, str]:
    """Return the last indicators, the VWAP and the next close, as a prompt has them."""
    names, *rows = data["15m"]["indicators"]
    row = dict(zip(names, rows[INDICATORS_SHOWN * (place + 1) - 1], strict=True))
    closes = {interval: at for interval, at, *_ in data["candleCloses"][1:]}
    return [row[name] for name in NAMES], list(data["now"].values())[place]["vwap"], closes["15m"]


def object_figures(place: int, data: dict[str, Any]) -> tuple[list[Any], float | None, str]:
    """Return the same as `lean_figures`, from the objects that external agents see."""
    figures = [data["15m"]["indicators"][name][place][-1] for name in NAMES]
    return figures, data["session"]["vwap"][place][-1], data["candleCloses"]["15m"]["next"]


def figures_of(order: dict[str, Any]) -> dict[str, Any]:
    """Return what an order is about, without stop and target, which have the three digits of the prompt's ATR."""
    return {name: order[name] for name in ("quantity", "leverage", "confidence")} | {
        f"{order['symbol']} {order['side']}": 1
    }


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
