"""SQL of venue orders and of the drift between paper and venue."""
