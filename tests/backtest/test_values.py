"""A summary of an account's values agrees with the values of every minute."""

from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trader.backtest.values import AccountValues, MarkColumn
from trader.exchange.domain.account import Position
from trader.exchange.domain.ledger import unopened_account
from trader.exchange.domain.orders import Side

OPENED = datetime(2025, 3, 4, tzinfo=UTC)
PRICES = st.decimals("0.5", "900000", places=1)


@st.composite
def all_values(draw: st.DrawFn) -> AccountValues:
    """Accounts of any size, from rich to long since worth nothing."""
    minutes = draw(st.integers(1, 6))
    account = unopened_account("scout", draw(st.decimals("-20000", "20000", places=2)), "USDC", OPENED)
    positions = {}
    for number in range(draw(st.integers(0, 3))):
        quantity = draw(st.decimals("0.001", "500", places=3))
        positions[f"M{number}"] = Position(
            id=UUID(int=number),
            symbol=f"M{number}",
            side=draw(st.sampled_from(Side)),
            quantity=quantity,
            entry_notional=quantity * draw(PRICES),
            margin=Decimal(1),
            opened_at=OPENED,
            funded_until=OPENED,
        )
    columns = [
        MarkColumn(
            lambda halves: halves * Decimal("0.05"),
            draw(st.lists(st.integers(1, 10**7), min_size=minutes, max_size=minutes)),
        )
        for _ in positions
    ]
    return AccountValues(replace(account, positions=positions), range(0, 60_000 * minutes, 60_000), columns)


@given(all_values(), st.data())
def test_a_summary_is_that_of_each_minute(values: AccountValues, data: st.DataObject) -> None:
    stop = data.draw(st.integers(1, len(values.times_ms)))
    begin = data.draw(st.integers(0, stop - 1))
    within = list(values.values())[begin:stop]
    lowest, highest = min(each.worth for each in within), max(each.leverage for each in within)
    assert values.summary(begin, stop) == (lowest, within[-1].worth, highest)
    assert values.lowest() == min(value.worth for value in values.values())
