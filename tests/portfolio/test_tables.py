"""Tables of results: round trips as CSV, as Parquet, and as DataFrames."""

import csv
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
        "stop", None, AT, AT, "=dip", None,
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


FORMULAS = ["=1+1", "+cmd", "-x", "@sum", "\t=1", "\r=1", "'=1", "＝1", "-3.5+1"]


def test_no_text_of_a_table_is_a_formula_and_every_one_is_read_back(tmp_path: Path) -> None:
    tables, texts = results.empty(), [*FORMULAS, "-3.5", "+1e7", "it's", "a=b"]
    for text in texts:
        tables.decisions.add(AT, text, text, text, text, text, text)
        tables.fills.add(AT, text, text, text, -3.5, -1, -1e-7, True, text)
    for table in tables:
        table.write(tmp_path, "csv")
    with (tmp_path / "decisions.csv").open(newline="") as lines:
        rows = [row[1:] for row in csv.reader(lines)][1:]
    assert [set(row) for row in rows] == [{f"'{text}" if text in FORMULAS else text} for text in texts]
    assert "-3.5,-1.0,-1e-07" in (tmp_path / "fills.csv").read_text(), "numbers stay numbers"
    loaded = results.load(tmp_path)
    assert list(loaded.decisions["reason"]) == texts
    assert list(loaded.fills["cause"]) == texts


@pytest.mark.parametrize(
    "row",
    ["1e999,1,1", "9" * 400 + ",1,1", "one,1,1", "1,1", "x" * 200_000 + ",1,1", "\x00,1,1", '"'],
)
def test_a_damaged_table_is_named(tmp_path: Path, row: str) -> None:
    for table in results.empty():
        table.write(tmp_path, "csv")
    with (tmp_path / "equity.csv").open("a") as lines:
        lines.write(f"2025-01-02T03:04:05.678Z,a,{row}\n")
    with pytest.raises(SettingsError, match=r"equity\.csv cannot be read"):
        results.load(tmp_path)
