"""Lighter: public market data, and orders and records of the accounts that trade there."""
