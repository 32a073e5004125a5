"""Market data as values: markets, books, quotes, candles, indicators."""
