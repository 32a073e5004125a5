"""The trading workflow: when each model runs, what it may do, and the record of it."""
