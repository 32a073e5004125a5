"""Embedded PostgreSQL: programs, folders, processes and the server."""
