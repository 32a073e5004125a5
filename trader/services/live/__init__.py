"""Live trading: accounts at a venue with their ledger, outbox, exits, protective orders and reconciliation."""
