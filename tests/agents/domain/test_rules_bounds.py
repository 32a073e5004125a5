"""Rule agents on random markets and accounts: every decision is within all bounds and passes the guard."""

import csv
import gzip
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import islice
from random import Random
from uuid import UUID

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.books import DEFAULT_MARKETS
from support.candles import FOLDER

from trader.agents.domain.guard import GuardRefusal, RiskContext, judge
from trader.agents.domain.models import CYCLE
from trader.agents.domain.observation import RunHistory
from trader.agents.domain.rules import apex, contrarian, sovereign, trendsurfer
from trader.agents.domain.rules.common import Held
from trader.agents.domain.tools import (
    TOOL_NAMES,
    TOOLS,
    ClosePosition,
    CreatePosition,
    Decision,
    Holding,
    UpdateExitPlan,
)
from trader.agents.domain.view import Memory, ObservedMarket, ObservedStats, View
from trader.agents.variants import VARIANTS, Variant
from trader.core.money import ZERO, divide, from_number
from trader.core.variant_id import VariantId
from trader.exchange.domain.account import Account, Position, Run, equity
from trader.exchange.domain.ledger import ExchangeRules
from trader.exchange.domain.orders import ExitPlan, Side
from trader.market.domain.indicators import Indicators, indicators
from trader.market.domain.markets import INTERVALS, MARKETS, Candle, Interval

NOW = datetime(2025, 1, 8, 14, 7, 30, tzinfo=UTC)
FEE = Decimal("0.0005")
RULES = ExchangeRules(dict(MARKETS), FEE, Decimal("0.0002"))
LEVEL = {"BTC": 95_000.0, "ETH": 3_300.0, "SOL": 190.0}
RISK_MAX = {
    VariantId.APEX: apex.RISK_MAX,
    VariantId.TRENDSURFER: trendsurfer.RISK,
    VariantId.CONTRARIAN: contrarian.RISK,
    VariantId.SOVEREIGN: sovereign.RISK,
}


def reading(rng: Random, price: float) -> Indicators:
    """Indicators around a price, any of them possibly absent."""

    def maybe(value: float) -> float | None:
        return None if rng.random() < 0.04 else value

    def near() -> float | None:
        return maybe(price * (1 + rng.gauss(0, 0.015)))

    return Indicators(
        close=near(),
        atr=maybe(price * 10 ** rng.uniform(-5, -0.3)),
        rsi=maybe(rng.uniform(0, 100)),
        adx=maybe(rng.uniform(5, 60)),
        plus_di=maybe(rng.uniform(0, 60)),
        minus_di=maybe(rng.uniform(0, 60)),
        kijun_sen=near(),
        vwap=near(),
        vwap_deviation=maybe(price * rng.choice([0.0, 1e-9, rng.uniform(0, 0.02)])),
        momentum=maybe(price * rng.gauss(0, 0.01)),
        squeeze_on=rng.choice([False, False, False, True, None]),
        squeeze_candles=rng.randint(1, 80),
        squeeze_released=rng.randint(0, 8),
    )


def priced(rng: Random, symbol: str) -> ObservedMarket:
    rules = MARKETS[symbol]
    level = LEVEL[symbol] * rng.uniform(0.5, 2)
    bid = from_number(round(level / float(rules.tick))) * rules.tick
    spread = rules.tick * rng.choice([1, 2, 5, 40])
    price = bid + spread / 2
    return ObservedMarket(
        symbol=symbol,
        quoted_at=NOW,
        stale=False,
        price=price,
        bid=bid,
        ask=bid + spread,
        spread=spread,
        funding_rate=ZERO,
        tick=rules.tick,
        lot=rules.lot,
        min_notional=rules.min_notional,
        leverage_max=rules.leverage_max,
        candles={},
        indicators={interval: reading(rng, float(price)) for interval in ("15m", "1h")},
    )


def position(rng: Random, market: ObservedMarket, worth: Decimal) -> Position:
    """A position that lost or won up to 3 %, with a stop that the exchange accepts."""
    side = rng.choice(list(Side))
    entry = market.price * from_number(rng.uniform(0.97, 1.03))
    quantity = max(market.lot, worth * from_number(rng.uniform(0.01, 0.6)) / market.price // market.lot * market.lot)
    distance = market.price * from_number(rng.uniform(0.0005, 0.05))
    stop = (market.price - distance * side.direction) // market.tick * market.tick
    return Position(
        id=UUID(int=1),
        symbol=market.symbol,
        side=side,
        quantity=quantity,
        entry_notional=quantity * entry,
        margin=quantity * entry / rng.randint(1, 5),
        opened_at=NOW - timedelta(hours=rng.randint(0, 60)),
        funded_until=NOW,
        exit_plan=ExitPlan(stop=rng.choice([stop, stop, None])),
    )


def account_of(rng: Random, shown: Mapping[str, ObservedMarket]) -> Account:
    """An account from tiny to large, with positions in none, some or all markets."""
    capital = from_number(round(10 ** rng.uniform(0.5, 6.5), 2))
    held = rng.sample(sorted(shown), rng.choice([0, 0, 1, 2, 3]))
    run = Run(id=UUID(int=2), number=1, initial_capital=capital, quote_currency="USDT", started_at=NOW)
    return Account(
        id="a",
        run=run,
        sequence=0,
        changed_at=NOW,
        positions={symbol: position(rng, shown[symbol], capital) for symbol in held},
    )


def seen(
    account: Account, shown: Mapping[str, ObservedMarket], drawdown: Decimal, stats: ObservedStats
) -> tuple[View, RiskContext]:
    """Return an agent's view of an account, assembled like the real ones, and the context that the guard reads."""
    marks = {symbol: market.price for symbol, market in shown.items()}
    worth = equity(account, marks)
    history = RunHistory(
        run_id=account.run.id, sequence=0, hour=NOW, trades=(), stats=stats, actions={},
        peak=divide(100 * worth, 100 - drawdown), day_opening=worth,
    )  # fmt: skip
    leverage_max = {symbol: market.leverage_max for symbol, market in shown.items()}
    quoted_at = dict.fromkeys(shown, NOW)
    context = history.risk_context(account, None, NOW, marks=marks, quoted_at=quoted_at, leverage_max=leverage_max)
    view = history.view(context, shown, RULES, stats=stats, memory=Memory(), cadence=CYCLE, restriction=None)
    return view, context


def record(rng: Random) -> ObservedStats:
    """Statistics of a random past."""
    return ObservedStats(
        trade_count=rng.choice([0, 5, 30, 500]),
        win_rate_percent=rng.choice([None, 0.0, 45.0, 60.0, 100.0]),
        average_win=rng.choice([None, Decimal("0.01"), Decimal(50)]),
        average_loss=rng.choice([None, ZERO, Decimal("0.01"), Decimal(40)]),
    )


@given(st.integers(0, 2**64))
@settings(max_examples=2 * settings().max_examples)
def test_every_decision_is_within_every_bound(seed: int) -> None:
    check(seed)


def test_random_contexts_lead_to_every_kind_of_decision() -> None:
    kinds = sum((check(seed) for seed in range(200)), Counter())
    opening = {(variant, CreatePosition) for variant in VariantId}
    caring = {(variant, ClosePosition) for variant in (VariantId.TRENDSURFER, VariantId.SOVEREIGN)}
    assert kinds.keys() >= opening | caring | {(VariantId.TRENDSURFER, UpdateExitPlan)}


def may_act(variant: Variant, account: Account, shown: View, symbol: str) -> bool:
    """Whether a backtest asks the agent at this time."""
    market, position = shown.markets[symbol], account.positions.get(symbol)
    indicators = market.indicators[variant.intervals[0]]
    if position is not None:
        return variant.agent().may_review(Held(position, indicators, market.price, market.tick, shown.at))
    return variant.agent().may_enter(indicators, float(market.price))


def check(seed: int) -> Counter[tuple[VariantId, type[Decision]]]:
    """Return the checked decisions of the agents in a random context."""
    kinds: Counter[tuple[VariantId, type[Decision]]] = Counter()
    rng = Random(seed)
    markets = {symbol: priced(rng, symbol) for symbol in DEFAULT_MARKETS}
    account = account_of(rng, markets)
    shown, context = seen(account, markets, from_number(rng.choice([0.0, rng.uniform(0, 99)])), record(rng))
    for variant, definition in VARIANTS.items():
        decisions = definition.agent().decide(shown)
        assert decisions == definition.agent().decide(shown)
        assert [type(decision) is Holding for decision in decisions] == [False] * (len(decisions) - 1) + [True]
        acts = any(may_act(definition, account, shown, symbol) for symbol in shown.markets)
        assert acts or len(decisions) == 1, "an agent acts where a backtest looks away"
        exposure, cash = shown.account.exposure, shown.account.available_cash
        entries = {(each.symbol, each.side): each for each in definition.agent().entries(shown)}
        for entry in entries.values():
            assert entry.cost > 0
            assert entry.leverage <= definition.limits.leverage_max
        order = next((each for each in decisions if isinstance(each, CreatePosition)), None)
        if order is not None and (listed := entries.get((order.symbol, order.side))) is not None:
            # it leaves its share of the cash to each other market, whatever speaks against that one
            assert (listed.stop, listed.quantity <= order.quantity) == (order.stop, True)
        for decision in decisions:
            encoded = msgspec.json.encode(decision)
            assert msgspec.json.decode(encoded, type=TOOLS[TOOL_NAMES[type(decision)]]) == decision
            if isinstance(decision, CreatePosition | ClosePosition | UpdateExitPlan):
                verdict = judge(decision, decision.symbol, context, definition.limits)
                assert not isinstance(verdict, GuardRefusal), verdict
            kinds[variant, type(decision)] += 1
            if isinstance(decision, CreatePosition):
                exposure, cash = _opened(decision, shown, variant, exposure, cash)
            elif isinstance(decision, UpdateExitPlan):
                _tightened(decision, shown)
        assert cash >= 0
        assert exposure <= max(definition.limits.leverage_max * shown.account.equity, shown.account.exposure)
    return kinds


def _opened(
    order: CreatePosition, shown: View, variant: VariantId, exposure: Decimal, cash: Decimal
) -> tuple[Decimal, Decimal]:
    """Check an entry, and return exposure and free cash after it."""
    market, limits = shown.markets[order.symbol], VARIANTS[variant].limits
    assert shown.position(order.symbol) is None
    quantity, leverage, stop = (from_number(value) for value in (order.quantity, order.leverage, order.stop))
    price = market.ask if order.side is Side.LONG else market.bid
    assert quantity % market.lot == 0
    assert stop % market.tick == 0
    assert quantity * market.price >= market.min_notional
    assert 1 <= leverage <= min(limits.leverage_max, market.leverage_max)
    assert (market.price - stop) * order.side.direction > 0
    assert order.target is None or (from_number(order.target) - market.price) * order.side.direction > 0
    assert 0 <= order.confidence <= 100
    assert quantity * abs(price - stop) <= RISK_MAX[variant] * shown.account.equity
    assert quantity * max(price, market.price) <= limits.position_notional_max * shown.account.equity
    spent = divide(quantity * price, leverage) + quantity * price * FEE
    return exposure + quantity * market.price, cash - spent


def _tightened(change: UpdateExitPlan, shown: View) -> None:
    held = shown.position(change.symbol)
    assert held is not None
    assert change.stop is not None
    before, after = held.exit_plan.stop, from_number(change.stop)
    assert before is None or (after - before) * held.side.direction > 0
    assert (held.mark - after) * held.side.direction > 0


def test_every_agent_finds_trades_in_real_markets() -> None:
    """Asked hourly over five real days, an agent with an empty account finds entries, but not everywhere."""
    history = {symbol: _real(symbol, 10_000) for symbol in DEFAULT_MARKETS}
    intervals: tuple[Interval, ...] = ("5m", "15m", "1h")
    candles = {symbol: {size: _merged(history[symbol], size) for size in intervals} for symbol in DEFAULT_MARKETS}
    run = Run(id=UUID(int=2), number=1, initial_capital=Decimal(10_000), quote_currency="USDT", started_at=NOW)
    empty = Account(id="a", run=run, sequence=0, changed_at=NOW)
    asked = range(2_880, 10_000, 60)
    entered: Counter[VariantId] = Counter()
    for index in asked:
        at = history["BTC"][index].open_time
        markets = {symbol: _shown(symbol, candles[symbol], at) for symbol in DEFAULT_MARKETS}
        shown, _ = seen(empty, markets, ZERO, ObservedStats())
        for variant, definition in VARIANTS.items():
            entered[variant] += len(definition.agent().decide(shown)) > 1
    for variant in VariantId:
        assert 0.05 * len(asked) < entered[variant] < len(asked), entered


def _real(symbol: str, count: int) -> list[Candle]:
    path = FOLDER / f"{symbol}USDT-1m-2025-01.csv.gz"
    if not path.exists():
        pytest.skip("the real candles are not here")
    with gzip.open(path, "rt") as lines:
        rows = list(islice(csv.reader(lines), 1, count + 1))
    return [
        Candle(datetime.fromtimestamp(int(row[0]) / 1000, UTC), *(float(text) for text in row[1:6])) for row in rows
    ]


def _merged(minutes: list[Candle], interval: Interval) -> list[Candle]:
    """Candles of an interval, each of as many whole minutes; the history begins at a full hour."""
    size = INTERVALS[interval] // timedelta(minutes=1)
    groups = [minutes[start : start + size] for start in range(0, len(minutes) - size + 1, size)]
    return [
        Candle(
            group[0].open_time,
            group[0].open,
            max(candle.high for candle in group),
            min(candle.low for candle in group),
            group[-1].close,
            sum(candle.volume for candle in group),
        )
        for group in groups
    ]


def _shown(symbol: str, candles: Mapping[Interval, list[Candle]], at: datetime) -> ObservedMarket:
    session = _closed(candles["5m"], "5m", at)
    rules = MARKETS[symbol]
    price = from_number(session[-1].close) // rules.tick * rules.tick
    return ObservedMarket(
        symbol=symbol, quoted_at=at, stale=False, price=price, bid=price - rules.tick, ask=price + rules.tick,
        spread=2 * rules.tick, funding_rate=ZERO, tick=rules.tick, lot=rules.lot, min_notional=rules.min_notional,
        leverage_max=rules.leverage_max, candles={},
        indicators={size: indicators(_closed(candles[size], size, at)[-120:], session) for size in ("15m", "1h")},
    )  # fmt: skip


def _closed(candles: list[Candle], interval: Interval, at: datetime) -> list[Candle]:
    """The closed candles among the last 300."""
    count = (at - candles[0].open_time) // INTERVALS[interval]
    return candles[max(0, count - 300) : count]
