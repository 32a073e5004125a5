"""Wicks, gaps and pauses on the books of the market model: whoever they reach is never better off than a worse path."""

from collections.abc import Sequence
from datetime import timedelta
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.books import RULES, START, deep_quote, moment_of, open_account, plain_rate

from trader.exchange.domain import account as figures
from trader.exchange.domain import rules as exchange
from trader.exchange.domain.ledger import Posting
from trader.exchange.domain.orders import Cause, ExitPlan, Order, OrderSide
from trader.exchange.domain.tick_rules import apply_tick
from trader.exchange.protocol import LIQUIDATIONS
from trader.market.domain.markets import SIMULATED_MARKETS, Quote
from trader.market.sources.books import BookModel, Grid, stress_after

ROW = SIMULATED_MARKETS["SOL"]
ENTRY = 160
USUAL_RANGE = 0.0006

sides = st.sampled_from(OrderSide)
presets = st.sampled_from(("default", "hyperliquid"))
leverages = st.sampled_from((3, 10, 20))
notionals = st.sampled_from((9_000, 200_000, 20_000_000))
"""Sizes of the position: small, as large as a thin book takes, and larger than any book."""


def quotes(side: OrderSide, moves: Sequence[float]) -> list[Quote]:
    """The quotes of successive seconds whose marks are this share of the entry worse for a position of this side."""
    grid = Grid(ROW.rules)
    model, marks, made = BookModel(grid, ROW.calm), [grid.nearest(ENTRY)] * 61, []
    for second, move in enumerate(moves):
        marks.append(grid.nearest(ENTRY * (1 - side.opens.direction * move)))
        stress = stress_after(marks[-61:], USUAL_RANGE)
        made.append(model.quote(START + timedelta(seconds=second + 1), marks[-1], stress, 1.0))
    return made


class Held:
    """A position opened on a calm book, and what became of it. `stop` is a share of the entry."""

    def __init__(
        self, side: OrderSide, moves: Sequence[float], preset: str, leverage: int, notional: int, stop: float | None
    ) -> None:
        self.rules = replace(RULES, liquidation=LIQUIDATIONS[preset], latency=timedelta(seconds=1))
        capital = Decimal(notional) * Decimal("1.02") / leverage
        self.quotes = [deep_quote("SOL", ENTRY), *quotes(side, moves)]
        moment = moment_of(self.quotes[0])
        level = None if stop is None else Decimal(ENTRY) * (1 - side.opens.direction * Decimal(str(stop)))
        self.stop = level
        order = Order(
            account_id="default", symbol="SOL", side=side, quantity=Decimal(notional) / ENTRY,
            leverage=Decimal(leverage), exit_plan=ExitPlan(stop=level),
        )  # fmt: skip
        posting = exchange.place(open_account(str(capital)), order, moment, self.rules, plain_rate)
        assert posting.fills, posting.answers
        self.account, self.postings = posting.account, [posting]
        for quote in self.quotes[1:]:
            moment = moment_of(quote, before=moment)
            update = apply_tick(self.account, moment, self.rules, plain_rate)
            self._check(update, quote)
            if update is not None:
                self.account = update.account
                self.postings.append(update)
        self.equity = figures.equity(self.account, moment.marks)

    def _check(self, update: Posting | None, quote: Quote) -> None:
        after, marks = self.account if update is None else update.account, {"SOL": quote.mark}
        equity = figures.equity(after, marks)
        assert equity >= 0
        if update is None or not update.fills:
            assert not after.positions or equity > figures.maintenance(after, marks, self.rules.markets)

    @property
    def stops(self) -> list[tuple[int, Decimal]]:
        """The seconds and prices at which the stop filled."""
        fills = [fill for posting in self.postings for fill in posting.fills if fill.cause is Cause.STOP]
        return [(int((fill.at - START).total_seconds()), fill.price) for fill in fills]


@given(
    sides, presets, leverages, notionals, st.sampled_from((None, 0.004, 0.03)), st.integers(1, 4),
    st.lists(st.integers(1, 450), min_size=2, max_size=2, unique=True).map(sorted),
)  # fmt: skip
def test_a_deeper_wick_never_leaves_more(
    side: OrderSide, preset: str, leverage: int, notional: int, stop: float | None, seconds: int, depths: list[int]
) -> None:
    shallow, deep = (
        Held(side, [depth / 1_000] * seconds + [0.0] * 3, preset, leverage, notional, stop).equity for depth in depths
    )
    assert deep <= shallow


@given(
    sides, presets, leverages, notionals, st.integers(1, 60),
    st.lists(st.integers(-400, 450), min_size=1, max_size=12),
)  # fmt: skip
def test_no_stop_fills_better_than_its_trigger_but_by_what_the_price_moved_during_latency(
    side: OrderSide, preset: str, leverage: int, notional: int, stop: int, moves: list[int]
) -> None:
    held = Held(side, [move / 1_000 for move in moves], preset, leverage, notional, stop / 1_000)
    if not held.stops:
        return
    assert held.stop is not None
    direction, (first, _) = side.opens.direction, held.stops[0]
    for second, price in held.stops:
        limit = held.quotes[first].mark if second == first else held.stop
        assert direction * (limit - price) >= 0
