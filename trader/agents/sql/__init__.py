"""SQL of models, invocations, and the history that agents see."""
