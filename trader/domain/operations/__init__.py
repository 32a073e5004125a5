"""Limits that operators set on losses."""
