"""The modules of the page without a browser: patches, a connection that falls silent, and what is said of it."""

import json
import random
import shutil
import subprocess
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trader.api.dashboard import assets
from trader.api.state_patches import encode_patch
from trader.domain.money import format_decimal

SCRIPT = Path(__file__).with_name("modules.mjs")
PING_S, SILENT_S, REFUSED_S = 15, 19, 6


def entries(*cash: int, more: int = 0) -> list[dict[str, Any]]:
    """A state like that of positions: the cash of each model, who holds two positions, or none without cash."""
    return [
        {"modelId": str(number), "cash": each, "positions": [{"id": f"{side}", "pnl": each} for side in "ab" if each]}
        for number, each in enumerate(cash, start=more)
    ]


def held(rng: random.Random, marks: list[Decimal], cash: Decimal) -> list[dict[str, Any]]:
    """A state of positions in these marks as the service sends it; quantities are those of the seed."""
    entries = []
    for number in range(20):
        positions, total = [], Decimal(0)
        for symbol, mark in enumerate(marks):
            side, quantity = rng.choice([1, -1]), Decimal(rng.randint(1, 10**6)).scaleb(-rng.randint(0, 6))
            gain = side * (quantity * mark - Decimal(rng.randint(1, 10**9)) / 7)
            total += gain
            positions.append({
                "id": str(symbol), "symbol": str(symbol), "side": "LONG" if side > 0 else "SHORT",
                "quantity": format_decimal(quantity), "currentPrice": format_decimal(mark),
                "notional": format_decimal(quantity * mark), "unrealizedPnl": format_decimal(gain),
            })  # fmt: skip
        entries.append({
            "modelId": str(number), "positions": positions, "totalUnrealizedPnl": float(total),
            "availableCash": float(max(Decimal(0), cash + total)),
        })  # fmt: skip
    return entries


def revaluations() -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Pairs of states that differ in their marks, and in what follows from them."""
    rng = random.Random(7)
    for seed in range(10):
        cash = Decimal(rng.randint(0, 10**12)) / 3
        marks = [[Decimal(rng.randint(1, 10**9)).scaleb(-place) for place in (0, 2, 8)] for _ in range(2)]
        old, new = (held(random.Random(seed), each, cash) for each in marks)
        yield old, new


CHANGES = [
    *revaluations(),
    (entries(1, 2, 3), entries(4, 5, 6)),
    (entries(1, 2, 3), entries(1, 2, 4)),
    (entries(1, 2, 3, 4), entries(5, 6, 7, 8, more=1)),
    (entries(1, 0, 3, 4), entries(2, 2, 0, 5)),
    (entries(), entries(1, 2)),
    ({"at": 1, "snapshots": entries(1, 2)}, {"at": 2, "snapshots": entries(3, 4)}),
]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    patches = [
        (old, msgspec.json.decode(encode_patch(msgspec.json.encode(old), msgspec.json.encode(new))))
        for old, new in CHANGES
    ]
    request = json.dumps({"folder": str(Path(assets.__file__).with_name("static")), "patches": patches})
    command = ["node", "--experimental-default-type=module", "--no-warnings", str(SCRIPT)]
    done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_the_page_applies_the_patches_of_the_service(seen: dict[str, Any]) -> None:
    assert seen["applied"] == [new for _, new in CHANGES]


def test_of_many_models_the_steps_of_runs_are_not_listened_to_all_the_time(seen: dict[str, Any]) -> None:
    assert set(seen["few"]) - set(seen["many"]) == {"workflow"}
    assert set(seen["many"]) == {"positions", "trades", "conversations", "portfolio"}


def test_a_stalled_server_is_named_within_twenty_seconds_and_a_full_stream_told_from_a_lost_one(
    seen: dict[str, Any],
) -> None:
    lost_s = PING_S + SILENT_S
    assert seen["states"] == [[0, "open"], [1000 * lost_s, "lost"], [1000 * (lost_s + REFUSED_S), "refused"]]
    assert seen["connections"] == 2, "it was tried again by itself"
    [lost], [full], [down] = seen["lost"], seen["full"], seen["down"]
    assert lost.startswith("bad: The connection to the service is lost. Nothing was received yet")
    assert down == lost
    assert full.startswith("warn: The service answers, and takes no more live streams now")


def test_a_figure_that_rounds_to_nothing_has_no_sign(seen: dict[str, Any]) -> None:
    nothing = ["0.00", "0.00\u00a0%"]
    assert seen["figures"] == ["−1.50", "−1.50\u00a0%", *nothing, *nothing, "2.00", "+2.00\u00a0%", "–", "–"]
