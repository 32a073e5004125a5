"""SQL for the relay."""
