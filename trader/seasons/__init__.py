"""Seasons: the result card, the bundle that proves it, its check, and the report page.

Read `bundle.py` (which rows belong to a season), `card.py` (the figures), then `check.py` (how a third party
verifies them).
"""
