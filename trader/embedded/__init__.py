"""The embedded PostgreSQL: its programs, its folder, its process."""
