"""Published names for research in Python: runs, sweeps, comparisons, exams, and the tables of results."""

from trader.backtest import BacktestResult, run_backtest
from trader.backtest.sweep import run_sweep
from trader.commands.compare import compare_folders
from trader.exam.function import run_exam
from trader.portfolio.tables import Results, Table, load

__all__ = ["BacktestResult", "Results", "Table", "compare_folders", "load", "run_backtest", "run_exam", "run_sweep"]
