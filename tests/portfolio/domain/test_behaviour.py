"""Behavior: agents that trade in a known way, and the figures that must show it."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trader.core.statistics import EquityPoint
from trader.portfolio.domain.behaviour import (
    Conduct,
    HoldingTimes,
    PlanChange,
    PlanOutcome,
    PositionPart,
    PriceExcursion,
    Stance,
    alike_percent,
    covered,
    describe,
    stances,
    volatilities,
)

START = datetime(2026, 3, 4, tzinfo=UTC)
HOUR = timedelta(hours=1)
MINUTE = timedelta(minutes=1)


def part(opened: float, closed: float | None, **fields: Any) -> PositionPart:
    """A position of 1,000 between two hours of the period, closed by decision with a gross gain of 10."""
    is_open = closed is None
    made = PositionPart(
        symbol="BTC",
        is_long=True,
        quantity=10.0,
        entry_notional=1000.0,
        exit_notional=None if is_open else 1010.0,
        gross=None if is_open else 10.0,
        fees=1.0,
        net=None if is_open else 9.0,
        reason=None if is_open else "order",
        stop=None,
        target=None,
        opened_at=START + opened * HOUR,
        closed_at=None if closed is None else START + closed * HOUR,
        lowest=None,
        highest=None,
    )
    return msgspec.structs.replace(made, **fields)


def conduct(*parts: PositionPart, hours: float = 100, changes: tuple[PlanChange, ...] = ()) -> Conduct:
    return Conduct(START, START + hours * HOUR, 10_000.0, parts, changes, ())


def test_an_agent_that_never_traded_has_counts_and_no_shares() -> None:
    behaviour = describe(conduct(), {})
    assert (behaviour.positions, behaviour.flips, behaviour.plans_changed) == (0, 0, 0)
    assert (behaviour.time_in_market_percent, behaviour.turnover) == (0.0, 0.0)
    assert behaviour.stops == behaviour.targets == PlanOutcome(0, 0, 0, 0, 0)
    assert behaviour.holding_times is None
    assert behaviour.leverage_by_volatility is None
    assert behaviour.fees_percent is behaviour.captured_percent is behaviour.alike_percent is None


def test_time_in_the_market_counts_each_moment_once() -> None:
    both = conduct(part(0, 20), part(10, 30, symbol="ETH"), part(90, None), part(-5, 50, symbol="SOL"))
    assert describe(both, {}).time_in_market_percent == 40, (
        "30 hours, 10 of the open position, none of the one held before"
    )


def test_stances_are_the_times_in_which_the_sides_of_two_accounts_did_not_change() -> None:
    """Parts of one position overlap, a flip changes sides at once, and earlier positions do not count."""
    own = conduct(part(2, 6), part(2, 8), part(8, 9, is_long=False), part(-5, 90, symbol="SOL"))
    other = conduct(part(4, 10), part(95, None, symbol="ETH", is_long=False))

    def held(*spans: tuple[str, float, float, Any, Any]) -> list[Stance]:
        return [
            Stance(symbol, START + begun * HOUR, START + ended * HOUR, *sides) for symbol, begun, ended, *sides in spans
        ]

    assert stances(own, other) == held(
        ("BTC", 2, 4, "LONG", None),
        ("BTC", 4, 8, "LONG", "LONG"),
        ("BTC", 8, 9, "SHORT", "LONG"),
        ("BTC", 9, 10, None, "LONG"),
        ("ETH", 95, 100, None, "SHORT"),
    )
    assert [each.is_disagreement for each in stances(own, other)] == [True, False, True, True, True]
    late = stances(other, own, START + 5 * HOUR)
    assert late[:2] == held(("BTC", 5, 8, "LONG", "LONG"), ("BTC", 8, 9, "LONG", "SHORT"))


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 20), st.booleans(), st.booleans()), max_size=12))
def test_stances_cover_the_time_that_either_held_and_name_each_side(opened: list[tuple[int, int, bool, bool]]) -> None:
    mine, theirs = (
        conduct(*(part(at, at + hours, is_long=is_long) for at, hours, is_long, is_own in opened if is_own is chosen))
        for chosen in (True, False)
    )
    found = stances(mine, theirs)
    assert sum((each.end - each.start for each in found), timedelta()) == covered(
        (max(one.opened_at, START), min(one.closed_at or mine.end, mine.end))
        for each in (mine, theirs)
        for one in each.parts
    )
    for each in found:
        middle = each.start + (each.end - each.start) / 2
        for account, side in ((mine, each.first), (theirs, each.other)):
            held = {one.is_long for one in account.parts if one.closed_at and one.opened_at <= middle < one.closed_at}
            assert side == ("LONG" if True in held else "SHORT" if held else None)


def test_a_position_closed_after_the_period_counts_as_open() -> None:
    behaviour = describe(conduct(part(90, 110)), {})
    assert (behaviour.positions, behaviour.time_in_market_percent) == (1, 10)
    assert (behaviour.holding_times, behaviour.turnover, behaviour.captured_percent) == (None, 0.1, None)


def test_positions_held_for_less_than_a_minute_are_counted_until_their_last_part_was_closed() -> None:
    second = 1 / 3600
    short, parted = part(0, 59 * second), [part(1, 1 + 10 * second), part(1, 1 + 60 * second)]
    assert describe(conduct(short, *parted, part(2, 3), part(4, None)), {}).within_minute == 1
    assert describe(conduct(), {}).within_minute == 0


def test_holding_times_cover_whole_positions() -> None:
    assert describe(conduct(part(0, 1), part(0, 3)), {}).holding_times == HoldingTimes(180, 180, 180)
    assert describe(conduct(part(0, 1), part(5, 7), part(8, 11)), {}).holding_times == HoldingTimes(72, 120, 168)


def test_fees_and_turnover() -> None:
    lost = part(5, 6, exit_notional=980.0, gross=-20.0, fees=3.0)
    behaviour = describe(conduct(part(0, 1), lost, part(7, None, fees=9.0)), {})
    assert behaviour.fees_percent == 40, "1 and 3 of the 10 that one gained"
    assert behaviour.turnover == pytest.approx((2010 + 1980 + 1000) / 10_000)
    assert describe(conduct(lost), {}).fees_percent is None


def test_a_flip_is_an_opposite_entry_within_an_hour_of_the_last_close() -> None:
    flipping = [
        part(0, 2),
        part(2, 4, is_long=False),
        part(5, 6),
        part(7.1, 8, is_long=False),
        part(8, 9, is_long=False),
    ]
    assert describe(conduct(*flipping), {}).flips == 2
    elsewhere = [part(0, 2), part(2, 4, is_long=False, symbol="ETH")]
    assert describe(conduct(*elsewhere), {}).flips == 0
    assert describe(conduct(part(0, 1), part(0, 2), part(2, 3, is_long=False)), {}).flips == 1, "its last part counts"


def test_outcomes_of_stops_and_targets() -> None:
    plan = {"stop": 95.0, "target": 110.0}
    parts = [
        part(0, 1, **plan, reason="stop"),
        part(2, 3, **plan, reason="target"),
        part(4, 5, **plan, reason="limit"),
        part(6, 7, stop=95.0, reason="liquidation"),
        part(8, 9),
        part(10, 11, **plan, reason="order"),
        part(10, 12, **plan, reason="target"),
        part(13, None, **plan),
    ]
    changes = (
        PlanChange("BTC", START + 0.5 * HOUR),
        PlanChange("BTC", START + 0.6 * HOUR),
        PlanChange("ETH", START + 2.5 * HOUR),
        PlanChange("BTC", START + 14 * HOUR),
    )
    behaviour = describe(conduct(*parts, changes=changes), {})
    assert behaviour.stops == PlanOutcome(planned=5, by_stop=1, by_target=2, by_decision=1, otherwise=1)
    assert behaviour.targets == PlanOutcome(planned=4, by_stop=1, by_target=2, by_decision=1, otherwise=0)
    assert behaviour.plans_changed == 2


def test_captured_is_the_profit_kept_from_the_largest_unrealized_gain() -> None:
    kept = part(0, 1, highest=104.0, lowest=99.0)
    gave_back = part(2, 3, is_long=False, exit_notional=1020.0, gross=-20.0, highest=103.0, lowest=98.0)
    assert describe(conduct(kept), {}).captured_percent == 25
    assert describe(conduct(gave_back), {}).captured_percent == -100
    assert describe(conduct(kept, gave_back), {}).captured_percent == pytest.approx(100 * -10 / 60)
    assert describe(conduct(part(0, 1)), {}).captured_percent == 100, "the exit itself was the best price"


@given(st.floats(1, 1e6), st.lists(st.floats(1, 1e6)), st.booleans())
def test_excursions_of_the_two_sides_mirror_each_other(entry: float, prices: list[float], is_long: bool) -> None:
    excursion = PriceExcursion.of(entry, prices, is_long=is_long)
    mirrored = PriceExcursion.of(entry, prices, is_long=not is_long)
    assert excursion.adverse <= 0 <= excursion.favourable
    assert (excursion.adverse, excursion.favourable) == (-mirrored.favourable, -mirrored.adverse)


def test_halving_leverage_with_volatility_is_detected() -> None:
    """In each block of 48 hours the moves are larger than before, and the leverage is halved."""
    closes, price = {}, 100.0
    for number in range(6 * 48 + 1):
        price *= 1 + 0.001 * (1 + number // 48) * (-1) ** number
        closes[START + number * HOUR] = price
    hours = [
        EquityPoint(START + (48 * block + 24 + number) * HOUR, 10_000.0, 8 / 2**block)
        for block in range(6)
        for number in range(1, 24)
    ]
    followed = conduct(hours=300)._replace(hours=hours)
    assert describe(followed, {"BTC": closes}).leverage_by_volatility == pytest.approx([8, 4, 2, 1, 0.5, 0.25])
    known = [point for point in hours if point.leverage != 8]
    unknown = [point.__class__(point.hour, point.value) for point in hours[:23]]
    assert describe(followed._replace(hours=[*unknown, *known[:59]]), {"BTC": closes}).leverage_by_volatility is None
    assert describe(followed, {}).leverage_by_volatility is None


def test_volatility_is_measured_over_the_previous_day() -> None:
    closes = {START + number * HOUR: 100.0 * 1.01 ** (number % 2) for number in range(25)}
    known = volatilities({"BTC": closes}, [START + number * HOUR for number in range(27)])
    assert list(known) == [START + 25 * HOUR], "24 moves are known before it, under 24 before and after"
    assert known[START + 25 * HOUR] == pytest.approx(0.00995033)


def test_replicates_are_alike_while_they_hold_the_same_side() -> None:
    first = conduct(part(0, 10), part(20, 30, symbol="ETH"))
    assert alike_percent([first]) is None
    assert alike_percent([first, first]) == 100
    assert alike_percent([first, conduct(part(0, 10, is_long=False))]) == 0
    assert alike_percent([first, conduct(part(5, 10), part(20, 30, symbol="ETH"))]) == 75
    assert alike_percent([first, first, conduct()]) == pytest.approx(100 / 3)
    late = conduct(part(25, 30, symbol="ETH"))._replace(start=START + 25 * HOUR)
    assert alike_percent([conduct(part(0, 40)), late]) == 0, "one market each, in the time that both have"
    assert alike_percent([conduct(), conduct()]) is None


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))))
def test_covered_counts_every_minute_once(bounds: list[tuple[int, int]]) -> None:
    spans = [(START + first * MINUTE, START + after * MINUTE) for first, after in bounds]
    minutes = {minute for first, after in bounds for minute in range(first, after)}
    assert covered(spans) == len(minutes) * MINUTE
