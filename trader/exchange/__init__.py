"""The paper exchange: accounts, orders, matching, liquidation, funding, and the ledger.

Read `domain/account.py`, `domain/orders.py` and `domain/rules.py` for the rules, then `paper.py` for the path of an
order, `tick_processor.py` for the path of a tick, and `accounts.py` for the accounts in memory and their ledger.
"""
