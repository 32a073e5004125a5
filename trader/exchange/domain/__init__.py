"""The rules of the paper exchange: accounts, orders, matching, liquidation, the ledger and its audit."""
