"""Reports: self-contained HTML files in the style of the dashboard."""
