"""Connection pool, schema, partitions and leader lock."""
