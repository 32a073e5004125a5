"""Backtests: the rules of the paper exchange applied to recorded candles in event time, which skips idle seconds.

`trader.results` publishes the functions that run them from Python. Read `spec.py` (what a backtest
runs on), `execution.py` (from a spec to its files), `run.py` (a whole run), `engine.py` (event time, and a session for
each decision), `sources.py` (who decides), then `output.py` and `result.py` (what is kept of it). Around these stand
the choice of participants (`models.py`, and `asked.py` for those that are asked: AI models with their `answers.py`,
external agents with `agents.py`), sweeps (`sweep.py`, with `workers.py`), and past days for a service (`history.py`).
"""

from trader.backtest.function import BacktestResult, run_backtest

__all__ = ["BacktestResult", "run_backtest"]
