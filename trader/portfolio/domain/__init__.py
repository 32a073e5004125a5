"""Statistics of equity series and trades: returns, intervals, evidence, luck, behavior, and season rules."""
