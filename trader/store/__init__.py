"""SQL only: every statement is a constant beside the one function that runs it."""
