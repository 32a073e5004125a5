"""SQL of models, invocations and what agents see."""
