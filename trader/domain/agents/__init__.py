"""Agents: their view, tools and messages, the guard, the rule agents, and records of invocations."""
