"""Market data sources: simulated (`synthetic`) or recorded (`replay`), and the protocol that all sources share."""
