"""The outside: market data, trading venues, AI providers."""
