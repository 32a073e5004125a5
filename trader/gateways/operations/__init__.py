"""Notifications to operators, the dead-man ping, and the supervisor that started the process."""
