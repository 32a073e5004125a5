"""Backtests: the rules of the paper exchange over recorded candles in event time, without waiting for each second."""
