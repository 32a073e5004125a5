"""Backtests: the rules of the paper exchange applied to recorded candles in event time, which skips idle seconds.

Read `run.py` (a whole run), `engine.py` (event time, and a session for each decision), `sources.py` (who decides),
then `result.py`.
"""
