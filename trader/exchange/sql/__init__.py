"""SQL for the ledger, accounts and trades."""
