"""Custom markets: a row must have every figure, or the start fails and names the missing one."""

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import msgspec
import pytest

from trader.core.errors import StartError
from trader.exchange.domain.ledger import ExchangeRules
from trader.market.domain.markets import PLAIN_FUNDING_RATE, MarginTier
from trader.market.sources.rows import (
    PATH_EDGE,
    PRESET_MARKETS,
    chosen_rows,
    preset_rows,
    read_rows,
    require_rules,
    surcharged,
)
from trader.market.sources.synthetic import SyntheticSource

LINK = """
[[markets]]
symbol = "LINK"
tick = 0.001
lot = 0.1
min_notional = 10
leverage_max = 10
maintenance_rate = 0.05
tiers = [[20_000_000, 0.1, 5]]
level = 20
beta = 1.3
own_volatility = 0.6
minute_volume = 150_000
half_spread_bp = 0.9
depth = 50_000
"""


def test_a_market_from_a_file_is_traded_alongside_the_built_in_ones(tmp_path: Path) -> None:
    path = tmp_path / "markets.toml"
    path.write_text(LINK, encoding="utf-8")
    rows = preset_rows("default", path)
    rules = rows["LINK"].rules
    assert (rules.tick, rules.lot, rules.min_notional) == (Decimal("0.001"), Decimal("0.1"), Decimal(10))
    assert rules.tiers == (MarginTier(Decimal(20_000_000), Decimal("0.1"), 5),)
    source = SyntheticSource(7, ("BTC", "LINK"), rows)
    quotes = source.tick(1_750_000_000).quotes
    assert quotes["BTC"].mark == SyntheticSource(7, ("BTC",)).tick(1_750_000_000).quotes["BTC"].mark
    assert 5 < quotes["LINK"].mark < 80
    assert len(quotes["LINK"].book.asks) == 12


def test_a_market_from_a_file_may_have_its_own_fees_and_funding(tmp_path: Path) -> None:
    path = tmp_path / "markets.toml"
    own = "taker_fee_bps = 3.5\nmaker_fee_bps = 0\nfunding_interval_h = 8\nfunding_rate = 0.00002"
    path.write_text(LINK + own, encoding="utf-8")
    source = SyntheticSource(7, ("BTC", "LINK"), preset_rows("default", path))
    rules = ExchangeRules(dict(source.markets), Decimal("0.0005"), Decimal("0.0002"))
    fees = {symbol: [rules.fee_rate(symbol, maker=maker) for maker in (False, True)] for symbol in source.markets}
    assert fees == {"BTC": [Decimal("0.0005"), Decimal("0.0002")], "LINK": [Decimal("0.00035"), Decimal(0)]}
    assert {symbol: rules.funding_hours(symbol) for symbol in source.markets} == {"BTC": 1, "LINK": 8}
    hour = datetime(2025, 1, 6, tzinfo=UTC)
    assert (source.funding_rate("BTC", hour), source.funding_rate("LINK", hour)) == (
        PLAIN_FUNDING_RATE, Decimal("0.00002"),
    )  # fmt: skip


def test_spreads_make_up_for_fees_below_what_drawn_paths_give_away_in_proportion_to_the_range(tmp_path: Path) -> None:
    path = tmp_path / "markets.toml"
    path.write_text(LINK + LINK.replace("LINK", "PAID") + "taker_fee_bps = 3.5", encoding="utf-8")
    rows = preset_rows("default", path)
    for symbol, fee_bps, paid in (("BTC", "0", 0), ("LINK", "0.3", 0.3), ("PAID", "0", 3.5)):
        surcharges = [
            surcharged(rows[symbol], range_bp, Decimal(fee_bps)).calm.surcharge_bp for range_bp in (5, 20, 100)
        ]
        assert surcharges == pytest.approx([max(0, PATH_EDGE * range_bp / 2 - paid) for range_bp in (5, 20, 100)])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("depth = 50_000", "", r"missing required field `depth` - at `\$.markets\[0\]`"),
        ("lot = 0.1", "lot = 0", r"Expected `float` > 0.0 - at `\$.markets\[0\].lot`"),
        ("lot = 0.1", "lots = 0.1", "contains unknown field `lots`"),
        ("leverage_max = 10", "leverage_max = 20", "maintenance_rate must be below 1 / leverage_max"),
        ("[[20_000_000, 0.1, 5]]", "[[20_000_000, 0.04, 5]]", "tiers must ascend"),
        ('"LINK"', '"BTC"', "BTC already exists"),
        ("level = 20", "level = ", "Invalid value"),
        ("lot = 0.1", "lot = 0.1\ntaker_fee_bps = 0.1234567", "fees have at most 6 decimals"),
    ],
)
def test_a_row_that_lacks_a_figure_is_refused(tmp_path: Path, old: str, new: str, reason: str) -> None:
    path = tmp_path / "markets.toml"
    path.write_text(LINK.replace(old, new), encoding="utf-8")
    with pytest.raises(StartError, match=rf"MARKETS_FILE .*markets.toml: .*{reason}"):
        preset_rows("default", path)


@pytest.mark.parametrize("change", [{"tick": Decimal("0.01")}, {"lot": Decimal(1)}])
def test_a_market_that_the_venue_lists_with_another_tick_or_lot_is_refused(
    tmp_path: Path, change: dict[str, Decimal]
) -> None:
    path = tmp_path / "markets.toml"
    path.write_text(LINK, encoding="utf-8")
    rows = read_rows(path)
    require_rules({"LINK": rows["LINK"].rules, "BTC": PRESET_MARKETS["default"]["BTC"].rules}, rows)
    with pytest.raises(StartError, match="The venue lists LINK with a tick of"):
        require_rules({"LINK": msgspec.structs.replace(rows["LINK"].rules, **change)}, rows)


def test_a_missing_file_and_a_market_without_a_row_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"MARKETS_FILE .*none.toml.*No such file"):
        preset_rows("default", tmp_path / "none.toml")
    with pytest.raises(StartError, match=r"MARKETS names BNB, .* define BTC, ETH, SOL$"):
        chosen_rows(("BTC", "BNB"), preset_rows("binance-usdm", None))
