"""View, tools, messages, guard, rule agents, and the records of invocations."""
