"""Tables of results: round trips as CSV, as Parquet, and as DataFrames."""

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas
import pytest

from trader.core.errors import SettingsError
from trader.portfolio import tables as results
from trader.portfolio.tables import Format

AT = datetime(2025, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_tables_round_trip(tmp_path: Path, form: Format) -> None:
    tables = results.empty()
    tables.trades.add(
        "a,b", "BTC", "LONG", Decimal("0.1"), Decimal("93123.45"), 94_000, None, 1, 2, -3, Decimal("-4.000000001"),
        "stop", None, AT, AT,
    )  # fmt: skip
    tables.fills.add(AT, "a,b", "BTC", "buy", 1, 2, 3, True, "order")
    tables.fills.add(AT, "c", "ETH", "sell", 1, 2, 3, False, "order")
    tables.decisions.add(AT, "c", "createPosition", "ETH", "rejected", "leverage", 'Leverage "20" is\nabove the 10')
    for table in tables:
        table.write(tmp_path, form)
    loaded = results.load(tmp_path)
    for before, after in zip(tables, loaded, strict=True):
        assert len(before) == len(after)
        for name, column in before.arrays().items():
            np.testing.assert_array_equal(after[name], column)
            assert after[name].dtype == column.dtype
    if form == "parquet":
        read = pandas.read_parquet(tmp_path / "trades.parquet")
        assert str(read.dtypes["opened_at"]) == "datetime64[ms, UTC]", "whoever reads the file knows the zone"
    trade = loaded.trades.frame().iloc[0]
    assert (trade.opened_at, trade.net_pnl) == (AT, -4.000000001)
    assert np.isnan(trade.confidence)
    assert list(loaded.fills["maker"]) == [True, False]


def test_a_folder_without_tables_or_with_others_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"has neither trades.parquet nor trades.csv"):
        results.load(tmp_path)
    (tmp_path / "trades.csv").write_text("account,profit\n")
    with pytest.raises(SettingsError, match="trades has the columns account, profit, not account, symbol"):
        results.load(tmp_path)
