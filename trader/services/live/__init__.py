"""Live trading: accounts at a venue, their outbox and their reconciliation."""
