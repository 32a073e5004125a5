"""Rules of exit plans and runs, one test each."""

from datetime import timedelta

import pytest
from msgspec.structs import replace
from support.books import START, deep_quote, moment_of, seconds
from support.paper_bench import BUY, SELL, D, PaperBench, eth, leveraged

from trader.exchange.domain.ledger import LimitFills, Posting
from trader.exchange.domain.orders import Cause, ExitPlan, OrderSide, OrderStatus, PlanTarget

# --- exit plans -------------------------------------------------------------------------------------------------------

LATER = START + timedelta(minutes=10)


@pytest.mark.parametrize(
    ("plan", "mark", "reason"),
    [
        (ExitPlan(stop=D(1_900)), 1_900, Cause.STOP),
        (ExitPlan(invalidation_price=D(1_900)), 1_900, Cause.INVALIDATION),
        (ExitPlan(target=D(2_100)), 2_100, Cause.TARGET),
        (ExitPlan(time_exit=START + timedelta(seconds=1)), 2_000, Cause.TIME),
        (ExitPlan(stop=D(1_900), invalidation_price=D(1_950)), 1_900, Cause.STOP),
        (ExitPlan(stop=D(1_900), time_exit=START + timedelta(seconds=1)), 1_900, Cause.STOP),
        (ExitPlan(target=D(2_100), time_exit=START + timedelta(seconds=1)), 2_100, Cause.TARGET),
    ],
)
def test_a_trigger_closes_the_whole_position_at_market(plan: ExitPlan, mark: int, reason: Cause) -> None:
    desk = PaperBench()
    desk.order(BUY, "1", plan=plan)
    posting = desk.eth(mark)
    assert posting is not None
    assert [(trade.close_reason, trade.quantity) for trade in posting.trades] == [(reason, D(1))]
    assert posting.fills[0].price == mark - D("0.01")
    assert posting.fills[0].request_id is None


@pytest.mark.parametrize(("latency", "every"), [(1.5, 1), (0.25, 0.2)], ids=["seconds", "below a second"])
def test_a_triggers_order_meets_the_first_book_after_the_latency(latency: float, every: float) -> None:
    desk = PaperBench()
    desk.rules = replace(desk.rules, latency=seconds(latency))
    desk.order(BUY, "1", plan=ExitPlan(stop=D(1_900)))
    fired = desk.eth(1_900)
    assert fired is not None
    assert (fired.fills, desk.position.closing) == ([], "stop")
    assert desk.position.closing_at == desk.moment.at + seconds(latency)
    assert desk.eth(1_950, after=seconds(every)) is None
    posting = desk.eth(1_800, after=seconds(every))
    assert posting is not None
    assert [(fill.price, fill.cause) for fill in posting.fills] == [(D("1799.99"), Cause.STOP)]


def test_a_market_that_ends_closes_its_positions_at_its_last_mark_and_cancels_its_orders() -> None:
    desk = PaperBench()
    ends_at = desk.moment.at + seconds(2)
    markets = desk.rules.markets | {"ETH": replace(desk.rules.markets["ETH"], ends_at=ends_at)}
    desk.rules = replace(desk.rules, markets=markets, latency=seconds(0.2))
    desk.order(BUY, "1", plan=ExitPlan(stop=D(1_900)))
    desk.order(BUY, "0.5", limit="1500")
    assert desk.eth(2_050, after=seconds(1)) is None
    posting = desk.eth(1_800, after=seconds(1))  # the stop fires with the last tick, after which there is no book
    assert posting is not None
    assert [(fill.price, fill.fee, fill.cause) for fill in posting.fills] == [(D(1_800), D(0), Cause.ENDED)]
    assert [change.cancel_reason for change in posting.resting] == ["the market ended"]
    assert (desk.account.positions, desk.account.resting) == ({}, ())


@pytest.mark.parametrize("mark", ["1900.01", "2099.99"])
def test_nothing_fires_before_its_price(mark: str) -> None:
    desk = PaperBench()
    desk.order(BUY, "1", plan=ExitPlan(stop=D(1_900), target=D(2_100), time_exit=LATER))
    assert desk.eth(mark) is None


def test_the_triggers_of_a_short_are_mirrored() -> None:
    for plan, mark in ((ExitPlan(stop=D(2_100)), 2_100), (ExitPlan(target=D(1_900)), 1_900)):
        desk = PaperBench()
        desk.order(SELL, "1", plan=plan)
        assert desk.eth(mark) is not None
        assert not desk.account.positions


def test_triggers_are_checked_against_the_mark_and_not_the_book() -> None:
    desk = PaperBench()
    desk.order(BUY, "1", plan=ExitPlan(stop=D(1_900)))
    assert desk.tick(eth([(1800, 9)], [(2050, 9)], mark="1900.01")) is None
    assert desk.tick(eth([(1850, 9)], [(2050, 9)], mark="1900")) is not None


def test_a_gap_fills_at_the_price_after_it() -> None:
    desk = PaperBench()
    desk.order(BUY, "1", plan=ExitPlan(stop=D(1_900)))
    desk.eth(1_500)
    assert desk.account.realized == D("1499.99") - D("2000.01")


@pytest.mark.parametrize(
    ("side", "plan"),
    [
        (BUY, ExitPlan(stop=D(2_000))),
        (BUY, ExitPlan(invalidation_price=D(2_001))),
        (BUY, ExitPlan(target=D(2_000))),
        (SELL, ExitPlan(stop=D(2_000))),
        (SELL, ExitPlan(invalidation_price=D(1_999))),
        (SELL, ExitPlan(target=D(2_000))),
        (BUY, ExitPlan(time_exit=START)),
    ],
)
def test_a_plan_on_the_wrong_side_of_the_mark_is_refused(side: OrderSide, plan: ExitPlan) -> None:
    desk = PaperBench()
    assert desk.order(side, "1", plan=plan).status is OrderStatus.REJECTED
    desk.order(side, "1")
    assert desk.set_plan(plan) is not None
    assert desk.position.exit_plan == ExitPlan()


def test_the_stop_of_a_resting_order_is_checked_against_its_limit() -> None:
    desk = PaperBench()
    assert desk.order(BUY, "1", limit="1900", plan=ExitPlan(stop=D(1_950))).status is OrderStatus.REJECTED
    assert desk.order(BUY, "1", limit="1900", plan=ExitPlan(stop=D(1_850))).status is OrderStatus.RESTING
    desk.eth(1_899)
    assert desk.position.exit_plan.stop == 1_850


def test_a_plan_can_be_replaced_directly_or_by_an_addition() -> None:
    desk = PaperBench()
    desk.order(BUY, "1", plan=ExitPlan(stop=D(1_900)))
    assert desk.set_plan(ExitPlan(target=D(2_200), invalidation="the trend breaks")) is None
    assert desk.position.exit_plan == ExitPlan(target=D(2_200), invalidation="the trend breaks")
    desk.order(BUY, "1")
    assert desk.position.exit_plan.target == 2_200
    desk.order(BUY, "1", plan=ExitPlan(stop=D(1_800)))
    assert desk.position.exit_plan == ExitPlan(stop=D(1_800))


def test_a_plan_without_a_position_is_refused() -> None:
    assert PaperBench().set_plan(ExitPlan(stop=D(1_900))) == "there is no ETH position"


def test_a_fired_stop_keeps_closing_if_the_mark_recovers_but_gains_nothing_by_waiting() -> None:
    desk = PaperBench()
    desk.order(BUY, "3", plan=ExitPlan(stop=D("1900.005")))
    desk.tick(eth([(1899, 1)], [(1901, 1)], mark="1900"))
    assert (desk.position.quantity, desk.position.closing) == (D(2), "stop")
    closed = desk.eth(2_000)
    assert closed is not None
    assert not desk.account.positions
    assert [(fill.price, fill.quantity) for fill in closed.fills] == [(D(1900), D(2))]
    assert [trade.close_reason for b in desk.postings for trade in b.trades] == [Cause.STOP, Cause.STOP]


def test_a_stop_fills_at_the_first_book_after_its_latency_wherever_the_price_went() -> None:
    desk = PaperBench()
    desk.rules = replace(desk.rules, latency=timedelta(seconds=1))
    desk.order(SELL, "3", plan=ExitPlan(stop=D(2_100)))
    desk.eth(2_110)
    desk.tick(eth([(2049, 1)], [(2051, 1)]))
    desk.eth(2_050)
    assert [[(fill.price, fill.quantity) for fill in each.fills] for each in desk.postings[2:]] == [
        [(D(2051), D(1))], [(D(2100), D(2))],
    ]  # fmt: skip


def test_a_stop_fires_during_a_liquidation_and_a_manual_close_finds_nothing_left() -> None:
    desk = PaperBench(1_050)
    desk.order(BUY, "10", leverage=20, plan=ExitPlan(stop=D(1_990)))
    posting = desk.eth("1930")
    assert posting is not None
    assert [(trade.close_reason, trade.quantity) for trade in posting.trades] == [
        (Cause.LIQUIDATION, D("2.5")), (Cause.STOP, D("7.5")),
    ]  # fmt: skip
    assert desk.order(SELL, "10", reduce_only=True).status is OrderStatus.REJECTED
    assert desk.eth("1900") is None


def test_an_exit_that_ruins_the_rest_of_the_account_leaves_it_to_the_liquidator() -> None:
    desk = leveraged()
    assert desk.set_plan(ExitPlan(stop=D(1_900))) is None
    posting = desk.tick(eth([(1_750, 99)], [(2_049, 99)], mark="1899.5"))
    assert posting is not None
    assert [(trade.symbol, trade.close_reason) for trade in posting.trades] == [
        ("ETH", Cause.STOP), ("SOL", Cause.LIQUIDATION),
    ]  # fmt: skip
    assert desk.equity == desk.account.cash == 0


def targets(*given: tuple[int, str]) -> tuple[PlanTarget, ...]:
    return tuple(PlanTarget(price=D(price), fraction=D(fraction)) for price, fraction in given)


def test_targets_fill_as_maker_and_the_stop_closes_only_what_they_left() -> None:
    desk = PaperBench()
    desk.order(BUY, "1", plan=ExitPlan(stop=D(1_900), targets=targets((2_200, "0.3"), (2_100, "0.5"))))
    assert desk.eth("2099.99") is None, "the bid is below the nearest target"
    desk.eth("2100.01")
    assert [(each.price, each.quantity) for each in desk.position.exit_plan.targets] == [(D(2_200), D("0.3"))]
    (fill,) = desk.postings[-1].fills
    assert (fill.price, fill.quantity, fill.maker, fill.cause) == (D(2_100), D("0.5"), True, Cause.TARGET)
    assert fill.fee == D(2_100) * D("0.5") * desk.rules.maker_rate
    desk.eth(1_900)
    assert not desk.account.positions
    trades = [(trade.close_reason, trade.quantity) for posting in desk.postings for trade in posting.trades]
    assert trades == [(Cause.TARGET, D("0.5")), (Cause.STOP, D("0.5"))]


@pytest.mark.parametrize(("fills", "filled"), [("touch", "0.5"), ("through", "0.2"), ("queue", None)])
def test_a_target_fills_by_the_rule_of_resting_orders(fills: LimitFills, filled: str | None) -> None:
    book = eth([(1_999, 9)], [(2_001, 9), (2_100, 3)])
    desk = PaperBench(10_000, book, limit_fills=fills)
    desk.order(BUY, "1", plan=ExitPlan(targets=targets((2_100, "0.5"))))
    posting = desk.tick(eth([(2_100, "0.2")], [(2_101, 9)]))
    assert posting is not None
    assert [fill.quantity for fill in posting.fills] == ([] if filled is None else [D(filled)])
    left = sum(each.quantity for each in desk.position.exit_plan.targets)
    assert left == D("0.5") - D(filled or 0)


def test_the_end_of_a_position_ends_its_targets_and_a_smaller_one_trims_them() -> None:
    desk = PaperBench()
    desk.order(BUY, "1", plan=ExitPlan(targets=targets((2_100, "0.5"), (2_200, "0.5"))))
    desk.order(SELL, "0.7", reduce_only=True)
    assert [each.quantity for each in desk.position.exit_plan.targets] == [D("0.3")]
    desk.order(SELL, "1.3")
    assert desk.position.exit_plan == ExitPlan()
    assert desk.eth(2_300) is None


def test_a_fired_stop_leaves_nothing_to_the_targets() -> None:
    desk = PaperBench()
    desk.order(BUY, "3", plan=ExitPlan(stop=D(1_900), targets=targets((2_100, "1"))))
    desk.tick(eth([(1899, 1)], [(1901, 1)], mark="1900"))
    posting = desk.eth(2_200)
    assert posting is not None
    assert [(fill.cause, fill.maker) for fill in posting.fills] == [(Cause.STOP, False)]


@pytest.mark.parametrize("side", [BUY, SELL])
def test_a_stop_follows_the_best_mark_at_the_trailing_distance_and_never_loosens(side: OrderSide) -> None:
    desk, sign = PaperBench(), side.direction
    desk.order(side, "1", plan=ExitPlan(stop=D(2_000 - sign * 50), trailing_distance=D(100)))
    stops = []
    for gain in (10, 60, 40, 200, 101):
        desk.eth(2_000 + sign * gain)
        stops.append((desk.position.exit_plan.stop or D(0)) - 2_000)
    assert stops == [sign * step for step in (-50, -40, -40, 100, 100)]
    assert desk.set_plan(replace(desk.position.exit_plan, stop=D(2_000))) is None
    assert desk.position.exit_plan.stop == 2_000 + sign, "a looser stop is drawn to the distance at once"
    posting = desk.eth(2_000 + sign)
    assert posting is not None
    assert [trade.close_reason for trade in posting.trades] == [Cause.STOP]


def test_a_trailing_distance_alone_is_a_stop_from_the_start() -> None:
    desk = PaperBench()
    desk.order(BUY, "1", plan=ExitPlan(trailing_distance=D(100)))
    assert (desk.position.exit_plan.stop, desk.position.risk) == (D(1_900), D("100.01"))


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (ExitPlan(targets=targets((2_100, "0.6"), (2_200, "0.5"))), "add up to 1.1; at most 1"),
        (ExitPlan(targets=targets((2_100, "0.6"), (1_990, "0.4"))), "the target 1990 of a long must be above the mark"),
        (ExitPlan(trailing_distance=D(2_000)), "the trailing distance 2000 of a long must be below the mark 2000"),
        (ExitPlan(targets=targets((2_100, "0.004"))), "closes 0.004 ETH, less than one lot (0.0001) or a notional of"),
    ],
)
def test_a_plan_that_cannot_be_kept_is_refused_with_its_figures(plan: ExitPlan, reason: str) -> None:
    desk = PaperBench()
    assert reason in (desk.order(BUY, "1", plan=plan).reason or "")
    desk.order(BUY, "1")
    assert reason in (desk.set_plan(plan) or "")
    assert desk.position.exit_plan == ExitPlan()


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_reset_cancels_closes_at_the_mark_without_fees_and_starts_a_run() -> None:
    desk = PaperBench()
    desk.order(BUY, "1")
    desk.order(BUY, "1", limit="1900")
    fees = desk.account.fees
    desk.tick(eth([(2050, "0.1")], [(2150, "0.1")]))
    before = desk.account
    posting = desk.reset(5_000)
    (trade,) = posting.trades
    assert (trade.close_reason, trade.exit_notional, posting.fills[0].fee) == (Cause.RESET, D(2_100), D(0))
    assert (trade.fees, posting.resting[0].cancel_reason) == (fees, "the account was reset")
    assert posting.run == before.run
    assert posting.starts_run
    account = desk.account
    assert (account.run.number, account.run.initial_capital, account.cash) == (2, D(5_000), D(5_000))
    assert not account.positions
    assert not account.resting
    assert account.realized == account.fees == 0
    assert account.sequence > before.sequence


def test_the_same_orders_give_the_same_rows() -> None:
    def rows() -> list[Posting]:
        desk = leveraged()
        desk.order(BUY, "0.01", limit="1900")
        desk.tick(deep_quote("ETH", "1820"), deep_quote("SOL", 99))
        desk.reset()
        return desk.postings

    assert rows() == rows()


def test_the_order_in_which_an_account_holds_its_positions_changes_no_row() -> None:
    """Positions opened by one update are read back from their rows in a different order."""

    def rows(*, reverse: bool) -> list[object]:
        desk = leveraged()
        if reverse:
            desk.account = replace(desk.account, positions=dict(reversed(list(desk.account.positions.items()))))
        desk.tick(deep_quote("ETH", 2_000), deep_quote("SOL", 100), after=timedelta(hours=1))
        desk.order(BUY, "0.01", limit="1900")
        desk.tick(deep_quote("ETH", 2_000), deep_quote("SOL", 100), after=timedelta(hours=1))
        desk.reset()
        return [(posting.funding, posting.fills, posting.trades) for posting in desk.postings]

    assert rows(reverse=False) == rows(reverse=True)


def test_a_refusal_changes_nothing_but_its_answer() -> None:
    desk = PaperBench()
    desk.order(BUY, "1")
    before = desk.account
    desk.moment = moment_of(deep_quote("ETH", 2_000, at=START + seconds(1)))
    desk.order(BUY, "1000")
    posting = desk.postings[-1]
    assert (posting.fills, posting.funding, posting.resting) == ((), (), ())
    assert (desk.account.positions, desk.account.cash) == (before.positions, before.cash)
