"""Snapshots, histories and statistics of accounts."""
