"""Statistics of equity series and trades: returns, intervals, evidence, behavior, and season rules."""
