"""SQL for the chain: appends, reads, and the rows that it covers."""
