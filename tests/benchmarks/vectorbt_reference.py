"""Scripted entries in vectorbt, for an interpreter that has it: reads them from standard input, prints figures.

Its input and output have the format of `nautilus_reference`. The second run is timed, since the first one compiles.
"""

import json
import sys
import time
from typing import Any

import numpy as np
import pandas as pd
import vectorbt


def main() -> None:
    given = json.load(sys.stdin)
    index = pd.to_datetime(np.array(given["minutes"]) * 60, unit="s")
    candles = pd.DataFrame({name: given[name] for name in ("open", "high", "low", "close")}, index=index)
    sides = pd.Series([given["entries"].get(str(minute + 1), 0) for minute in given["minutes"]], index=index)

    def simulate() -> Any:
        return vectorbt.Portfolio.from_signals(
            **candles,
            entries=sides > 0,
            short_entries=sides < 0,
            upon_opposite_entry="ignore",
            size=given["quantity"],
            sl_stop=given["stop"],
            tp_stop=given["target"],
            fees=0.0005,
            init_cash=10_000_000,
        ).trades.count()

    simulate()
    began_s = time.process_time()
    trades = int(simulate())
    print(json.dumps({"seconds": time.process_time() - began_s, "trades": trades}))


if __name__ == "__main__":
    main()
