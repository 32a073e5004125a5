"""Scripted entries in nautilus_trader, for an interpreter that has it: reads them from standard input, prints figures.

The input is JSON: `minutes` (of 1970) with `open`, `high`, `low`, `close` and `volume`, `entries` (side by minute), and
`stop`, `target` and `quantity`. The output is JSON: the processor time of the run in seconds, and its trades.
"""

import json
import sys
import time
from typing import Any

import pandas as pd
from nautilus_trader.backtest.engine import BacktestEngine, BacktestEngineConfig
from nautilus_trader.config import LoggingConfig
from nautilus_trader.model.currencies import USDT
from nautilus_trader.model.data import Bar, BarType
from nautilus_trader.model.enums import AccountType, OmsType, OrderSide
from nautilus_trader.model.objects import Money
from nautilus_trader.persistence.wranglers import BarDataWrangler
from nautilus_trader.test_kit.providers import TestInstrumentProvider
from nautilus_trader.trading.strategy import Strategy

MINUTE_NS = 60_000_000_000


class Scripted(Strategy):  # type: ignore[misc]
    """Enters as specified by the input if no position is open, with a stop and a target."""

    def __init__(self, instrument: Any, bar_type: Any, given: dict[str, Any]) -> None:
        super().__init__()
        self.instrument = instrument
        self.bar_type = bar_type
        self.given = given
        self.entries = {int(minute): side for minute, side in given["entries"].items()}
        self.trades = 0

    def on_start(self) -> None:
        self.subscribe_bars(self.bar_type)

    def on_bar(self, bar: Bar) -> None:
        side = self.entries.get(bar.ts_event // MINUTE_NS)
        if side is None or not self.portfolio.is_flat(self.instrument.id):
            return
        price = float(bar.close)
        self.submit_order_list(
            self.order_factory.bracket(
                instrument_id=self.instrument.id,
                order_side=OrderSide.BUY if side > 0 else OrderSide.SELL,
                quantity=self.instrument.make_qty(self.given["quantity"]),
                sl_trigger_price=self.instrument.make_price(price * (1 - side * self.given["stop"])),
                tp_price=self.instrument.make_price(price * (1 + side * self.given["target"])),
            )
        )

    def on_position_closed(self, _event: Any) -> None:
        self.trades += 1


def main() -> None:
    given = json.load(sys.stdin)
    instrument = TestInstrumentProvider.btcusdt_perp_binance()
    bar_type = BarType.from_str(f"{instrument.id}-1-MINUTE-LAST-EXTERNAL")
    closed_at = pd.to_datetime([60 * (minute + 1) for minute in given["minutes"]], unit="s", utc=True)
    columns = {name: given[name] for name in ("open", "high", "low", "close", "volume")}
    bars = BarDataWrangler(bar_type, instrument).process(pd.DataFrame(columns, index=closed_at))
    engine = BacktestEngine(BacktestEngineConfig(logging=LoggingConfig(bypass_logging=True)))
    engine.add_venue(instrument.id.venue, OmsType.NETTING, AccountType.MARGIN, starting_balances=[Money(10_000, USDT)])
    engine.add_instrument(instrument)
    engine.add_data(bars)
    strategy = Scripted(instrument, bar_type, given)
    engine.add_strategy(strategy)
    began_s = time.process_time()
    engine.run()
    print(json.dumps({"seconds": time.process_time() - began_s, "trades": strategy.trades}))
    engine.dispose()


if __name__ == "__main__":
    main()
