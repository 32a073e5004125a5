"""Published names for the tables of a result: `from trader.results import load`."""

from trader.portfolio.tables import Results, Table, load

__all__ = ["Results", "Table", "load"]
