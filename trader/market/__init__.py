"""Markets: prices, order books, candles and indicators, and the feed that distributes them.

Read `domain/markets.py`, then `sources/source.py` (the protocol of every source), then `feed.py`.
"""
