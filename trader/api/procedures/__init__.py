"""Thin handlers, one module per domain; importing this package declares them all."""
