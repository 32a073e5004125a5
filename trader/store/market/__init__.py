"""SQL of market data."""
