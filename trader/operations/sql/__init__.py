"""SQL for halts, operator commands, credentials and loss baselines."""
