"""Published names for research in Python: runs, sweeps, comparisons, and the tables of results."""

from trader.backtest import BacktestResult, run_backtest
from trader.backtest.sweep import run_sweep
from trader.commands.compare import compare_folders
from trader.portfolio.tables import Results, Table, load

__all__ = ["BacktestResult", "Results", "Table", "compare_folders", "load", "run_backtest", "run_sweep"]
