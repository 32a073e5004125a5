"""Agents: what they see, what they decide, and how a decision turns into orders and a record.

Read `schedule.py` (when a model is invoked), `workflow.py` (one invocation), `calls.py` (one tool call), `execute.py`
(the decision kernel: guard, order, outcome), then `domain/view.py`, `domain/tools.py` and `domain/guard.py`.
`external.py` serves agents that run elsewhere; `providers/` calls AI models.
"""
