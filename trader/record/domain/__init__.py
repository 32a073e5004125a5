"""Links of the chain, and the canonical form of each record."""
