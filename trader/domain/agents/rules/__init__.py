"""Rule agents: one module per variant, each with one pure function from view and limits to decisions."""
