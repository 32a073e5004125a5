"""The page at `/`, and the static files that it, the reference page and the reports share."""
