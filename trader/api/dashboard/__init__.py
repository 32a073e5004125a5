"""The page at `/`, and its static files, shared with the reference page and the reports."""
