"""What decides for a model: AI providers, rule agents, supplementary indicators."""
