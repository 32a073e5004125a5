"""SQL for market data."""
