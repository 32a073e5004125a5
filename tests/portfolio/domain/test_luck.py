"""Luck: random traders make the model's trades at other moments, under the rules of the exchange."""

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pytest
from support.books import RULES, make_quote, moment_of, open_account

from trader.exchange.domain import account as figures
from trader.exchange.domain import rules as exchange
from trader.exchange.domain.orders import Order, OrderSide, OrderStatus
from trader.exchange.domain.tick_rules import apply_tick
from trader.market.domain.markets import Candle
from trader.portfolio.domain.luck import (
    HALF_SPREAD,
    TRADERS,
    ComparedPeriod,
    Costs,
    Drawn,
    MarketArrays,
    MarketPrices,
    OwnTrade,
    draw,
    final_equities,
    traders_for,
    try_luck,
)

START = datetime(2025, 1, 1, tzinfo=UTC)
STEP = timedelta(minutes=5)
COSTS = Costs(
    float(RULES.taker_rate),
    float(RULES.markets["ETH"].maintenance_rate),
    float(RULES.liquidation_rate),
    float(RULES.markets["ETH"].leverage_max),
)
RATE = 0.0000125


def walk(seed: int, count: int, volatility: float = 0.002) -> list[Candle]:
    rng = np.random.default_rng(seed)
    opens = np.round(2000 * np.exp(np.cumsum(rng.normal(0, volatility, count + 1))), 2)
    return [
        Candle(START + number * STEP, price, max(price, after) * 1.0005, min(price, after) * 0.9995, after, 1.0)
        for number, (price, after) in enumerate(pairwise(opens))
    ]


def prices(candles: list[Candle]) -> MarketPrices:
    return MarketPrices(candles, STEP, [RATE] * (len(candles) // 12 + 1))


def gain_of(own: list[OwnTrade], drawn: Drawn, candles: list[Candle]) -> float:
    """One trader's gain from trades in one market, relative to its equity."""
    return float(final_equities([own], [drawn], MarketArrays([prices(candles)], [COSTS]))[0]) - 1


def trade(size: float = 1.0, steps: int = 6, *, is_long: bool = True) -> OwnTrade:
    return OwnTrade("ETH", is_long, size, steps * STEP)


def test_a_random_trader_makes_each_trade_once_and_holds_it_as_long() -> None:
    own = [trade(steps=steps) for steps in (1, 3, 5, 40)]
    order, entries, exits = draw(own, 500, STEP, 300, np.random.default_rng(1))
    assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(4), (300, 1)))
    assert np.array_equal(exits - entries, np.array([1, 3, 5, 40])[order])
    assert (entries[:, 1:] >= exits[:, :-1]).all(), "one position at a time"
    assert entries.min() >= 0
    assert exits.max() <= 499
    assert len(np.unique(entries[:, 0])) > 100


def test_trades_that_fill_their_period_still_fit() -> None:
    _, entries, exits = draw([trade(steps=30)] * 4, 100, STEP, 20, np.random.default_rng(1))
    assert exits.max() <= 99
    assert (exits > entries).all()


@pytest.mark.parametrize("size", [0.5, 3.0])
@pytest.mark.parametrize("is_long", [True, False])
def test_gains_follow_the_rules_of_the_exchange(size: float, *, is_long: bool) -> None:
    """One trade of each kind, executed order by order under the rules of the models' accounts."""
    candles = walk(3, 200)
    drawn = Drawn(np.array([[0]]), np.array([[17]]), np.array([[95]]))
    gain = gain_of([trade(size, 78, is_long=is_long)], drawn, candles)
    account = open_account(10_000, at=START)
    sides = (OrderSide.BUY, OrderSide.SELL) if is_long else (OrderSide.SELL, OrderSide.BUY)
    quantity = Decimal(str(round(10_000 * size / candles[17].open, 4)))
    for number in range(17, 96):
        mid = Decimal(str(candles[number].open))
        half = mid * Decimal(str(HALF_SPREAD))
        quote = make_quote("ETH", ((mid - half, "1000"),), ((mid + half, "1000"),), at=candles[number].open_time)
        moment = moment_of(quote, at=candles[number].open_time)
        posting = apply_tick(account, moment, RULES, lambda _, __: Decimal(str(RATE)))
        account = account if posting is None else posting.account
        if number in {17, 95}:
            order = Order(
                account_id=account.id, symbol="ETH", side=sides[number == 95], quantity=quantity,
                leverage=Decimal(10), reduce_only=number == 95,
            )  # fmt: skip
            placed = exchange.place(account, order, moment, RULES, lambda _, __: Decimal(str(RATE)))
            assert [answer.status for answer in placed.answers] == [OrderStatus.FILLED]
            account = placed.account
    expected = float(figures.equity(account, {})) / 10_000 - 1
    assert gain == pytest.approx(expected, abs=2e-5 * size)


def test_a_trade_beyond_its_margin_is_liquidated() -> None:
    falling = [Candle(START + n * STEP, 2000.0 - n, 2000.0 - n, 1999.0 - n, 1999.0 - n, 1.0) for n in range(300)]
    drawn = Drawn(np.array([[0]]), np.array([[0]]), np.array([[299]]))
    assert -1 <= gain_of([trade(10.0, 299)], drawn, falling) < -0.85
    assert gain_of([trade(10.0, 299, is_long=False)], drawn, falling) > 1
    assert gain_of([trade(1.0, 299)], drawn, falling) == pytest.approx(-0.15, abs=0.01)


def ramp(slope: float) -> MarketPrices:
    opens = [2000.0 * (1 + slope * number / 300) for number in range(301)]
    candles = [
        Candle(START + number * STEP, entry, max(entry, after), min(entry, after), after, 1.0)
        for number, (entry, after) in enumerate(pairwise(opens))
    ]
    return MarketPrices(candles, STEP, [0.0] * 26)


def hold(size: float) -> tuple[list[OwnTrade], Drawn]:
    return [trade(size, 299)], Drawn(np.array([[0]]), np.array([[0]]), np.array([[299]]))


def pair(*slopes: float, sizes: tuple[float, float]) -> float:
    own, drawn = zip(*(hold(size) for size in sizes), strict=True)
    return float(final_equities(own, drawn, MarketArrays([ramp(slope) for slope in slopes], [COSTS, COSTS]))[0])


def test_the_positions_of_all_markets_share_one_margin() -> None:
    """A loss of 3 times 40 % ends an account, unless another market has gained enough; and vice versa."""
    alone = gain_of(*hold(3.0), [Candle(START + n * STEP, p, p, p, p, 1.0) for n, p in enumerate(ramp(-0.4).open)])
    assert alone < -0.85
    assert pair(-0.4, 0.4, sizes=(3.0, 3.0)) == pytest.approx(1, abs=0.02)
    assert pair(-0.2, -0.2, sizes=(2.0, 2.0)) == pytest.approx(1 - 4 * 0.2, abs=0.02)
    assert pair(-0.2, -0.2, sizes=(3.0, 3.0)) < 0.1, "each alone would have kept 40 %"
    assert pair(-0.2, 0.0, sizes=(3.0, 3.0)) == pytest.approx(0.4, abs=0.02)


def test_an_entry_is_capped_at_the_free_margin() -> None:
    most = COSTS.leverage_max
    assert pair(0.01, 0.01, sizes=(most, most)) == pytest.approx(pair(0.01, 0.01, sizes=(most, 0.0)), abs=0.002)
    assert pair(0.01, 0.01, sizes=(most / 2, most)) == pytest.approx(1 + 0.01 * most, abs=0.04)


def test_a_random_trader_has_a_uniform_quantile() -> None:
    candles, quantiles = walk(5, 2000), []
    markets = MarketArrays([prices(candles)], [COSTS])
    for seed in range(40):
        own = [trade(1.0, 10, is_long=number % 2 == 0) for number in range(20)]
        drawn = draw(own, len(candles), STEP, 1, np.random.default_rng(1000 + seed))
        period = ComparedPeriod(float(final_equities([own], [drawn], markets)[0]), 100)
        luck = try_luck(own, period, {"ETH": prices(candles)}, {"ETH": COSTS}, STEP, seed)
        assert not isinstance(luck, str)
        quantiles.append(luck.quantile_percent / 100)
    places = np.sort(quantiles)
    distance = np.max(np.abs(places - (np.arange(40) + 0.5) / 40))
    assert distance < 0.31, "Kolmogorov and Smirnov's, at one in a thousand"


def test_foresight_beats_luck_and_the_same_seed_gives_the_same_result() -> None:
    candles = walk(6, 2000)
    own = [trade(1.0, 10) for _ in range(40)]
    luck = try_luck(own, ComparedPeriod(1.4, 100), {"ETH": prices(candles)}, {"ETH": COSTS}, STEP, 7)
    assert not isinstance(luck, str)
    assert luck.quantile_percent == 100
    assert luck.p_value == 1 / (TRADERS + 1)
    assert luck.low_percent < luck.median_percent < luck.high_percent < luck.return_percent
    assert luck == try_luck(own, ComparedPeriod(1.4, 100), {"ETH": prices(candles)}, {"ETH": COSTS}, STEP, 7)


def test_too_few_trades_say_so() -> None:
    assert try_luck(
        [trade()] * 9, ComparedPeriod(1.0, 100), {"ETH": prices(walk(1, 100))}, {"ETH": COSTS}, STEP, 1
    ) == ("9 positions; a comparison with luck needs 10")


def test_a_p_value_is_corrected_for_looks_and_models() -> None:
    luck = try_luck(
        [trade()] * 10, ComparedPeriod(2.0, 72, looks=8), {"ETH": prices(walk(1, 500))}, {"ETH": COSTS}, STEP, 1
    )
    assert not isinstance(luck, str)
    assert luck.corrected_p(3) == pytest.approx(24 / (TRADERS + 1))
    for models in (1, 8, 50):
        assert 8 * models / (traders_for(models) + 1) <= 0.05, "enough random traders to tell the best from luck"


def test_random_entries_that_keep_losers_open_show_no_skill() -> None:
    """They sell only after a gain of 1 %: judged by their closed trades, 39 % of them have p values under 5 %."""
    symbols, steps, small = ["A", "B", "C"], 2000, 0
    for season in range(20):
        rng, own, drawn = np.random.default_rng(season), [], []
        known = [prices(walk(1000 * season + number, steps)) for number in range(len(symbols))]
        for symbol, market in zip(symbols, known, strict=True):
            held, at = [], int(rng.integers(0, 60))
            while at < steps - 10:
                gains = np.flatnonzero(market.open[at + 1 :] > 1.01 * market.open[at])
                held.append((at, at + 1 + int(gains[0]) if len(gains) else steps - 1))
                at = held[-1][1] + 1 + int(rng.integers(0, 60))
            own.append([OwnTrade(symbol, True, 0.3, (end - entry) * STEP) for entry, end in held])
            entries, exits = np.array(held).T
            drawn.append(Drawn(np.arange(len(held))[None], entries[None], exits[None]))
        growth = float(final_equities(own, drawn, MarketArrays(known, [COSTS] * 3))[0])
        positions = [position for each in own for position in each]
        period, terms = ComparedPeriod(growth, 160, looks=8), dict.fromkeys(symbols, COSTS)
        luck = try_luck(positions, period, dict(zip(symbols, known, strict=True)), terms, STEP, season, 399)
        small += not isinstance(luck, str) and luck.corrected_p(1) <= 0.05
    assert small <= 4, "of 20 seasons, at one in four hundred"
