"""PostgreSQL: connection pool, schema, partitions, leader lock, and the relay between processes.

Read `pool.py`, then `schema.py` and `leadership.py`; `embedded/` runs a server if `DATABASE_URL` is not set.
"""
