"""The prompt: figures in few digits, tables that grow at the end, and everything that changes every minute last."""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rs_bpe.bpe import openai

from trader.agents.domain.memory import DECISIONS_ADDED_MAX, DECISIONS_SHOWN, LINE_MAX, REFUSAL_MAX, REFUSALS_SHOWN
from trader.agents.domain.prompt import (
    CONTEXT_ROWS_MIN,
    GLOSSARY,
    INDICATOR_NAMES,
    INDICATORS_SHOWN,
    QUESTION,
    ROWS_MAX,
    ROWS_MIN,
    cadence_text,
    json_text,
    opening_messages,
    relative_volumes,
    rules_text,
    view_data,
)
from trader.agents.domain.rules.sizing import Entry
from trader.agents.domain.tools import NOTE_MAX, tool_schemas
from trader.agents.domain.view import (
    SERIES_SHOWN,
    LastAction,
    Memory,
    ObservedAccount,
    ObservedMarket,
    ObservedOrder,
    ObservedPosition,
    ObservedStats,
    ObservedTrade,
    PastDecision,
    Supplementary,
    VariantLimits,
    View,
)
from trader.agents.variants import VARIANTS
from trader.core.clock import floor_time
from trader.core.variant_id import VariantId
from trader.exchange.domain.orders import ExitPlan, OrderSide, PlanTarget, Side
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import INTERVALS, Candle, Interval

NOW = datetime(2025, 1, 2, 12, 0, 0, 250_000, tzinfo=UTC)
D = Decimal

ACCOUNT = ObservedAccount(
    initial_capital=D("1E+4"), equity=D("10012.3456789012345678"), cash=D(10_000), available_cash=D("9012.5"),
    margin=D(1_000), exposure=D(9_400), day_opening_equity=D("1.0E+4"), peak_equity=D(10_100),
    drawdown_percent=D("0.87"), day_loss_percent=D(0), taker_fee_rate=D("0.0005"),
)  # fmt: skip
POSITION = ObservedPosition(
    symbol="BTC", side=Side.LONG, quantity=D("0.10000"), entry_price=D(94_000), mark=D("94100.50"),
    notional=D("9410.05"), margin=D(940), leverage=D(10), unrealized=D("10.05"), fees=D("4.7"), funding=D("-0.0118"),
    risk=D(100), liquidation_price=None, exit_plan=ExitPlan(stop=D(93_000), time_exit=NOW), confidence=D(55),
    opened_at=NOW,
)  # fmt: skip
TARGETED = replace(
    POSITION.exit_plan, trailing_distance=D(500),
    targets=(PlanTarget(price=D(96_000), fraction=D("0.5"), quantity=D("0.05")),),
)  # fmt: skip
TRADE = ObservedTrade(
    symbol="ETH", side=Side.SHORT, quantity=D(1), entry_price=D(3_300), exit_price=D(3_200), net_pnl=D("96.75"),
    fees=D("3.25"), funding=D(0), close_reason="target", confidence=None, opened_at=NOW, closed_at=NOW,
)  # fmt: skip
MARKET = ObservedMarket(
    symbol="BTC", quoted_at=NOW, stale=False, price=D("94100.50"), bid=D(94_100), ask=D(94_101), spread=D(1),
    funding_rate=D("0.0000125"), tick=D("0.1"), lot=D("0.00001"), min_notional=D(10), leverage_max=40,
    candles={"15m": (Candle(NOW, 94_000.123456789, 1.0, 2.0, 3.0, 0.000012345678912),)},
    indicators={"15m": Indicators(close=94_100.5)},
    last_action=LastAction(action="createPosition", side=Side.LONG, cycles_ago=2),
)  # fmt: skip
ORDER = ObservedOrder(
    id=UUID(int=7), client_order_id="grid-1", symbol="BTC", side=OrderSide.BUY, quantity=D(1), remaining=D(1),
    limit_price=D(93_500), reduce_only=False, created_at=NOW,
)  # fmt: skip
SUPPLEMENTARY = Supplementary(source="taapi.io", venue="binance", interval="1h", fetched_at=NOW)
VIEW = View(
    at=NOW, account=ACCOUNT, positions=(POSITION,), trades=(TRADE,), stats=ObservedStats(trade_count=1),
    markets={"BTC": MARKET},
)  # fmt: skip


def shown(view: View = VIEW) -> tuple[str, dict[str, Any]]:
    text = opening_messages("Be calm.", VariantLimits(leverage_max=7), view, is_lean=False)[1]["content"]
    return text, msgspec.json.decode(text)


def view_text(view: View) -> str:
    return json_text(view_data(view))


def read(view: View, entries: Sequence[Entry] = ()) -> dict[str, Any]:
    """Return what a model reads in the lean form."""
    text = opening_messages("Look at `entries`.", VariantLimits(leverage_max=7), view, entries)[1]["content"]
    assert text.endswith(f"\n\n{QUESTION}")
    shown_data: dict[str, Any] = msgspec.json.decode(text.removesuffix(QUESTION))
    return shown_data


def keys_of(value: Any) -> Iterator[str]:
    """Yield the names of fields and columns, except the names of markets, intervals and indicators."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from () if key in {"BTC", *INTERVALS} else (key,)
            yield from () if key in ("indicators", "supplementary") else keys_of(each)
    elif isinstance(value, list):
        is_table = bool(value) and isinstance(value[0], list) and value[0][:1] == ["symbol"]
        yield from value[0] if is_table else ()
        for each in value[is_table:]:
            yield from keys_of(each)


def test_the_document_names_every_field_of_an_agents_view() -> None:
    market = replace(MARKET, supplementary=SUPPLEMENTARY, funding_history=(D("0.1"),), open_interest=D(1))
    view = replace(VIEW, orders=(ORDER,), markets={"BTC": market}, restriction="halted", data={"news": 1.0})
    text = (Path(__file__).parents[3] / "docs/agents.md").read_text(encoding="utf-8")
    section = text[text.index("### The view") : text.index("## Webhooks")]
    named = {name for code in re.findall(r"`([^`]+)`", section) for name in code.split(".")}
    keys = set(keys_of(shown(view)[1])) - {"news"}
    assert keys <= named
    assert len(keys) > 70


def rows_of(table: list[list[Any]]) -> list[dict[str, Any]]:
    names, *rows = table
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_amounts_have_at_most_eight_plain_digits() -> None:
    text, data = shown()
    assert '"initialCapital":10000,' in text
    assert '"equity":10012.346,' in text
    assert '"fundingRate":0.0000125' in text
    assert "E+" not in text
    assert "E-" not in text
    (position,) = rows_of(data["positions"])
    assert (position["quantity"], position["exitPlan"]["stop"], position["funding"]) == (0.1, 93_000, -0.0118)
    assert data["markets"]["BTC"] == {**data["markets"]["BTC"], **data["now"]["BTC"]}, "as strategies name them"
    assert data["now"]["BTC"]["lastAction"] == {
        "action": "createPosition", "side": "LONG", "cyclesAgo": 2, "candlesAgo": 1,
    }  # fmt: skip


def test_all_times_have_the_same_format() -> None:
    text, data = shown(replace(VIEW, orders=(ORDER,)))
    (trade,), (position,) = rows_of(data["trades"]), rows_of(data["positions"])
    times = [data["at"], trade["openedAt"], trade["closedAt"], position["openedAt"], position["exitPlan"]["timeExit"]]
    assert {*times, data["orders"][0]["createdAt"]} == {"2025-01-02T12:00Z"}
    assert data["15m"]["from"] == "2025-01-02T09:00Z"
    assert set(re.findall(r"20\d\d-[^\"]*", text)) == {f"2025-01-02T{time}Z" for time in ("12:00", "12:15", "09:00")}


def test_candles_are_rows_one_interval_apart_with_null_for_missing_ones() -> None:
    candle = MARKET.candles["15m"][0]
    later = replace(MARKET, candles={"15m": (candle, candle._replace(open_time=NOW + timedelta(minutes=30)))})
    other = replace(MARKET, symbol="ETH", candles={"15m": ()}, indicators={"15m": Indicators()})
    _, data = shown(replace(VIEW, at=NOW + timedelta(minutes=45), markets={"BTC": later, "ETH": other}))
    values = [94_000.1, 1, 2, 3, 0.0000123]
    assert data["15m"]["from"] == "2025-01-02T09:45Z"
    assert data["15m"]["candles"] == [*[[None, None]] * 9, [values, None], [None, None], [values, None]]


def test_named_indicators_are_series_at_the_decision_interval() -> None:
    past = [Indicators(adx=20.0, rsi=40.0, vwap=7.0), Indicators(adx=21.0, rsi=41.0), Indicators(adx=22.123456)]
    history = {"15m": past, "5m": past}
    both = {"15m": past[-1], "5m": past[-1]}
    market = replace(MARKET, candles={"15m": (), "5m": ()}, indicators=both, indicator_history=history)
    view = replace(VIEW, markets={"BTC": market})
    limits = VariantLimits(leverage_max=7)
    text = opening_messages("Trade `adx` over `vwap`.", limits, view, is_lean=False)[1]["content"]
    data = msgspec.json.decode(text)
    unknown = {"relativeVolume": [[None] * SERIES_SHOWN]}
    assert data["15m"]["indicators"] == {"adx": [[20, 21, 22.1235]], **unknown}
    assert data["5m"]["indicators"] == {"adx": [22.1235], "relativeVolume": [None]}
    assert data["session"] == {"vwap": [[7, None, None]]}
    _, data = shown(view)
    assert set(data["15m"]["indicators"]) | set(data["session"]) == {*INDICATOR_NAMES, *unknown}


@given(st.integers(1, 60), st.sampled_from([1, 5]), st.integers(0, 500))
def test_the_view_shows_at_least_twenty_decisions_and_keeps_the_first_for_a_while(
    count: int, every: int, start: int
) -> None:
    def lines(newest: int) -> list[str]:
        moments = [NOW + n * timedelta(minutes=every) for n in range(start, start + newest)]
        past = [PastDecision(at=at, text="holding") for at in moments][::-1][: DECISIONS_SHOWN + DECISIONS_ADDED_MAX]
        view = replace(VIEW, cadence=timedelta(minutes=every), memory=Memory(decisions=tuple(past)))
        shown_lines: list[str] = msgspec.json.decode(view_text(view))["decisions"]
        return shown_lines

    runs = [lines(count + later) for later in range(5)]
    for later, each in enumerate(runs):
        assert min(count + later, DECISIONS_SHOWN) <= len(each) < DECISIONS_SHOWN + DECISIONS_ADDED_MAX
    assert sum(before[0] != after[0] for before, after in pairwise(runs)) <= 1


def test_every_field_of_the_view_is_shown() -> None:
    view = replace(
        VIEW,
        markets={
            "BTC": replace(
                MARKET,
                open_interest=D(5),
                supplementary=SUPPLEMENTARY,
                change_since_look_percent=0.1,
                book_imbalance=0.5,
                funding_history=(D("0.0001"),),
            ),
        },
        positions=(replace(POSITION, exit_plan=TARGETED),),
        orders=(ORDER,),
        memory=Memory(note="mind the gap", decisions=(PastDecision(at=NOW, text="holding: flat"),), refused=("no",)),
    )
    text, data = shown(view)
    named = set(re.findall(r'"(\w+)"', text))
    for struct in (
        ObservedAccount, ObservedPosition, ObservedStats, ObservedMarket, ObservedOrder, LastAction, Indicators,
        Supplementary, ExitPlan,
    ):  # fmt: skip
        missing = {field.encode_name for field in msgspec.structs.fields(struct)} - named - NAMED_OTHERWISE
        assert not missing, struct
    assert data["decisions"] == ["2025-01-02T12:00Z holding: flat"]
    assert (data["note"], data["refused"]) == ("mind the gap", ["no"])
    assert data["orders"][0]["limitPrice"] == 93_500
    assert data["now"]["BTC"]["openInterest"] == 5


NAMED_OTHERWISE = {"symbol", "quotedAt", "candles", "indicators", "indicatorHistory", "close"}
"""Markets are named by their keys, `stale` says what the time of the quote is for, and an interval has its tables."""


@given(minutes=st.integers(0, 10_000))
def test_a_minute_later_only_the_end_of_the_prompt_differs(minutes: int) -> None:
    """Unless a candle has closed: then the part of its interval differs."""
    before, after = (view_text(view_at(NOW + timedelta(minutes=minutes + later))) for later in (0, 1))
    has_closed = (NOW + timedelta(minutes=minutes + 1)).minute % 5 == 0
    kept = next(n for n, (pair, other) in enumerate(zip(before, after, strict=False)) if pair != other)
    assert has_closed or kept > before.index('"at":')
    for text in (before, after):
        for interval, least in (("5m", ROWS_MIN), ("1h", CONTEXT_ROWS_MIN)):
            rows = len(msgspec.json.decode(text)[interval]["candles"])
            assert rows == least


@given(minutes=st.integers(0, 10_000), every=st.sampled_from([1, 5, 15, 60, 90, 240]))
def test_the_candles_reach_back_to_the_last_look_and_say_when_the_next_one_closes(minutes: int, every: int) -> None:
    at = NOW + timedelta(minutes=minutes)
    looked_at = at - timedelta(minutes=every)
    data = msgspec.json.decode(
        view_text(replace(view_at(at), cadence=timedelta(minutes=every), memory=Memory(looked_at=looked_at)))
    )
    for interval in ("5m", "1h"):
        span, closes = INTERVALS[interval], data["candleCloses"][interval]
        ends = [datetime.fromisoformat(data[interval]["from"]) + n * span for n in range(1, 1 + ROWS_MAX + 4)]
        ends = ends[: len(data[interval]["candles"])]
        new = [end for end in ends if looked_at < end <= at]
        assert closes["closed"] == len([1 for n in range(1, 241) if looked_at < floor_time(at, span) - (n - 1) * span])
        assert len(new) == min(closes["closed"], len(ends))
        assert datetime.fromisoformat(closes["next"]) == ends[-1] + span > at


def test_a_cycle_without_a_new_candle_says_so_and_what_has_changed() -> None:
    """A model asked every minute about 15-minute candles: one has closed since its trade, and none since it looked."""
    at = datetime(2025, 1, 2, 12, 17, tzinfo=UTC)
    market = replace(
        MARKET,
        change_since_look_percent=-0.12,
        last_action=LastAction(action="createPosition", side=Side.LONG, cycles_ago=3),
    )
    view = replace(VIEW, at=at, markets={"BTC": market}, memory=Memory(looked_at=at - timedelta(minutes=1)))
    _, data = shown(view)
    assert (data["lookedAt"], data["candleCloses"]) == (
        "2025-01-02T12:16Z",
        {"15m": {"next": "2025-01-02T12:30Z", "closed": 0}},
    )
    assert data["now"]["BTC"]["changeSinceLookPercent"] == -0.12
    assert data["now"]["BTC"]["lastAction"]["candlesAgo"] == 1
    _, first = shown(replace(view, markets={"BTC": replace(MARKET, last_action=None)}, memory=Memory()))
    assert (first["lookedAt"], first["candleCloses"]["15m"]["closed"], first["now"]["BTC"]["lastAction"]) == (
        None,
        None,
        None,
    )


def test_figures_without_a_source_are_left_out_and_never_zero() -> None:
    _, data = shown()
    assert not {"openInterest", "bookImbalance", "changeSinceLookPercent", "supplementary"} & data["now"]["BTC"].keys()
    assert "fundingHistory" not in data
    assert data["15m"]["indicators"]["relativeVolume"] == [[None] * SERIES_SHOWN]
    known = replace(MARKET, funding_history=(D("0.00001"), D("-0.00002")), book_imbalance=-0.25, open_interest=D(5))
    _, data = shown(replace(VIEW, markets={"BTC": known, "ETH": replace(MARKET, symbol="ETH")}))
    assert data["fundingHistory"] == {"BTC": [0.00001, -0.00002]}
    assert (data["now"]["BTC"]["bookImbalance"], "bookImbalance" in data["now"]["ETH"]) == (-0.25, False)


def test_a_volume_is_compared_with_the_average_before_it() -> None:
    def of(*volumes: float) -> list[Candle]:
        return [Candle(NOW + n * timedelta(minutes=15), 1, 1, 1, 1, volume) for n, volume in enumerate(volumes)]

    assert relative_volumes(of(*[10.0] * 20, 25.0), 2) == [None, 2.5]
    assert relative_volumes(of(*[0.0] * 22), 2) == [None, None], "unknown, not 0"
    assert relative_volumes(of(), 2) == [None, None]


def test_a_model_reads_candles_as_basis_points_and_indicators_in_three_digits() -> None:
    span = timedelta(minutes=15)
    candles = tuple(Candle(NOW - n * span, 1, 1_010 - n, 990, 1_001 - n, 5) for n in range(14, 0, -1))
    past = tuple(Indicators(adx=20.0, atr=1.23456 + n, kijun_sen=1_234.56) for n in range(SERIES_SHOWN))
    market = replace(MARKET, candles={"15m": candles}, indicators={"15m": past[-1]}, indicator_history={"15m": past})
    other = replace(MARKET, symbol="ETH", candles={"15m": ()}, indicators={"15m": Indicators()})
    data = read(replace(VIEW, markets={"BTC": market, "ETH": other}))
    own, none = data["15m"]["candles"]
    assert (data["15m"]["close"], len(own), none) == ([1000, None], ROWS_MIN, [None] * ROWS_MIN)
    assert own[-2:] == [[80, -100, -10], [90, -100, 0]]
    names, *rows = data["15m"]["indicators"]
    last = [dict(zip(names, row, strict=True)) for row in rows]
    assert [row["symbol"] for row in last] == ["BTC"] * INDICATORS_SHOWN + ["ETH"] * INDICATORS_SHOWN
    assert [row["atr"] for row in last] == [3.23, 4.23, 5.23, None, None, None]
    assert last[0]["kijunSen"] == 1_234.56, "an order may repeat this price"


def test_a_model_reads_tables_without_what_is_absent() -> None:
    entry = Entry("BTC", Side.LONG, 93_000.5, 0.1, 9.0, 0.05)
    data = read(VIEW, [entry])
    assert data["entries"] == [[*Entry._fields], ["BTC", "LONG", 93_000.5, 0.1, 9, 0.05]]
    assert data["markets"] == [["symbol", "tick", "lot", "minNotional", "leverageMax"], ["BTC", 0.1, 0.00001, 10, 40]]
    names, row = data["now"]
    assert row[names.index("price")] == 94_100.5
    assert not {"openInterest", "bid", "changeSinceLookPercent"} & {*names}
    assert not {"note", "orders", "refused", "session", "lookedAt", "decisions", "entries"} & read(VIEW).keys()
    assert data["stats"] == {"tradeCount": 1, "netPnl": 0}


@pytest.mark.parametrize("variant", VariantId)
def test_a_full_view_fits_into_6800_tokens_with_the_tools(variant: VariantId) -> None:
    """Three markets, each with a position and the maximum number of candles, five trades, a note and decisions."""
    count, made = openai.o200k_base().count, VARIANTS[variant]
    base, at = {"BTC": 106_521.3, "ETH": 3_368.25, "SOL": 253.591}, datetime(2025, 1, 3, 7, 59, tzinfo=UTC)
    markets = {symbol: market_of(symbol, price, made.intervals, at) for symbol, price in base.items()}
    said = "BTC: no range, ADX 27.1; ETH: range with ADX 15.2, but 3381.32 is 0.9 deviations from VWAP 3308.31; " * 2
    view = replace(
        VIEW,
        at=at,
        markets=markets,
        positions=tuple(
            replace(
                POSITION, symbol=symbol, entry_price=D(repr(price)), unrealized=D("-123.4567890123"), confidence=D(62),
                fees=D("4.70123456789"), liquidation_price=D("91234.56789012"),
                exit_plan=ExitPlan(stop=D(93_000), target=D(99_000), invalidation=said, time_exit=NOW),
            )
            for symbol, price in base.items()
        ),
        trades=(replace(TRADE, quantity=D("12.3456"), net_pnl=D("-96.7512345678"), fees=D("3.2512345678")),) * 5,
        memory=Memory(
            note=(said * 6)[:NOTE_MAX],
            decisions=(PastDecision(at=NOW, text=said[:LINE_MAX]),) * (DECISIONS_SHOWN + 3),
            refused=(said[: LINE_MAX + REFUSAL_MAX],) * REFUSALS_SHOWN,
        ),
    )  # fmt: skip
    messages = opening_messages(made.prompt, made.limits, view)
    tools = msgspec.json.encode(tool_schemas(tuple(view.markets))).decode()
    assert count("".join([tools, *(message["content"] for message in messages)])) <= 6_800


def market_of(symbol: str, price: float, intervals: Sequence[Interval], at: datetime) -> ObservedMarket:
    """A market with 24 candles and every indicator at each interval."""
    values: dict[str, Any] = dict.fromkeys(Indicators.__struct_fields__, price / 3.1)
    indicators = Indicators(**values)
    candles: dict[Interval, tuple[Candle, ...]] = {}
    for interval in intervals:
        span = INTERVALS[interval]
        opens = [floor_time(at, span) - n * span for n in range(24, 0, -1)]
        prices = [price * (1 + n % 19 / 997) for n in range(24)]
        candles[interval] = tuple(
            Candle(opened, each, each * 1.0012, each * 0.9987, each * 1.0003, 1_234.5 + each)
            for opened, each in zip(opens, prices, strict=True)
        )
    history = dict.fromkeys(intervals, (indicators,) * SERIES_SHOWN)
    return replace(
        MARKET, symbol=symbol, candles=candles, indicators=dict.fromkeys(intervals, indicators),
        indicator_history=history, change_24h_percent=-12.3456,
    )  # fmt: skip


def view_at(at: datetime) -> View:
    """A view with the candles closed at this time."""
    candles: dict[Interval, tuple[Candle, ...]] = {}
    for interval in ("5m", "1h"):
        span = INTERVALS[interval]
        opens = [floor_time(at, span) - n * span for n in range(24, 0, -1)]
        candles[interval] = tuple(Candle(opened, 100 + opened.minute, 200, 50, 100, 7) for opened in opens)
    indicators = {interval: Indicators(close=candles[interval][-1].close) for interval in candles}
    return replace(VIEW, at=at, markets={"BTC": replace(MARKET, candles=candles, indicators=indicators)})


def test_the_rules_state_the_limits_of_the_variant() -> None:
    limits = VariantLimits(leverage_max=7, position_notional_max=4, day_loss_max_percent=12, reversal_cycles=6)
    text = rules_text(limits)
    for part in ("at most 7", "at most 4 × equity", "`dayLossPercent` is 12 or more", "within 6 cycles"):
        assert part in text
    system = opening_messages("Be calm.\n", limits, replace(VIEW, cadence=timedelta(minutes=5)), is_lean=False)[0][
        "content"
    ]
    assert system.startswith(f"Be calm.\n\n{text}\n\n## The data\n\nJSON.")
    assert system.endswith(f"{GLOSSARY}\n\n{cadence_text(timedelta(minutes=5), '15m')}")
    assert "You are asked every 5 minutes." in system
    assert "So 3 of your cycles see the same `15m` candles" in system
    assert "candleCloses" not in cadence_text(timedelta(minutes=15), "15m"), "every cycle has a new candle"
