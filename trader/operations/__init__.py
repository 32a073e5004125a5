"""Operations: alarms, notifications, access, halts, loss limits, and operator commands.

Read `operator_commands.py` and `loss_limits.py` for what stops trading, `alarms.py` for what operators are notified of,
and `access.py` for permissions.
"""
