"""Sources of market data, all behind the one protocol of `source`."""
