"""Alarms, credentials and loss limits as values and rules."""
