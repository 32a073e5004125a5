"""AI providers, rule agents as a provider, and supplementary indicators."""
