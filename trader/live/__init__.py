"""Live trading: accounts at a venue with their ledger, outbox, exits, protective orders and reconciliation.

Read `domain/orders.py` (the states of a venue order), `outbox.py`, `ledger.py` and `reconciler.py`, then
`account.py`, which joins them. `venue.py` is the protocol of a venue, `venues.py` lists the available venues,
`lighter/` implements one, and `tests/support/venue_template.py` is the starting point for another.
"""
