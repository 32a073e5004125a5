"""SQL of halts and operator commands."""
