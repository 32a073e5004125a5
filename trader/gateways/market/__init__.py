"""Market data sources: simulated (`synthetic`) or recorded (`replay`), and the protocol of all sources."""
