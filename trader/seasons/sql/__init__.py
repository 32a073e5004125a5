"""SQL of the season report."""
