"""Rule agents: one module per variant, each a pure function from view and limits to decisions."""
