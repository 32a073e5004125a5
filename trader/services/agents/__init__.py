"""The trading workflow: the schedule of invocations, their steps, and their records."""
