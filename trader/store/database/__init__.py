"""The connection pool, schema migrations, partitions and leadership."""
