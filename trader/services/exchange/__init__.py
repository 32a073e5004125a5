"""The paper exchange: accounts in memory, the tick processor, the ledger writer."""
