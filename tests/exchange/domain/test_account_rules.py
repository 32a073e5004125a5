"""Account rules, one test each: figures, liquidation and funding."""

from datetime import timedelta

import pytest
from msgspec.structs import replace
from support.books import DEFAULT_MARKETS, RULES, START, deep_quote, make_quote, moment_of
from support.paper_bench import BUY, SELL, D, PaperBench, eth, leveraged

from trader.exchange.domain import account as figures
from trader.exchange.domain.orders import Cause, ExitPlan, OrderSide, OrderStatus
from trader.exchange.protocol import LIQUIDATIONS
from trader.market.domain.markets import MarginTier
from trader.market.sources.rows import PRESET_MARKETS

# --- the account ------------------------------------------------------------------------------------------------------


def test_the_mark_is_the_mid_or_the_venues_own() -> None:
    assert eth([(1999, 1)], [(2002, 1)]).mark == D("2000.5")
    assert eth([(1999, 1)], [(2002, 1)], mark="2001.7").mark == D("2001.7")


def test_the_figures_of_an_account() -> None:
    desk = PaperBench(10_000, eth([(1999, 50)], [(2001, 50)]))
    desk.order(BUY, "10", leverage=20)
    desk.order(BUY, "1", limit="1900", leverage=10)
    desk.tick(eth([(2099, 50)], [(2101, 50)]))
    cash = D(10_000) - D("10.005")
    assert desk.account.cash == cash
    assert desk.equity == cash + 990
    assert desk.account.margin == D("1000.5")
    assert desk.available == cash + 990 - D("1000.5") - 190
    assert figures.maintenance(desk.account, desk.moment.marks, RULES.markets) == D("0.02") * 21_000


def test_available_and_borrowed_have_a_floor_of_zero_and_borrowed_is_negative_cash() -> None:
    desk = PaperBench(1_000, deep_quote("ETH", 2_000), deep_quote("SOL", 100))
    desk.order(BUY, "1", leverage=10)
    desk.order(BUY, "50", leverage=10, symbol="SOL")
    desk.tick(deep_quote("ETH", 800), deep_quote("SOL", 140))
    desk.order(SELL, "1", reduce_only=True)
    assert (desk.account.borrowed, desk.available) == (-desk.account.cash, max(D(0), desk.equity - desk.account.margin))
    assert desk.account.borrowed > 0


def test_an_order_that_leaves_available_cash_below_zero_after_its_fees_is_rejected() -> None:
    desk = PaperBench(2_000, eth([("2000", 9)], [("2000", 9)]))
    answer = desk.order(BUY, "1")
    assert (answer.status, answer.fills) == (OrderStatus.REJECTED, ())
    assert "insufficient margin" in str(answer.reason)
    assert (desk.account.cash, desk.account.taken) == (D(2_000), {})
    assert desk.order(BUY, "0.9995").status is OrderStatus.FILLED


def test_a_reducing_order_needs_no_margin() -> None:
    desk = PaperBench(2_001, eth([("2000", 9)], [("2000", 9)]))
    desk.order(BUY, "1")
    desk.tick(eth([("1500", 9)], [("1500", 9)]))
    assert desk.available == 0
    assert desk.order(SELL, "0.5").status is OrderStatus.FILLED


def test_an_unaffordable_resting_fill_is_canceled_instead() -> None:
    desk = PaperBench(2_000, deep_quote("ETH", 2_000), deep_quote("SOL", 100))
    desk.order(BUY, "0.5", limit="1900")
    desk.order(BUY, "10", symbol="SOL")
    desk.tick(deep_quote("SOL", 80))
    posting = desk.eth(1_800)
    assert posting is not None
    assert posting.resting[0].cancel_reason == "insufficient margin when the book reached it"
    assert "ETH" not in desk.account.positions


# --- liquidation ------------------------------------------------------------------------------------------------------


def test_liquidation_comes_when_equity_meets_maintenance_and_cancels_resting_orders() -> None:
    desk = leveraged()
    price = figures.liquidation_price(desk.account, "ETH", desk.moment.marks, RULES.markets)
    assert price is not None
    desk.order(BUY, "0.01", limit="1000")
    assert desk.tick(eth([("999", 99)], [("3000", 99)], mark=str(price + D("0.01")))) is None
    posting = desk.tick(eth([("1790", 99)], [("3000", 99)], mark=str(price)))
    assert posting is not None
    assert posting.resting[0].cancel_reason == "liquidation"
    assert {fill.cause for fill in posting.fills} == {Cause.LIQUIDATION}


def test_the_liquidation_price_is_the_mark_where_equity_meets_maintenance() -> None:
    desk = leveraged()
    for symbol in ("ETH", "SOL"):
        price = figures.liquidation_price(desk.account, symbol, desk.moment.marks, RULES.markets)
        assert price is not None
        marks = {**desk.moment.marks, symbol: price}
        gap = figures.equity(desk.account, marks) - figures.maintenance(desk.account, marks, RULES.markets)
        assert abs(gap) < D("1e-12")


def test_a_short_is_liquidated_above_and_an_unleveraged_long_never() -> None:
    desk = PaperBench()
    desk.order(BUY, "1")
    assert figures.liquidation_price(desk.account, "ETH", desk.moment.marks, RULES.markets) is None
    desk.order(SELL, "5", leverage=5)
    price = figures.liquidation_price(desk.account, "ETH", desk.moment.marks, RULES.markets)
    assert price is not None
    assert price > 2_000


def test_each_part_of_a_notional_uses_the_rate_of_its_tier() -> None:
    market = PRESET_MARKETS["binance-usdm"]["BTC"].rules
    required = [market.maintenance(D(notional)) for notional in (50_000, 600_000, 3_000_000)]
    assert required == [D(200), D(200) + D(550_000) * D("0.005"), D(2_950) + D(2_400_000) * D("0.0065")]
    for preset, rows in PRESET_MARKETS.items():
        assert rows.keys() >= DEFAULT_MARKETS.keys(), preset
        for market, *_ in rows.values():
            rates = [market.maintenance_rate, *(tier.maintenance_rate for tier in market.tiers)]
            assert rates == sorted(set(rates)), preset
            assert market.maintenance_rate < D(1) / market.leverage_max, "a position can be opened at full leverage"
            for tier in market.tiers:
                assert tier.maintenance_rate < D(1) / tier.leverage_max
                assert market.leverage_max_at(tier.above) > market.leverage_max_at(tier.above + 1) == tier.leverage_max


def tiered() -> PaperBench:
    """An account on ETH at 2,000: 25× up to a notional of 40,000, 10× up to 100,000, 5× above."""
    desk = PaperBench(100_000)
    tiers = (MarginTier(D(40_000), D("0.03"), 10), MarginTier(D(100_000), D("0.05"), 5))
    desk.rules = replace(RULES, markets={**RULES.markets, "ETH": replace(RULES.markets["ETH"], tiers=tiers)})
    return desk


def test_a_larger_position_allows_less_leverage() -> None:
    desk = tiered()
    refused = desk.order(BUY, "20.0001", leverage=25)
    assert refused.status is OrderStatus.REJECTED
    assert str(refused.reason) == "the leverage 25 is above 10, the maximum of a ETH position of 40000.2"
    assert not desk.account.positions
    assert desk.order(BUY, "20", leverage=25).status is OrderStatus.FILLED
    assert desk.order(BUY, "30", leverage=11).status is OrderStatus.REJECTED
    assert desk.order(BUY, "30", leverage=10).status is OrderStatus.FILLED
    assert desk.order(BUY, "5", leverage=6).status is OrderStatus.REJECTED
    assert desk.order(BUY, "5").status is OrderStatus.FILLED, "without leverage an order of any size is allowed"


def test_resting_orders_count_toward_position_size_unless_they_reduce() -> None:
    desk = tiered()
    assert desk.order(BUY, "15", limit="1900", leverage=25).status is OrderStatus.RESTING
    assert desk.order(BUY, "10", limit="1900", leverage=25).status is OrderStatus.REJECTED
    assert desk.order(BUY, "10", leverage=25).status is OrderStatus.REJECTED
    assert desk.order(SELL, "20", leverage=25).status is OrderStatus.FILLED, "the buys are on the other side"
    assert desk.order(BUY, "19", limit="1900", leverage=25).status is OrderStatus.RESTING, "15 and 19 less the 20 held"
    assert desk.order(BUY, "20", leverage=25).status is OrderStatus.FILLED, "it closes"


@pytest.mark.parametrize(("eth_mid", "sol_mid", "order"), [(1_820, 99, ["ETH", "SOL"]), (2_010, 80, ["SOL", "ETH"])])
def test_the_largest_loss_is_reduced_first(eth_mid: int, sol_mid: int, order: list[str]) -> None:
    desk = leveraged()
    posting = desk.tick(deep_quote("ETH", eth_mid), deep_quote("SOL", sol_mid))
    assert posting is not None
    assert [trade.symbol for trade in posting.trades] == order
    assert desk.equity > D("1.1") * figures.maintenance(desk.account, desk.moment.marks, RULES.markets)


def test_only_as_much_as_needed_is_reduced() -> None:
    desk = leveraged()
    desk.rules = replace(RULES, liquidation_rate=D(0))
    posting = desk.tick(deep_quote("ETH", 1_814), deep_quote("SOL", "99.8"))
    assert posting is not None
    assert {trade.symbol for trade in posting.trades} == {"ETH"}, "the first step made the account safe"
    assert desk.equity > D("1.1") * figures.maintenance(desk.account, desk.moment.marks, RULES.markets)


def test_each_update_closes_a_quarter_of_a_position_as_a_separate_trade() -> None:
    desk = leveraged()
    position = desk.account.positions["ETH"]
    postings = [desk.tick(deep_quote("ETH", mid), deep_quote("SOL", 99)) for mid in (1_820, 1_780)]
    trades = [trade for posting in postings if posting is not None for trade in posting.trades]
    assert [trade.quantity for trade in trades if trade.symbol == "ETH"] == [D("2.5"), D("1.875")]
    assert {trade.parent_id for trade in trades if trade.symbol == "ETH"} == {position.id}
    assert {trade.close_reason for trade in trades} == {Cause.LIQUIDATION}
    assert (desk.position.id, desk.position.quantity) == (position.id, D("5.625"))


def test_a_liquidation_waits_for_the_next_update_of_a_market_before_its_next_step() -> None:
    desk = leveraged()
    first = desk.tick(deep_quote("ETH", "1815"), deep_quote("SOL", 99))
    assert first is not None
    assert [fill.symbol for fill in first.fills] == ["ETH", "SOL"]
    assert desk.account.liquidating
    assert desk.order(SELL, "1", symbol="SOL", reduce_only=True).status is OrderStatus.FILLED
    assert {fill.cause for fill in desk.postings[-1].fills} == {Cause.ORDER}, "an order adds no step"
    second = desk.eth("1815")
    assert second is not None
    assert [fill.symbol for fill in second.fills] == ["ETH"], "SOL had no update"


def test_an_order_that_brings_equity_to_maintenance_begins_a_liquidation() -> None:
    desk = PaperBench(1_050)
    desk.order(BUY, "10", leverage=20)
    desk.moment = moment_of(make_quote("ETH", [(1880, 99)], [(1992, 99)], at=START + timedelta(seconds=1)))
    assert desk.order(SELL, "2", reduce_only=True).status is OrderStatus.FILLED
    assert [fill.cause for fill in desk.postings[-1].fills] == [Cause.ORDER, Cause.LIQUIDATION]


def test_quarters_are_rounded_up_to_the_lot_and_a_small_position_is_closed_whole() -> None:
    desk = PaperBench(8)
    desk.order(BUY, "0.0699", leverage=20)
    postings = [desk.eth("1900"), desk.eth("1900")]
    closed = [fill.quantity for posting in postings if posting is not None for fill in posting.fills]
    assert closed == [D("0.0175"), D("0.0524")], "the rest is below 100 USD"
    assert not desk.account.positions


def test_a_liquidation_fill_pays_one_percent_on_top_of_the_taker_fee() -> None:
    desk = leveraged()
    posting = desk.tick(deep_quote("ETH", "1820"), deep_quote("SOL", 99))
    assert posting is not None
    for fill, trade in zip(posting.fills, posting.trades, strict=True):
        notional = fill.quantity * fill.price
        assert (fill.fee, fill.liquidation_fee) == (notional * D("0.0005"), notional * D("0.01"))
        assert trade.liquidation_fees == fill.liquidation_fee


def test_the_liquidation_fee_never_takes_equity_below_zero() -> None:
    desk = PaperBench(1_050)
    desk.order(BUY, "10", leverage=20)
    begun, goes_on = desk.eth("1897"), desk.eth("1897")
    assert begun is not None
    assert goes_on is not None
    (first,), (second, rest) = begun.fills, goes_on.fills
    assert 0 < first.liquidation_fee < first.quantity * first.price / 100
    assert second.liquidation_fee == 0, "the first step took everything"
    assert (rest.quantity, rest.fee, desk.equity) == (D("5.625"), D(0), D(0)), "the liquidator took over the rest"


def test_a_started_liquidation_ends_above_its_target_despite_a_thin_book() -> None:
    """What one book cannot take is reduced on the next, at an equity at which no liquidation would start."""
    desk = PaperBench(1_050)
    desk.order(BUY, "10", leverage=20)
    desk.tick(eth([(1933, "0.1")], [(1935, 99)]))
    assert (desk.position.quantity, desk.account.liquidating) == (D("9.9"), True)
    assert desk.order(BUY, "0.01", leverage=20).status is OrderStatus.REJECTED
    desk.eth(1_937)
    assert (desk.position.quantity, desk.account.liquidating) == (D("7.425"), False)
    assert desk.eth(1_936) is None, "the target was reached, so only equity at maintenance starts it again"


def test_a_liquidation_ends_once_the_market_makes_the_account_safe() -> None:
    desk = PaperBench(1_050)
    desk.order(BUY, "10", leverage=20)
    desk.tick(eth([(1933, "0.1")], [(1935, 99)]))
    posting = desk.eth(1_950)
    assert posting is not None
    assert (list(posting.fills), desk.account.liquidating) == ([], False)
    assert desk.eth(1_950) is None


@pytest.mark.parametrize("side", [BUY, SELL])
def test_an_account_that_has_lost_everything_does_not_live_on_for_a_rebound(side: OrderSide) -> None:
    desk = leveraged()
    desk.order(SELL, "10", reduce_only=True)
    desk.order(side, "10", leverage=20)
    posting = desk.eth("1500" if side is BUY else "2500", after=timedelta(minutes=1))
    assert posting is not None
    assert [fill.symbol for fill in posting.fills] == ["ETH", "SOL"], "at the last mark where there is no new one"
    ((payment,), trade) = posting.insurance, posting.trades[-1]
    assert payment.amount == trade.insurance == desk.account.insurance > 2_000
    assert payment.order_id == trade.id
    assert desk.account.cash == desk.equity == 0
    assert desk.eth(2_000) is None


def test_a_liquidation_that_the_book_cannot_take_continues_with_the_next() -> None:
    desk = PaperBench(1_050)
    desk.order(BUY, "10", leverage=20)
    desk.tick(eth([(1920, 1)], [(1922, 9)]))
    assert desk.position.quantity == 9
    desk.tick(eth([(1920, 19)], [(1922, 9)]))
    assert desk.position.quantity == D("6.75")


def test_an_account_is_taken_over_if_its_liquidation_finds_nothing_in_the_book() -> None:
    desk = PaperBench(1_050)
    desk.order(BUY, "10", leverage=20)
    desk.tick(eth([(1920, 1)], [(1922, 9)]))
    posting = desk.tick(eth([(1920, "0.5")], [(1922, 9)]))
    assert posting is not None
    ((fill, trade),) = zip(posting.fills, posting.trades, strict=True)
    assert (fill.price, fill.quantity, fill.fee) == (D(1921), D(9), D(0))
    assert trade.liquidation_fees > 0
    assert desk.equity == desk.account.cash == 0


def on_hyperliquid(capital: int) -> PaperBench:
    """An account on ETH at 2,000, where positions of up to 100,000 are closed whole, and 20 % of larger ones."""
    desk = PaperBench(capital)
    desk.rules = replace(RULES, liquidation=LIQUIDATIONS["hyperliquid"], liquidation_rate=D(0))
    return desk


def test_a_venue_that_closes_positions_whole_does_so_up_to_its_limit() -> None:
    desk = on_hyperliquid(1_050)
    desk.order(BUY, "10", leverage=20)
    posting = desk.eth("1932")
    assert posting is not None
    assert [fill.quantity for fill in posting.fills] == [10]
    assert not desk.account.positions
    assert desk.equity > 0, "what is left stays with the account"
    assert desk.account.partly_liquidated_at is None


def test_a_large_position_loses_a_fifth_and_all_of_the_rest_within_the_cooldown() -> None:
    desk = on_hyperliquid(10_500)
    desk.order(BUY, "100", leverage=20)
    first = desk.eth("1932", after=timedelta(seconds=1))
    assert first is not None
    assert [fill.quantity for fill in first.fills] == [20]
    assert desk.account.partly_liquidated_at == first.fills[0].at
    assert not desk.account.liquidating, "equity is above the maintenance of the rest"
    within = desk.eth("1918", after=timedelta(seconds=29))
    assert within is not None
    assert [fill.quantity for fill in within.fills] == [80]


def test_after_the_cooldown_a_large_position_loses_a_fifth_again() -> None:
    desk = on_hyperliquid(10_500)
    desk.order(BUY, "100", leverage=20)
    desk.eth("1932", after=timedelta(seconds=1))
    again = desk.eth("1918", after=timedelta(seconds=30))
    assert again is not None
    assert [fill.quantity for fill in again.fills] == [16]


def test_a_liquidator_takes_over_what_the_book_could_not_close_in_time() -> None:
    desk = on_hyperliquid(10_500)
    desk.order(BUY, "100", leverage=20)
    posting = desk.tick(eth([("1920", "1")], [("1922", 999)], mark="1921"))
    assert posting is not None
    first, taken_over = posting.fills
    assert (first.quantity, first.price) == (D(1), D(1920))
    assert (taken_over.quantity, taken_over.price, taken_over.fee) == (D(99), D(1921), D(0))
    assert taken_over.liquidation_fee > 0
    assert desk.equity == desk.account.cash == 0
    assert not desk.account.positions
    assert not posting.insurance


# --- funding ----------------------------------------------------------------------------------------------------------


def test_longs_pay_a_positive_funding_rate_once_per_hour_boundary() -> None:
    desk = PaperBench()
    desk.order(BUY, "2")
    assert desk.eth(2_000, timedelta(minutes=29)) is None
    posting = desk.eth(2_100, timedelta(minutes=1))
    assert posting is not None
    (payment,) = posting.funding
    assert (payment.amount, payment.boundary) == (-2 * D(2_100) * D("0.0000125"), START + timedelta(minutes=30))
    assert desk.eth(2_100) is None
    assert desk.account.funding == desk.position.funding == payment.amount


def test_a_boundary_in_a_gap_uses_the_last_mark_before_it() -> None:
    desk = PaperBench()
    desk.order(BUY, "2")
    desk.eth(2_050, timedelta(minutes=10))
    posting = desk.eth(2_900, timedelta(hours=2))
    assert posting is not None
    assert [payment.mark for payment in posting.funding] == [D(2_050)] * 2
    assert desk.account.funding == 2 * -2 * D(2_050) * D("0.0000125")


def test_an_eight_hour_interval_is_paid_in_full_at_its_end() -> None:
    desk = PaperBench()
    desk.rules = replace(RULES, funding_interval_h=8)
    desk.order(BUY, "2")
    assert desk.eth(2_000, timedelta(hours=6)) is None
    posting = desk.eth(2_100, timedelta(minutes=30))
    assert posting is not None
    (payment,) = posting.funding
    assert (payment.boundary.hour, payment.rate, payment.mark) == (8, D("0.0001"), D(2_100))
    assert desk.eth(2_100, timedelta(hours=7)) is None


def test_a_market_may_have_its_own_fees_and_funding_interval() -> None:
    own = replace(RULES.markets["ETH"], taker_rate=D("0.001"), maker_rate=D(0), funding_interval_h=8)
    desk = PaperBench()
    desk.rules = replace(RULES, markets={**RULES.markets, "ETH": own})
    answer = desk.order(BUY, "2")
    assert answer.total_fees == 2 * D("2000.01") * D("0.001")
    assert desk.eth(2_000, timedelta(hours=6)) is None
    posting = desk.eth(2_100, timedelta(minutes=30))
    assert posting is not None
    assert [payment.boundary.hour for payment in posting.funding] == [8]


def test_shorts_receive_a_positive_rate() -> None:
    desk = PaperBench()
    desk.order(SELL, "2")
    desk.eth(2_000, timedelta(minutes=30))
    assert desk.account.funding == 4_000 * D("0.0000125")


def test_every_missed_boundary_is_posted() -> None:
    desk = PaperBench()
    desk.rate = lambda symbol, boundary: D(boundary.hour)  # distinguishes the boundaries
    desk.order(SELL, "0.01")
    posting = desk.eth(2_000, timedelta(hours=3))
    assert posting is not None
    assert [payment.amount for payment in posting.funding] == [D(40), D(60), D(80)]


def test_a_position_closed_after_a_boundary_pays_for_it_before_any_update() -> None:
    desk = PaperBench()
    desk.order(BUY, "1")
    desk.moment = moment_of(deep_quote("ETH", 2_000, at=START + timedelta(minutes=31)))
    desk.order(SELL, "1")
    assert len(desk.postings[-1].funding) == 1
    assert desk.postings[-1].trades[0].funding == D(-2_000) * D("0.0000125")


def test_a_reset_after_a_boundary_pays_for_it_before_any_update() -> None:
    desk = PaperBench()
    desk.order(BUY, "1")
    desk.moment = moment_of(deep_quote("ETH", 2_000, at=START + timedelta(minutes=31)))
    posting = desk.reset()
    assert len(posting.funding) == 1
    assert posting.trades[0].funding == D(-2_000) * D("0.0000125")


def test_a_liquidation_after_a_boundary_also_pays_for_it_in_markets_without_an_update() -> None:
    desk = leveraged()
    desk.tick(deep_quote("ETH", 2_000), deep_quote("SOL", 100), after=timedelta(minutes=29, seconds=59))
    posting = desk.tick(deep_quote("ETH", 1_500), after=timedelta(seconds=1))
    assert posting is not None
    paid = {payment.symbol: payment.amount for payment in posting.funding}
    assert paid == {"ETH": D(-15_000) * D("0.0000125"), "SOL": D(-10_000) * D("0.0000125")}


def test_funding_received_at_a_boundary_can_avert_a_liquidation() -> None:
    desk = PaperBench(1_000, deep_quote("ETH", 2_000), deep_quote("SOL", 100))
    desk.rate = lambda symbol, boundary: D("0.01") if symbol == "SOL" else D(0)
    desk.order(BUY, "1", leverage=20)
    desk.order(SELL, "100", leverage=20, symbol="SOL")
    posting = desk.eth("1270", timedelta(minutes=30))
    assert posting is not None
    assert {payment.symbol: payment.amount for payment in posting.funding} == {"SOL": 100}
    assert posting.trades == []


def test_nothing_is_due_by_the_date_of_an_account_whose_clock_was_ahead() -> None:
    desk = leveraged()
    desk.set_plan(ExitPlan(time_exit=START + timedelta(hours=6)))
    desk.tick(deep_quote("ETH", 2_000), after=timedelta(hours=3))
    assert desk.tick(deep_quote("SOL", 100), after=-timedelta(hours=3)) is None
    posting = desk.tick(deep_quote("SOL", 100), after=timedelta(minutes=30))
    assert posting is not None
    assert [(payment.symbol, payment.boundary) for payment in posting.funding] == [
        ("SOL", START + timedelta(minutes=30))
    ]
    assert posting.trades == []


def test_no_funding_for_a_position_opened_at_the_boundary() -> None:
    desk = PaperBench(10_000, deep_quote("ETH", 2_000, at=START + timedelta(minutes=30)))
    desk.order(BUY, "1")
    assert desk.eth(2_000) is None
