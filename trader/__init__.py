"""trader: the backend on which AI models trade crypto perpetuals, on paper or live.

`trader.backtest(strategy, data)` backtests a strategy from Python.
"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `trader.backtest` when it is first used, so that `import trader` stays cheap."""
    if name == "backtest":
        return importlib.import_module("trader.backtest")
    raise AttributeError(f"module 'trader' has no attribute {name!r}")
