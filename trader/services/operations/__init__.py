"""Loss limits and the commands of operators."""
