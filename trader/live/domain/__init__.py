"""Venue orders as pure values: how they are sent and booked, and how the ledger is reconciled with the venue."""
