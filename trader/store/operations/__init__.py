"""SQL of halts, operator commands and loss baselines."""
