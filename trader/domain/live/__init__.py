"""Orders at a real venue: their states, their postings, reconciliation with the venue."""
