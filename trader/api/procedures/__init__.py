"""Procedures: thin handlers, one module per domain, each declared by `@procedure`."""
