"""Rule agents by example: entries, reviews of positions, and cycles without a trade."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trader.agents.built_view import build_view
from trader.agents.domain.rules import apex, sovereign
from trader.agents.domain.rules.sizing import Signal, room_of, sized
from trader.agents.domain.tools import ClosePosition, CreatePosition, Decision, Holding, UpdateExitPlan
from trader.agents.domain.view import (
    LastAction,
    ObservedMarket,
    ObservedPosition,
    ObservedStats,
    ObservedTrade,
    View,
)
from trader.agents.variants import VARIANTS
from trader.core.money import ZERO
from trader.core.variant_id import VariantId
from trader.exchange.domain.orders import ExitPlan, Side
from trader.market.domain.indicators import Indicators
from trader.market.domain.markets import MARKETS, Interval

NOW = datetime(2025, 1, 8, 14, 7, 30, tzinfo=UTC)
PRICE = Decimal("100.05")

RELEASE = Indicators(
    close=100.0, atr=1.0, vwap=99.0, vwap_deviation=0.5, momentum=0.8, squeeze_on=False, squeeze_candles=12,
    squeeze_released=1, adx=22.0, rsi=60.0,
)  # fmt: skip
TREND = Indicators(close=100.0, atr=1.0, adx=35.0, plus_di=30.0, minus_di=10.0, kijun_sen=98.0)
RANGE = Indicators(close=100.0, atr=1.0, adx=15.0, rsi=45.0, vwap=104.0, vwap_deviation=1.5)


def market(indicators: Indicators | None, interval: Interval, **changes: Any) -> ObservedMarket:
    """SOL at 100.05 with a spread of two ticks."""
    rules = MARKETS["SOL"]
    fields: dict[str, Any] = {
        "symbol": "SOL", "quoted_at": NOW, "stale": False, "price": PRICE, "bid": PRICE - rules.tick,
        "ask": PRICE + rules.tick, "spread": 2 * rules.tick, "funding_rate": ZERO, "tick": rules.tick,
        "lot": rules.lot, "min_notional": rules.min_notional, "leverage_max": rules.leverage_max, "candles": {},
        "indicators": {} if indicators is None else {interval: indicators},
    }  # fmt: skip
    return ObservedMarket(**(fields | changes))


def view(*markets: ObservedMarket, positions: tuple[ObservedPosition, ...] = (), **changes: Any) -> View:
    """An agent's view of an account of 10,000. `changes` replace fields of it, its trades or statistics."""
    empty = build_view({}, at=NOW)
    seen = {name: changes.pop(name) for name in ("trades", "stats") if name in changes}
    listed = {shown.symbol: shown for shown in markets}
    return replace(empty, account=replace(empty.account, **changes), positions=positions, markets=listed, **seen)


def holding(side: Side = Side.LONG, stop: str | None = "97", **changes: Any) -> ObservedPosition:
    """10 SOL from 99, opened an hour ago."""
    entry, quantity = Decimal(99), Decimal(10)
    lost = ZERO if stop is None else (entry - Decimal(stop)) * side.direction
    fields: dict[str, Any] = {
        "symbol": "SOL", "side": side, "quantity": quantity, "entry_price": entry, "mark": PRICE,
        "notional": quantity * PRICE, "margin": quantity * entry / 2, "leverage": Decimal(2),
        "unrealized": quantity * (PRICE - entry) * side.direction, "fees": ZERO, "funding": ZERO,
        "risk": quantity * lost if lost > 0 else None, "liquidation_price": None,
        "exit_plan": ExitPlan(stop=None if stop is None else Decimal(stop)), "confidence": None,
        "opened_at": NOW - timedelta(hours=1),
    }  # fmt: skip
    return ObservedPosition(**(fields | changes))


def run(variant: VariantId, shown: View) -> tuple[list[Decision], str]:
    """The decisions of an agent before `holding`, and its reason."""
    definition = VARIANTS[variant]
    *decisions, last = definition.agent().decide(shown)
    assert isinstance(last, Holding)
    return decisions, last.reason


def entry(variant: VariantId, indicators: Indicators, **changes: Any) -> CreatePosition:
    interval = VARIANTS[variant].intervals[0]
    decisions, reason = run(variant, view(market(indicators, interval), **changes))
    assert len(decisions) == 1, reason
    assert isinstance(decisions[0], CreatePosition)
    return decisions[0]


def refused(variant: VariantId, indicators: Indicators, **changes: Any) -> str:
    interval = VARIANTS[variant].intervals[0]
    decisions, reason = run(variant, view(market(indicators, interval), **changes))
    assert decisions == []
    return reason


# Apex


def test_apex_trades_a_release_on_the_right_side_of_vwap() -> None:
    order = entry(VariantId.APEX, RELEASE)
    assert order.side is Side.LONG
    assert order.stop == 98.551  # the ask of 100.051 less 1.5 ATR
    assert order.target == 103.051
    assert order.time_exit == NOW + timedelta(hours=2)
    assert order.quantity == 133.333  # 2 % of equity over 1.5
    assert order.leverage == 6  # a tenth of the margin is lost 1.5 % away


@given(st.floats(0.2, 60.0))
def test_apex_derives_leverage_from_its_stop_and_size_from_its_risk(atr: float) -> None:
    order = entry(VariantId.APEX, replace(RELEASE, atr=atr))
    distance = 100.051 - order.stop
    assert order.leverage == min(max(0.1 * 100.051 // distance, 1), 10)
    assert order.leverage * distance <= 0.1 * 100.051 or order.leverage == 1
    assert order.quantity == pytest.approx(min(200 / distance, 0.98 * 5 * 10_000 / 100.051), abs=0.002)


@pytest.mark.parametrize("cash", ["10000", "900", "450"])
def test_a_margin_risk_raises_the_leverage_but_not_the_size(cash: str) -> None:
    shown, limits = view(market(RELEASE, "15m"), available_cash=Decimal(cash)), VARIANTS[VariantId.APEX].limits
    signal = Signal(side=Side.LONG, stop=98.0, invalidation="", confidence=50, risk=Decimal("0.005"), why="")
    lowest = sized(shown, limits, shown.markets["SOL"], signal, room_of(shown, limits))
    risked = replace(signal, margin_risk=Decimal("0.1"))
    result = sized(shown, limits, shown.markets["SOL"], risked, room_of(shown, limits))
    assert isinstance(lowest, CreatePosition)
    assert lowest.leverage == {"10000": 1, "900": 3, "450": 6}[cash]
    assert result == replace(lowest, leverage=max(lowest.leverage, 4.0))


def test_apex_goes_short_below_vwap() -> None:
    order = entry(VariantId.APEX, replace(RELEASE, vwap=101.0, momentum=-0.8))
    assert (order.side, order.stop, order.target) == (Side.SHORT, 101.549, 97.049)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vwap": 101.0}, "wrong side"),
        ({"squeeze_on": True, "squeeze_released": None}, "in a squeeze for 12 candles"),
        ({"squeeze_released": 6}, "ended 6 candles ago"),
        ({"squeeze_released": None, "squeeze_candles": None}, "no squeeze"),
        ({"atr": 0.05}, "too small for costs"),
        ({"atr": None}, "too little history for ATR"),
        ({"vwap": None}, "too little history for VWAP"),
        ({"momentum": None}, "too little history for momentum"),
        ({"squeeze_on": None}, "too little history for squeeze"),
    ],
)
def test_apex_waits(changes: dict[str, Any], reason: str) -> None:
    assert reason in refused(VariantId.APEX, replace(RELEASE, **changes))


def test_apex_bets_half_kelly_of_its_own_trades() -> None:
    assert apex.half_kelly(ObservedStats()) == Decimal("0.1")  # the prior: (0.52 − 0.48 / 1.5) / 2
    own = ObservedStats(trade_count=40, win_rate_percent=50.0, average_win=Decimal(22), average_loss=Decimal(20))
    assert apex.half_kelly(own) == pytest.approx(Decimal("0.0227"), abs=Decimal("0.0001"))
    assert apex.risk(own) == apex.RISK_MAX
    some = ObservedStats(trade_count=10, win_rate_percent=50.0, average_win=Decimal(10), average_loss=Decimal(20))
    assert apex.half_kelly(some) == pytest.approx(Decimal("0.01"), abs=Decimal("1e-9"))  # half prior: 51 %, 1:1
    assert apex.risk(some) == pytest.approx(Decimal("0.01"), abs=Decimal("1e-9"))


def test_apex_without_an_edge_takes_minimal_risk() -> None:
    losing = ObservedStats(trade_count=30, win_rate_percent=20.0, average_win=Decimal(10), average_loss=Decimal(10))
    assert apex.half_kelly(losing) == 0
    assert entry(VariantId.APEX, RELEASE, stats=losing).quantity == 16.666  # 0.25 % of equity over 1.5
    hopeless = ObservedStats(trade_count=30, win_rate_percent=0.0, average_loss=Decimal(10))
    assert apex.risk(hopeless) == apex.RISK_PROBE


# Trendsurfer


def test_trendsurfer_follows_the_stronger_line_with_its_stop_at_the_kijun() -> None:
    order = entry(VariantId.TRENDSURFER, TREND)
    assert (order.side, order.stop, order.target, order.time_exit) == (Side.LONG, 98.0, None, None)
    assert order.quantity == 48.756  # 1 % of equity over 2.051
    short = entry(VariantId.TRENDSURFER, replace(TREND, plus_di=10.0, minus_di=30.0, kijun_sen=102.0))
    assert (short.side, short.stop) == (Side.SHORT, 102.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"adx": 25.0}, "no trend, ADX 25.0"),
        ({"plus_di": 5.0}, "disagree"),
        ({"kijun_sen": 99.5}, "from the Kijun"),
        ({"kijun_sen": 90.0}, "from the Kijun"),
        ({"adx": None}, "too little history for ADX"),
        ({"kijun_sen": None}, "too little history for Kijun"),
        ({"atr": None}, "too little history for ATR"),
    ],
)
def test_trendsurfer_waits(changes: dict[str, Any], reason: str) -> None:
    assert reason in refused(VariantId.TRENDSURFER, replace(TREND, **changes))


@pytest.mark.parametrize(
    ("side", "stop", "kijun", "moved"),
    [
        (Side.LONG, "97", 98.0004, 98.0),
        (Side.LONG, None, 98.0, 98.0),
        (Side.LONG, "98.5", 98.0, None),
        (Side.LONG, "98", 98.0004, None),
        (Side.SHORT, "103", 102.0, 102.0),
        (Side.SHORT, "102", 102.5, None),
        (Side.LONG, "97", None, None),
    ],
)
def test_the_trailing_stop_only_ever_tightens(
    side: Side, stop: str | None, kijun: float | None, moved: float | None
) -> None:
    shown = view(market(replace(TREND, kijun_sen=kijun), "15m"), positions=(holding(side, stop),))
    decisions, _ = run(VariantId.TRENDSURFER, shown)
    assert decisions == ([] if moved is None else [UpdateExitPlan(symbol="SOL", stop=moved)])


@pytest.mark.parametrize(("side", "stop", "kijun"), [(Side.LONG, "97", 100.5), (Side.SHORT, "103", 100.0)])
def test_a_price_beyond_the_kijun_closes_the_position(side: Side, stop: str, kijun: float) -> None:
    shown = view(market(replace(TREND, kijun_sen=kijun), "15m"), positions=(holding(side, stop),))
    decisions, reason = run(VariantId.TRENDSURFER, shown)
    assert decisions == [ClosePosition(symbol="SOL")]
    assert "beyond the Kijun" in reason


# Contrarian


def test_contrarian_fades_toward_vwap() -> None:
    order = entry(VariantId.CONTRARIAN, RANGE)  # 2.6 deviations below
    assert (order.side, order.target, order.stop) == (Side.LONG, 104.0, 98.551)
    assert order.time_exit == NOW + timedelta(hours=6)
    assert order.quantity == 66.666
    by_rsi = entry(VariantId.CONTRARIAN, replace(RANGE, rsi=75.0, vwap=98.0, vwap_deviation=5.0))
    assert (by_rsi.side, by_rsi.target, by_rsi.stop) == (Side.SHORT, 98.0, 101.549)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"adx": 25.0}, "no range, ADX 25.0"),
        ({"vwap_deviation": 3.0}, "nothing to fade"),
        ({"vwap_deviation": 3.0, "rsi": 80.0}, "nothing to fade"),  # overbought below VWAP is not a fade toward it
        ({"vwap": 100.2, "vwap_deviation": 0.05}, "too small for costs"),
        ({"rsi": None}, "too little history for RSI"),
        ({"vwap_deviation": None}, "too little history for deviation"),
        ({"atr": None}, "too little history for ATR"),
    ],
)
def test_contrarian_waits(changes: dict[str, Any], reason: str) -> None:
    assert reason in refused(VariantId.CONTRARIAN, replace(RANGE, **changes))


# Sovereign


def test_sovereign_trades_each_regime_differently() -> None:
    trend = entry(VariantId.SOVEREIGN, TREND)
    assert (trend.side, trend.stop, trend.target) == (Side.LONG, 98.051, None)
    assert trend.quantity == 100.0  # 2 % of equity over 2 ATR
    fade = entry(VariantId.SOVEREIGN, RANGE)
    assert (fade.side, fade.stop, fade.target, fade.time_exit) == (Side.LONG, 98.051, 104.0, None)
    assert "between the regimes" in refused(VariantId.SOVEREIGN, replace(TREND, adx=22.0))
    assert "too little history for ADX" in refused(VariantId.SOVEREIGN, replace(TREND, adx=None))


@pytest.mark.parametrize(
    ("drawdown", "risk"),
    [("0", "0.02"), ("4.99", "0.02"), ("5", "0.01"), ("12", "0.005"), ("100", "0.0000000190734863")],
)
def test_sovereign_halves_its_risk_for_every_5_percent_of_drawdown(drawdown: str, risk: str) -> None:
    assert sovereign.risk(Decimal(drawdown)) == Decimal(risk)


@pytest.mark.parametrize(
    ("hours", "unrealized", "closed"), [(23, "5", False), (24, "19.99", True), (24, "20", False), (30, "-5", True)]
)
def test_sovereign_closes_positions_that_earned_less_than_1_r_in_24_hours(
    hours: int, unrealized: str, closed: bool
) -> None:
    held = holding(opened_at=NOW - timedelta(hours=hours), unrealized=Decimal(unrealized))
    assert held.risk == 20
    decisions, _ = run(VariantId.SOVEREIGN, view(market(TREND, "1h"), positions=(held,)))
    assert decisions == ([ClosePosition(symbol="SOL")] if closed else [])


# All of them

SIGNALS = {
    VariantId.APEX: RELEASE,
    VariantId.TRENDSURFER: TREND,
    VariantId.CONTRARIAN: RANGE,
    VariantId.SOVEREIGN: TREND,
}
every_variant = pytest.mark.parametrize("variant", VariantId)


def traded(closed_at: datetime) -> ObservedTrade:
    return ObservedTrade(
        symbol="SOL", side=Side.LONG, quantity=Decimal(1), entry_price=PRICE, exit_price=PRICE, net_pnl=ZERO, fees=ZERO,
        funding=ZERO, close_reason="stop", confidence=None, opened_at=closed_at, closed_at=closed_at,
    )  # fmt: skip


@every_variant
def test_a_held_market_is_not_entered_again(variant: VariantId) -> None:
    shown = view(market(SIGNALS[variant], VARIANTS[variant].intervals[0]), positions=(holding(stop="99.9"),))
    decisions, reason = run(variant, shown)
    assert decisions == []
    assert "LONG 10 from 99 at 100.05 (+10.50)" in reason


@every_variant
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"day_loss_percent": Decimal(10)}, "no new position before 00:00 UTC"),
        ({"equity": ZERO, "available_cash": ZERO}, "no equity left"),
        ({"available_cash": ZERO}, "below the minimum of 10"),
        ({"exposure": Decimal(1_000_000)}, "below the minimum of 10"),
    ],
)
def test_an_account_that_may_not_open_positions_opens_none(
    variant: VariantId, changes: dict[str, Any], reason: str
) -> None:
    assert reason in refused(variant, SIGNALS[variant], **changes)


@every_variant
def test_a_stale_price_is_not_acted_on(variant: VariantId) -> None:
    stale = market(SIGNALS[variant], VARIANTS[variant].intervals[0], stale=True)
    for positions in ((), (holding(opened_at=NOW - timedelta(days=2)),)):
        decisions, reason = run(variant, view(stale, positions=positions))
        assert decisions == []
        assert "too old to act on" in reason


@every_variant
def test_a_reversal_waits_for_its_cycles(variant: VariantId) -> None:
    interval = VARIANTS[variant].intervals[0]
    for side, cycles, allowed in ((Side.SHORT, 3, False), (Side.SHORT, 4, True), (Side.LONG, 1, True)):
        last = LastAction(action="closePosition", side=side, cycles_ago=cycles)
        decisions, reason = run(variant, view(market(SIGNALS[variant], interval, last_action=last)))
        assert bool(decisions) is allowed, reason


@every_variant
def test_after_an_exit_three_candles_must_close(variant: VariantId) -> None:
    interval = VARIANTS[variant].intervals[0]
    span = timedelta(hours=1) if interval == "1h" else timedelta(minutes=15)
    boundary = NOW - (NOW - datetime(2025, 1, 8, tzinfo=UTC)) % span
    entered = [
        bool(run(variant, view(market(SIGNALS[variant], interval), trades=(traded(closed_at),)))[0])
        for closed_at in (NOW, boundary - 2 * span, boundary - 2 * span - timedelta(milliseconds=1), NOW + 9 * span)
    ]
    assert entered == [False, False, True, True], "the last is the date of a clock that was ahead"


@every_variant
def test_without_indicators_or_markets_an_agent_holds(variant: VariantId) -> None:
    interval = VARIANTS[variant].intervals[0]
    assert run(variant, view(market(None, interval))) == ([], f"SOL: no {interval} indicators")
    assert run(variant, view()) == ([], "no market has a price")
    assert run(variant, view(positions=(holding(),))) == ([], "SOL: no price")
    decisions, reason = run(variant, view(market(Indicators(), interval)))
    assert decisions == []
    assert "too little history" in reason


def test_confidence_grows_with_the_signal() -> None:
    assert entry(VariantId.APEX, replace(RELEASE, squeeze_candles=20)).confidence > entry(
        VariantId.APEX, replace(RELEASE, squeeze_candles=3)
    ).confidence  # fmt: skip
    for variant in (VariantId.TRENDSURFER, VariantId.SOVEREIGN):
        assert entry(variant, replace(TREND, adx=45.0)).confidence > entry(variant, TREND).confidence
    assert (
        entry(VariantId.CONTRARIAN, replace(RANGE, rsi=15.0)).confidence > entry(VariantId.CONTRARIAN, RANGE).confidence
    )
