"""Composition: opens the external systems, creates every part of the service once, and gives it its role.

Read `external`, then `service`, then `leadership`. Only `trader.app` and the commands use them.
"""
