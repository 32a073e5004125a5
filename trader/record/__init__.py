"""The record: a chain of digests over decisions and results that cannot be rewritten unnoticed.

Read `domain/chain.py` for the links, `results.py` for the rows of other tables that enter the chain, and `anchors.py`
for the copies of its head that are kept elsewhere. `agents/verification.py` checks the chain against the rows of every
subject.
"""
