"""Every struct that crosses the wire, one module per domain: the contract."""
