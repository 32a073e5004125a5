"""SQL of the ledger, accounts and trades."""
