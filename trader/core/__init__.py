"""Shared foundations: clock, money, errors, logs, events and schedulers. Nothing here depends on the domain.

Read `clock.py`, `money.py` and `errors.py` first: every other module uses them.
"""
