"""Orders at a real venue: how they are sent and booked, and how the ledger is reconciled with the venue."""
