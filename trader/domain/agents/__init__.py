"""What agents see and decide: the view, the tools, the guard, the rule agents."""
