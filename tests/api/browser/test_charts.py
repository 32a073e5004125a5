"""Pictures of the charts: known data is drawn by the page's modules in a real browser, and its pixels are read back."""

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from support.chromium import chromium_program
from support.dashboard import on_page
from support.process import ServiceProcess

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="session")]

SCRIPT = Path(__file__).with_name("charts.mjs").read_text(encoding="utf-8")
GAIN, LOSS = "#07794f", "#bf2f12"
BARS = [(100, 130, 90, 120), (120, 125, 80, 95), (95, 140, 95, 140), (140, 150, 105, 110), (110, 112, 70, 75)]
"""Open, high, low and close."""

CANDLES: dict[str, Any] = {
    "interval": "1h",
    "times": [f"2026-03-04T{hour:02}:00:00.000Z" for hour in range(len(BARS))],
    **dict(zip(("open", "high", "low", "close"), map(list, zip(*BARS, strict=True)), strict=True)),
    "volume": [1, 2, None, 4, 5],
}
MARKERS: list[dict[str, Any]] = [
    {"color": "#aa00aa", "shape": "arrowUp", "position": "atPriceBottom", "at": 1, "price": 78},
    {"color": "#0000cc", "shape": "arrowDown", "position": "atPriceTop", "at": 3, "price": 152},
]
STOP = 85
CLOSE_TO = 1.5
"""Pixels: edges are drawn on whole ones."""


async def test_charts_show_their_data_in_place(service: ServiceProcess, tmp_path: Path) -> None:
    chromium_program()
    start_ms = 1772582400000
    markers = [
        {**marker, "id": str(number), "text": "", "at": start_ms + marker["at"] * 3_600_000}
        for number, marker in enumerate(MARKERS)
    ]
    data = {"candles": CANDLES, "markers": markers, "levels": [{"price": STOP, "title": "", "kind": "loss"}]}
    data["trade"] = trade_of(start_ms)
    async with on_page(tmp_path / "profile", service.url, "/#/system") as tab:
        await tab.evaluate("document.documentElement.dataset.theme = 'light'")
        seen = await tab.evaluate(f"{SCRIPT}({json.dumps(data)})")
        assert tab.problems == []
    check_candles(seen["market"])
    check_trade(seen["alone"])
    check_curves(seen)


def trade_of(start_ms: int) -> dict[str, Any]:
    """A trade of 40 hours within 240 hourly candles, which three trades' marks at its exit share."""
    prices = [100 + (hour % 7) for hour in range(240)]
    times = [start_ms + hour * 3_600_000 for hour in range(240)]
    entry, exit_ = times[100], times[140]
    hint = {"name": "Ada", "side": "long", "text": "closed at 104 by stop", "profit": -12.5}
    mark = {"id": "a", "price": 103, "shape": "circle", "position": "atPriceMiddle", "text": "", "hint": hint}
    return {
        "candles": {
            "interval": "1h",
            "times": [datetime.fromtimestamp(at / 1000, UTC).isoformat() for at in times],
            "open": prices,
            "high": [price + 2 for price in prices],
            "low": [price - 2 for price in prices],
            "close": [price + 1 for price in prices],
            "volume": [None] * 240,
        },
        "markers": [{**mark, "at": entry, "color": "#aa00aa"}, {**mark, "at": exit_, "color": "#0000cc"}],
        "levels": [
            {"price": 60, "title": "stop", "kind": "loss", "isPlan": True},
            {"price": 150, "title": "target", "kind": "gain", "isPlan": True},
        ],
        "time": {"from": entry, "to": exit_},
        "shade": "#e8eaf9",
    }


def check_trade(alone: dict[str, Any]) -> None:
    """On a phone the whole trade is in view, shaded, with its plan; the pointer tells of it; levels change color."""
    entry, exit_ = (sum(box["x"]) / 2 for box in alone["markers"])
    assert 10 < entry < exit_ < alone["width"] - 10
    assert alone["shade"]["x"] == pytest.approx([entry, exit_], abs=3)
    assert alone["shade"]["y"][1] - alone["shade"]["y"][0] > 0.9 * alone["height"]
    assert all(rows >= 1 for rows in alone["plan"]), "stop and target are on the scale"
    assert alone["hint"] == "Ada long closed at 104 by stop −12.50"
    assert alone["ohlc"].startswith("O ")
    assert alone["dark"] >= 1
    assert alone["labels"] > 10
    assert alone["cut"] >= 0, "no time is cut"
    assert alone["crowd"], "marks of one candle are counted"


def check_candles(market: dict[str, Any]) -> None:
    """Every body, wick, marker and level is at its price, on one scale, and in its color."""
    drawn = market["candles"]
    assert [candle["color"] for candle in drawn] == [GAIN if bar[3] >= bar[0] else LOSS for bar in BARS]
    (top_y, bottom_y), (_, top, bottom, _) = drawn[0]["wick"], BARS[0]

    def y_of(price: float) -> float:
        return float(top_y + (top - price) * (bottom_y - top_y) / (top - bottom))

    for candle, (opened, high, low, close) in zip(drawn, BARS, strict=True):
        expected = [y_of(price) for price in (max(opened, close), min(opened, close), high, low)]
        assert [*candle["body"], *candle["wick"]] == pytest.approx(expected, abs=CLOSE_TO)
    centers = [sum(candle["x"]) / 2 for candle in drawn]
    steps = [later - earlier for earlier, later in itertools.pairwise(centers)]
    assert steps == pytest.approx([steps[0]] * len(steps), abs=CLOSE_TO)
    for box, marker in zip(market["markers"], MARKERS, strict=True):
        assert sum(box["x"]) / 2 == pytest.approx(centers[marker["at"]], abs=CLOSE_TO)
        is_below = marker["position"] == "atPriceBottom"
        tip, far = box["y"] if is_below else box["y"][::-1]
        assert abs(tip - y_of(marker["price"])) < abs(far - y_of(marker["price"])) < 40
        assert (far > tip) is is_below
    assert any(abs(row - y_of(STOP)) <= CLOSE_TO for row in market["dashes"])


def check_curves(seen: dict[str, Any]) -> None:
    """Lines run between their values, their badges are at their last values, and a dot links to its trade."""
    (rising_early, falling_early), (rising_late, falling_late) = seen["lines"]
    assert rising_early == pytest.approx(falling_late, abs=CLOSE_TO)
    assert rising_late == pytest.approx(falling_early, abs=CLOSE_TO)
    assert rising_early + rising_late == pytest.approx(seen["height"], abs=2 * CLOSE_TO)
    span = 2 * (rising_early - rising_late)
    assert 0.8 * seen["height"] < span < seen["height"]
    middle = (rising_early + rising_late) / 2
    assert seen["badges"] == pytest.approx([middle - span / 2, middle + span / 2], abs=2 * CLOSE_TO)
    assert seen["dot"] == GAIN
    assert seen["presses"] == [[False, "#/system"], [True, "#/positions"]]
