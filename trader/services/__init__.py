"""Load, decide, save, publish: what the service does, in terms of domain, store and gateways."""
