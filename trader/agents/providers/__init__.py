"""AI providers and their protocols, rule agents and strategies as providers, webhooks, supplementary indicators."""
