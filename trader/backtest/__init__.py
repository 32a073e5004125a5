"""Backtests: the rules of the paper exchange applied to recorded candles in event time, which skips idle seconds.

Read `spec.py` (what a backtest runs on), `execution.py` (from a spec to its files), `run.py` (a whole run), `engine.py`
(event time, and a session for each decision), `sources.py` (who decides), then `result.py`. Calling this module is
calling the function of `function.py`: `trader.backtest(strategy, data)`.
"""

import importlib
import sys
from types import ModuleType
from typing import Any


class _CallableModule(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Backtest a strategy: `trader.backtest.function.backtest`, which has the arguments."""
        return importlib.import_module("trader.backtest.function").backtest(*arguments, **options)


sys.modules[__name__].__class__ = _CallableModule
