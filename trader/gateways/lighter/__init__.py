"""Lighter: public market data, and the accounts that trade there."""
