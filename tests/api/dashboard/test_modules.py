"""The modules of the page without a browser: new records, a silent connection, and the messages about it."""

import csv
import io
import json
import shutil
import subprocess
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.records import HOUR, START, id_of, make_account, make_position

from trader.api.dashboard import assets
from trader.api.schemas.common import ENCODER
from trader.api.schemas.positions import positions_of
from trader.api.schemas.trades import trade_details_of
from trader.exchange.domain.account import Position, Trade
from trader.exchange.domain.orders import Cause, ExitPlan, Side
from trader.exchange.sql.trades import WholeTrade
from trader.market.domain.markets import MARKETS

SCRIPT = Path(__file__).with_name("modules.mjs")
PING_S, SILENT_S, REFUSED_S = 15, 19, 6


def entries(*ids: int) -> list[dict[str, Any]]:
    return [{"id": str(number), "timestamp": f"2026-03-04T00:{number:02}:00.000Z"} for number in ids]


MARK = Decimal(51_000)


def held(side: Side, stop: int | None = None, leverage: int | None = None) -> Position:
    position = make_position(quantity="0.3", entry="50000")
    return msgspec.structs.replace(
        position,
        side=side,
        margin=position.entry_notional / (leverage or 1),
        leveraged=leverage is not None,
        exit_plan=ExitPlan(stop=None if stop is None else Decimal(stop)),
    )


def closed(position: Position, exit_price: str) -> Trade:
    exit_notional = position.quantity * Decimal(exit_price)
    return Trade(
        **msgspec.structs.asdict(position) | {"fees": Decimal("9.75"), "funding": Decimal("-1.5")},
        account_id="ax",
        run_id=id_of("run", "ax", 1),
        parent_id=None,
        exit_notional=exit_notional,
        gross_pnl=(exit_notional - position.entry_notional) * position.side.direction,
        liquidation_fees=Decimal(0),
        close_reason=Cause.ORDER,
        closed_at=START + HOUR,
    )


POSITIONS = [held(Side.LONG, 49_000, 3), held(Side.LONG, 50_500), held(Side.SHORT, 51_500, 7), held(Side.SHORT)]
"""With a stop on either side of the entry or without one, with a leverage and without one."""

TRADES = [closed(position, price) for position in POSITIONS for price in ("48888.5", "51234.5")]


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    lists = [(entries(3, 1), entries(4, 2)), (entries(2, 1), entries(2))]
    request = json.dumps({"folder": str(Path(assets.__file__).with_name("static")), "lists": lists, **traded()})
    command = ["node", "--experimental-default-type=module", "--no-warnings", str(SCRIPT)]
    done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def traded() -> dict[str, Any]:
    """Return the positions and trades as the page receives them."""
    accounts = [make_account("ax", positions={position.symbol: position}) for position in POSITIONS]
    positions = positions_of(accounts, {"BTC": MARK}, MARKETS, {})
    trades = [trade_details_of(WholeTrade("ax", trade, [], None, None), None, None) for trade in TRADES]
    shown: dict[str, Any] = json.loads(ENCODER.encode({"positions": positions, "trades": trades}))
    return shown


def test_the_figures_of_the_page_are_those_of_the_books(seen: dict[str, Any]) -> None:
    for position, (notional, margin, gain, to_stop) in zip(POSITIONS, seen["positions"], strict=True):
        assert notional == pytest.approx(float(position.entry_notional))
        assert margin == pytest.approx(float(position.margin))
        assert gain == pytest.approx(float(100 * position.unrealized(MARK) / position.entry_notional))
        stop = position.exit_plan.stop
        lost = None if stop is None else position.unrealized(MARK) - position.unrealized(stop)
        assert to_stop == (None if lost is None else pytest.approx(float(100 * lost / position.notional(MARK))))
    for trade, (notional, gain, move, multiple) in zip(TRADES, seen["trades"], strict=True):
        assert notional == pytest.approx(float(trade.entry_notional))
        assert gain == pytest.approx(float(100 * trade.net_pnl / trade.entry_notional))
        assert move == pytest.approx(float(100 * trade.gross_pnl / trade.entry_notional))
        assert multiple == (None if trade.risk is None else pytest.approx(float(trade.gross_pnl / trade.risk)))
    assert {trade.risk is None for trade in TRADES} == {True, False}


def test_the_page_puts_new_records_in_their_places(seen: dict[str, Any]) -> None:
    assert seen["merged"] == [["4", "3", "2", "1"], ["2", "1"]]


def test_with_many_models_the_page_follows_steps_only_on_demand(seen: dict[str, Any]) -> None:
    assert set(seen["few"]) - set(seen["many"]) == {"workflow"}
    assert set(seen["many"]) == {"positions", "trades", "conversations", "portfolio"}


def test_the_page_reports_a_stalled_server_within_twenty_seconds_and_distinguishes_a_full_stream_from_a_lost_one(
    seen: dict[str, Any],
) -> None:
    lost_s = PING_S + SILENT_S
    assert seen["states"] == [[0, "open"], [1000 * lost_s, "lost"], [1000 * (lost_s + REFUSED_S), "refused"]]
    assert seen["connections"] == 2, "it was retried automatically"
    (state, lost), (full_state, full), (_, down) = seen["lost"], seen["full"], seen["down"]
    assert (state, full_state) == ("bad disconnected", "warn no stream")
    assert lost.startswith("bad: The connection to the service is lost. Nothing was received yet")
    assert down == lost
    assert full.startswith("warn: The service answers but accepts no more live streams")


def test_one_state_is_described_in_a_word_and_in_sentences(seen: dict[str, Any]) -> None:
    assert seen["fine"] == [" live"]
    assert seen["starting"] == ["warn connecting"]
    assert seen["stale"][0] == "warn stale prices"
    assert seen["stale"][1].startswith("warn: Prices are stale")
    assert [text.partition(" ")[0] for text in seen["worst"][1:]] == ["bad:", "warn:"], "the worst first"
    assert seen["worst"][:2] == ["bad unhealthy", "bad: The service is unhealthy: no price; It is locked."]
    assert seen["warned"] == ["warn live", "warn: No model is active"]


def test_one_wide_interval_leaves_the_others_readable(seen: dict[str, Any]) -> None:
    assert seen["scales"] == [[-6, 18], [-5, 6], [0, 0]]


def test_tables_sort_names_as_people_do_and_are_saved_as_they_are(seen: dict[str, Any]) -> None:
    assert seen["names"] == [None, "Ada", "model 2", "Model 10"]
    rows = list(csv.reader(io.StringIO(seen["csv"])))
    assert rows == [
        ["Name", "Low", "High"],
        ['GPT-5 "mini"', "-1.25", "0.5"],
        ["'=1+1", "-3.5", "'-3.5+cmd"],
        ["'＝1", "+1e-7", "-Infinity"],
    ]


def test_a_change_of_the_lead_is_one_that_lasts(seen: dict[str, Any]) -> None:
    assert seen["leads"] == [["1970-01-01T00:00:04.000Z", "b", "takes the lead from \u2068A\u2069"]]


def test_a_verdict_says_whether_its_p_value_is_corrected(seen: dict[str, Any]) -> None:
    assert seen["sentences"] == ["Better, p 0.012 after correction.", "Better, p 0.012."], "the primary one is not"
    alone, first = seen["summaries"]
    assert "Only \u2068A\u2069 has a rank" in alone
    assert "distinguishable" not in alone, "there is none to distinguish it from"
    assert "It is distinguishable from every other." in first


def test_a_figure_that_rounds_to_nothing_has_no_sign(seen: dict[str, Any]) -> None:
    nothing = ["0.00", "0.00\u00a0%"]
    assert seen["figures"] == ["−1.50", "−1.50\u00a0%", *nothing, *nothing, "2.00", "+2.00\u00a0%", "–", "–"]
